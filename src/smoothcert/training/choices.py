"""Choices and limits of recipes and the command line; importing them takes no time, so `--help` can show them."""

from typing import Literal

Augmentation = Literal["flip-crop", "flip", "crop", "none"]
Bound = Literal["one-sided", "two-sided", "randomized"]
Compiling = Literal["auto", "always", "never"]
InputLayer = Literal["normalize", "center", "none"]
Tracker = Literal["tensorboard", "wandb"]
NoiseName = Literal["gaussian", "laplace", "uniform"]
LARGEST_SIGMA = 1e6
"""Far above any useful noise level: images are in [0, 1]."""
SMALLEST_ALPHA = 1e-300
"""Far below any useful error probability. Still smaller floats have fewer digits, and bounds from them are wrong."""
