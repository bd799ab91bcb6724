"""`smoothcert certify`, `merge`, `compress` and `recertify`: commands that write certificates files."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from smoothcert.cli.options import (
    Alpha,
    BoundName,
    ClassifierOptions,
    Device,
    MaxImages,
    Noise,
    Precision,
    Seed,
    Sigma,
    Skip,
    Votes,
    check_file_name,
    command_line,
    console,
    count_option,
    parse_radii,
)
from smoothcert.errors import RequestError
from smoothcert.io.console import PlainConsole
from smoothcert.io.text import counted
from smoothcert.training.choices import Bound
from smoothcert.training.run_folder import check_exists, check_file, recipe_of_certificates, refuse_file


@dataclass(frozen=True)
class CertifyOptions(ClassifierOptions):
    """The options of `certify` that are the same for all classifiers and do not change a certificate."""

    cascade: Annotated[
        bool, typer.Option("--cascade", help="All run folders as one classifier, asked from the largest sigma down.")
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for certificates; each of several runs gets a folder in it.", show_default="the run's"
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Name of the file.", show_default="test-nN and the rule")] = None
    compress_: Annotated[bool, typer.Option("--compress", help="Compress the file (.tsv.gz) when it is complete.")] = (
        False
    )
    radius: Annotated[float | None, typer.Option(help="Warn if n cannot reach this radius.")] = None
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per classifier, and nothing else on standard output.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")] = False

    @property
    def kind(self) -> str:
        return "cascade" if self.cascade else super().kind

    def groups(self, runs: Sequence[Path]) -> "list[tuple[CertifyOptions, Sequence[Path]]]":
        """Return the runs of each classifier (none for the user's own), with the folder of its certificates."""
        if self.kind or len(runs) < 2:
            return [(self, runs)]
        folders = [None if self.out is None else self.out / run.resolve().name for run in runs]
        return [(replace(self, out=folder), [run]) for folder, run in zip(folders, runs, strict=True)]

    @property
    def console(self) -> PlainConsole:
        """Where notes and results for people are printed: nowhere if the request is for less."""
        return PlainConsole(quiet=self.quiet or self.json_)

    def check_all(self, runs: Sequence[Path], sigma: float | None) -> None:
        """Refuse what does not fit together, before torch is imported."""
        if self.ensemble and self.cascade:
            raise RequestError("give --ensemble or --cascade, not both; runs of one sigma are one stage of a cascade")
        if self.cascade and sigma is not None:
            raise RequestError(f"--sigma: expected none with --cascade, which uses those of its runs, got {sigma:g}")
        level = sigma if sigma is not None else self.denoiser  # which has a noise level
        self.check(runs, {"--sigma S": level, "--out DIR": self.out}, several=True)
        if self.out is not None:
            refuse_file(self.out)
        if not self.kind and len({run.resolve() for run in runs}) < len(runs):
            raise RequestError("run: expected different run folders, got one of them twice; name each once")
        if not self.kind and self.out is not None and len({run.resolve().name for run in runs}) < len(runs):
            raise RequestError("--out: expected runs with different names, got a name twice; certify them one by one")
        if self.name is not None:
            check_file_name(self.name)
        if self.radius is not None and not 0 <= self.radius < math.inf:
            raise RequestError(f"--radius: expected a number >= 0, got {self.radius}")


@dataclass(frozen=True)
class SettingsOptions:
    """The options of `certify` that are fields of CertifySettings, under the same names."""

    n: Votes = 100_000
    n0: Annotated[int, count_option(help="Votes that choose the class, before the others.")] = 100
    alpha: Alpha = 0.001
    sigma: Sigma = None
    noise: Noise = None
    skip: Skip = 1
    max_images: MaxImages = None
    shard: Annotated[str, typer.Option(help="i/k: the i-th of k shares of the images; see `smoothcert merge`.")] = "1/1"
    until_radius: Annotated[
        float | None, typer.Option(help="Stop sampling an image when it is clear whether its radius is at least this.")
    ] = None
    radii: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated radii: stop sampling when the largest certified one is clear.",
            rich_help_panel="Fewer votes",
        ),
    ] = None
    radius_loss: Annotated[
        float | None, typer.Option(help="Use fewer votes and lose about this much radius, in units of sigma.")
    ] = None
    label_aware: Annotated[
        bool,
        typer.Option("--label-aware", help="For benchmarks: no more votes for images whose first votes are wrong."),
    ] = False
    bound: BoundName = "one-sided"
    sound: Annotated[bool, typer.Option("--sound", help="Integer noise: the certificates account for rounding.")] = (
        False
    )
    precision: Annotated[Precision, typer.Option(help="Precision of the network.")] = "auto"
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the network.")] = False
    batch_size: Annotated[int | None, count_option(help="Noisy images in a forward pass.")] = None
    seed: Seed = None

    def fields(self) -> dict[str, Any]:
        """Return the fields; radii and shares that cannot be read are refused."""
        return {**vars(self), "radii": parse_radii(self.radii) or (), "shard": parse_shard(self.shard)}


