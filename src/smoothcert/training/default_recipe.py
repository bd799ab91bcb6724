"""A recipe for data without a preset: network, augmentation, batch, learning rate and schedule that suit the images."""

from smoothcert.data import Images
from smoothcert.errors import RequestError
from smoothcert.models import is_code, is_own_code
from smoothcert.objectives import BUILT_IN
from smoothcert.training.augmentation import default_augmentation
from smoothcert.training.recipe import TrainRecipe

EPOCHS = 20
SMALL_SIDE = 64
"""Largest side of images for which the networks of CIFAR-10 are used."""
BATCH_SIZES = (256, 128, 64, 32, 16, 8, 4, 2)
STEPS = 50
"""Steps per epoch, at least, if there are images enough for batches of 16."""
RATE_PER_256 = 0.1
"""Learning rate at a batch size of 256; smaller batches get a proportionally smaller one."""
TRAINED_RATE_PER_256 = 0.01
"""The same for networks that start from trained weights, and for users' networks, which may have such weights.

At a rate of 0.01 whatever the batch size, a network without batch norm is at chance after the few steps of 200 images.
"""
CHOSEN = ("model", "augment", "epochs", "batch_size", "learning_rate", "learning_rate_warm_up", "schedule", "nesterov")
"""The fields that `default_recipe` chooses."""


def default_recipe(
    data: Images,
    dataset: str,
    sigma: float,
    objective: str,
    *,
    image_size: int | None = None,
    model: str | None = None,
    epochs: int | None = None,
    trained: bool = False,
) -> TrainRecipe:
    """Return a recipe for the training images `data`, which recipes call `dataset`.

    SGD with Nesterov momentum and a cosine schedule, with at least STEPS steps per epoch unless batches would be
    smaller than 16. With `trained`, training starts from trained weights, and the learning rate is lower.
    """
    network = default_network(data.shape) if model is None else model
    epochs = EPOCHS if epochs is None else epochs
    method = BUILT_IN.get(objective)
    batch_size = default_batch_size(len(data), dataset, method().num_noise if method and method.chunked else 1)
    rate = (TRAINED_RATE_PER_256 if trained or is_code(network) else RATE_PER_256) * batch_size / 256
    return TrainRecipe(
        dataset=dataset,
        image_size=image_size,
        augment=default_augmentation(data, dataset),
        model=network,
        sigma=sigma,
        objective=objective,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=rate,
        learning_rate_drops=(),
        learning_rate_warm_up=1 if epochs > 1 else 0,
        schedule="cosine",
        nesterov=True,
    )


def default_batch_size(images: int, dataset: str, noises: int = 1) -> int:
    """Return a multiple of `noises` that gives STEPS steps per epoch, unless batches would be smaller than 16."""
    fitting = [size // noises * noises for size in BATCH_SIZES if noises <= size // noises * noises <= images]
    if not fitting:
        raise RequestError(f"{dataset}: expected at least {max(2, noises)} training images, got {images}; add some")
    enough = [size for size in fitting if size <= 16 or images * noises // size >= STEPS]
    return enough[0] if enough else fitting[-1]


def default_network(shape: tuple[int, int, int]) -> str:
    """Return the network for images of `shape` (c, h, w)."""
    channels, *sides = shape
    if shape == (1, 28, 28):
        return "lenet"
    if channels == 3:
        return "resnet20" if max(sides) <= SMALL_SIDE else "resnet50"
    raise RequestError(
        f"model: no built-in network takes images of shape {'x'.join(map(str, shape))}; give your own with --model "
        "FILE.py:function, or --image-size 28 for grey images in folders"
    )


def describe_choices(recipe: TrainRecipe, final: TrainRecipe, *, trained: bool) -> str:
    """Return the fields that `default_recipe` has chosen for `recipe` and that `final` keeps, on one line."""
    chosen = {name: getattr(recipe, name) for name in CHOSEN}
    if is_own_code(recipe.model) and not trained:  # nobody knows whether the code loads weights
        rate = recipe.learning_rate * RATE_PER_256 / TRAINED_RATE_PER_256
        chosen["learning_rate"] = f"{recipe.learning_rate} (if your code loads trained weights; else try {rate:g})"
    elif final.batch_size != recipe.batch_size:  # the recipe that is changed keeps its rate
        rate = recipe.learning_rate * final.batch_size / recipe.batch_size
        chosen["learning_rate"] = f"{recipe.learning_rate} (for batch_size {recipe.batch_size}; else try {rate:g})"
    kept = [name for name in CHOSEN if chosen[name] is not None and getattr(final, name) == getattr(recipe, name)]
    return ", ".join(f"{name} {chosen[name]}" for name in kept)
