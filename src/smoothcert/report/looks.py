"""Colour and line style of each method: the same in every figure and page, whatever the order of the runs."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from smoothcert.io.text import natural_order

Dash = tuple[float, ...]


class Look(NamedTuple):
    """The look of a curve."""

    colour: str
    dark: str
    """The colour on a dark page."""
    dash: Dash = ()
    """Lengths of dashes and gaps in line widths; empty for a solid line."""


DASHES: tuple[Dash, ...] = ((), (5, 1.5), (6, 2, 1, 2), (1, 1), (3, 1, 1, 1, 1, 1))
_, DASHED, DASH_DOT, DOTTED, DASH_DOTS = DASHES
# Neighbours in the papers' tables differ in hue, lightness and style, so that they also differ in black and white and
# for colour-blind readers.
_KNOWN = {
    "Gaussian": Look("#4d4d4d", "#c9ced6", DASH_DOTS),
    "Stability": Look("#3a9fd6", "#8fd3f4", DASH_DOT),
    "SmoothAdv": Look("#009e73", "#2fc49a", DASHED),
    "MACER": Look("#c0639a", "#e09bc4", DOTTED),
    "Consistency": Look("#0058a8", "#5aa2ff"),
    "SmoothAdv + Consistency": Look("#6a3d9a", "#b794f4", DASHED),
    "SmoothMix": Look("#d55e00", "#f08a4b"),
    "SmoothMix, one-step": Look("#8c1c13", "#ff6b5e", DASHED),
    "SmoothMix (η = 5)": Look("#d55e00", "#f08a4b"),
    "SmoothMix (η = 5), one-step": Look("#8c1c13", "#ff6b5e", DASHED),
    "SmoothMix (η = 1)": Look("#c98500", "#e6b422", DASH_DOTS),
    "SmoothMix (η = 1), one-step": Look("#7a5c00", "#c9a94b", DOTTED),
    "CAT-RS": Look("#5a8f00", "#a3d154", DASH_DOTS),
}
_SPARE = (
    ("#00838f", "#4dd0e1"),
    ("#a0522d", "#d7a17e"),
    ("#e0115f", "#ff7ba9"),
    ("#3f51b5", "#9fa8ff"),
    ("#808000", "#d0d060"),
    ("#800080", "#e080e0"),
    ("#2e8b57", "#7fd6a4"),
)
_RAMP = ("#440154", "#3b528b", "#21918c", "#4fae5a", "#c8aa00")
_DARK_RAMP = ("#9d85d6", "#5b8fd6", "#2fb5ac", "#7ad151", "#fde725")
_LEAST_OF_RAMP = 3
"""This many variants of one method are shown by the colours of a ramp, in the order of their hyper-parameter."""


def looks_of(labels: Iterable[str]) -> dict[str, Look]:
    """Label -> its look; no two labels share one until all looks are taken.

    The looks of the papers' methods are fixed. Three or more variants of a method, such as "Consistency (λ = 1)", get
    the colours of a ramp in the order of their numbers. Other labels get spare looks in alphabetical order.
    """
    rest = sorted(set(labels), key=natural_order)
    looks: dict[str, Look] = {}
    families: dict[str, list[str]] = {}
    for label in rest:
        families.setdefault(_family(label), []).append(label)
    ramps = [[label for label in labels if label != family] for family, labels in families.items()]
    ramps = [variants for variants in ramps if len(variants) >= _LEAST_OF_RAMP]
    for number, variants in enumerate(ramps):
        for i, label in enumerate(variants):
            share = i / (len(variants) - 1)
            dash = DASHES[number % len(DASHES)]
            looks[label] = Look(_between(_RAMP, share), _between(_DARK_RAMP, share), dash)
    # Exact names first: a variant must not take the look of a method that is in the figure.
    for name_of in (str, _family, lambda label: label.partition(" (")[0].partition(", ")[0]):
        for label in rest:
            look = _KNOWN.get(name_of(label))
            if label not in looks and look is not None and look not in looks.values():
                looks[label] = look
    spare = (Look(*pair, dash) for dash in DASHES for pair in _SPARE)
    for label in rest:
        if label not in looks:
            looks[label] = next(spare, Look("#4d4d4d", "#c9ced6", DASH_DOTS))
    return looks


def _family(label: str) -> str:
    """The method of a label, without its hyper-parameters."""
    return re.sub(r" \(.* = .*\)", "", label, count=1)


def _between(stops: Sequence[str], share: float) -> str:
    """The colour at `share` in [0, 1] of the way through `stops`."""
    place = share * (len(stops) - 1)
    first = min(int(place), len(stops) - 2)
    low, high = (bytes.fromhex(stop[1:]) for stop in stops[first : first + 2])
    mixed = (round(a + (b - a) * (place - first)) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
