"""The settings that the modules and functions of `smoothcert.losses` take."""

from collections.abc import Mapping
from typing import Any, Required, TypedDict

import torch

from smoothcert.objectives.consistency import Form
from smoothcert.objectives.inner_attacks import Adversary, NoiseAttack


class Settings(TypedDict, total=False):
    """What every module takes: the noise level is required."""

    sigma: Required[float]
    num_noise: int
    generator: torch.Generator | None


class GaussianSettings(Settings, total=False):
    noise_attack: NoiseAttack | Mapping[str, Any] | None


class StabilitySettings(Settings, total=False):
    weight: float


class SmoothAdvSettings(Settings, total=False):
    adversary: Adversary | Mapping[str, Any]


class CatRsSettings(Settings, total=False):
    weight: float
    steps: int
    epsilon: float


class MacerSettings(Settings, total=False):
    weight: float
    gamma: float
    beta: float
    deferred: bool


class ConsistencySettings(Settings, total=False):
    weight: float
    entropy_weight: float
    form: Form
    adversary: Adversary | Mapping[str, Any] | None
    noise_attack: NoiseAttack | Mapping[str, Any] | None


class SmoothMixSettings(Settings, total=False):
    steps: int
    step_size: float
    eta: float
    one_step: bool
    one_step_radius: float | None
    max_norm: float | None
    noise_attack: NoiseAttack | Mapping[str, Any] | None
