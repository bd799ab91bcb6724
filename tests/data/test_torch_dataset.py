"""`images_from_dataset`: pixels against the items, seeds of random transforms, labels, class names, refusals."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from smoothcert.data import Normalization, images_from_dataset, with_known_classes
from smoothcert.errors import RequestError

PIXELS = torch.arange(6 * 3 * 4 * 5, dtype=torch.int64).reshape(6, 3, 4, 5).mul(7).remainder(256).to(torch.uint8)
LABELS = torch.tensor([0, 2, 1, 2, 0, 1])
ORDER = torch.tensor([[3, 1], [5, 0]])


class Listed(Dataset[Any]):
    """A dataset as torchvision builds them: `classes`, `targets` and a transform, here one that draws numbers."""

    classes = ("cat", "dog", "frog")

    def __init__(self, transform: Callable[[Tensor], Tensor] = lambda image: image) -> None:
        self.targets, self.transform, self.reads = LABELS.tolist(), transform, 0

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return self.transform(PIXELS[index]), self.targets[index]


class Encoded(Listed):
    """A dataset whose targets are names, and whose items have their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = [self.classes[label] for label in LABELS]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return PIXELS[index], int(LABELS[index])


def jitter(image: Tensor) -> Tensor:
    """A random transform that draws from each of the three global generators."""
    return (image / 255 * torch.rand(()) * random.random() * np.random.rand()).float()


def stream(data: Any, seed: int, share: slice = slice(0, 2)) -> Tensor:
    return torch.cat([images for images, _ in data.batches(ORDER, share, seed)])


def test_labels_that_a_target_transform_changes_are_those_of_the_items() -> None:
    class Transformed(Listed):
        def target_transform(self, label: int) -> int:
            return 2 - label

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            image, label = super().__getitem__(index)
            return image, self.target_transform(label)

    assert images_from_dataset(Transformed()).labels.tolist() == (2 - LABELS).tolist()


def test_a_subset_has_the_items_and_labels_in_its_order() -> None:
    data = images_from_dataset(Listed())
    part = data.subset(torch.tensor([4, 0]))
    images, labels = part.batch(torch.arange(2))
    assert torch.equal(images * 255, PIXELS[[4, 0]].float())
    assert labels.tolist() == LABELS[[4, 0]].tolist()
    assert (len(part), part.split, part.class_names) == (2, "part of train", data.class_names)
    assert part.digest() != data.digest()


def test_items_of_relabelled_data_are_read_although_they_have_their_own_labels() -> None:
    data = with_known_classes(images_from_dataset(Listed()), ("frog", "cat", "bird", "dog"))
    images, labels = data.batch(torch.arange(6))
    assert torch.equal(images * 255, PIXELS.float())
    assert labels.tolist() == [1, 0, 3, 0, 1, 3]
    assert [data[index][1] for index in range(6)] == labels.tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_batches_equal_the_items(dtype: torch.dtype) -> None:
    pixels = PIXELS if dtype == torch.uint8 else PIXELS.to(dtype) / 255
    data = images_from_dataset(TensorDataset(pixels, LABELS))
    assert (data.shape, len(data), data.num_classes, data.class_names) == ((3, 4, 5), 6, 3, None)
    assert data.file_names is None
    expected = torch.from_numpy(PIXELS.numpy().astype(np.float64) / 255).to(torch.float32)
    images, labels = data.batch(torch.tensor([4, 2, 2]))
    assert torch.equal(images, expected[[4, 2, 2]])
    assert torch.equal(labels, LABELS[[4, 2, 2]])
    for workers in (0, 2):
        found = images_from_dataset(TensorDataset(pixels, LABELS), workers=workers)
        assert torch.equal(stream(found, seed=1), expected[ORDER.flatten()])


def test_names_targets_and_options_are_used() -> None:
    dataset = Listed()
    data = images_from_dataset(dataset, name="pets", split="test", normalization=Normalization((0.5,), (0.2,)))
    assert dataset.reads == 1, "labels come from targets"
    assert (data.name, data.split, data.class_names) == ("pets", "test", ("cat", "dog", "frog"))
    assert data.normalization == Normalization((0.5,), (0.2,))
    part = images_from_dataset(Subset(Listed(), [5, 3]))
    assert (part.labels.tolist(), part.num_classes, part.class_names) == ([1, 2], 3, ("cat", "dog", "frog"))
    more = images_from_dataset(dataset, num_classes=10)
    assert (more.num_classes, more.class_names) == (10, None)
    for unlisted in (TensorDataset(PIXELS, LABELS), Encoded()):
        assert images_from_dataset(Subset(unlisted, [5, 3])).labels.tolist() == [1, 2]
    assert images_from_dataset(Encoded()).labels.tolist() == LABELS.tolist(), "labels are read: targets are names"


