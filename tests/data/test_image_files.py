"""ImageFiles: decoding against plain Pillow, random crops, workers, and damaged files."""

import math
import os
import signal
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from photographs import write_photograph
from PIL import Image

from smoothcert.data.decoding import Decoder, random_box
from smoothcert.data.image_files import FileList, ImageFiles
from smoothcert.data.streamed_images import default_workers
from smoothcert.errors import RequestError, WorkError
from smoothcert.training.augmentation import lacks_augmentation, with_augmentation
from smoothcert.training.choices import Augmentation

DECODER = Decoder(3, 24, 24, shorter_side=28)
SIZES = [(60, 40), (40, 60), (33, 33), (250, 130), (20, 90), (61, 47), (300, 300), (25, 24)]


@pytest.fixture
def files(tmp_path: Path) -> FileList:
    for number, (width, height) in enumerate(SIZES):
        write_photograph(tmp_path / f"{number}.jpg", number, width, height)
    return FileList.of(tmp_path, [f"{number}.jpg" for number in range(len(SIZES))])


def made(files: FileList, **changes: object) -> ImageFiles:
    data = ImageFiles(
        files=files,
        labels=torch.arange(len(files)) % 3,
        num_classes=3,
        name="made",
        split="train",
        decoder=DECODER,
        random_parts=True,
        workers=0,
    )
    return replace(data, **changes)


