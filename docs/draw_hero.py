"""Draw hero.png, the first figure of the README, from the certificates in results/mnist.

python docs/draw_hero.py
"""

from pathlib import Path

from matplotlib.figure import Figure

from smoothcert.certification.certificates import read_certificates
from smoothcert.report.curves import draw_curves
from smoothcert.report.style import TITLE_SIZE, pictures_of
from smoothcert.report.summary import summarize

ROOT = Path(__file__).parents[1]
RUNS = ("gaussian-0.5", "macer-0.5", "consistency-0.5", "smoothmix-eta5-0.5")
RADIUS = 1.75


def draw() -> Figure:
    paths = [ROOT / "results" / "mnist" / run / "certificates" / "test-n100000.tsv.gz" for run in RUNS]
    files = list(map(read_certificates, paths))
    shared = set.intersection(*(set(file.columns.index.tolist()) for file in files))
    summaries = [summarize(file.only(shared), run, (RADIUS,)) for run, file in zip(RUNS, files, strict=True)]
    plain, best = (summary.accuracy_at[RADIUS] for summary in (summaries[0], summaries[-1]))
    figure = draw_curves(summaries)
    figure.suptitle(
        f"At L2 radius {RADIUS:g}, SmoothMix certifies {best:.0%} of\n"
        f"the MNIST test digits, Gaussian training {plain:.0%}",
        fontsize=TITLE_SIZE + 1,
        fontweight="bold",
    )
    return figure


if __name__ == "__main__":
    picture = pictures_of("hero", draw, ["png"])["hero.png"]
    assert picture is not None
    (ROOT / "docs" / "figures" / "hero.png").write_bytes(picture)
