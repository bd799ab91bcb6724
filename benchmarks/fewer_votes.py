"""What the sequential test saves on a trained run, and what it loses: real certificates, image by image.

    python benchmarks/fewer_votes.py RUN [--radius 0.5] [--images 200] [--n 100000]

Certifies test images of RUN until the radius is decided, then gives the images that were not certified at it, but
might have been, all n votes: the difference in certified accuracy is the price. Images whose votes lie five standard
deviations on the wrong side of the threshold are not worth n votes to either rule and are not sampled again.
"""

import argparse
import math
from pathlib import Path

import torch

from smoothcert.certification.certify_dataset import Certification
from smoothcert.certification.prepare import Prepared
from smoothcert.certification.settings import CertifySettings, make_counter
from smoothcert.data import load_dataset
from smoothcert.noise import NOISES
from smoothcert.training.checkpoint import load_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--radius", type=float, default=0.5)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for, but torch sees no GPU; use --device cpu")
    device, run = torch.device(arguments.device), load_run(arguments.run)
    data = load_dataset(run.recipe.dataset, "test")
    indices = list(range(0, len(data), len(data) // arguments.images))[: arguments.images]
    settings = CertifySettings(sigma=run.recipe.sigma, n=arguments.n, seed=1)
    fixed = settings.completed({}, device, data.shape)
    sequential = fixed.model_copy(update={"radii": (arguments.radius,)})
    counter = make_counter(run.model, data.shape, data.num_classes, sequential, device)
    threshold = 1 - NOISES["gaussian"](run.recipe.sigma).error_at(arguments.radius)

    spent = certified = lost = again = 0
    for index in indices:
        (row,) = Certification(Prepared(counter, sequential, data.shape, device), data).rows([index])
        spent += row.certificate.n0 + row.certificate.n
        if row.radius_if_correct > arguments.radius:
            certified += 1
            continue
        share, n = row.certificate.count / row.certificate.n, row.certificate.n
        hopeless = share + 5 * math.sqrt(share * (1 - share) / n) + 5 / n < threshold
        # With the same seed both rules choose the same class; one that is wrong is lost to both.
        top = dict(row.certificate.votes).get(row.label, 0)
        if hopeless or top != row.certificate.count:
            continue
        again += 1
        (full,) = Certification(Prepared(counter, fixed, data.shape, device), data).rows([index])
        lost += full.radius_if_correct > arguments.radius
    images = len(indices)
    print(f"{arguments.run.name}, radius {arguments.radius:g}, {images} images, at most n = {arguments.n:,} votes")
    print(
        f"certified: {certified / images:.1%}; lost against n votes each: {lost / images:.1%} "
        f"({again} images sampled again)"
    )
    print(f"votes per image: {spent / images:,.0f}, {images * (100 + arguments.n) / spent:.0f} times fewer")


if __name__ == "__main__":
    main()
