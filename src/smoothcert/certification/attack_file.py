"""The attacks file: append, read and resume; and the accuracy under attack.

An attacks file is a TSV with the columns below, one row per image, and a JSON file next to it that records what was
attacked and how. It bounds robust accuracy from above, as a certificates file bounds it from below.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import special

from smoothcert.certification.certificates import parse_rows
from smoothcert.certification.checks import check_settings
from smoothcert.certification.columns import LARGEST_INTEGER
from smoothcert.errors import RequestError
from smoothcert.io.compressed import read_content
from smoothcert.io.results import ResultWriter, read_settings
from smoothcert.smoothing.certificate import ABSTAIN

COLUMNS = ("idx", "label", "predict", "distance", "certified_radius", "contradiction", "radius", "time")
HEADER = "\t".join(COLUMNS) + "\n"
SAME_IF_BOTH_HAVE_IT = (
    *("dataset", "split", "images_sha256"),
    *("noise", "sigma", "sound", "precision", "weights_sha256", "classes_sha256"),
)
"""Settings in which certificates and attacks must agree: otherwise they are about other images or classifiers. One that
only one of the two files records is not compared."""
SAME_OR_IN_NEITHER = ("consensus", "denoiser", "cascade")
"""Settings that must be equal, or absent in both."""


@dataclass(frozen=True, slots=True)
class AttackedImage:
    """The first point at which the smoothed classifier returns a class other than the label.

    `prediction` is the class there, `distance` its distance from the image, `radius` that of the searched ball. Both
    numbers are 0 for an image that is wrong without attack, and infinite for one that withstood every attack;
    `prediction` is then the class of the image itself, or ABSTAIN. `certified_radius` is what a certificates file
    claims for the image (None if it has no row); `contradiction`: the point is inside it and has another class, or the
    image itself has another class than the certified one.
    """

    index: int
    label: int
    prediction: int
    distance: float
    certified_radius: float | None
    contradiction: bool
    radius: float
    seconds: float

    @property
    def withstood(self) -> bool:
        return math.isinf(self.distance)


@dataclass(frozen=True, slots=True)
class AttacksFile:
    """All rows of a file, in file order, and the settings next to it."""

    path: Path
    rows: tuple[AttackedImage, ...]
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def contradictions(self) -> tuple[AttackedImage, ...]:
        """Rows that cannot be true together with the certificate of their image."""
        return tuple(row for row in self.rows if row.contradiction)


def empirical_accuracy(rows: Sequence[AttackedImage], radius: float) -> float:
    """Return the fraction of images that are not shown to be wrong, without attack or closer than `radius`.

    It is an upper bound on the robust accuracy at `radius` over these images: each image is counted as wrong by mistake
    with probability at most the file's alpha, and a better attack may find more of them.
    """
    if not rows:
        raise RequestError("expected at least one attacked image, got none; attack some with `smoothcert attack RUN`")
    return sum(row.distance > 0 and row.distance >= radius for row in rows) / len(rows)


def contradiction_p_value(file: AttacksFile) -> float | None:
    """Return the probability of at least as many contradictions as the file has, if they happen by chance only.

    A certificate and an attack may each fail with their own alpha, so a row contradicts its certificate with
    probability at most the sum, independently of other rows. Rows whose image was not certified count too: among the
    others alone, wrong certificates may be more frequent. If the probability is tiny, the certificates or the attack
    are wrong. None if no certificates were compared, or if they do not record their alpha.
    """
    compared = file.settings.get("certificates") or {}
    alphas = (compared.get("alpha"), file.settings.get("alpha"))
    if None in alphas:
        return None
    trials = sum(row.certified_radius is not None for row in file.rows)
    seen = len(file.contradictions)
    if seen == 0:
        return 1.0
    return float(special.bdtrc(seen - 1, trials, min(1.0, sum(float(alpha or 0) for alpha in alphas))))


def format_row(row: AttackedImage) -> str:
    """Return one line of the file with its newline. Floats are written with repr, so that reading returns them."""
    certified = "" if row.certified_radius is None else repr(row.certified_radius)
    numbers = (row.index, row.label, row.prediction, repr(row.distance), certified, int(row.contradiction))
    return "\t".join(map(str, (*numbers, repr(row.radius), round(row.seconds, 6)))) + "\n"


def parse_row(line: str) -> AttackedImage:
    """Invert `format_row`. Raise ValueError if the line is not a row."""
    cells = line.rstrip("\r\n").split("\t")
    if len(cells) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} columns, got {len(cells)}")
    index, label, predict, contradiction = (int(cells[i]) for i in (0, 1, 2, 5))
    distance, radius, seconds = (float(cells[i]) for i in (3, 6, 7))
    certified = float(cells[4]) if cells[4] else None
    if not (0 <= index <= LARGEST_INTEGER and 0 <= label <= LARGEST_INTEGER and -1 <= predict <= LARGEST_INTEGER):
        raise ValueError(f"expected an index and classes >= 0, got {cells[0]}, {cells[1]} and {cells[2]}")
    if not 0 <= seconds <= LARGEST_INTEGER:
        raise ValueError(f"expected a time in seconds, got {cells[7]}")
    if not 0 <= distance <= radius or math.isinf(distance) != math.isinf(radius):
        raise ValueError(f"expected 0 <= distance <= radius, got {cells[3]} and {cells[6]}")
    if math.isfinite(distance) != (predict not in (label, ABSTAIN)):
        raise ValueError(f"distance {cells[3]} does not fit label {label} and prediction {predict}")
    if certified is not None and not 0 <= certified < math.inf:
        raise ValueError(f"expected a certified radius >= 0, got {cells[4]}")
    if contradiction not in (0, 1) or (contradiction and not certified):
        raise ValueError(f"contradiction {cells[5]} does not fit certified radius {cells[4]}")
    return AttackedImage(index, label, predict, distance, certified, bool(contradiction), radius, seconds)


def read_attacks(path: str | Path) -> AttacksFile:
    """Read an attacks file. An incomplete last row is left out."""
    path = Path(path)
    rows, _ = _parse_file(path)
    stored = read_settings(path)
    check_settings(stored["settings"], path)
    return AttacksFile(path, tuple(rows), stored["settings"], stored["provenance"])


def _parse_file(path: Path) -> tuple[list[AttackedImage], int]:
    return parse_rows(read_content(path, "an attacks file"), path, (COLUMNS,), parse_row, "an attacks file")


def attacks_writer(
    path: Path, settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> ResultWriter[AttackedImage]:
    """Open or resume the attacks file `path`."""
    return ResultWriter(path, settings, provenance, header=HEADER, parse=_parse_file, format_row=format_row)
