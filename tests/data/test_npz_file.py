"""Images of users in npz files: every form that is accepted, and wrong, damaged and oversized files."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from smoothcert.data import load_dataset, load_npz, npz_file
from smoothcert.errors import RequestError, WorkError

RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (6, 5, 7), dtype=np.uint8)
COLOUR = RANDOM.integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)
LABELS = np.array([0, 3, 1, 1, 2, 0], dtype=np.uint8)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (GREY, GREY[:, None]),
        (GREY[:, :, :, None], GREY[:, None]),
        (COLOUR, COLOUR.transpose(0, 3, 1, 2)),
        (COLOUR.transpose(0, 3, 1, 2), COLOUR.transpose(0, 3, 1, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_npz_in_every_form(tmp_path: Path, images: np.ndarray, expected: np.ndarray, dtype: type) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, images=images, labels=LABELS.astype(dtype))
    data = load_dataset(f"npz:{path}", "test")
    np.testing.assert_array_equal(data.images.numpy(), expected)
    np.testing.assert_array_equal(data.labels.numpy(), LABELS)
    assert (data.num_classes, data.name, data.split) == (4, f"npz:{path}", "all")


def test_npz_with_splits_counts_the_classes_of_both(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, train_images=COLOUR, train_labels=LABELS, test_images=COLOUR[:2], test_labels=LABELS[4:])
    train, test = (load_dataset(f"npz:{path}", split) for split in ("train", "test"))
    assert train.num_classes == test.num_classes == 4
    np.testing.assert_array_equal(test.images.numpy(), COLOUR[:2].transpose(0, 3, 1, 2))
    assert (len(train), test.labels.tolist()) == (6, [2, 0])


def test_npz_with_class_names(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez_compressed(path, images=GREY, labels=LABELS, class_names=np.array(["a", "b", "c", "d", "never seen"]))
    data = load_dataset(f"npz:{path}", "test")
    assert data.class_names == ("a", "b", "c", "d", "never seen")
    assert data.num_classes == 5
    np.savez(path, images=GREY, labels=LABELS, class_names=np.array([b"a", b"b", "ä".encode(), b"d"]))
    assert load_dataset(f"npz:{path}", "test").class_names == ("a", "b", "ä", "d")
    for names, given in ((["a", "b"], "got 2 names"), (["a", "b", "a", "d"], "got 'a' twice")):
        np.savez(path, images=GREY, labels=LABELS, class_names=np.array(names))
        with pytest.raises(RequestError, match=f"a name for each label from 0 to 3, each once, {given}"):
            load_dataset(f"npz:{path}", "test")


def test_labels_that_count_from_one_are_reported(tmp_path: Path) -> None:
    for labels, notes in ((LABELS, 0), (LABELS + 1, 1)):
        np.savez(tmp_path / "a.npz", images=GREY, labels=labels)
        assert len(load_npz(tmp_path / "a.npz", "test").notes) == notes


def test_test_labels_that_training_does_not_have_are_reported(tmp_path: Path) -> None:
    path, labels = tmp_path / "a.npz", np.array([0, 1, 2])
    for test_labels, notes in ((labels, ()), (labels + 1, ("no training image has the test labels 3; a network",))):
        np.savez(path, train_images=GREY[:3], train_labels=labels, test_images=GREY[:3], test_labels=test_labels)
        for split in ("train", "test"):
            found = load_npz(path, split).notes
            assert len(found) == len(notes)
            assert all(expected in note for expected, note in zip(notes, found, strict=True))


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"images": GREY}, "got images; add labels"),
        ({"train_images": GREY, "train_labels": LABELS}, "train_labels; add test_images and test_labels"),
        ({"x": GREY}, "add images and labels"),
        ({"images": GREY / 255, "labels": LABELS}, "got float64 of shape [6, 5, 7]"),
        ({"images": GREY.astype(np.int64), "labels": LABELS}, "got int64 of shape [6, 5, 7]"),
        ({"images": GREY[0], "labels": LABELS}, "got uint8 of shape [5, 7]"),
        ({"images": COLOUR[:0], "labels": LABELS[:0]}, "of shape [0, 5, 7, 3]; add images"),
        ({"images": COLOUR[..., :2], "labels": LABELS}, "of shape [6, 5, 7, 2]; reorder"),
        ({"images": COLOUR[:, :3], "labels": LABELS}, "of shape [6, 3, 7, 3]; reorder"),
        ({"images": GREY, "labels": LABELS[:4]}, "of dtype int64 and shape [6], got dtype int64 and shape [4]"),
        (
            {"images": GREY, "labels": LABELS.astype(np.int64) - 1},
            "expected labels as integers [n] from 0 to 999,999, got -1 to 2; number the classes from 0",
        ),
        ({"images": GREY, "labels": LABELS / 1}, "got float64 [6]"),
        ({"images": GREY, "labels": LABELS[:, None]}, "got uint8 [6, 1]"),
        ({"images": np.uint8(3), "labels": LABELS}, "got uint8 of shape []"),
        ({"images": GREY, "labels": np.int64(3)}, "got int64 []"),
        ({"images": GREY[:, :0], "labels": LABELS}, "of shape [6, 0, 7]"),
        ({"images": GREY[:0], "labels": LABELS[:0]}, "of shape [0, 5, 7]"),
        ({"images": GREY, "labels": LABELS.astype(np.int64) + 2**40}, "from 0 to 999,999, got"),
        ({"images": GREY, "labels": LABELS.astype(np.uint64) + 2**63}, "from 0 to 999,999, got"),
    ],
)
def test_wrong_npz_is_one_line(tmp_path: Path, arrays: dict[str, np.ndarray], problem: str) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    with pytest.raises(RequestError) as raised:
        load_dataset(f"npz:{path}", "test")
    assert problem in str(raised.value)
    assert "own.npz" in str(raised.value)
    assert "\n" not in str(raised.value)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("never",)


def test_npz_of_objects_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", images=GREY, labels=np.array([Malicious()], dtype=object))
    with pytest.raises(WorkError, match=r"npz:own\.npz: expected an npz file of plain arrays") as raised:
        load_dataset("npz:own.npz", "test")
    assert "\n" not in str(raised.value)
    assert not Path("never").exists()


def test_damaged_and_absent_npz(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    with pytest.raises(RequestError, match="expected a file, got nothing"):
        load_dataset(f"npz:{path}", "test")
    np.savez(path, images=GREY, labels=LABELS)
    whole = path.read_bytes()
    np.save(tmp_path / "single.npy", GREY)
    for content in (b"", b"text", whole[:-30], (tmp_path / "single.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(
            WorkError, match=r"expected an npz file of plain arrays, found: .*; write it again"
        ) as raised:
            load_dataset(f"npz:{path}", "test")
        assert "\n" not in str(raised.value)


def claiming_npz(path: Path, shape: tuple[int, ...], dtype: str = "|u1") -> Path:
    """An npz file whose images claim a shape without having the data."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    np.savez(path, labels=LABELS)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("images.npy", header.getvalue())
    return path


