"""Recompute a certificates file for another alpha or bound from its stored votes."""

from dataclasses import replace
from pathlib import Path

from smoothcert.certification.certificates import (
    CertificatesFile,
    CertifiedImage,
    read_certificates,
    write_certificates,
)
from smoothcert.certification.checks import BOUNDS, ONE_SIDED, RANDOMIZED, RowLimits, bound_of
from smoothcert.certification.serve.log import HEADER, format_answer, read_log, unlabelled
from smoothcert.errors import RequestError
from smoothcert.io.compressed import read_content
from smoothcert.io.files import write_text_atomically
from smoothcert.io.results import new_result, refuse_existing, settings_path, write_settings
from smoothcert.smoothing.certificate import certificate_from_bound
from smoothcert.smoothing.votes import coin_of
from smoothcert.training.choices import SMALLEST_ALPHA


def recertify(path: str | Path, out: str | Path, *, alpha: float | None = None, bound: str | None = None) -> int:
    """Write the certificates that follow from the votes of `path` at `alpha` and `bound` to `out`; return their number.

    Votes whose number was fixed before they were drawn may be bounded at any alpha that is chosen without looking at
    them. A file of a sequential rule is refused: the number of its votes depends on the votes. So is one of a cascade:
    at another alpha another stage may answer, whose votes the file does not have. Of a log of `smoothcert serve` the
    answers of the fixed rule are recomputed.
    """
    path, out = Path(path), Path(out)
    if alpha is not None and not SMALLEST_ALPHA <= alpha < 1:
        raise RequestError(f"alpha: expected at least {SMALLEST_ALPHA:g} and less than 1, got {alpha}")
    if read_content(path, "a certificates file").startswith(HEADER.encode()):
        return _recertify_log(path, out, alpha, bound)
    file = read_certificates(path)
    _refuse_unfit(file)
    refuse_existing(out)
    settings = dict(file.settings)
    if missing := [key for key in ("alpha", "bound", "noise", "sigma") if settings.get(key) is None]:
        raise RequestError(
            f"{settings_path(path)}: expected the setting '{missing[0]}', got none; restore the file that certify wrote"
        )
    settings["alpha"] = settings["alpha"] if alpha is None else alpha
    settings["bound"] = bound or bound_of(settings)
    if settings["bound"] not in BOUNDS:
        raise RequestError(f"bound: expected one of {', '.join(BOUNDS)}, got {settings['bound']}")
    if settings["bound"] == RANDOMIZED != file.settings["bound"] and settings.get("seed") is None:
        raise RequestError(f"{path}: expected the seed that its coins are drawn from, got none; recertify each shard")
    limits = RowLimits(settings)
    rows = [bounded_again(row, limits) for row in file.rows]
    with new_result(out):
        write_certificates(out, rows, settings, {**file.provenance, "recertified_from": path.name})
    return len(rows)


def _refuse_unfit(file: CertificatesFile) -> None:
    """Refuse a file whose votes give no other certificates: it has none, or the number or the stage depends on them."""
    path, settings = file.path, file.settings
    if not file.rows:
        raise RequestError(f"{path}: expected certificates, got none; certify first")
    if any(row.certificate.n == 0 and not settings.get("label_aware") for row in file.rows):
        raise RequestError(f"{path}: stores no votes; recertify needs a certificates file that smoothcert wrote")
    if not settings:
        raise RequestError(f"{path}: expected its settings in {settings_path(path).name} next to it; restore it")
    if settings.get("radii"):
        raise RequestError(
            f"{path}: its votes were stopped by a sequential test; certify again with the settings you want"
        )
    if settings.get("cascade"):
        raise RequestError(
            f"{path}: which stage of a cascade answers depends on alpha; certify again with the new alpha"
        )


def bounded_again(row: CertifiedImage, limits: RowLimits) -> CertifiedImage:
    """Return the row with the certificate that its votes give under the settings of `limits`."""
    old = row.certificate
    if old.n == 0:
        return row
    # The coin that certify would have drawn, unless the file has it.
    drawn = limits.settings["bound"] == RANDOMIZED
    coin = (old.coin or coin_of((limits.settings["seed"], row.index))) if drawn else None
    claim = replace(old, prediction=old.chosen, coin=coin)
    radius = 0.0 if claim.abstained else limits.radius(claim)
    new = certificate_from_bound(claim.prediction, radius, old.n0, old.count, old.votes, coin=coin)
    return replace(row, certificate=new)


def _recertify_log(path: Path, out: Path, alpha: float | None, bound: str | None) -> int:
    """Write the answers of the fixed rule at another `alpha`, or checked and unchanged, to the log `out`.

    Answers of the sequential rule are left out: the number of their votes depends on the votes.
    """
    rows, settings = read_log(path)
    if bound is not None:
        raise RequestError(f"{path}: bound: expected none for a log of `smoothcert serve`, got {bound}; leave it out")
    fixed = [row for row in rows if row.question.rule == "fixed" and row.certificate.n == row.question.votes]
    if not fixed:
        raise RequestError(
            f"{path}: expected answers of the fixed rule, got none among {len(rows)}, all of which pass the check; "
            "their votes were stopped by a sequential test: ask with rule=fixed for answers that can be recomputed"
        )
    refuse_existing(out)
    lines = []
    for row in fixed:
        model = settings["models"][row.model]
        question = replace(row.question, alpha=alpha or row.question.alpha)
        limits = RowLimits({**model, "alpha": question.alpha, "bound": ONE_SIDED})
        image = bounded_again(unlabelled(row), limits)
        lines.append(format_answer(replace(row, question=question, certificate=image.certificate)))
    with new_result(out):
        write_settings(out, settings, {"recertified_from": path.name})
        write_text_atomically(out, HEADER + "".join(lines))
    return len(lines)
