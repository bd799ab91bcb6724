"""The certificate of one image."""

from dataclasses import dataclass

ABSTAIN = -1
"""The prediction when nothing could be proved."""
MOST_VOTES = 10**9
"""The largest number of votes per image that a request may ask for."""

Votes = tuple[tuple[int, int], ...]
"""(class, count) of all classes with votes, largest count first."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """With probability at least 1 - alpha over the sampling, g(x') = predict for all ||x' - x|| < radius.

    `predict` is ABSTAIN and `radius` 0 when nothing could be proved. `count` of the `n` fresh votes went to the class
    that the first `n0` votes had chosen; `votes` are all n votes.
    """

    predict: int
    radius: float
    n0: int
    n: int
    count: int
    votes: Votes
    earlier: tuple[Votes, ...] = ()
    """The votes of the stages of a cascade before the one that `votes` belong to."""
    coin: float | None = None
    """The coin of a randomized bound, on which the radius depends; None for the other bounds."""

    @property
    def spent(self) -> int:
        """All votes that were drawn: n0 + n, at each stage of a cascade."""
        return (self.n0 + self.n) * (1 + len(self.earlier))

    @property
    def abstained(self) -> bool:
        return self.predict == ABSTAIN
