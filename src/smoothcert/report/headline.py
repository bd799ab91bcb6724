"""The result of a report in words: one short paragraph per sigma and data set."""

import math
import statistics
from collections.abc import Sequence

from smoothcert.io.text import counted, radius_text, some_of
from smoothcert.report.names import images_text
from smoothcert.report.paired import FEW, LEVEL, Comparison, difference_of_shares
from smoothcert.report.seeds import SeedMean
from smoothcert.report.summary import Summary, wilson_interval

MOST_RUNS = 4
"""Up to this number, runs that are not ranked are named one by one."""
MOST_CLASSES = 10
"""Of more classes than this, their number is given."""
STATISTICS = (
    "A difference of ACR is called established if it exceeds two standard errors of the paired difference, or, where "
    f"at most {FEW} images differ, by the randomization test (5%) of their signs; one of accuracies, by the sign test "
    "(5%) of the images that one run alone certifies. Each difference has a test of its own: of twenty between equal "
    "runs, one may be established by chance; only the words on the best run and the reference allow for the choice of "
    "the best. Intervals are 95% Wilson intervals over the choice of images, for ACR that of numbers between 0 and the "
    "largest radius. "
    "± always means the sample standard deviation over training seeds."
)
"""What the words and signs on a page mean; a page prints it once."""


def headlines(comparisons: Sequence[Comparison], seeds: Sequence[SeedMean] = ()) -> list[str]:
    """Sentences on each comparison, in order; runs have the names that the tables have."""
    return [" ".join(_sentences(comparison, len(comparisons) > 1, seeds)) for comparison in comparisons]


def _sentences(comparison: Comparison, several: bool, seeds: Sequence[SeedMean]) -> list[str]:
    radius = comparison.headline_radius
    first = comparison.first
    noise_level = "Without a recorded σ" if first.sigma is None else f"At σ = {first.sigma:g}"
    start = f"{', '.join(filter(None, (noise_level, first.apart)))}: " if several or first.apart else ""
    if radius is None:
        text = [f"{start}{_without_radius(comparison)}"]
    elif comparison.ranked:
        text = [_ranked(comparison, radius, start)]
    else:
        text = [f"{start}{_unranked(comparison, radius)}"]
    if radius is not None:
        text.append(_over_seeds(comparison, radius, seeds))
    if comparison.obstacles:
        text.append(f"These runs are not ranked: {'; '.join(comparison.obstacles)}.")
    sentences = [*text, *_never_certified(comparison), _limit(comparison)]
    return [sentence for sentence in sentences if sentence]


def _without_radius(comparison: Comparison) -> str:
    """The sentence for a table without a radius above 0 that all runs can show."""
    largest = max(float(run.outcomes.radius.max()) for run in comparison.runs)
    if largest == 0:
        return "No image is classified correctly with a certified radius above 0."
    if any(0 < radius <= largest for radius in comparison.first.accuracy_at):
        return "No radius of the table above 0 can be shown by the votes of all runs; leave out those with few votes."
    return f"The largest certified radius is {radius_text(largest)}; choose radii up to it for the table."


def _count(run: Summary, radius: float) -> int:
    """The images that are certified for their label at `radius`."""
    return int(run.outcomes.certified_at(radius).sum())


def _claim(comparison: Comparison, run: Summary, radius: float) -> str:
    split = run.split if len({run.split for run in comparison.runs}) == 1 else None
    count = _count(run, radius)
    keep = "keeps its" if count == 1 else "keep their"
    return (
        f"{count:,} of {images_text(run.images, run.dataset, split)} {keep} class under every "
        f"change of {run.norm} length up to {radius:g} ({run.name}; {_interval(run, radius)})"
    )


def _interval(run: Summary, radius: float) -> str:
    ends = wilson_interval(_count(run, radius) / run.images, run.images)
    # Outwards: rounded to the nearest count, the interval of 20 images would miss in up to 26% of all cases.
    low, high = math.floor(ends[0] * run.images), math.ceil(ends[1] * run.images)
    return f"95% interval {low:,} to {high:,}"


def _unranked(comparison: Comparison, radius: float) -> str:
    """The first runs at `radius`, in their order."""
    first, *others = comparison.runs
    words = [
        f"{run.name}: {_count(run, radius):,} of {run.images:,} ({_interval(run, radius)})"
        for run in others[: MOST_RUNS - 1]
    ]
    if (more := len(comparison.runs) - MOST_RUNS) > 0:
        words.append(f"{counted(more, 'more run')} {'is' if more == 1 else 'are'} in the tables")
    return "; ".join([_claim(comparison, first, radius), *words]) + "."


