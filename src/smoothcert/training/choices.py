"""The choices that recipes and the command line share; importing them takes no time, so `--help` can show them."""

from typing import Literal

Bound = Literal["one-sided", "two-sided", "randomized"]
Compiling = Literal["auto", "always", "never"]
InputLayer = Literal["normalize", "center", "none"]
Tracker = Literal["tensorboard", "wandb"]
NoiseName = Literal["gaussian", "laplace", "uniform"]
