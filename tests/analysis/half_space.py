"""A classifier whose smoothed confidence is known, and run folders of networks at their random start."""

import json
from pathlib import Path

import torch
from tiny import tiny_recipe
from torch import Tensor, nn

from smoothcert.data import mnist
from smoothcert.training.checkpoint import InputSpec, Run, new_model, save_weights
from smoothcert.training.metrics import METRICS
from smoothcert.training.run_folder import RECIPE

SIGMA = 0.25
SCORES = (0.6, 0.3, -0.2, 0.9)
"""Signed distances of the images to the boundary of the half-space; all are labelled 1, so one is wrong."""


class HalfSpace(nn.Module):
    """Class 1 where 16 pixels have a sum over 8: logits (-steepness * s, steepness * s), s the signed L2 distance.

    A steep one returns them in a mapping, as Hugging Face models do.
    """

    def __init__(self, steepness: float = 1.0) -> None:
        super().__init__()
        self.steepness = steepness

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        score = self.steepness * (images.flatten(1).sum(1) / 4 - 2)
        logits = torch.stack([-score, score], dim=1)
        return {"logits": logits} if self.steepness > 1 else logits


def untrained_run(folder: Path, seconds: tuple[float, ...] = (2.0, 1.0), **changes: object) -> Path:
    """A run folder as training leaves it, of a network at its random start."""
    recipe = tiny_recipe(**changes)
    folder.mkdir(parents=True)
    spec = InputSpec.of(mnist.load_sample("test"))
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = new_model(recipe.model, spec)
    recipe.save(folder / RECIPE)
    save_weights(Run(folder, recipe, spec, model, len(seconds), {"versions": {"device": "cuda (a card)"}}))
    lines = [json.dumps({"epoch": epoch, "loss": 1.0, "seconds": s}) + "\n" for epoch, s in enumerate(seconds)]
    (folder / METRICS).write_text("".join(lines))
    return folder