def test_random_transforms_depend_on_seed_and_index_alone() -> None:
    data = images_from_dataset(Listed(jitter))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = stream(data, seed=1)
    assert torch.equal(stream(data, seed=1, share=slice(1, 2)), first[1::2])
    assert torch.equal(stream(images_from_dataset(Listed(jitter), workers=2), seed=1), first)
    assert not torch.equal(stream(data, seed=2), first)
    factors = first.flatten(1).sum(1) / PIXELS[ORDER.flatten()].flatten(1).sum(1)
    assert float(factors.sort().values.diff().min()) > 1e-3 * float(factors.max()), "each item has its own draw"
    assert torch.equal(data.batch(ORDER[0])[0], data.batch(ORDER[0])[0])
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_digest_changes_with_pixels_and_labels() -> None:
    def digest(pixels: Tensor, labels: Tensor) -> str:
        return images_from_dataset(TensorDataset(pixels, labels)).digest()

    edited = PIXELS.clone()
    edited[3, 1, 2, 2] += 1
    assert digest(PIXELS, LABELS) == digest(PIXELS.clone(), LABELS)
    assert len({digest(PIXELS, LABELS), digest(edited, LABELS), digest(PIXELS, LABELS.flip(0))}) == 3


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(PIXELS[0], 0)])


IMAGE = PIXELS[0]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (DataLoader(TensorDataset(PIXELS, LABELS)), r"got DataLoader; give that of a loader as loader\.dataset"),
        ("mnist-sample", "expected a map-style torch Dataset .*, got str"),
        (Endless(), "expected a map-style torch Dataset .*, got Endless; .* collect the items in a list"),
        ({0: (IMAGE, 0)}, "got dict; "),
        ([], "expected at least one item, got none"),
        ([{"image": IMAGE, "label": 0}], r"expected \(image, label\), got dict; wrap"),
        ([(IMAGE, 0, 1)], "got 3 values; wrap"),
        ([IMAGE], "got Tensor; wrap"),
        ([(IMAGE.numpy(), 0)], r"expected the image as a tensor \[c, h, w\], got ndarray; convert it"),
        ([(IMAGE[0], 0)], r"expected an image \[c, h, w\], got dtype uint8 and shape \[4, 5\]; reshape it"),
        ([(IMAGE.permute(1, 2, 0), 0)], r"looks like \[h, w, c\]; use permute\(2, 0, 1\)"),
        ([(IMAGE.long(), 0)], "dtype uint8 or floating-point values .*, got dtype int64"),
        ([(IMAGE / 127.5 - 1, 0)], r"expected pixels in \[0, 1\], got -1 to .*; remove Normalize"),
        ([(IMAGE * torch.nan, 0)], r"expected pixels in \[0, 1\], got nan"),
        ([(IMAGE, 0.5)], "expected an integer as label, got float"),
        ([(IMAGE, True)], "expected an integer as label, got bool"),
        ([(IMAGE, torch.eye(3)[0])], "expected an integer as label, got dtype float32 and shape"),
        ([(IMAGE, -1)], "expected a label of at least 0, got -1"),
        ([(IMAGE, 0), (IMAGE, "cat")], "dataset item 1: expected an integer as label, got str"),
    ],
)
def test_other_datasets_are_refused_in_one_line(dataset: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        images_from_dataset(dataset)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_items_that_differ_are_refused_when_they_are_read(workers: int) -> None:
    class Changing(Listed):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            image, label = super().__getitem__(index)
            return (image[:, :2] if index == 1 else image), (label + 1 if index == 2 else label)

    data = images_from_dataset(Changing(), workers=workers)
    with pytest.raises(RequestError, match=r"item 1: expected an image like the first one, .*\[3, 2, 5\]; resize"):
        stream(data, seed=0)
    with pytest.raises(RequestError, match=r"item 2: expected label 1 as in dataset\.targets .*, got 2"):
        data.batch(torch.tensor([2]))


def test_labels_beyond_the_number_of_classes_are_refused() -> None:
    with pytest.raises(RequestError, match=r"expected labels in 0\.\.1, got labels in 0\.\.2"):
        images_from_dataset(TensorDataset(PIXELS, LABELS), num_classes=2)
