"""Runs to compare: on the same test images, under the same noise, in forward passes that fit into memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from smoothcert.attacks import smoothed_pgd
from smoothcert.classifier import Classifier, evaluating, logits_under_noise, probabilities
from smoothcert.data import DatasetReader, Images, refuse_data_code, with_known_classes
from smoothcert.data.datasets import published_name
from smoothcert.data.images import in_parts
from smoothcert.errors import RequestError
from smoothcert.io.references import full_name
from smoothcert.io.text import one_line
from smoothcert.models.precision import at_precision
from smoothcert.noise import NOISES, Noise
from smoothcert.objectives import SmoothMix
from smoothcert.papers.presets import PRESETS, preset
from smoothcert.report.labels import NamedRun, labels_of
from smoothcert.report.locate import distinct_names
from smoothcert.report.names import dataset_name, shared_network
from smoothcert.report.style import plain
from smoothcert.smoothing.votes import Stage, block_keys, default_batch_size
from smoothcert.training.checkpoint import Run, load_runs

NOISE_BLOCK = 20
"""Number of noise samples of an image in memory at once."""
GRADIENT_BATCH = 256
"""Number of noisy images whose gradient is computed at once."""
LARGEST_SEED = 2**63 - 1
"""Generators take 63 bits."""
MOST_NOISES = 10**6
"""Limit for an image or an attack: an analysis keeps a number per noise, and some keep all noise samples in memory."""
LARGEST_LENGTH = 10**6
"""Limit of a noise level or an attack step: far above the diagonal of any image, far below the limit of float32."""


@dataclass(frozen=True)
class ComparedRun:
    """A run under analysis: a distinct name, its network in float32 and eval mode on the device, its label."""

    name: str
    classifier: nn.Module
    label: str


@dataclass(frozen=True)
class ComparedRuns:
    """Runs that take the same images and are smoothed by the same noise."""

    runs: tuple[ComparedRun, ...]
    data: Images
    noise: Noise
    device: torch.device
    network: str | None = None
    """The name of the network, if all runs have the same."""

    @property
    def title(self) -> str:
        """The data set and the network for the title of a figure, as in "MNIST, LeNet"."""
        return plain(", ".join(filter(None, (dataset_name(self.data.name), self.network))))

    @property
    def labels(self) -> dict[str, str]:
        """Name of a run -> its label in figures."""
        return {run.name: plain(run.label) for run in self.runs}

    def images(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Test images [k, c, h, w] and their labels [k], on the device."""
        if wrong := [index for index in indices if not 0 <= index < len(self.data)]:
            raise RequestError(
                f"index: expected 0 to {len(self.data) - 1}, the images of {self.data.name}, got {wrong[0]}"
            )
        images, labels = self.data.batch(torch.tensor(indices, device="cpu"))
        return images.to(self.device), labels.to(self.device)

    def images_at_once(self) -> int:
        """How many images, with NOISE_BLOCK noise samples each, fit into a forward pass."""
        return max(1, default_batch_size(self.device, self.data.shape) // NOISE_BLOCK)

    def noise_blocks(self, indices: Sequence[int], num_noise: int, seed: int, stage: Stage) -> Iterator[Tensor]:
        """Noise [at most NOISE_BLOCK, k, c, h, w] for the images `indices`, in total `num_noise` per image.

        It depends only on image, seed and stage, so that all runs see the same noise. The stage "select" is for finding
        adversarial examples, "estimate" for evaluating them on fresh noise.
        """
        refuse_outside("seed", seed, 0, LARGEST_SEED)
        blocks = -(-num_noise // NOISE_BLOCK)
        keys = [block_keys((seed, index), stage, blocks) for index in indices]
        for block in range(blocks):
            size = min(NOISE_BLOCK, num_noise - block * NOISE_BLOCK)
            out = torch.empty((len(indices), size, *self.data.shape), device=self.device)
            for slot, image_keys in zip(out, keys, strict=True):
                self.noise.fill(slot, image_keys[block])
            yield out.transpose(0, 1)


@dataclass(frozen=True)
class UnrestrictedAttack:
    """SmoothMix's adversary: normalised ascent on -log pbar_y within [0, 1], no norm limit."""

    steps: int
    step_size: float
    num_noise: int = 32

    def __post_init__(self) -> None:
        if not self.step_size > 0:
            raise RequestError(f"step-size: expected a number > 0, got {self.step_size}")
        refuse_outside("step-size", self.step_size, 0, LARGEST_LENGTH)
        refuse_outside("steps", self.steps)
        refuse_outside("num-noise", self.num_noise)


def refuse_outside(name: str, value: float, least: int = 1, most: int = MOST_NOISES) -> None:
    """Refuse a number that is too small, or so large that the work takes forever or overflows."""
    if not least <= value <= most:
        raise RequestError(f"{name}: expected {least} to {most:,}, got {value}")


def load_compared_runs(
    folders: Sequence[Path],
    device: torch.device,
    *,
    sigma: float | None = None,
    dataset: str | None = None,
    image_size: int | None = None,
    load: DatasetReader | None = None,
    code: str | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> ComparedRuns:
    """The runs in `folders`, all on the test images of `dataset`, by default of their training, under one noise.

    `sigma` is by default the one that the runs were trained with. Runs of another noise than the first are refused, and
    of other data or noise levels unless `dataset` or `sigma` chooses one. `load` reads the images, in folders with the
    side `image_size`, by default that of the training; `code` names the user's network as in `load_runs`.
    `on_run` receives each run.
    """
    runs = load_runs(folders, code)
    _refuse_other(runs, "noise", "compare runs of one noise")
    if dataset is None:
        _refuse_other(runs, "dataset", "choose the images of the comparison with --dataset")
    if sigma is None:
        _refuse_other(runs, "sigma", "choose the noise level of the comparison with --sigma")
    first = runs[0].recipe
    level = first.sigma if sigma is None else sigma
    refuse_outside("sigma", level, 0, LARGEST_LENGTH)
    if dataset is None:
        refuse_data_code(folders[0], first.dataset)
    name = dataset or first.dataset
    reading = runs[0].reading(name)
    images = (load or DatasetReader())(name, "test", image_size or reading.get("image_size"), reading.get("channels"))
    images = with_known_classes(images, runs[0].spec.class_names)
    for run in runs:
        run.refuse_other_images(images)
        on_run(run)
    named = dict(zip(names_of(folders), runs, strict=True))
    recipes = {name: run.recipe.model_dump(mode="json") for name, run in named.items()}
    labels = labels_of([NamedRun(name, run.recipe.method, recipes[name], (level, "")) for name, run in named.items()])
    ready = tuple(
        ComparedRun(name, at_precision(run.model, "fp32", device, run.spec.shape), labels[name])
        for name, run in named.items()
    )
    return ComparedRuns(ready, images, NOISES[first.noise](level), device, shared_network(recipes.values()))


def _refuse_other(runs: Sequence[Run], key: str, remedy: str) -> None:
    wanted, *others = (full_name(str(getattr(run.recipe, key))) for run in runs)
    for run, value in zip(runs[1:], others, strict=True):
        if value != wanted:
            raise RequestError(
                f"{run.folder}: expected {key} {wanted} as in {runs[0].folder}, got {key} {value}; {remedy}"
            )


def names_of(folders: Sequence[Path]) -> list[str]:
    """Distinct, printable names of runs; a folder that is given twice is refused."""
    whole = [folder.resolve() for folder in folders]
    if repeated := [folder for folder, times in Counter(whole).items() if times > 1]:
        raise RequestError(f"{repeated[0]}: expected each run once, got it twice; leave one out")
    return [one_line(name) for name in distinct_names([folder.name for folder in whole], whole)]


def default_attack(data: Images, sigma: float) -> tuple[int, float]:
    """Steps T and step size alpha of the published SmoothMix runs on `data`; on other data those of CIFAR-10.

    In all of them except ImageNet's, T * alpha = 8 sigma.
    """
    name = f"{published_name(data.name)}/smoothmix"
    objective = preset(name if name in PRESETS else "cifar10/smoothmix", sigma).objective
    assert isinstance(objective, SmoothMix)
    return objective.steps, objective.step_size


@torch.no_grad()
def smoothed(classifier: Classifier, images: Tensor, noise: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean softmax and vote share under noise, both [k, classes], of images [k, c, h, w].

    Each block of `noise`, [m, k, c, h, w] or [m, 1, c, h, w] for all images, is one forward pass.
    """
    confidence = votes = torch.zeros((), dtype=torch.float64, device=images.device)
    count = 0
    with evaluating(classifier):
        for block in noise:
            logits = logits_under_noise(classifier, images, block)
            confidence = confidence + probabilities(logits).double().sum(0)
            votes = votes + nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).sum(0)
            count += len(block)
    return confidence / count, votes / count


def adversarial_examples(
    compared: ComparedRuns, run: ComparedRun, indices: Sequence[int], attack: UnrestrictedAttack, seed: int
) -> Tensor:
    """The unrestricted adversarial example of each image for `run`, [k, c, h, w] in [0, 1].

    The example of an image does not depend on the other images: its noise depends on its index only.
    """
    at_once = max(1, GRADIENT_BATCH // attack.num_noise)
    moved = []
    for part in in_parts(indices, at_once):
        images, labels = compared.images(part)
        noise = torch.cat(list(compared.noise_blocks(part, attack.num_noise, seed, "select")))
        iterates = smoothed_pgd(
            run.classifier, images, labels, noise, steps=attack.steps, step_size=attack.step_size, max_norm=None
        )
        *_, last = iterates
        moved.append(last)
    return torch.cat(moved)
