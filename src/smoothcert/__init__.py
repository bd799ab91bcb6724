"""Train image classifiers that can be certified by randomized smoothing, certify them, show the result.

>>> from smoothcert import SmoothedClassifier
"""

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # as in typing, whose import takes longer than all of this file
if TYPE_CHECKING:
    from smoothcert.certification.certificates import read_certificates
    from smoothcert.errors import RequestError, WorkError
    from smoothcert.objectives import losses
    from smoothcert.smoothing.certificate import ABSTAIN, Certificate
    from smoothcert.smoothing.classifier import SmoothedClassifier

__all__ = [
    "ABSTAIN",
    "Certificate",
    "RequestError",
    "SmoothedClassifier",
    "WorkError",
    "__version__",
    "losses",
    "read_certificates",
]
_MODULES = {
    "ABSTAIN": "smoothing.certificate",
    "Certificate": "smoothing.certificate",
    "RequestError": "errors",
    "SmoothedClassifier": "smoothing.classifier",
    "WorkError": "errors",
    "losses": "objectives.losses",
    "read_certificates": "certification.certificates",
}


def __getattr__(name: str) -> object:
    """Import public names on first use: a command starts with what it needs, reports and `--help` without torch."""
    if name in _MODULES:
        module = import_module(f"smoothcert.{_MODULES[name]}")
        return module if name == "losses" else getattr(module, name)
    raise AttributeError(f"module 'smoothcert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
