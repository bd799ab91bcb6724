"""Estimates of the time of runs on this machine: measured seconds per input times the number of inputs."""

from functools import cache

import torch
from torch import nn

from smoothcert.certification.estimate import seconds_per_input, seconds_per_vote
from smoothcert.certification.settings import CertifyRecipe, make_counter
from smoothcert.models import is_code
from smoothcert.models.precision import resolve_precision
from smoothcert.objectives.inputs_per_image import inputs_by_epoch
from smoothcert.smoothing.votes import default_batch_size
from smoothcert.training.captured_step import WARM_UP_STEPS
from smoothcert.training.checkpoint import InputSpec, new_model
from smoothcert.training.device import training_device, weights_layout
from smoothcert.training.recipe import TrainRecipe

MANY_VOTES = 10**9
"""Votes that are worth a precise measurement."""
REPLAYS = 64
"""Largest number of captured steps in one measurement; one step of a small network is too short."""


def training_seconds(recipe: TrainRecipe, spec: InputSpec, images: int, epochs: int, device: torch.device) -> float:
    """Return an estimate for the last `epochs` epochs of `images` training images."""
    used = images // recipe.batch_size * recipe.batch_size
    inputs = used * sum(inputs_by_epoch(recipe.objective, range(recipe.epochs - epochs, recipe.epochs)))
    at_once = recipe.images_per_step * recipe.objective.num_noise
    bf16 = resolve_precision(recipe.precision, device) == "bf16"
    return inputs * _seconds_per_trained_input(recipe.model, spec, at_once, bf16, device)


def certification_seconds(model: str, spec: InputSpec, votes: int, device: torch.device) -> float:
    """Return an estimate for `votes` votes of the network `model`."""
    return votes * _seconds_per_vote(model, spec, device)


@cache
def _seconds_per_trained_input(name: str, spec: InputSpec, most: int, bf16: bool, device: torch.device) -> float:
    """Measure forward and backward passes in batches of up to `most` inputs; on a GPU captured, with `most` inputs."""
    own_network = is_code(name)
    model = _network(name, spec).to(device, memory_format=weights_layout(own_network))  # type: ignore[call-overload]
    model.train()

    def step(size: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(torch.randn(size, *spec.shape, device=device)).logsumexp(1).sum()
        loss.backward()
        model.zero_grad()

    if device.type != "cuda" or own_network:  # user networks are not captured
        return seconds_per_input(step, most, device)
    with training_device(device):
        for _ in range(WARM_UP_STEPS):
            step(most)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step(most)

        def replay(count: int) -> None:
            for _ in range(count):
                graph.replay()

        return seconds_per_input(replay, REPLAYS, device) / most


@cache
def _seconds_per_vote(name: str, spec: InputSpec, device: torch.device) -> float:
    """Measure noise and forward passes of certification."""
    precision = resolve_precision("auto", device)
    most = default_batch_size(device, spec.shape)
    recipe = CertifyRecipe(sigma=1.0, seed=0, precision=precision, batch_size=most)
    counter = make_counter(_network(name, spec), spec.shape, spec.num_classes, recipe, device)
    return seconds_per_vote(counter, torch.zeros(1, *spec.shape, device=device), MANY_VOTES)


def _network(name: str, spec: InputSpec) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return new_model(name, spec)