@pytest.mark.parametrize("shape", [(10**10,), (10**15,), (10**6, 10**6, 1000), (2**62, 2**62, 3)])
def test_npz_that_claims_more_than_it_holds_is_one_line(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = claiming_npz(tmp_path / "own.npz", shape)
    with pytest.raises(WorkError, match="expected an npz file of plain arrays") as raised:
        load_dataset(f"npz:{path}", "test")
    assert "\n" not in str(raised.value)


def test_the_limit_of_a_compressed_npz_is_its_unpacked_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "own.npz", images=np.zeros((6, 500, 500), np.uint8), labels=LABELS)
    assert (tmp_path / "own.npz").stat().st_size < 10_000
    assert len(load_npz(tmp_path / "own.npz", "test")) == 6
    monkeypatch.setattr(npz_file, "NPZ_BYTES", 1_000_000)
    with pytest.raises(RequestError, match="expected at most 1,000,000 bytes of arrays"):
        load_npz(tmp_path / "own.npz", "test")


def test_npz_with_other_members_is_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", labels=LABELS)
    with zipfile.ZipFile(tmp_path / "own.npz", "a") as archive:
        archive.writestr("images", b"not an array")
    claiming_npz(tmp_path / "negative.npz", (-1, 5, 5))
    claiming_npz(tmp_path / "short.npz", (6, 5, 5))
    for name in ("own.npz", "negative.npz", "short.npz"):
        with pytest.raises(WorkError, match="expected an npz file of plain arrays"):
            load_dataset(f"npz:{tmp_path / name}", "test")
