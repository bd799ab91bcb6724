"""How the images of a certificates file were certified, as its settings record it: bound, noise, limits, rule."""

from collections.abc import Sequence

import numpy as np

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.certification.checks import ONE_SIDED, RANDOMIZED, bound_of
from smoothcert.data import known_class_names
from smoothcert.io.text import one_line
from smoothcert.noise import NOISES, Gaussian
from smoothcert.smoothing.bounds import SLACK
from smoothcert.smoothing.cascade import stage_error
from smoothcert.smoothing.certificate import largest_radius

MANY_IMAGES = 20
"""This many images of one class, and no other, are not a coincidence."""


def noise_of(file: CertificatesFile) -> str:
    """The name of the noise; files of other tools may not say which, and are taken to be Gaussian."""
    return str(file.settings.get("noise") or "gaussian")


def norm_of(file: CertificatesFile) -> str:
    """The norm of the radii, "L1" or "L2", which depends on the noise."""
    return NOISES[noise_of(file)].norm


def kept_apart(file: CertificatesFile) -> str:
    """Why the radii cannot be compared with those of plain certificates; "" if they can."""
    if file.settings.get("cascade"):
        return "cascade"
    return "randomized bound" if file.is_randomized else ""


def class_names_of(file: CertificatesFile) -> tuple[str, ...]:
    """The names of the classes, in the order of their numbers, as the file records them or its data set has them."""
    recorded = file.settings.get("classes") or file.provenance.get("class_names")
    if isinstance(recorded, list):
        return tuple(map(str, recorded))
    return known_class_names(file.settings.get("dataset")) or ()


def class_name(label: int, names: Sequence[str]) -> str:
    """The name of a class among `names`; its number if they do not have it."""
    return one_line(names[label]) if 0 <= label < len(names) else str(label)


def ceiling_of(file: CertificatesFile, sigma: float | None, n: int | None, alpha: float | None) -> float | None:
    """The radius of an image whose n votes all agree (the largest, if it depends on a coin); None if it is not known.

    A sequential rule stops such an image at the radii that it was asked for.
    """
    if sigma is None or n is None or alpha is None or file.settings.get("radii"):
        return None
    if sigmas := file.settings.get("cascade"):
        errors = [stage_error(n, n, stage, len(sigmas), alpha) for stage in range(len(sigmas))]
        return max(Gaussian(s).radius(error) for s, error in zip(sigmas, errors, strict=True))
    slack = SLACK if file.settings.get("sound") else 0.0
    return largest_radius(n, NOISES[noise_of(file)](sigma), alpha, bound_of(file.settings), slack)


def protocol_of(file: CertificatesFile, n: int | None, alpha: float | None) -> dict[str, object]:
    """What radii depend on besides the network and the image, by name."""
    settings = file.settings
    adaptive = bool(settings.get("radii") or settings.get("radius_loss"))  # the rule chooses n for each image
    return {
        "n": settings.get("n") if n is None or adaptive else n,
        "alpha": alpha,
        "bound": bound_of(settings),
        "noise": noise_of(file),
        "radii": str(settings.get("radii") or "none"),
        "full radius after n votes": bool(settings.get("radii") and settings.get("hold_back")),
        "radius loss": settings.get("radius_loss") or 0,
        "label-aware": bool(settings.get("label_aware")),
        "sound": bool(settings.get("sound")),
    }


def remarks_on(file: CertificatesFile) -> tuple[str, ...]:
    """What is unusual; usual are n votes for each image of several classes, under Gaussian noise in floats."""
    settings = file.settings
    columns = file.columns
    n = settings.get("n")
    radii = ", ".join(map(str, settings.get("radii") or ()))
    cascade = settings.get("cascade") or ()
    of_one_class = len(columns) >= MANY_IMAGES and len(np.unique(columns.label)) == 1
    spent = int(columns.spent.sum())  # 0: votes are not recorded
    most = int(columns.n0.sum()) + (n * len(columns) if n else int(columns.n.sum()))
    remarks = {
        f"sampled until radius {radii} was decided": bool(radii),
        f"two-stage, about {settings.get('radius_loss')} sigma of radius given up": bool(settings.get("radius_loss")),
        "label-aware: wrong images were not sampled, for benchmarks only": bool(settings.get("label_aware")),
        f"{bound_of(settings)} bound": bound_of(settings) not in (ONE_SIDED, RANDOMIZED),
        "randomized bound: each radius depends on a coin that the file stores": file.is_randomized,
        f"cascade over σ {', '.join(f'{sigma:g}' for sigma in cascade)}": bool(cascade),
        "sound integer noise": bool(settings.get("sound")),
        f"{settings.get('noise')} noise, radii in L1": norm_of(file) == "L1",
        f"{most / max(spent, 1):.1f} times fewer votes than n for each image": most > spent > 0,
        f"all images of class {class_name(columns.label[0], class_names_of(file))}, so its ACR alone": of_one_class,
        "a last row, not written to its end, is left out": file.torn,
    }
    return tuple(remark for remark, holds in remarks.items() if holds)
