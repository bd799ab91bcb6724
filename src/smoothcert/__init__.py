"""Train image classifiers that can be certified by randomized smoothing, certify them, show the result.

>>> import smoothcert as sc
"""

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # as in typing, whose import takes longer than all of this file
if TYPE_CHECKING:
    from smoothcert.certification.certificates import read_certificates
    from smoothcert.certification.smoothed_classifier import SmoothedClassifier
    from smoothcert.data import load_dataset
    from smoothcert.errors import RequestError, WorkError
    from smoothcert.report.run_table import report
    from smoothcert.smoothing.certificate import ABSTAIN, Certificate
    from smoothcert.smoothing.certificate_batch import CertificateBatch

__all__ = [
    "ABSTAIN",
    "Certificate",
    "CertificateBatch",
    "RequestError",
    "SmoothedClassifier",
    "WorkError",
    "__version__",
    "load_dataset",
    "read_certificates",
    "report",
]
_MODULES = {
    "ABSTAIN": "smoothing.certificate",
    "Certificate": "smoothing.certificate",
    "CertificateBatch": "smoothing.certificate_batch",
    "RequestError": "errors",
    "SmoothedClassifier": "certification.smoothed_classifier",
    "WorkError": "errors",
    "load_dataset": "data",
    "read_certificates": "certification.certificates",
    "report": "report.run_table",
}


def __getattr__(name: str) -> object:
    """Import public names on first use: a command imports what it needs, and reports and `--help` need no torch."""
    if name in _MODULES:
        value: object = getattr(import_module(f"smoothcert.{_MODULES[name]}"), name)
        return value
    raise AttributeError(f"module 'smoothcert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
