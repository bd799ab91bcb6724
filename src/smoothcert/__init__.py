"""Train image classifiers that can be certified by randomized smoothing, certify them, show the result.

>>> import smoothcert as sc

Certify a classifier: `SmoothedClassifier(model, sigma=0.5).certify(images)`, or a data set: `certify_dataset`.
Train: `train(preset("mnist/consistency", sigma=0.5), out="runs/a")`, or use `losses` in your own loop.
Examine and compare: `doctor`, `load`, `read_certificates`, `report`. `docs/api.md` shows each name with an example.
"""

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # as in typing, whose import takes longer than all of this file
if TYPE_CHECKING:
    from smoothcert.analysis.doctor import doctor as doctor
    from smoothcert.certification.cascade import Cascade as Cascade
    from smoothcert.certification.certificates import read_certificates as read_certificates
    from smoothcert.certification.certify_dataset import certify_dataset as certify_dataset
    from smoothcert.certification.ensemble import RunEnsemble as RunEnsemble
    from smoothcert.certification.settings import CertifySettings as CertifySettings
    from smoothcert.certification.smoothed_classifier import SmoothedClassifier as SmoothedClassifier
    from smoothcert.data import load_dataset as load_dataset
    from smoothcert.errors import RequestError as RequestError
    from smoothcert.errors import WorkError as WorkError
    from smoothcert.models.ensemble import Ensemble as Ensemble
    from smoothcert.models.hub import load_hub as load_hub
    from smoothcert.objectives import losses as losses
    from smoothcert.papers.presets import preset as preset
    from smoothcert.report import report as report
    from smoothcert.smoothing.certificate import ABSTAIN as ABSTAIN
    from smoothcert.smoothing.certificate import Certificate as Certificate
    from smoothcert.smoothing.certificate_batch import CertificateBatch as CertificateBatch
    from smoothcert.training.api import load as load
    from smoothcert.training.api import train as train
    from smoothcert.training.checkpoint import Run as Run
    from smoothcert.training.recipe import TrainRecipe as TrainRecipe

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
"""Public name -> the module that defines it."""
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    """Import public names on first use: a command imports what it needs, and reports and `--help` need no torch."""
    if name in _MODULES:
        module = import_module(f"smoothcert.{_MODULES[name]}")
        return module if name == "losses" else getattr(module, name)
    raise AttributeError(f"module 'smoothcert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
