"""One step of training: the loop calls `take_step` on each batch."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from smoothcert.objectives import LossTerms, Objective, Progress
from smoothcert.training.recipe import TrainRecipe

if TYPE_CHECKING:
    from smoothcert.training.run_in_progress import RunInProgress


def take_step(run: "RunInProgress", images: Tensor, labels: Tensor) -> None:
    """Train on one batch, on a GPU by a captured step, and update the average of the weights, if there is one."""
    (run.captured or training_step)(run, images, labels)
    run.steps_done += 1
    if run.average is not None:
        run.average.update(run.epoch * run.steps + run.steps_done)


def training_step(run: "RunInProgress", images: Tensor, labels: Tensor) -> None:
    """Draw noise, compute the loss of a batch, backpropagate, update the weights, and log to the meter of `run`.

    A step has `num_noise` noisy copies of `images_per_step` images, of which this process computes its share:
    images [share, c, h, w] in [0, 1], labels [share].
    """
    recipe, generator = run.recipe, run.generator
    shape = (recipe.objective.num_noise, recipe.images_per_step, *images.shape[1:])
    noise = run.noise.sample(shape, generator)[:, run.share]
    uniform = torch.rand(recipe.images_per_step, generator=generator, device=images.device)[run.share]
    with run.autocast():
        terms = run.module(images, labels, noise, run.progress._replace(uniform=uniform))
    terms.loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.meter.add(terms, labels)


class StepLoss(nn.Module):
    """The loss of one step as a module, which DistributedDataParallel wraps once, whatever the loss computes."""

    def __init__(self, classifier: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.classifier = classifier
        self.objective = objective
        self.set_compiled(False)

    def set_objective(self, objective: Objective) -> None:
        """Compute the loss of another objective from now on."""
        self.objective = objective
        self.set_compiled(self.compiled)

    def set_compiled(self, compiled: bool) -> None:
        """Choose whether torch.compile compiles the loss."""
        self.loss = self.objective.loss
        self.compiled = compiled
        if compiled:
            # The runs of one process share the compiler, which compiles each kind of run separately.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            self.loss = torch.compile(self.objective.loss, dynamic=False)

    def forward(self, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress) -> LossTerms:
        return self.loss(self.classifier, images, labels, noise, progress)


def make_optimizer(model: nn.Module, recipe: TrainRecipe, device: torch.device) -> torch.optim.Optimizer:
    """SGD or AdamW. On a GPU it is one kernel that reads the learning rate from a tensor: a captured step sees it
    change."""
    gpu = device.type == "cuda"
    parameters = model.parameters()
    rate = torch.full((), recipe.learning_rate, device=device) if gpu else recipe.learning_rate
    decay = recipe.weight_decay
    fused = True if gpu else None
    if recipe.optimizer == "adamw":
        betas = (recipe.momentum, 0.999)
        return torch.optim.AdamW(parameters, rate, betas, weight_decay=decay, fused=fused, capturable=gpu)
    return torch.optim.SGD(parameters, rate, recipe.momentum, nesterov=recipe.nesterov, weight_decay=decay, fused=fused)
