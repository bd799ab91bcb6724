"""Train image classifiers that can be certified by randomized smoothing, certify them, show the result.

>>> from smoothcert import SmoothedClassifier
"""

from typing import TYPE_CHECKING, Any

from smoothcert.certificates import ABSTAIN, Certificate, read_certificates
from smoothcert.errors import RequestError, WorkError
from smoothcert.version import __version__

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """SmoothedClassifier on first use: it brings torch, which reports and `smoothcert --help` do without."""
    if name == "SmoothedClassifier":
        from smoothcert.smoothing import SmoothedClassifier

        return SmoothedClassifier
    raise AttributeError(f"module 'smoothcert' has no attribute {name!r}")