def plain_centre(path: Path, shorter_side: int, size: int) -> np.ndarray:
    """Resize and centre crop, as the field's scripts do them: [3, size, size]."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    if width < height:
        image = image.resize((shorter_side, int(shorter_side * height / width)), Image.Resampling.BILINEAR)
    else:
        image = image.resize((int(shorter_side * width / height), shorter_side), Image.Resampling.BILINEAR)
    left, top = round((image.width - size) / 2.0), round((image.height - size) / 2.0)
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


def test_centre_equals_plain_pillow(files: FileList) -> None:
    """Also for photographs of more than twice the size, which Pillow could decode at half of it."""
    for index in range(len(files)):
        np.testing.assert_array_equal(DECODER.centre(files[index]), plain_centre(files[index], 28, 24))


def test_random_crop_is_the_box_scaled_and_mirrored(files: FileList) -> None:
    mirrored = []
    for seed in range(12):
        generator, index = np.random.default_rng(seed), seed % len(SIZES)
        box = random_box(*SIZES[index], generator)
        part = Image.open(files[index]).crop(box).resize((24, 24), Image.Resampling.BILINEAR)
        mirrored.append(generator.random() < 0.5)
        expected = np.asarray(part)[:, ::-1] if mirrored[-1] else np.asarray(part)
        found = DECODER.random(files[index], np.random.default_rng(seed))
        np.testing.assert_array_equal(found, expected.transpose(2, 0, 1))
    assert 0 < sum(mirrored) < 12


def test_random_boxes_have_the_areas_and_ratios_of_the_papers() -> None:
    generator, width, height = np.random.default_rng(0), 400, 400
    boxes = np.array([random_box(width, height, generator) for _ in range(4000)])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0
    assert boxes.max() <= 400
    area, ratio = across * down / (width * height), np.log(across / down)
    assert 0.078 < area.min() < 0.1
    assert 0.97 < area.max() <= 1
    assert np.abs(ratio).max() < math.log(4 / 3) + 0.02
    # Small parts always fit, whatever their ratio: below 3/4 of the area the draws are uniform.
    fits = area < 0.75
    assert abs(area[fits].mean() - (0.08 + 0.75) / 2) < 5 * 0.67 / math.sqrt(12 * fits.sum())
    assert abs(ratio[fits].mean()) < 5 * 2 * math.log(4 / 3) / math.sqrt(12 * fits.sum())
    for first, last in ((0, 2), (1, 3)):
        centres = (boxes[:, first] + boxes[:, last]) / 2
        assert abs(centres.mean() - 200) < 5 * centres.std() / math.sqrt(4000)
        assert boxes[fits, first].min() == 0
        assert boxes[fits, last].max() == 400


@pytest.mark.parametrize(
    ("size", "box"), [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506)), ((1, 1), (0, 0, 1, 1))]
)
def test_long_images_give_their_centre(size: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    assert random_box(*size, np.random.default_rng(0)) == box


def test_batch_is_the_centre_over_255(files: FileList) -> None:
    data = made(files)
    images, labels = data.batch(torch.tensor([5, 0, 5]))
    expected = np.stack([DECODER.centre(files[index]) for index in (5, 0, 5)]).astype(np.float32) / np.float32(255)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    np.testing.assert_array_equal(images.numpy(), expected)
    assert labels.tolist() == [2, 0, 2]
    assert torch.equal(data.batch([5, 0, 5])[0], images)  # type: ignore[arg-type]
    assert (len(data), data.shape) == (8, (3, 24, 24))


def test_workers_and_shares_change_nothing(files: FileList) -> None:
    data, order = made(files), torch.tensor([[3, 1, 4, 0], [5, 2, 6, 7]])
    state = torch.get_rng_state()
    alone = list(data.batches(order, slice(0, 4), seed=2**62))
    for share in (slice(0, 4), slice(1, 3)):
        found = list(replace(data, workers=2).batches(order, share, seed=2**62))
        for (images, labels), (expected_images, expected_labels) in zip(found, alone, strict=True):
            assert torch.equal(images, expected_images[share])
            assert torch.equal(labels, expected_labels[share])
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_spawned_worker_needs_can_be_pickled(files: FileList) -> None:
    data = made(files)
    copy = ForkingPickler.loads(ForkingPickler.dumps(data))
    assert torch.equal(copy.read(3, seed=5), data.read(3, seed=5))


def test_seed_and_index_decide_the_crop(files: FileList) -> None:
    data = made(files)
    order = torch.arange(8).view(2, 4)
    first, again, other = (torch.cat([x for x, _ in data.batches(order, slice(0, 4), seed)]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert all(not torch.equal(one, two) for one, two in zip(first, other, strict=True))
    twins = FileList.of(files.root, ["0.jpg", "0.jpg"])
    one, two = next(made(twins).batches(torch.tensor([[0, 1]]), slice(0, 2), seed=1))[0]
    assert not torch.equal(one, two)
    turned = torch.cat([images for images, _ in data.batches(order.flip(0), slice(0, 4), 1)])
    assert torch.equal(turned, first[[4, 5, 6, 7, 0, 1, 2, 3]])


def test_a_subset_has_the_files_and_labels_in_its_order(files: FileList) -> None:
    data = made(files)
    part = data.subset(torch.tensor([6, 1, 2]))
    images, labels = part.batch(torch.arange(3))
    expected, expected_labels = data.batch(torch.tensor([6, 1, 2]))
    assert torch.equal(images, expected)
    assert torch.equal(labels, expected_labels)
    assert (len(part), part.split, part.file_names) == (3, "part of train", ("6.jpg", "1.jpg", "2.jpg"))
    assert part.random_parts
    assert part.digest() != data.digest()


def test_without_augmentation_batches_are_the_centres(files: FileList) -> None:
    data = made(files, random_parts=False)
    (images, labels), *_ = data.batches(torch.tensor([[2, 7]]), slice(0, 2), seed=0)
    expected = data.batch(torch.tensor([2, 7]))
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])


@pytest.mark.parametrize("name", ["none", "flip"])
def test_a_named_augmentation_replaces_random_parts(files: FileList, name: Augmentation) -> None:
    order = torch.arange(8).view(1, 8)
    centres, _ = made(files).batch(order[0])
    replaced = with_augmentation(made(files), name)
    assert [lacks_augmentation(data) for data in (made(files), replaced)] == [False, name == "none"]
    images, _ = next(replaced.batches(order, slice(0, 8), seed=0))
    mirrored = [not torch.equal(image, centre) for image, centre in zip(images, centres, strict=True)]
    for image, centre, turned in zip(images, centres, mirrored, strict=True):
        assert torch.equal(image, centre.flip(2) if turned else centre)
    assert (sum(mirrored) > 0) == (name == "flip")
    assert sum(mirrored) < 8


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.png", "L"), ("a.png", "RGBA"), ("a.png", "P"), ("a.jpg", "CMYK"), ("a.jpg", "L"), ("a.webp", "RGB")],
)
def test_every_kind_of_image_becomes_rgb(tmp_path: Path, name: str, mode: str) -> None:
    path = write_photograph(tmp_path / name, 0, 50, 40, mode)
    np.testing.assert_array_equal(DECODER.centre(path), plain_centre(path, 28, 24))


def test_sixteen_bits_are_refused_not_clipped(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    Image.fromarray(np.full((30, 30), 40_000, dtype=np.uint16)).save(path)
    with pytest.raises(WorkError, match=r"deep\.png: expected 8 bits per channel, got more \(Pillow mode I;16\)"):
        DECODER.centre(path)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["cut", "text", "empty", "absent"])
def test_damaged_file_is_one_line_that_names_it(files: FileList, workers: int, damage: str) -> None:
    path = files[6]
    content = {"cut": path.read_bytes()[:3000], "text": b"not an image", "empty": b""}
    path.unlink() if damage == "absent" else path.write_bytes(content[damage])
    data = made(files, workers=workers)
    with pytest.raises(WorkError) as raised:
        list(data.batches(torch.arange(8).view(4, 2), slice(0, 2), seed=0))
    message = str(raised.value)
    assert message.startswith(f"{path}: expected ")
    assert "\n" not in message
    assert message.count("6.jpg") == 1
    assert "found none; restore it" in message if damage == "absent" else "replace or delete it" in message
    with pytest.raises(WorkError, match=r"6\.jpg: expected "):
        data.batch(torch.tensor([0, 6]))


class Ended(Decoder):
    """A decoder whose process is killed, as by a system that has run out of memory."""

    def centre(self, path: Path) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_worker_that_is_killed_is_one_line(files: FileList) -> None:
    data = made(files, workers=1, random_parts=False, decoder=Ended(3, 24, 24, 28))
    with pytest.raises(WorkError, match="use fewer workers") as raised:
        list(data.batches(torch.arange(8).view(4, 2), slice(0, 2), seed=0))
    assert "\n" not in str(raised.value)


def test_wrong_data_is_refused(files: FileList) -> None:
    with pytest.raises(RequestError, match=r"shape \[8\], got .* shape \[7\]"):
        made(files, labels=torch.zeros(7, dtype=torch.int64))
    for labels in (torch.full((8,), 3), torch.full((8,), -1)):
        with pytest.raises(RequestError, match=r"expected labels in 0\.\.2"):
            made(files, labels=labels)


def test_workers_are_shared_among_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)), raising=False)
    assert default_workers() == 16
    for processes, expected in (("2", 12), ("8", 3), ("64", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert default_workers() == expected


def test_the_digest_changes_with_labels_names_and_sizes(files: FileList) -> None:
    data = made(files)
    fewer = made(FileList.of(files.root, [f"{number}.jpg" for number in range(7)]))
    digests = {data.digest(), made(files, labels=data.labels.flip(0)).digest(), fewer.digest()}
    assert len(digests) == 3
    assert made(files).digest() == data.digest() in digests
    with files[3].open("ab") as file:
        file.write(b" ")
    assert data.digest() not in digests


def test_names_with_any_characters(tmp_path: Path) -> None:
    names = ["späť/ä b.png", "a/very/long/" + "x" * 100 + ".png"]
    for number, name in enumerate(names):
        write_photograph(tmp_path / name, number)
    files = FileList.of(tmp_path, names)
    assert [files[index] for index in range(2)] == [tmp_path / name for name in names]
    assert DECODER.centre(files[0]).shape == (3, 24, 24)
