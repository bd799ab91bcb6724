"""PREDICT of Cohen et al. 2019 (https://arxiv.org/abs/1902.02918): from votes to a class or ABSTAIN."""

from collections.abc import Sequence

import numpy as np

from smoothcert.smoothing.bounds import top_two_p_value
from smoothcert.smoothing.certificate import ABSTAIN


def class_from_votes(votes: Sequence[int], alpha: float) -> int:
    """The class of the smoothed classifier, or ABSTAIN. Wrong with probability at most alpha over the votes."""
    order = np.argsort(-np.asarray(votes), kind="stable")
    count1, count2 = int(votes[order[0]]), int(votes[order[1]])
    return int(order[0]) if top_two_p_value(count1, count2) <= alpha else ABSTAIN
