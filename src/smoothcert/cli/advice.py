"""Warnings and next steps that `smoothcert certify` prints."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smoothcert.cli.options import command_line
from smoothcert.io.text import duration, rate

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.certification.certificates import CertifiedImage
    from smoothcert.certification.estimate import CertificationEstimate
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.smoothing.accuracy import NoiseAccuracy


def next_step(path: Path, folder: Path, shard: tuple[int, int]) -> str:
    """Return what to do with a finished file: a report, or a merge once all shards are finished."""
    before, marker, after = path.name.partition(f"shard{shard[0]}of")
    if shard[1] == 1 or not marker:
        return f"next: {command_line('report', folder if shard[1] == 1 else path)}"
    shards = f"{shlex.quote(str(path.with_name(before + 'shard')))}*{shlex.quote('of' + after)}"
    return f"when all {shard[1]} shards are finished, next: smoothcert merge {shards} --out merged.tsv"


def measured_accuracy(accuracy: "NoiseAccuracy") -> str:
    return f"clean accuracy {accuracy.clean:.0%}, under noise {accuracy.noisy:.0%} ({accuracy.images} images)"


def accuracy_warning(accuracy: "NoiseAccuracy") -> str | None:
    """Return what to do if the network is poor on some images; None for a good one."""
    measured = measured_accuracy(accuracy)
    if accuracy.fault == "chance":
        return (
            f"accuracy at chance: {measured}; check the normalisation (it belongs inside the model), the input range "
            "[0, 1] and the order of the labels, for which there is `smoothcert doctor`"
        )
    if accuracy.fault == "noise":
        return f"not robust to this noise: {measured}; choose a smaller --sigma; `smoothcert doctor` says how to train"
    return None


def long_work(estimate: "CertificationEstimate", settings: "CertifySettings", images: int) -> str:
    """Return how long a certification of the data set with `images` images takes, and a cheaper alternative."""
    from smoothcert.certification.estimate import cheaper_settings

    most = "at most " if settings.radii or settings.radius_loss is not None or settings.label_aware else ""
    text = (
        f"{most}about {duration(estimate.seconds)} on this machine ({estimate.images:,} images, "
        f"{estimate.votes:,} votes each, {rate(1 / estimate.seconds_per_vote)} votes/s)"
    )
    cheaper = cheaper_settings(settings, images, estimate.seconds_per_vote)
    if cheaper is None:
        return f"{text}; a GPU or several machines (--shard) are faster"
    fewer, seconds = cheaper
    return f"{text}; --skip {fewer.skip} --n {fewer.n}: about {duration(seconds)}"


def spent_votes(rows: "Sequence[CertifiedImage]", n: int) -> str:
    """Return how many votes the images took, compared with n for each."""
    spent = sum(row.certificate.spent for row in rows)
    most = sum(row.certificate.n0 + n for row in rows)
    return f"{spent:,} votes for {len(rows)} image{'' if len(rows) == 1 else 's'}" + (
        f", {most / spent:.1f} times fewer than n each" if most > spent else ""
    )
