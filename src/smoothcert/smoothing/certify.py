"""CERTIFY of Cohen et al. 2019 (https://arxiv.org/abs/1902.02918): votes in, certificate out."""

from collections.abc import Sequence

import numpy as np

from smoothcert.bounds import error_upper_bound
from smoothcert.certificates import ABSTAIN, Certificate
from smoothcert.noise import Gaussian


def certificate_from_votes(
    selection: Sequence[int], estimation: Sequence[int], noise: Gaussian, alpha: float
) -> Certificate:
    """The certificate that n0 votes for choosing the class and n *fresh* votes for bounding it give.

    `selection` and `estimation` are votes per class. With probability at least 1 - alpha over the votes, either
    the result abstains or the smoothed classifier is constant within its radius.
    """
    top = int(np.argmax(selection))
    n, count = int(np.sum(estimation)), int(estimation[top])
    order = sorted((c for c, k in enumerate(estimation) if k), key=lambda c: -estimation[c])
    votes = tuple((c, int(estimation[c])) for c in order)
    q = error_upper_bound(count, n, alpha)
    n0 = int(np.sum(selection))
    radius = noise.radius(q)
    # p_low <= 1/2, or so close above it that the radius rounds to nothing: nothing is shown.
    if radius <= 0:
        return Certificate(ABSTAIN, 0.0, n0, n, count, votes)
    return Certificate(top, radius, n0, n, count, votes)