def _ranked(comparison: Comparison, radius: float, start: str) -> str:
    """The best run at `radius`, then the next best and the reference, and whether their differences are established.

    The best of many runs often exceeds a reference to which all are equal: of ten, in 9% of all cases by a test at 5%.
    Its difference therefore has a test at 5% / the number of the other runs.
    """
    best = comparison.best_at(radius)
    if best is None:
        return f"{start}No image is certified at radius {radius:g}."
    runs = {run.name: run for run in comparison.runs}
    others = {best.second: best.lead}
    if comparison.reference is not None and comparison.reference not in (best.name, best.second):
        ours, theirs = (runs[name].outcomes.certified_at(radius) for name in (best.name, comparison.reference))
        others[comparison.reference] = difference_of_shares(ours, theirs, LEVEL / (len(runs) - 1))
    words = [
        f"{name}: {_count(runs[name], radius):,}, the difference is {'' if lead.significant else 'not '}established"
        for name, lead in others.items()
    ]
    return f"{start}{_claim(comparison, runs[best.name], radius)}. {'; '.join(words)}."


def _over_seeds(comparison: Comparison, radius: float, seeds: Sequence[SeedMean]) -> str:
    """The means over seeds at `radius`: the sentences before are about single runs, the best of which are lucky."""
    names = {run.name for run in comparison.runs}
    means = [mean for mean in seeds if names.issuperset(run.name for run in mean.members)]
    if not means:
        return ""
    words = []
    scopes = {f" of {mean.members[0].images:,}" for mean in means[:MOST_RUNS]}
    for mean in means[:MOST_RUNS]:
        counts = [_count(run, radius) for run in mean.members]
        scope = f" of {mean.members[0].images:,}" if len(scopes) > 1 else ""
        words.append(f"{mean.name} {statistics.fmean(counts):.1f} ± {statistics.stdev(counts):.1f}{scope}")
    more = f"; {len(means) - MOST_RUNS} more are in the table" if len(means) > MOST_RUNS else ""
    return (
        "These are single runs, and the best of several seeds is partly luck; compare the mean ± sd over seeds: "
        f"{', '.join(words)}{scopes.pop() if len(scopes) == 1 else ''} images{more}."
    )


def _never_certified(comparison: Comparison) -> list[str]:
    """A sentence on each set of classes that runs never certify, unless the classes may be as good as the others."""
    names: dict[str, list[str]] = {}
    for run in (run for run in comparison.runs if _fewer_than_by_chance(run)):
        never = run.never_certified
        certified = [cls for cls in run.classes if cls not in never]
        images = sum(len(run.classes[cls]) for cls in never)
        if len(certified) < len(never):
            text = f"Only images of {_classes([run.class_name(cls) for cls in certified])} are certified"
        else:
            of = _classes([run.class_name(cls) for cls in never])
            text = f"None of the {images:,} images of {of} is certified"
        names.setdefault(text, []).append(run.name)
    return [f"{text} by {some_of(runs)}." for text, runs in names.items()]


def _fewer_than_by_chance(run: Summary) -> bool:
    """Whether the classes that `run` never certifies are a finding, at 5%, and not a matter of their few images.

    Of all ways to choose the certified images, in some they avoid the images of these classes; as many sets of classes
    could be avoided as there are sets of this size. Of 20 images of ten equal classes, a class without a certified one
    is the rule: at an accuracy of 60%, 84% of all runs have such a class.
    """
    certified = int(run.outcomes.certified.sum())
    others = sum(len(outcomes) for outcomes in run.classes.values() if outcomes.certified.any())
    sets = math.comb(len(run.classes), len(run.never_certified))
    chance = sets * math.comb(others, certified) / math.comb(run.images, certified)  # of integers too large for floats
    return bool(run.never_certified) and chance <= LEVEL


def _classes(names: Sequence[str]) -> str:
    if len(names) > MOST_CLASSES:
        return f"{len(names):,} classes"
    return f"class {names[0]}" if len(names) == 1 else f"the classes {', '.join(names)}"


def _limit(comparison: Comparison) -> str:
    """The sentence for runs in which n, not the network, sets the radius of many images."""
    limited = [run for run in comparison.runs if run.limited_by_n]
    if not limited:
        return ""
    shares = sorted({round(100 * (run.at_ceiling or 0.0)) for run in limited})
    share = f"{shares[0]}%" if len(shares) == 1 else f"{shares[0]} to {shares[-1]}%"
    which = "" if len(limited) == len(comparison.runs) else f" of {len(limited)} of the {len(comparison.runs)} runs"
    ceilings = {radius_text(run.ceiling) for run in limited if run.ceiling is not None}
    radius = f", {ceilings.pop()}" if len(ceilings) == 1 else ""
    return f"The number of votes n limits the result{which}: {share} of the images have the largest radius{radius}."
