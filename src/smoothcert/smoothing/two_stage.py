"""Two stages: a few votes choose the class and the number of fresh votes that are worth their cost.

The second stage is plain CERTIFY on votes that the first has not seen, so Clopper-Pearson at the full alpha holds with
probability at least 1 - alpha, whatever the first stage chose. Counting the first votes again would break this, because
n would depend on the votes that are then bounded.
"""

from bisect import bisect_left

from scipy import special

OUTSIDE = 0.1
"""Probability that p is larger than the largest one for which the loss is predicted. It decides how often the loss is a
little larger than requested, never whether a certificate holds."""
MINIMUM = 1000


def _predicted_radius(q: float, n: int, alpha: float) -> float:
    """The radius, in units of sigma, from n votes of which the share q fails: Clopper-Pearson at a real count."""
    bound = float(special.betainccinv(n * q + 1, n * (1 - q), alpha))
    return max(0.0, -float(special.ndtri(bound)))


def _votes_for(q: float, minimum: int, n_max: int, alpha: float, radius_loss: float) -> int:
    """The least n in [minimum, n_max] whose radius is within `radius_loss` of that of n_max votes."""
    target = _predicted_radius(q, n_max, alpha) - radius_loss
    return bisect_left(range(n_max), True, lo=minimum, key=lambda n: _predicted_radius(q, n, alpha) >= target)


def second_stage_votes(
    first_count: int, first_n: int, *, alpha: float, n_max: int, radius_loss: float, minimum: int = MINIMUM
) -> int:
    """Number of fresh votes that are predicted to lose at most `radius_loss` * sigma of radius against `n_max` votes.

    The prediction is for the largest p that the first stage leaves plausible, by Clopper-Pearson: the larger p, the
    more votes are needed. It is `minimum` (at most n_max) when even this p gives no radius, and close to n_max when no
    vote failed, because the radius of such an image grows with every vote. Only the cost depends on the prediction: the
    fresh votes are bounded at the full alpha, which holds for every n.
    """
    if not 0 <= first_count <= first_n or first_n < 1:
        raise ValueError(f"expected 0 <= count <= n and n >= 1, got count {first_count}, n {first_n}")
    if not 0 < alpha < 1 or n_max < 1 or minimum < 1 or radius_loss < 0:
        given = f"{alpha}, {n_max}, {minimum}, {radius_loss}"
        raise ValueError(f"expected 0 < alpha < 1, n_max, minimum >= 1, radius_loss >= 0, got {given}")
    failures = first_n - first_count
    least_error = float(special.betaincinv(failures, first_count + 1, OUTSIDE)) if failures else 0.0
    return _votes_for(least_error, min(minimum, n_max), n_max, alpha, radius_loss)
