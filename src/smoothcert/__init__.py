"""Train image classifiers that can be certified by randomized smoothing, certify them, report the results.

>>> import smoothcert as sc

Certify a classifier: `SmoothedClassifier(model, sigma=0.5).certify(images)`, or a data set: `certify_dataset`.
Train: `train(preset("mnist/consistency", sigma=0.5), out="runs/a")`, or use `losses` in your own loop.
Examine and compare: `doctor`, `load`, `read_certificates`, `report`. `docs/api.md` shows each name with an example.
"""

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # as in typing, whose import takes longer than all of this file
if TYPE_CHECKING:
    from smoothcert.analysis.doctor import doctor
    from smoothcert.certification.cascade import Cascade
    from smoothcert.certification.certificates import read_certificates
    from smoothcert.certification.certify_dataset import certify_dataset
    from smoothcert.certification.ensemble import RunEnsemble
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.certification.smoothed_classifier import SmoothedClassifier
    from smoothcert.data import load_dataset
    from smoothcert.errors import RequestError, WorkError
    from smoothcert.models.ensemble import Ensemble
    from smoothcert.models.hub import load_hub
    from smoothcert.objectives import losses
    from smoothcert.papers.presets import preset
    from smoothcert.report import report
    from smoothcert.smoothing.certificate import ABSTAIN, Certificate
    from smoothcert.smoothing.certificate_batch import CertificateBatch
    from smoothcert.training.api import load, train
    from smoothcert.training.checkpoint import Run
    from smoothcert.training.recipe import TrainRecipe

__all__ = [
    "ABSTAIN",
    "Cascade",
    "Certificate",
    "CertificateBatch",
    "CertifySettings",
    "Ensemble",
    "RequestError",
    "Run",
    "RunEnsemble",
    "SmoothedClassifier",
    "TrainRecipe",
    "WorkError",
    "__version__",
    "certify_dataset",
    "doctor",
    "load",
    "load_dataset",
    "load_hub",
    "losses",
    "preset",
    "read_certificates",
    "report",
    "train",
]
_MODULES = {
    "ABSTAIN": "smoothing.certificate",
    "Cascade": "certification.cascade",
    "Certificate": "smoothing.certificate",
    "CertificateBatch": "smoothing.certificate_batch",
    "CertifySettings": "certification.settings",
    "Ensemble": "models.ensemble",
    "RequestError": "errors",
    "Run": "training.checkpoint",
    "RunEnsemble": "certification.ensemble",
    "SmoothedClassifier": "certification.smoothed_classifier",
    "TrainRecipe": "training.recipe",
    "WorkError": "errors",
    "certify_dataset": "certification.certify_dataset",
    "doctor": "analysis.doctor",
    "load": "training.api",
    "load_dataset": "data",
    "load_hub": "models.hub",
    "preset": "papers.presets",
    "losses": "objectives.losses",
    "read_certificates": "certification.certificates",
    "report": "report",
    "train": "training.api",
}


def __getattr__(name: str) -> object:
    """Import public names on first use: a command imports what it needs, and reports and `--help` need no torch."""
    if name in _MODULES:
        module = import_module(f"smoothcert.{_MODULES[name]}")
        return module if name == "losses" else getattr(module, name)
    if name == "models":  # the doctor's advice names smoothcert.models.Normalize
        return import_module("smoothcert.models")
    raise AttributeError(f"module 'smoothcert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
