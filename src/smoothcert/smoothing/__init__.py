"""g from f: votes of any callable under noise, PREDICT and CERTIFY."""

from smoothcert.smoothing.certify import certificate_from_votes
from smoothcert.smoothing.classifier import SmoothedClassifier
from smoothcert.smoothing.predict import class_from_votes
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import VoteCounter, select_and_estimate

__all__ = [
    "Rule",
    "SmoothedClassifier",
    "VoteCounter",
    "certificate_from_votes",
    "class_from_votes",
    "select_and_estimate",
]
