"""Flips and crops: a loop over images, enumerations by hand, statistics, shares, and no value read from the device."""

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from smoothcert.data import ImageData, images_from_dataset
from smoothcert.data.augmentation import AUGMENTATIONS, flip_and_crop
from smoothcert.training.choices import Augmentation


def one_at_a_time(image: np.ndarray, mirrored: bool, down: int, right: int, paddings: tuple[int, int]) -> np.ndarray:
    """Pad, cut, mirror: in that order, with plain slices."""
    channels, height, width = image.shape
    above, left = paddings
    canvas = np.zeros((channels, height + 2 * above, width + 2 * left), dtype=image.dtype)
    canvas[:, above : above + height, left : left + width] = image
    part = canvas[:, down : down + height, right : right + width]
    return part[:, :, ::-1] if mirrored else part


def test_recipes_know_the_names() -> None:
    assert get_args(Augmentation) == tuple(AUGMENTATIONS), "correct Augmentation in training/choices.py"


@pytest.mark.parametrize(
    ("shape", "paddings"),
    [
        ((200, 3, 32, 32), (4, 4)),
        ((50, 1, 28, 28), (3, 3)),
        ((50, 3, 7, 16), (0, 2)),
        ((50, 3, 40, 12), (5, 1)),
        ((6, 3, 224, 224), (28, 28)),
    ],
)
def test_equals_a_loop_over_images(shape: tuple[int, ...], paddings: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(shape, generator=generator)
    uniform = torch.rand((shape[0], 3), generator=generator)
    results = [augment(images, uniform).numpy() for augment in AUGMENTATIONS.values() if augment is not None]
    rows, columns = (2 * padding + 1 for padding in paddings)
    for image, (first, second, third), both, mirrored, cut in zip(
        images.numpy(), uniform.tolist(), *results, strict=True
    ):
        offsets = int(second * rows), int(third * columns)
        np.testing.assert_array_equal(both, one_at_a_time(image, first < 0.5, *offsets, paddings))
        np.testing.assert_array_equal(cut, one_at_a_time(image, False, *offsets, paddings))
        np.testing.assert_array_equal(mirrored, image[:, :, ::-1] if first < 0.5 else image)


def written_out(image: list[list[int]]) -> list[tuple[tuple[int, ...], ...]]:
    """The nine crops of an image with one zero at each end of its sides: moved by at most one pixel, row by row."""
    blank = [0] * len(image[0])
    moved_down, moved_up = [blank, *image[:-1]], [*image[1:], blank]
    return [
        tuple(tuple(row) for row in columns)
        for rows in (moved_down, image, moved_up)
        for columns in ([[0, *row[:-1]] for row in rows], rows, [[*row[1:], 0] for row in rows])
    ]


@pytest.mark.parametrize("name", ["flip-crop", "crop", "flip"])
def test_all_results_of_a_small_image_are_equally_likely(name: str) -> None:
    """An image of 8 x 8 with different pixels has nine crops, and each of them a mirror image."""
    image = np.arange(1, 65).reshape(8, 8)
    crops = written_out(image.tolist()) if "crop" in name else [tuple(map(tuple, image.tolist()))]
    mirrored = [tuple(row[::-1] for row in rows) for rows in crops] if "flip" in name else []
    expected = {*crops, *mirrored}
    assert len(expected) == {"flip-crop": 18, "crop": 9, "flip": 2}[name]
    count = 400 * len(expected)
    uniform = torch.rand((count, 3), generator=torch.Generator().manual_seed(5))
    augment = AUGMENTATIONS[name]
    assert augment is not None
    results = augment(torch.from_numpy(image).expand(count, 1, 8, 8), uniform)[:, 0].tolist()
    counts = Counter(tuple(map(tuple, rows)) for rows in results)
    assert counts.keys() == expected
    assert all(abs(number - 400) < 5 * 20 for number in counts.values()), "within five standard deviations"


def test_the_extremes_of_the_random_numbers() -> None:
    below_one = 1 - 2**-24
    image = torch.rand((1, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    for uniform, (mirrored, down, right) in [
        ((0.0, 0.0, 0.0), (True, 0, 0)),
        ((below_one, below_one, below_one), (False, 8, 8)),
        ((0.5, 0.5, 0.5), (False, 4, 4)),
    ]:
        expected = one_at_a_time(image[0].numpy(), mirrored, down, right, (4, 4))
        np.testing.assert_array_equal(flip_and_crop(image, torch.tensor([uniform]))[0].numpy(), expected)
    assert torch.equal(flip_and_crop(image, torch.tensor([[0.5, 0.5, 0.5]])), image)


def placements(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mirrored, down, right) of augmented copies of `marked()`, read off the pixels."""
    bright, dim = batch[:, 0] == 1.0, batch[:, 0] == 0.5
    row, column = bright.flatten(1).long().argmax(1) // 32, bright.flatten(1).long().argmax(1) % 32
    mirrored = dim.flatten(1).long().argmax(1) % 32 < column
    return mirrored, 20 - row, torch.where(mirrored, 31 - column, column).neg() + 20


def marked() -> Tensor:
    image = torch.zeros(1, 1, 32, 32)
    image[0, 0, 16, 16] = 1.0
    image[0, 0, 16, 17] = 0.5
    return image


def test_half_are_mirrored_and_all_offsets_are_equally_likely() -> None:
    count = 8_100
    uniform = torch.rand((count, 3), generator=torch.Generator().manual_seed(2))
    mirrored, down, right = placements(flip_and_crop(marked().expand(count, -1, -1, -1), uniform))
    # Five standard deviations of a fair coin, and of a fair die with 81 faces.
    assert abs(mirrored.float().mean().item() - 0.5) < 5 * 0.5 / count**0.5
    counts = torch.bincount(down * 9 + right, minlength=81)
    assert len(counts) == 81
    assert (counts - 100).abs().max() < 5 * 100**0.5


@pytest.mark.usefixtures("no_reads")
def test_no_value_is_read_from_the_device() -> None:
    for augment in filter(None, AUGMENTATIONS.values()):
        augment(torch.rand((4, 3, 32, 32)), torch.rand((4, 3)))
    with pytest.raises(AssertionError, match="a value is read"):
        torch.rand(()).item()


def test_augmentation_does_not_depend_on_the_share() -> None:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (40, 3, 32, 32), generator=generator, dtype=torch.uint8)
    data = ImageData(pixels, torch.arange(40) % 10, 10, "made", "train", augment=flip_and_crop)
    order = torch.randperm(40, generator=generator).view(5, 8)
    whole = list(data.batches(order, slice(0, 8), seed=7))
    parts = [list(data.batches(order, share, seed=7)) for share in (slice(0, 3), slice(3, 8))]
    for step, (images, labels) in enumerate(whole):
        assert torch.equal(images, torch.cat([part[step][0] for part in parts]))
        assert torch.equal(labels, torch.cat([part[step][1] for part in parts]))
        assert not torch.equal(images, data.batch(order[step])[0])
    again, other = (torch.cat([images for images, _ in data.batches(order, slice(0, 8), seed)]) for seed in (7, 8))
    assert torch.equal(again, torch.cat([images for images, _ in whole]))
    assert not torch.equal(again, other)
    for row, (images, labels) in zip(order, data.batches(order, slice(0, 8), None), strict=True):
        assert torch.equal(images, data.batch(row)[0]), "without a seed nothing is augmented"
        assert torch.equal(labels, row % 10)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_are_read_again_get_the_same_augmentation(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """As images in memory, for every share of the steps, also where several groups of steps are drawn."""
    monkeypatch.setattr("smoothcert.data.images.STEPS_AT_ONCE", 2)
    generator = torch.Generator().manual_seed(4)
    pixels = torch.randint(0, 256, (40, 3, 16, 24), generator=generator, dtype=torch.uint8)
    labels = torch.arange(40) % 10
    memory = ImageData(pixels, labels, 10, "made", "train", augment=flip_and_crop)
    items: Any = list(zip(pixels, labels.tolist(), strict=True))
    streamed = replace(images_from_dataset(items, workers=workers), augment=flip_and_crop)
    order = torch.randperm(40, generator=generator).view(5, 8)
    for share in (slice(0, 8), slice(3, 7)):
        for seed in (7, None):
            pairs = zip(memory.batches(order, share, seed), streamed.batches(order, share, seed), strict=True)
            for (images, targets), (other_images, other_targets) in pairs:
                assert torch.equal(images, other_images)
                assert torch.equal(targets, other_targets)
