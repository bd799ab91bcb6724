"""Train image classifiers that can be certified by randomized smoothing, certify them, show the result.

>>> from smoothcert import SmoothedClassifier
"""

from smoothcert.certificates import ABSTAIN, Certificate, read_certificates
from smoothcert.errors import RequestError, WorkError
from smoothcert.smoothing import SmoothedClassifier
from smoothcert.version import __version__

__all__ = [
    "ABSTAIN",
    "Certificate",
    "RequestError",
    "SmoothedClassifier",
    "WorkError",
    "__version__",
    "read_certificates",
]
