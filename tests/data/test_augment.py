"""flip_and_crop: compared with a loop over images, its statistics, and no value read from the device."""

import numpy as np
import pytest
import torch
from torch import Tensor

from smoothcert.data import ImageData
from smoothcert.data.images import flip_and_crop


def one_at_a_time(image: np.ndarray, flip: bool, down: int, right: int) -> np.ndarray:
    """Pad, cut, mirror: in that order, with plain slices."""
    channels, height, width = image.shape
    canvas = np.zeros((channels, height + 8, width + 8), dtype=image.dtype)
    canvas[:, 4 : 4 + height, 4 : 4 + width] = image
    part = canvas[:, down : down + height, right : right + width]
    return part[:, :, ::-1] if flip else part


def test_equals_a_loop_over_images() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in [(200, 3, 32, 32), (50, 1, 7, 12)]:
        images = torch.rand(shape, generator=generator)
        uniform = torch.rand((shape[0], 3), generator=generator)
        result = flip_and_crop(images, uniform).numpy()
        for image, (first, second, third), found in zip(images.numpy(), uniform.tolist(), result, strict=True):
            np.testing.assert_array_equal(found, one_at_a_time(image, first < 0.5, int(second * 9), int(third * 9)))


def test_the_extremes_of_the_random_numbers() -> None:
    below_one = 1 - 2**-24
    image = torch.rand((1, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    for uniform, (flip, down, right) in [
        ((0.0, 0.0, 0.0), (True, 0, 0)),
        ((below_one, below_one, below_one), (False, 8, 8)),
        ((0.5, 0.5, 0.5), (False, 4, 4)),
    ]:
        expected = one_at_a_time(image[0].numpy(), flip, down, right)
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
    flip_and_crop(torch.rand((4, 3, 32, 32)), torch.rand((4, 3)))
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
