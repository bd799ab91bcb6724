"""A user's own objective is tried on one step before the run folder is made: mistakes in it leave nothing behind."""

import inspect
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smoothcert.data import Images
from smoothcert.errors import RequestError
from smoothcert.io.text import named_error
from smoothcert.models.user_code import line_in
from smoothcert.noise import NOISES
from smoothcert.objectives import LossTerms, Objective, Progress, checked_terms, name_in_recipes
from smoothcert.training.metrics import taken_name
from smoothcert.training.recipe import TrainRecipe


def try_loss(
    recipe: TrainRecipe,
    data: Images,
    network: nn.Module,
    images: int,
    teacher: nn.Module | None = None,
    on_note: Callable[[str], None] = print,
) -> None:
    """Compute the loss of the first `images` images and its gradients; refuse what breaks a rule of `Objective.loss`.

    A loss that is the same for other noise gets a note. What `state_dict` has, the mode of `network`, and the global
    random numbers are as before.
    """
    name = name_in_recipes(recipe.objective)
    device = next(network.parameters()).device
    x, y = (part.to(device) for part in data.batch(torch.arange(images, device="cpu")))
    shape = (recipe.objective.num_noise, *x.shape)
    generator = torch.Generator(device).manual_seed(0)
    noise, other_noise = (NOISES[recipe.noise](recipe.sigma).sample(shape, generator) for _ in range(2))
    zero = torch.zeros((), device=device)
    targets = None if recipe.teacher is None else x.new_full((images, data.num_classes), 1 / data.num_classes)
    progress = Progress(recipe.sigma, zero, zero, torch.full((images,), 0.5, device=device), zero, targets, teacher)
    training = network.training
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            objective = recipe.objective.in_epoch(0)
            private = contents_of(objective.__pydantic_private__ or {})
            result = checked_terms(recipe.objective, objective.loss(network.train(), x, y, noise, progress))
            if (fault := broken_rule(result, images, data.num_classes)) is not None:
                raise RequestError(f"objective: expected {name}.loss() to return {fault}")
            result.loss.backward()
            if (parameter := without_finite_gradient(network)) is not None:
                raise RequestError(
                    f"objective: expected {name}.loss() to have finite gradients, got others for {parameter}; look for "
                    "log(0), sqrt(0) and 0/0, also in the part that torch.where does not choose"
                )
            refuse_changes(name, private, contents_of(objective.__pydantic_private__ or {}))
            attributes = other_attributes(objective)
            late = recipe.objective.in_epoch(recipe.epochs - 1)
            last = progress._replace(warmup=zero + 1, after_first_drop=zero + 1, epoch=zero + recipe.epochs - 1)
            gradients = []
            for drawn in (noise, other_noise):
                network.zero_grad()
                network.load_state_dict(before)
                with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # the same dropout
                    late.loss(network, x, y, drawn, last).loss.backward()
                gradients.append([p.grad for p in network.parameters() if p.grad is not None])
            refuse_changes(name, attributes, other_attributes(late))
            if len(gradients[0]) == len(gradients[1]) and all(map(torch.equal, *gradients)):
                on_note(
                    f"{name}.loss() does not use its argument noise, so the network is not trained for the noise of "
                    "certification; use logits_under_noise(classifier, images, noise)"
                )
        except (RequestError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a user's code may fail in any way
            place = line_in(file_of(type(recipe.objective)), error)
            raise RequestError(f"objective: {name}.loss() failed{place} ({named_error(error)}); correct it") from error
        finally:
            network.zero_grad()
            network.load_state_dict(before)
            network.train(training)


def refuse_changes(name: str, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Refuse a loss that changes its objective."""
    if changed := [key for key, value in before.items() if key in after and after[key] != value]:
        raise RequestError(
            f"objective: expected {name}.loss() to keep nothing from step to step, got another {changed[0]}, "
            "which --resume could not restore; keep it in your own network (--model), which is saved"
        )


def other_attributes(objective: Objective) -> dict[str, object]:
    """The contents of the attributes that are no fields, such as cached properties, which may be set but not change."""
    return contents_of(
        {key: value for key, value in vars(objective).items() if key not in type(objective).model_fields}
    )


def without_finite_gradient(network: nn.Module) -> str | None:
    """The name of the first parameter whose gradient is not finite."""
    gradients = ((name, parameter.grad) for name, parameter in network.named_parameters())
    return next((name for name, grad in gradients if grad is not None and not grad.isfinite().all()), None)


def file_of(kind: type) -> str:
    """The file of a class; empty for one of a notebook or an interpreter."""
    try:
        return inspect.getfile(kind)
    except (OSError, TypeError):
        return ""


def contents_of(attributes: Mapping[str, Any]) -> dict[str, object]:
    """Each attribute as bytes, which show a change in place, too; one that cannot be saved as it is."""
    contents: dict[str, object] = {}
    for key, value in attributes.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            contents[key] = buffer.getvalue()
        except Exception:  # a user's object may fail in any way
            contents[key] = value
    return contents


def broken_rule(result: LossTerms, images: int, classes: int) -> str | None:
    """What a loss should have returned and what it did return, or None if nothing is wrong with it."""
    loss, terms, logits = result
    if not isinstance(loss, Tensor) or loss.ndim:
        return f"a loss of shape [], got {described(loss)}; take its mean"
    if not loss.requires_grad:
        return "a loss with a gradient, got one without; do not detach it, nor compute it under torch.no_grad()"
    if not loss.isfinite():
        return f"a finite loss, got {loss.item()} before the first step; look for log(0), 0/0 and overflow"
    if not isinstance(terms, dict):
        return f"terms as a dict of tensors, got {type(terms).__name__}"
    for key, term in terms.items():
        if not isinstance(term, Tensor) or term.ndim:
            return f"tensors of shape [] as terms, got {described(term)} for {key!r}"
    if (fault := taken_name(terms)) is not None:
        return fault
    if logits is not None and not (isinstance(logits, Tensor) and logits.shape[1:] == (images, classes)):
        return f"noisy_logits of shape [num_noise, {images}, {classes}] or None, got {described(logits)}"
    return None


def described(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
