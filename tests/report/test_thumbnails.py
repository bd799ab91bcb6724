"""Pictures are the images that certificates speak of, and never come from a network."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from smoothcert.data import DATASETS, cifar10, mnist
from smoothcert.report.html_data import Pictures
from smoothcert.report.thumbnails import THUMBNAIL, pictures


def found(answer: Pictures | str) -> Pictures:
    assert isinstance(answer, Pictures), answer
    return answer


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a report must not download")

    monkeypatch.setattr(mnist, "download", refuse)
    monkeypatch.setattr(cifar10, "download", refuse)


def test_small_images_keep_every_pixel_and_their_label() -> None:
    data = mnist.load_sample("test")
    got = found(pictures("mnist-sample", "test", [5, 0, 1999, 2000, -1]))
    assert sorted(got.files) == [0, 5, 1999], "indices that the split does not have are left out"
    for index, file in got.files.items():
        assert file.startswith(b"\x89PNG")
        np.testing.assert_array_equal(np.asarray(opened(file)), data.images[index, 0].numpy())
        assert got.labels[index] == int(data.labels[index])
    assert got.class_names == ()


@pytest.mark.parametrize(
    "dataset",
    ["mnist", "cifar10", "imagenet", "imagenet (not the official set)", "folder:nowhere", "npz:nowhere.npz"],
)
def test_absent_data_give_a_reason_and_write_nothing(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = pictures(dataset, "test", [0], tmp_path / "data", named=[dataset])
    assert isinstance(answer, str)
    assert dataset in answer
    assert "not there" in answer
    assert "\n" not in answer
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOOTHCERT_DATA", str(tmp_path))
    cifar_files(tmp_path)
    assert sorted(found(pictures("cifar10 (not the official files)", "test", [1])).files) == [1]


def cifar_files(folder: Path) -> np.ndarray:
    records = np.random.default_rng(0).integers(0, 256, (3, 3073), dtype=np.uint8)
    records[:, 0] = 1, 9, 4
    (folder / "cifar-10-batches-bin").mkdir()
    records.tofile(folder / "cifar-10-batches-bin" / "test_batch.bin")
    return records


def test_colours_and_class_names(tmp_path: Path) -> None:
    records = cifar_files(tmp_path)
    got = found(pictures("cifar10 (not the official files)", "test", [2], tmp_path))
    np.testing.assert_array_equal(
        np.asarray(opened(got.files[2])), records[2, 1:].reshape(3, 32, 32).transpose(1, 2, 0)
    )
    assert got.class_names == DATASETS["cifar10"].class_names
    assert got.labels == {2: 4}
    other = pictures("cifar10", "test", [2], tmp_path)
    assert isinstance(other, str)
    assert "not the official files" in other


def test_damaged_data_are_a_reason(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"short")
    answer = pictures("cifar10", "test", [0], tmp_path)
    assert isinstance(answer, str)
    assert "damaged" in answer


def test_user_images_of_any_size_become_thumbnails(tmp_path: Path) -> None:
    for name, size in (("ants/1", (300, 200)), ("bees/1", (120, 400))):
        (tmp_path / name).parent.mkdir()
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    name = f"folder:{tmp_path}"
    got = found(pictures(name, "test", [0, 1], named=[name]))
    assert got.class_names == ("ants", "bees")
    assert got.labels == {0: 0, 1: 1}
    for file in got.files.values():
        assert opened(file).format == "JPEG"
        assert max(opened(file).size) == THUMBNAIL


def test_user_arrays(tmp_path: Path) -> None:
    pixels = torch.arange(2 * 4 * 5, dtype=torch.uint8).reshape(2, 4, 5).numpy()
    np.savez(tmp_path / "own.npz", images=pixels, labels=np.array([1, 0]), class_names=np.array(["no", "yes"]))
    name = f"npz:{tmp_path / 'own.npz'}"
    for split in ("test", "all"):  # as requested, and as certificates of data without a split record it
        got = found(pictures(name, split, [1], named=[name]))
        np.testing.assert_array_equal(np.asarray(opened(got.files[1])), pixels[1])
        assert got.class_names == ("no", "yes")


@pytest.mark.parametrize("named", [[], ["folder:elsewhere"], ["npz:private"], ["folder:private/cats"]])
def test_a_path_that_the_user_does_not_name_is_not_read(
    named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private" / "cats").mkdir(parents=True)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "private" / "cats" / "1.png")
    for dataset in ("folder:private", f"folder:{tmp_path / 'private'}", "folder:private/../private"):
        answer = pictures(dataset, "test", [0], named=named)
        assert answer == f"No pictures: they are in {dataset}, which is read only on request; add --images {dataset}."
    assert sorted(found(pictures("folder:private", "test", [0], named=["folder:./private"])).files) == [0]


@pytest.mark.parametrize("dataset", ["martian letters", "folder", "folder:", "npz:"])
def test_an_unknown_data_set_is_a_reason(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a path is not the current folder, which nobody has named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cats").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "cats" / "1.png")
    assert pictures(dataset, "test", [0]) == f"No pictures: {dataset} is not a data set that smoothcert can read."
