"""The average certified radius that fewer votes would have shown, from the votes that a file stores."""

import math
from functools import lru_cache

import numpy as np
from scipy import special
from scipy.interpolate import CubicSpline

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.certification.checks import ONE_SIDED
from smoothcert.certification.columns import Floats, Integers
from smoothcert.noise import UNIT_RADII
from smoothcert.report.protocol import bound_of, noise_of

MOST_STORED_VOTES = 10**7
"""Logarithms of factorials are tabulated up to this number."""
_CHUNK = 256
_SMOOTH, _EXACT, _POINTS = 5, 300, 3_000
"""With this many times n stored votes, files with more than 300 distinct counts use a curve through 3,300 points."""


def acr_at_fewer_votes(file: CertificatesFile, n: int) -> float | None:
    """The ACR to expect of `file` if it had drawn n votes per image instead of its N >= n.

    The N stored votes are exchangeable, so n of them are a draw without replacement: the number of votes for the
    chosen class is hypergeometric, and the ACR is the mean over all such draws. None if the file has fewer votes, not
    the same number for all images, or a rule other than CERTIFY with the one-sided bound.
    """
    settings, columns = file.settings, file.columns
    counts = set(columns.n.tolist())
    sigma, alpha = settings.get("sigma"), settings.get("alpha")
    unusual = any(settings.get(key) for key in ("cascade", "radii", "radius_loss", "label_aware", "sound"))
    if unusual or bound_of(file) != ONE_SIDED or sigma is None or alpha is None or len(counts) != 1:
        return None
    (votes,) = counts
    if not n <= votes <= MOST_STORED_VOTES:
        return None
    right = columns.count[columns.chosen == columns.label]
    distinct, repeats = np.unique(right, return_counts=True)
    noise = noise_of(file)
    if votes >= _SMOOTH * n and len(distinct) > _EXACT:
        radii = _curve(votes, n, alpha, noise)(np.log(votes - distinct + 1))
    else:
        radii = expected_unit_radii(distinct, votes, n, alpha, noise)
    return float(sigma * (radii @ repeats) / len(columns))


@lru_cache(maxsize=8)
def _curve(votes: int, n: int, alpha: float, noise: str) -> CubicSpline:
    """`expected_unit_radii` as a function of log(1 + votes for other classes), for all counts of all runs.

    Exact at the first few hundred counts, interpolated within 1e-7 elsewhere: the mean over draws of far fewer votes is
    smooth.
    """
    wrong = np.unique(np.concatenate([np.arange(_EXACT), np.geomspace(_EXACT, votes, _POINTS).astype(np.int64)]))
    expected = expected_unit_radii(votes - wrong[::-1], votes, n, alpha, noise)
    return CubicSpline(np.log(wrong + 1.0), expected[::-1])


def expected_unit_radii(counts: Integers, votes: int, n: int, alpha: float, noise: str) -> Floats:
    """For each of `counts` out of `votes`: the mean radius at sigma = 1 over all draws of n votes without replacement.

    `counts` ascend. Terms beyond 8 standard deviations and 20 votes, below 1e-15 together, are left out.
    """
    radii, logs = _unit_radii(n, alpha, noise), _log_factorials(votes)
    result = np.zeros(len(counts))
    whole = logs[votes] - logs[n] - logs[votes - n]
    for start in range(0, len(counts), _CHUNK):
        right = counts[start : start + _CHUNK, None].astype(np.int64)
        wrong = votes - right
        share = right / votes
        spread = np.sqrt(n * share * (1 - share) * (votes - n) / max(1, votes - 1))
        width = int(8 * spread.max()) + 20
        drawn = np.floor(n * share).astype(np.int64) + np.arange(-width, width + 1)
        possible = (drawn >= 0) & (drawn <= n) & (drawn <= right) & (n - drawn <= wrong)
        k = np.where(possible, drawn, np.maximum(0, n - wrong))
        log = logs[right] - logs[k] - logs[right - k] + logs[wrong] - logs[n - k] - logs[wrong - n + k] - whole
        result[start : start + _CHUNK] = (np.where(possible, np.exp(log), 0.0) * radii[k]).sum(axis=1)
    return result


@lru_cache(maxsize=8)
def _unit_radii(n: int, alpha: float, noise: str) -> Floats:
    """The radius at sigma = 1 of 0, 1, ..., n votes out of n for the chosen class."""
    count = np.arange(n // 2 + 1, n, dtype=np.float64)
    error = np.append(special.betainccinv(n - count + 1, count, alpha), -math.expm1(math.log(alpha) / n))
    above = [UNIT_RADII[noise](q) if q < 0.5 else 0.0 for q in error.tolist()]
    return np.concatenate([np.zeros(n + 1 - len(above)), above])


@lru_cache(maxsize=2)
def _log_factorials(most: int) -> Floats:
    logs: Floats = special.gammaln(np.arange(most + 1, dtype=np.float64) + 1)
    return logs
