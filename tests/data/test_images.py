"""ImageData: wrong data, and the content of a batch."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from smoothcert.data import ImageData, Normalization, images_from_dataset
from smoothcert.data.decoding import Decoder
from smoothcert.data.image_files import FileList, ImageFiles
from smoothcert.data.images import spread
from smoothcert.errors import RequestError


def make(images: Tensor | None = None, labels: Tensor | None = None, num_classes: int = 4) -> ImageData:
    if images is None:
        images = torch.arange(6 * 3 * 2 * 5, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(6, 3, 2, 5)
    if labels is None:
        labels = torch.tensor([0, 1, 2, 3, 2, 1])
    return ImageData(images, labels, num_classes, "made", "train")


@pytest.mark.parametrize(("total", "most"), [(10, 4), (150, 100), (199, 100), (3, 100)])
def test_some_indices_are_spread_over_all_data(total: int, most: int) -> None:
    """From 0 on, with gaps that differ by one at most, also after the last one."""
    indices = spread(total, most)
    assert len(indices) == min(total, most)
    gaps = torch.diff(indices, prepend=torch.tensor([0]), append=torch.tensor([total]))[1:]
    assert indices[0] == 0
    assert int(gaps.max()) - int(gaps.min()) <= 1


def test_length_and_shape() -> None:
    data = make()
    assert len(data) == 6
    assert data.shape == (3, 2, 5)
    assert repr(data) == "ImageData(num_classes=4, name='made', split='train', normalization=None)"


def test_the_digest_is_that_of_the_content_in_any_memory_layout() -> None:
    data, digest = make(), hashlib.sha256(b"[6, 3, 2, 5] 4\n")
    for array in (data.labels.numpy().astype("<i8"), data.images.numpy()):
        digest.update(array.tobytes())
    last = data.images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    every_second = data.labels.repeat_interleave(2)[::2]
    assert not last.is_contiguous()
    assert data.digest() == make(last, every_second).digest() == digest.hexdigest()
    assert make(num_classes=5).digest() != data.digest()


def test_batch_is_pixels_over_255_in_the_order_of_the_indices() -> None:
    pixels = np.arange(256, dtype=np.uint8).reshape(4, 1, 8, 8)
    data = make(torch.from_numpy(pixels), torch.tensor([3, 0, 1, 2]))
    images, labels = data.batch(torch.tensor([2, 0, 2]))
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    expected = pixels[[2, 0, 2]].astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(images.numpy(), expected)
    assert labels.tolist() == [1, 3, 1]
    for indices in ([2, 0, 2], np.array([2, 0, 2])):
        assert torch.equal(data.batch(indices)[0], images)  # type: ignore[arg-type]


def test_batch_reaches_both_ends_of_the_unit_interval() -> None:
    data = make(torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1), torch.tensor([0, 1]))
    images, _ = data.batch(torch.tensor([0, 1]))
    assert images.flatten().tolist() == [0.0, 1.0]


def test_a_loader_takes_the_data_as_they_are() -> None:
    """Also data that are read when they are needed; iterating ends after the last image."""
    data = make()
    pixels, labels = data.batch(torch.arange(6))
    streamed = images_from_dataset(torch.utils.data.TensorDataset(data.images, data.labels))
    for source in (data, streamed):
        images, numbers = zip(*DataLoader(source, batch_size=4), strict=True)
        assert torch.equal(torch.cat(images), pixels)
        assert torch.equal(torch.cat(numbers), labels)
        assert [label for _, label in source] == labels.tolist()
        assert torch.equal(source[-1][0], pixels[5])
        with pytest.raises(IndexError):
            source[6]


def test_batch_does_not_change_the_data() -> None:
    data = make()
    before = data.images.clone()
    data.batch(torch.arange(6))[0].zero_()
    assert torch.equal(data.images, before)


def test_no_value_is_read_from_the_device(request: pytest.FixtureRequest) -> None:
    data = make()
    request.getfixturevalue("no_reads")
    data.batch(torch.arange(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batch_has_the_same_bits_on_every_device() -> None:
    data = make(torch.arange(256).to(torch.uint8).reshape(4, 1, 8, 8), torch.tensor([3, 0, 1, 2]))
    there = data.to("cuda")
    images, labels = there.batch(torch.arange(4, device="cuda"))
    assert images.is_cuda
    assert labels.is_cuda
    assert torch.equal(images.cpu(), data.batch(torch.arange(4))[0])


def test_a_subset_keeps_the_order_and_the_name_of_the_data_set() -> None:
    data = make()
    part = data.subset(torch.tensor([4, 1]))
    assert torch.equal(part.images, torch.stack([data.images[4], data.images[1]]))
    assert part.labels.tolist() == [2, 1]
    assert (part.num_classes, part.name, part.split) == (4, "made", "part of train"), "image 0 is another one"
    assert len(data.subset(torch.tensor([], dtype=torch.int64))) == 0
    for indices in ([4, 1], range(4, 0, -3), np.array([4, 1]), torch.tensor([4, 1], dtype=torch.uint8)):
        assert data.subset(indices).digest() == part.digest()
    assert len(data.subset([])) == 0


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 6], "expected indices from 0 to 5 of 6 images, got some from 0 to 6"),
        (torch.tensor([-1]), "got some from -1 to -1"),
        (torch.arange(6) < 3, r"got dtype bool and shape \[6\]; give mask.nonzero\(\).flatten\(\) of a mask"),
        (torch.tensor([1.0]), "expected whole numbers"),
        (torch.tensor([[1]]), r"got dtype int64 and shape \[1, 1\]"),
    ],
)
def test_wrong_indices_of_a_subset_are_refused_alike_for_all_kinds_of_images(indices: Any, message: str) -> None:
    data = make()
    streamed = images_from_dataset(TensorDataset(data.images, data.labels))
    files = ImageFiles(
        files=FileList.of(Path(), [f"{number}.png" for number in range(6)]),
        labels=data.labels,
        num_classes=4,
        name="files",
        split="train",
        decoder=Decoder(3, 2, 5, shorter_side=8),
    )
    for images in (data, streamed, files):
        with pytest.raises(RequestError, match=message) as caught:
            images.subset(indices)
        assert "\n" not in str(caught.value)


def test_a_normalization_has_tuples_whatever_it_is_made_of() -> None:
    """So that it equals the one that is stored next to the weights."""
    expected = Normalization((0.5, 0.25), (0.5, 0.125))
    assert Normalization([0.5, 0.25], np.array([0.5, 0.125])) == expected  # type: ignore[arg-type]
    assert Normalization(torch.tensor([0.5, 0.25]), (0.5, 0.125)) == expected  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"one per channel, as std, got 0\.5; give a tuple"):
        Normalization((0.5,), 0.5)  # type: ignore[arg-type]


def test_to_keeps_the_content() -> None:
    data = make()
    there = data.to("cpu")
    assert torch.equal(there.images, data.images)
    assert torch.equal(there.labels, data.labels)
    assert (there.num_classes, there.name, there.split) == (4, "made", "train")


@pytest.mark.parametrize(
    ("images", "labels", "num_classes", "words"),
    [
        (torch.zeros(6, 3, 2, 5), None, 4, ["uint8", "dtype float32", "[6, 3, 2, 5]"]),
        (torch.zeros(6, 2, 5, dtype=torch.uint8), None, 4, ["[n, c, h, w]", "[6, 2, 5]"]),
        (None, torch.zeros(6, dtype=torch.int32), 4, ["int64", "dtype int32"]),
        (None, torch.zeros(6, 1, dtype=torch.int64), 4, ["shape [6]", "[6, 1]"]),
        (None, torch.zeros(5, dtype=torch.int64), 4, ["shape [6]", "shape [5]"]),
        (None, torch.tensor([0, 1, 2, 3, 4, 0]), 4, ["0..3", "0..4"]),
        (None, torch.tensor([0, -1, 2, 3, 2, 0]), 4, ["0..3", "-1..3"]),
        (None, None, 0, ["at least 1", "got 0"]),
    ],
)
def test_wrong_data_is_refused_in_one_line(
    images: Tensor | None, labels: Tensor | None, num_classes: int, words: list[str]
) -> None:
    with pytest.raises(RequestError) as raised:
        make(images, labels, num_classes)
    message = str(raised.value)
    assert "\n" not in message
    for word in ["'made'", "'train'", "expected", "got", *words]:
        assert word in message
