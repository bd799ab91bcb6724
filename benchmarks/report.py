"""CPU time of `smoothcert report` for many runs.

    python benchmarks/report.py [--runs 50] [--images 10000] [--formats md,csv,html]

Writes runs with made-up votes of ten classes (three noise levels, the same images), then reports on them in a process
of its own, whose CPU time includes the start of Python.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from smoothcert.certification.certificates import CertifiedImage, write_certificates
from smoothcert.noise import Gaussian
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.smoothing.certificate import certificate_from_bound, sorted_votes

SIGMAS, VOTES, FIRST_VOTES, ALPHA, CLASSES = (0.25, 0.5, 1.0), 100_000, 100, 0.001, 10
METHODS = ("gaussian", "consistency", "smoothmix", "macer", "stability", "smoothadv")


def write_run(folder: Path, number: int, images: int) -> None:
    """Certificates of `images` images whose votes for the label follow a beta distribution."""
    generator = np.random.default_rng(number)
    sigma, method = SIGMAS[number % 3], METHODS[number // 3 % 6]
    share = generator.beta(4, 0.3, images)
    others = generator.dirichlet(np.full(CLASSES - 1, 0.3), images) * (1 - share)[:, None]
    drawn = generator.multinomial(VOTES, np.column_stack([share, others]))
    labels = np.random.default_rng(0).integers(CLASSES, size=images).tolist()
    noise, bounds, rows = Gaussian(sigma), dict[int, float](), []
    for index, (label, counts) in enumerate(zip(labels, drawn, strict=True)):
        votes = np.roll(counts, label)
        best = int(votes.argmax())
        count = int(votes[best])
        if count not in bounds:
            bounds[count] = noise.radius(error_upper_bound(count, VOTES, ALPHA))
        certificate = certificate_from_bound(best, bounds[count], FIRST_VOTES, count, sorted_votes(votes))
        rows.append(CertifiedImage(index, label, certificate, 0.005))
    settings = {"sigma": sigma, "training_sigma": sigma, "n": VOTES, "n0": FIRST_VOTES, "alpha": ALPHA}
    about = {"dataset": "mnist", "split": "test", "objective": method, "model": "lenet", "num_classes": CLASSES}
    write_certificates(folder / "certificates" / "test.tsv.gz", rows, {**settings, **about, "bound": "one-sided"}, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--formats", default="md,csv,html")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(asked.runs):
            write_run(folder / "runs" / f"{METHODS[number // 3 % 6]}-{number}", number, asked.images)
        command = [sys.executable, "-m", "smoothcert", "report", "runs", "--format", asked.formats]
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        sizes = ", ".join(
            f"{path.name} {path.stat().st_size:,} bytes" for path in sorted(folder.glob("report/report.*"))
        )
        print(f"{asked.runs} runs x {asked.images:,} certificates, {asked.formats}: {seconds:.1f} CPU s,", end=" ")
        print(f"{time.perf_counter() - start:.1f} s, peak memory {used.ru_maxrss / 1024:,.0f} MiB; {sizes}")


if __name__ == "__main__":
    main()
