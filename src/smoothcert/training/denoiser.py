"""Denoisers: the recipe that trains one, what its training requires, and how a trained one is loaded from a path."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smoothcert.errors import RequestError
from smoothcert.io.files import with_home
from smoothcert.models import DENOISERS, Denoised, as_module, is_code
from smoothcert.objectives import Denoising
from smoothcert.training.checkpoint import Run, load_run, tensors_digest
from smoothcert.training.device import weights_layout
from smoothcert.training.frozen_classifier import is_built_in_network
from smoothcert.training.initial_weights import own_model_with_weights
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.run_folder import RECIPE
from smoothcert.training.sampler_settings import Uniform

EPOCHS = 30


def denoiser_recipe(dataset: str, sigma: float, **fields: Any) -> TrainRecipe:
    """Return the recipe of a denoiser: a U-Net, AdamW with a cosine schedule; `fields` replace its settings."""
    defaults = {
        **{"model": "unet", "objective": Denoising(), "epochs": EPOCHS, "batch_size": 256},
        **{"optimizer": "adamw", "learning_rate": 1e-3, "schedule": "cosine", "weight_decay": 0.0},
    }
    return TrainRecipe(dataset=dataset, sigma=sigma, **{**defaults, **fields})


@dataclass(frozen=True)
class Denoiser:
    """A trained denoiser: its network, the images and the noise that it is for, and what result files call it."""

    model: nn.Module
    path: Path
    name: str
    shape: tuple[int, int | None, int | None]
    """Channels, height and width of its images; None stands for any."""
    sigma: float
    noise: str = "gaussian"
    run: Run | None = None
    """The run that trained it; None for a diffusion model."""

    def about(self) -> dict[str, Any]:
        """Identifies the denoiser in result files."""
        settings = getattr(self.model, "settings", {})  # of a diffusion model
        weights = tensors_digest(self.model.state_dict())
        return {"model": self.name, "sigma": self.sigma, "noise": self.noise, "weights_sha256": weights, **settings}

    def check(self, shape: tuple[int, ...], sigma: float, noise: str) -> None:
        """Refuse images of another shape, and noise that the denoiser was not made for."""
        if len(shape) != 3 or any(known not in (None, size) for known, size in zip(self.shape, shape, strict=True)):
            raise RequestError(
                f"{self.path}: expected images {_sizes(self.shape)}, which the denoiser is for, got {_sizes(shape)}; "
                "give a denoiser for these images"
            )
        if (self.sigma, self.noise) != (sigma, noise):
            raise RequestError(
                f"{self.path}: expected {self.noise} noise at sigma {self.sigma:g}, which the denoiser is for, got "
                f"{noise} noise at sigma {sigma:g}; certify with that noise, or train a denoiser for this one"
            )


def _sizes(shape: tuple[int | None, ...]) -> str:
    return "x".join("any" if size is None else str(size) for size in shape)


def load_denoiser(path: str | Path, sigma: float | None = None) -> Denoiser:
    """Load the denoiser of a run folder (`smoothcert train-denoiser`), or a diffusion model that diffusers saved.

    A diffusion model works for any noise level within its schedule, so `sigma` is required for it; a denoiser of ours
    has the noise level of its training.
    """
    from smoothcert.models.diffusion import is_diffusion_model, load_diffusion_model

    path = with_home(path)
    if not path.is_dir():
        raise RequestError(
            f"{path}: expected the folder of a denoiser, got {'a file' if path.exists() else 'none'}; "
            "`smoothcert train-denoiser` makes one"
        )
    if is_diffusion_model(path) and not (path / RECIPE).exists():
        if sigma is None or not sigma > 0:
            raise RequestError(f"sigma: expected a number above 0 for the diffusion model {path}, got {sigma}; give it")
        network, shape = load_diffusion_model(path, sigma)
        return Denoiser(network, path, "diffusion UNet2DModel", shape, sigma)
    run = load_run(path)
    if not run.is_denoiser:
        raise RequestError(
            f"{path}: expected a denoiser, got the classifier {run.recipe.model}; `smoothcert train-denoiser` makes one"
        )
    return Denoiser(run.model, path, run.recipe.model, run.spec.shape, run.recipe.sigma, run.recipe.noise, run)


def load_classifier(name: str, num_classes: int, init: Path | None, on_note: Callable[[str], None]) -> nn.Module:
    """Load the classifier of a run folder, or build a user's own (see `own_model_with_weights`)."""
    if not Path(name).is_dir() and is_code(name):
        return as_module(own_model_with_weights(name, num_classes, init, on_note), name, "classifier")
    if init is not None:
        raise RequestError(f"--classifier-init: expected none with {name}, which has weights; leave it out")
    run = load_run(Path(name))
    run.refuse_denoiser()
    return run.model


def check_denoiser_request(recipe: TrainRecipe, tested: bool) -> None:
    """Refuse a recipe that mixes a denoiser with what only classifiers have, and the other way round."""
    if isinstance(recipe.objective, Denoising) != (recipe.model in DENOISERS):
        raise RequestError(
            f"objective: expected denoising together with one of the models {', '.join(DENOISERS)}, and only with "
            f"these, got {recipe.method} with {recipe.model}; `smoothcert train-denoiser` trains a denoiser"
        )
    if isinstance(recipe.objective, Denoising) and (tested or recipe.sampler != Uniform()):
        raise RequestError(
            "a denoiser has no accuracy of its own: expected no test data and the uniform sampler, got others; "
            "leave them out"
        )


def behind_denoiser(denoiser: nn.Module, classifier: nn.Module | None, device: torch.device) -> Denoised:
    """Return the denoiser in front of a frozen copy of `classifier`."""
    if classifier is None:
        return Denoised(denoiser, None)
    frozen = copy.deepcopy(classifier).eval().requires_grad_(False)
    layout = weights_layout(own_network=device.type != "cuda" or not is_built_in_network(classifier))
    return Denoised(denoiser, frozen.to(device, memory_format=layout))  # type: ignore[call-overload]
