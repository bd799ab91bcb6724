"""Trained classifiers that a loss uses and that stay as they are: a teacher, or the classifier behind a denoiser."""

from typing import Any

import torch
from torch import Tensor, nn

from smoothcert.classifier import image_layout, logits_of
from smoothcert.data import Images
from smoothcert.errors import RequestError
from smoothcert.models import check_outputs
from smoothcert.models.ensemble import Ensemble
from smoothcert.models.kernels import is_plain
from smoothcert.models.precision import DTYPES, at_precision, resolve_precision
from smoothcert.objectives import Denoising, Distillation, Objective
from smoothcert.training.checkpoint import tensors_digest
from smoothcert.training.recipe import TrainRecipe


def check_classifier(recipe: TrainRecipe, data: Images, classifier: nn.Module) -> None:
    """Refuse a classifier that the objective does not use or that is for other images."""
    if not isinstance(recipe.objective, Denoising | Distillation):
        raise RequestError(
            f"classifier: expected none for {recipe.method}, got one; only distillation and denoisers use it"
        )
    if not isinstance(classifier, nn.Module):
        raise RequestError(
            f"classifier: expected an nn.Module, got {type(classifier).__name__}; give load(RUN).model, or "
            "Ensemble([...]) of several models"
        )
    check_outputs(classifier, "the classifier", data.shape, data.num_classes)


def refuse_missing_classifier(objective: Objective) -> None:
    """Refuse to train by an objective that needs a classifier without one."""
    if isinstance(objective, Distillation):
        raise RequestError(
            "teacher: distillation expects a trained network, got none; give --teacher RUN (Python: classifier=)"
        )
    if isinstance(objective, Denoising) and objective.stability_weight:
        raise RequestError(
            f"stability_weight: expected 0 without a classifier, got {objective.stability_weight:g}; give --classifier"
        )


class Teacher(nn.Module):
    """A frozen copy of `classifier` that is evaluated as in a certification: inputs [batch, c, h, w] to logits."""

    def __init__(
        self, classifier: nn.Module, recipe: TrainRecipe, device: torch.device, shape: tuple[int, int, int]
    ) -> None:
        super().__init__()
        precision = resolve_precision(recipe.precision, device)
        self.network = at_precision(classifier, precision, device, shape)
        self.dtype = DTYPES[precision]
        self.layout = image_layout(self.network)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            return logits_of(self.network(inputs.to(self.dtype).contiguous(memory_format=self.layout)))


def about_classifier(classifier: nn.Module) -> dict[str, Any]:
    """What identifies a classifier in the provenance of a run; the members of an ensemble are named one by one."""
    about: dict[str, Any] = {
        "model": type(classifier).__name__,
        "weights_sha256": tensors_digest(classifier.state_dict()),
    }
    if isinstance(classifier, Ensemble):
        about["members"] = [about_classifier(member) for member in classifier.members]
        if classifier.consensus is not None:  # other answers of the same weights
            about["model"] += f" with consensus {classifier.consensus}"
    return about


def is_built_in_network(network: nn.Module) -> bool:
    """Whether all layers of `network` are ours or torch's, so that it makes no decisions in Python in its forward."""
    built_in = ("torch.nn.modules.", "smoothcert.models.")
    hub = ("smoothcert.models.hub", "smoothcert.models.diffusion")  # around the code of other libraries
    layers = [(type(layer).__module__, is_plain(layer)) for layer in network.modules()]
    return all(plain and module.startswith(built_in) and not module.startswith(hub) for module, plain in layers)
