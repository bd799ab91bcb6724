"""Train image classifiers that can be certified by randomized smoothing, certify them, show the result.

>>> from smoothcert import SmoothedClassifier
"""

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # as in typing, whose import takes longer than all of this file
if TYPE_CHECKING:
    from smoothcert.certification.certificates import read_certificates
    from smoothcert.certification.certify_dataset import certify_dataset
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.errors import RequestError, WorkError
    from smoothcert.papers.presets import preset
    from smoothcert.smoothing.certificate import ABSTAIN, Certificate
    from smoothcert.smoothing.classifier import SmoothedClassifier
    from smoothcert.training.api import load, train
    from smoothcert.training.checkpoint import Run
    from smoothcert.training.recipe import TrainRecipe

__all__ = [
    "ABSTAIN",
    "Certificate",
    "CertifySettings",
    "RequestError",
    "Run",
    "SmoothedClassifier",
    "TrainRecipe",
    "WorkError",
    "__version__",
    "certify_dataset",
    "load",
    "preset",
    "read_certificates",
    "train",
]
_MODULES = {
    "ABSTAIN": "smoothing.certificate",
    "Certificate": "smoothing.certificate",
    "CertifySettings": "certification.settings",
    "RequestError": "errors",
    "Run": "training.checkpoint",
    "SmoothedClassifier": "smoothing.classifier",
    "TrainRecipe": "training.recipe",
    "WorkError": "errors",
    "load": "training.api",
    "preset": "papers.presets",
    "certify_dataset": "certification.certify_dataset",
    "read_certificates": "certification.certificates",
    "train": "training.api",
}


def __getattr__(name: str) -> object:
    """Import public names on first use: a command starts with what it needs, reports and `--help` without torch."""
    if name in _MODULES:
        found: object = getattr(import_module(f"smoothcert.{_MODULES[name]}"), name)
        return found
    raise AttributeError(f"module 'smoothcert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
