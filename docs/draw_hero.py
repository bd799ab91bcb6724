"""Draw hero.png, the first figure of the README, from the certificates in results/mnist.

python docs/draw_hero.py
"""

from pathlib import Path

from smoothcert.certification.certificates import read_certificates
from smoothcert.report.curves import draw_curves
from smoothcert.report.style import pictures_of
from smoothcert.report.summary import summarize

ROOT = Path(__file__).parents[1]
RUNS = ("gaussian-0.5", "macer-0.5", "consistency-0.5", "smoothmix-eta5-0.5")
RADIUS = 1.75


def main() -> None:
    paths = [ROOT / "results" / "mnist" / run / "certificates" / "test-n100000.tsv.gz" for run in RUNS]
    files = list(map(read_certificates, paths))
    shared = set.intersection(*(set(file.columns.index.tolist()) for file in files))
    files = [file.only(shared) for file in files]
    summaries = [summarize(file, run, (RADIUS,)) for run, file in zip(RUNS, files, strict=True)]
    plain, best = (summary.accuracy_at[RADIUS] for summary in (summaries[0], summaries[-1]))
    message = (
        f"At L2 radius {RADIUS:g}, SmoothMix certifies {best:.0%} of\n"
        f"the MNIST test digits, Gaussian training {plain:.0%}"
    )
    picture = pictures_of("hero", lambda: draw_curves(summaries, message), ["png"])["hero.png"]
    assert picture is not None
    (ROOT / "docs" / "figures" / "hero.png").write_bytes(picture)


if __name__ == "__main__":
    main()