def certify(
    *,
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, each certified separately.", show_default=False)
    ] = None,
    request: CertifyOptions,
    settings: SettingsOptions,
    device: Device = "auto",
) -> None:
    """Certify test images with trained runs, an ensemble of them or your own model; continues an unfinished file."""
    folders = runs or []
    request.check_all(folders, settings.sigma)
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.cli.certify_targets import certify_target, find_target, last_line
    from smoothcert.distributed import find_device, meet, team
    from smoothcert.io.records import parse_recipe

    meet()
    torch_device = find_device(device)
    fields = settings.fields()
    parse_recipe(CertifySettings, fields, "certify")  # refuses wrong settings before anything is loaded
    # All are checked before the first is certified.
    targets = [find_target(*group, fields) for group in request.groups(folders)]
    with team() as group:
        written = [
            certify_target(request, target, request.images(target.first), torch_device, group) for target in targets
        ]
        if group.leads:
            request.console.print(last_line(written))


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, k) of `i/k`."""
    match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None:
        raise RequestError(f"shard: expected i/k, such as 3/8, got {text}")
    return int(match[1]), int(match[2])


def merge(
    files: Annotated[list[Path], typer.Argument(help="Certificates files of the shards.")],
    out: Annotated[Path, typer.Option(help="Certificates file to write.")],
    partial: Annotated[bool, typer.Option("--partial", help="Merge incomplete shards too.")] = False,
) -> None:
    """Merge the certificates files of shards; missing and incomplete shards are refused."""
    from smoothcert.certification.shards import merge_certificates

    rows = merge_certificates(files, out, partial=partial, on_note=console.note)
    console.print(f"wrote {rows} rows to {out}; next: {command_line('report', out)}")


def compress(
    paths: Annotated[list[Path], typer.Argument(help="Run folders, folders of them, or certificates files.")],
) -> None:
    """Compress certificates (to NAME.tsv.gz) and metrics of finished runs; every command reads both forms."""
    for path in paths:
        check_exists(path)
    from smoothcert.certification.shards import compress_certificates
    from smoothcert.io.compressed import compressed_form
    from smoothcert.report import find_certificates
    from smoothcert.training.metrics import METRICS, compress_metrics
    from smoothcert.training.recipe import load_run_recipe

    sizes: dict[Path, int] = {}
    for _, path in find_certificates(paths):
        size = path.stat().st_size
        if (reason := compress_certificates(path)) is not None:
            console.print(f"{path}: left as it is: {reason}")
        else:
            sizes[compressed_form(path)] = size
        recipe = recipe_of_certificates(path)
        if recipe is not None and (metrics := recipe.with_name(METRICS)).exists():
            size = metrics.stat().st_size
            if compress_metrics(metrics, load_run_recipe(recipe).epochs):
                sizes[compressed_form(metrics)] = size
    before = sum(sizes.values())
    after = sum(path.stat().st_size for path in sizes)
    console.print(f"compressed {counted(len(sizes), 'file')} from {before / 1e3:,.0f} to {after / 1e3:,.0f} kB")


def recertify(
    file: Annotated[Path, typer.Argument(help="Certificates file that smoothcert wrote.")],
    alpha: Annotated[
        float | None,
        typer.Option(help="Largest probability that a certificate is wrong.", show_default="the file's"),
    ] = None,
    bound: Annotated[Bound | None, typer.Option(help="Confidence bound.", show_default="the file's")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="next to the old one")] = None,
) -> None:
    """Compute certificates for another alpha or bound from stored votes, without sampling or a model."""
    check_file(file, "a certificates file")
    from smoothcert.certification.recertify import recertify as recompute
    from smoothcert.io.compressed import PLAIN, read_content, stem
    from smoothcert.training.run_folder import CERTIFICATES

    changes = [*([f"alpha{alpha:g}"] if alpha is not None else []), *([bound] if bound else [])]
    words = [stem(file), *(changes or ["recertified"])]
    target = out if out is not None else file.with_name("-".join(words) + (file.name.removeprefix(stem(file)) or PLAIN))
    rows = recompute(file, target, alpha=alpha, bound=bound)
    total = read_content(file, "a certificates file").count(b"\n") - 1  # a log has rows that cannot be recomputed
    others = "; the others are checked, not recomputed: they ended before their last vote or by a sequential test"
    console.print(f"wrote {rows:,} of {total:,} rows to {target}{others if rows < total else ''}")
    if target.parent == file.parent and file.parent.name == CERTIFICATES:
        text = f"reports about {file.parent.parent} now show both files, and do not rank them; --out writes elsewhere"
        console.note(text)
