"""Train image classifiers that can be certified by randomized smoothing, certify them, show the result.

>>> from smoothcert import SmoothedClassifier
"""

from importlib import import_module

from smoothcert.version import __version__

TYPE_CHECKING = False  # as in typing, whose import takes longer than all of this file
if TYPE_CHECKING:
    from smoothcert.certificates import ABSTAIN, Certificate, read_certificates
    from smoothcert.errors import RequestError, WorkError
    from smoothcert.smoothing import SmoothedClassifier

__all__ = [
    "ABSTAIN",
    "Certificate",
    "RequestError",
    "SmoothedClassifier",
    "WorkError",
    "__version__",
    "read_certificates",
]
_MODULES = {
    "ABSTAIN": "certificates",
    "Certificate": "certificates",
    "RequestError": "errors",
    "SmoothedClassifier": "smoothing",
    "WorkError": "errors",
    "read_certificates": "certificates",
}


def __getattr__(name: str) -> object:
    """Import public names on first use: a command starts with what it needs, reports and `--help` without torch."""
    if name in _MODULES:
        found: object = getattr(import_module(f"smoothcert.{_MODULES[name]}"), name)
        return found
    raise AttributeError(f"module 'smoothcert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
