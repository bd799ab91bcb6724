"""How the images of a certificates file were certified, as its settings record it: bound, noise, limits, rule."""

import math

import numpy as np

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.certification.checks import EARLY_NAME, ONE_SIDED, RANDOMIZED, TWO_SIDED
from smoothcert.errors import WorkError
from smoothcert.noise import NOISES, Gaussian
from smoothcert.smoothing.bounds import smallest_error_bound
from smoothcert.smoothing.cascade import stage_error

MANY_IMAGES = 20
"""This many images of one class, and no other, are not a coincidence."""


def number_of(file: CertificatesFile, key: str) -> float | None:
    """The setting `key` as a number; None if it is not recorded, a WorkError if it is no number."""
    value = file.settings.get(key)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise WorkError(
            f"{file.path}: the settings next to it are damaged: expected a number for '{key}', got {value!r}"
        )
    return number


def text_of(file: CertificatesFile, key: str) -> str | None:
    """The setting `key` as text; None if it is empty or not recorded."""
    value = file.settings.get(key)
    return None if value is None or value == "" else str(value)


def bound_of(file: CertificatesFile) -> str:
    """The name of the confidence bound; the first files have a longer one, files of other tools none."""
    bound = text_of(file, "bound") or ONE_SIDED
    return ONE_SIDED if bound == EARLY_NAME else bound


def is_randomized(file: CertificatesFile) -> bool:
    """Whether the radii depend on coins, by a randomized bound."""
    return file.settings.get("bound") == "randomized"


def in_l1(file: CertificatesFile) -> bool:
    """Whether the noise certifies in L1; files of other tools may not say which noise, and are in L2."""
    kind = NOISES.get(str(file.settings.get("noise")))
    return kind is not None and kind.norm == "L1"


def kept_apart(file: CertificatesFile) -> str:
    """Why the radii cannot be compared with those of plain certificates; "" if they can."""
    return "cascade" if file.settings.get("cascade") else "randomized bound" if is_randomized(file) else ""


def ceiling_of(file: CertificatesFile, sigma: float | None, n: int | None, alpha: float | None) -> float | None:
    """The radius of an image whose n votes all agree; None if it is not known."""
    gaussian = (text_of(file, "noise") or "gaussian").lower() == "gaussian"
    # Other bounds may show more than alpha^(1/n).
    known = gaussian and bound_of(file) in (ONE_SIDED, TWO_SIDED, RANDOMIZED)
    if not known or sigma is None or n is None or alpha is None or n < 1 or not 0 < alpha < 1:
        return None
    if sigmas := file.settings.get("cascade"):
        errors = [stage_error(n, n, stage, len(sigmas), alpha) for stage in range(len(sigmas))]
        return max(Gaussian(s).radius(error) for s, error in zip(sigmas, errors, strict=True))
    return Gaussian(sigma).radius(smallest_error_bound(n, alpha, randomized=is_randomized(file)))


def protocol_of(file: CertificatesFile, n: int | None, alpha: float | None) -> dict[str, object]:
    """What radii depend on besides the network and the image, by name."""
    settings = file.settings
    adaptive = bool(settings.get("radii") or settings.get("radius_loss"))  # the rule chooses n for each image
    return {
        "n": number_of(file, "n") if n is None or adaptive else n,
        "alpha": alpha,
        "bound": bound_of(file),
        "noise": text_of(file, "noise") or "gaussian",
        "radii": str(settings.get("radii") or ""),
        "radius loss": text_of(file, "radius_loss"),
        "label-aware": bool(settings.get("label_aware")),
        "sound": bool(settings.get("sound")),
    }


def remarks_on(file: CertificatesFile) -> tuple[str, ...]:
    """What is unusual; usual are n votes for each image of several classes, under Gaussian noise in floats."""
    settings, columns, n = file.settings, file.columns, number_of(file, "n")
    radii = settings.get("radii") or ()
    radii = ", ".join(map(str, radii)) if isinstance(radii, list | tuple) else str(radii)
    cascade = settings.get("cascade") or ()
    of_one_class = len(columns) >= MANY_IMAGES and len(np.unique(columns.label)) == 1
    spent = int(columns.spent.sum())
    most = int(columns.n0.sum()) + (n * len(columns) if n else int(columns.n.sum()))
    remarks = {
        f"sampled until radius {radii} was decided": bool(radii),
        f"two-stage, about {settings.get('radius_loss')} sigma of radius given up": settings.get("radius_loss")
        is not None,
        "label-aware: wrong images were not sampled, for benchmarks only": bool(settings.get("label_aware")),
        f"{bound_of(file)} bound": bound_of(file) not in (ONE_SIDED, RANDOMIZED),
        "randomized bound: each radius depends on a coin that the file stores": is_randomized(file),
        f"cascade over σ {', '.join(f'{sigma:g}' for sigma in cascade)}": bool(cascade),
        "sound integer noise": bool(settings.get("sound")),
        f"{settings.get('noise')} noise, radii in L1": in_l1(file),
        f"{most / max(spent, 1):.1f} times fewer votes than n for each image": most > spent,
        f"all images of class {columns.label[0]}, so its ACR alone": of_one_class,
        "a last row, not written to its end, is left out": file.torn,
    }
    return tuple(remark for remark, holds in remarks.items() if holds)
