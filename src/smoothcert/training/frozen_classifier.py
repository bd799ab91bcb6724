"""Trained classifiers that a loss uses and that stay as they are: a teacher, or the classifier behind a denoiser."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smoothcert.classifier import image_layout, logits_of
from smoothcert.data import Images
from smoothcert.errors import RequestError
from smoothcert.models import check_outputs
from smoothcert.models.ensemble import Ensemble
from smoothcert.models.kernels import is_plain
from smoothcert.models.precision import DTYPES, Precision, at_precision
from smoothcert.objectives import Denoising, Distillation
from smoothcert.training.checkpoint import tensors_digest
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.resume import State


def check_classifier_request(recipe: TrainRecipe, data: Images, classifier: nn.Module | None) -> None:
    """Refuse a classifier that the objective does not use or that is for other images, and a missing one."""
    if classifier is None:
        if isinstance(recipe.objective, Distillation):
            raise RequestError("teacher: distillation expects a trained one, got none; give --teacher RUN")
        return
    if not isinstance(recipe.objective, Denoising | Distillation):
        raise RequestError(
            f"classifier: expected none for {recipe.method}, got one; only distillation and denoisers use it"
        )
    check_outputs(classifier, "the classifier", data.shape, data.num_classes)


class Teacher(nn.Module):
    """A frozen copy of `classifier` that is evaluated as in a certification: inputs [batch, c, h, w] to logits."""

    def __init__(
        self, classifier: nn.Module, precision: Precision, device: torch.device, shape: tuple[int, int, int]
    ) -> None:
        super().__init__()
        self.network = at_precision(classifier, precision, device, shape)
        self.dtype, self.layout = DTYPES[precision], image_layout(self.network)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            return logits_of(self.network(inputs.to(self.dtype).contiguous(memory_format=self.layout)))


def about_classifier(classifier: nn.Module) -> dict[str, Any]:
    """What identifies a classifier in the provenance of a run; the members of an ensemble are named one by one."""
    about = {"model": type(classifier).__name__, "weights_sha256": tensors_digest(classifier.state_dict())}
    if not isinstance(classifier, Ensemble):
        return about
    return {**about, "members": [about_classifier(member) for member in classifier.members]}


def is_built_in_network(network: nn.Module) -> bool:
    """Whether all layers of `network` are ours or torch's, so that it makes no decisions in Python in its forward."""
    own = ("torch.nn.modules.", "smoothcert.models.")
    hub = ("smoothcert.models.hub", "smoothcert.models.diffusion")  # around the code of other libraries
    layers = [(type(layer).__module__, is_plain(layer)) for layer in network.modules()]
    return all(plain and module.startswith(own) and not module.startswith(hub) for module, plain in layers)


def check_frozen_classifier(folder: Path, state: State | None, classifier: Mapping[str, Any] | None) -> None:
    """Refuse to continue a training with another classifier than the recorded one."""
    recorded = None if state is None else state.provenance.get("classifier")
    if state is not None and recorded != classifier:
        raise RequestError(
            f"{folder}: expected the classifier that its training started with ({_named(recorded)}), got "
            f"{_named(classifier)}; give the same --teacher or --classifier, or choose another --out"
        )


def _named(classifier: Mapping[str, Any] | None) -> str:
    return "none" if classifier is None else f"{classifier['model']} {classifier['weights_sha256'][:12]}"
