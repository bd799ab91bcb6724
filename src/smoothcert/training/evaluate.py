"""The accuracy of a run on test images under noise, between epochs."""

import torch
from torch.func import functional_call

from smoothcert.classifier import evaluating
from smoothcert.data import Images
from smoothcert.noise import NOISES
from smoothcert.training.seeds import derived_seed
from smoothcert.training.setup import RunInProgress

BATCH = 500


@torch.no_grad()
def noisy_accuracy(run: RunInProgress, data: Images) -> float:
    """The share of `data` that the network, with the weights that are saved, classifies correctly under noise.

    Each image has one noisy copy, drawn from (seed, epoch); training is not affected.
    """
    generator = torch.Generator(run.device).manual_seed(derived_seed(run.recipe.seed, 3, run.epoch))
    noise, weights, correct = NOISES[run.recipe.noise](run.recipe.sigma), dict(run.weights()), 0
    with evaluating(run.model), torch.autocast(run.device.type, torch.bfloat16, enabled=run.precision == "bf16"):
        for indices in torch.split(torch.arange(len(data)), BATCH):
            images, labels = data.batch(indices)
            noisy = images + noise.sample(images.shape, generator)
            logits = run.model(noisy) if run.average is None else functional_call(run.model, weights, (noisy,))
            correct += int((logits.argmax(1) == labels).sum())
    return correct / len(data)
