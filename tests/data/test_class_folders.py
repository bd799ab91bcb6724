"""Class folders of users, the names that `load_dataset` accepts, and class names."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from photographs import photograph, write_photograph
from PIL import Image

from smoothcert.data import (
    ImageData,
    ImageFiles,
    default_folder,
    load_dataset,
    load_folder,
    read_class_names,
    with_known_classes,
)
from smoothcert.data.image_files import read_image_files
from smoothcert.data.images import in_unit_interval
from smoothcert.errors import RequestError, WorkError


def test_class_folders_serve_both_splits(tmp_path: Path) -> None:
    names = ["ant/b.png", "ant/a.PNG", "bee/c.bmp", "cat/d.webp"]
    for number, name in enumerate(names):
        write_photograph(tmp_path / name, number, 20, 12)
    (tmp_path / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "bee" / ".hidden.png").write_text("not an image")
    for split in ("train", "test"):
        data = load_dataset(f"folder:{tmp_path}", split)
        assert isinstance(data, ImageData)
        assert data.shape == (3, 12, 20)
        assert data.labels.tolist() == [0, 0, 1, 2]
        assert (data.num_classes, data.class_names, data.split) == (3, ("ant", "bee", "cat"), "all")
        for place, number in enumerate([1, 0, 2]):
            expected = np.asarray(photograph(number, 20, 12)).transpose(2, 0, 1)
            np.testing.assert_array_equal(data.images[place].numpy(), expected)
        assert data.file_names == ("ant/a.PNG", "ant/b.png", "bee/c.bmp", "cat/d.webp")
        assert data.subset(torch.tensor([3, 1])).file_names == ("cat/d.webp", "ant/b.png")


@pytest.mark.parametrize("test_folder", ["test", "val"])
def test_splits_share_the_classes_of_training(tmp_path: Path, test_folder: str) -> None:
    for number, name in enumerate(["train/ant/a.png", "train/bee/a.png", f"{test_folder}/bee/a.png"]):
        write_photograph(tmp_path / name, number)
    train, test = (load_dataset(f"folder:{tmp_path}", split) for split in ("train", "test"))
    assert train.labels.tolist() == [0, 1]
    assert test.labels.tolist() == [1]
    assert train.num_classes == test.num_classes == 2
    np.testing.assert_array_equal(test.images[0].numpy(), np.asarray(photograph(2, 60, 40)).transpose(2, 0, 1))


def test_paths_may_be_strings(tmp_path: Path) -> None:
    write_photograph(tmp_path / "ant" / "a.png", 0)
    (tmp_path / "names.txt").write_text("bee\nant\n")
    assert load_folder(str(tmp_path), "test").name == f"folder:{tmp_path}"
    assert read_class_names(str(tmp_path / "names.txt")) == ("bee", "ant")
    images, _ = read_image_files([str(tmp_path / "ant" / "a.png")], (3, 40, 60))
    assert torch.equal(in_unit_interval(images), load_folder(tmp_path, "test").batch(torch.tensor([0]))[0])
    with pytest.raises(RequestError, match=f"expected ImageNet in {tmp_path}"):
        load_dataset("imagenet", "test", str(tmp_path))


def test_train_may_be_a_class(tmp_path: Path) -> None:
    write_photograph(tmp_path / "train" / "a.png", 0)
    write_photograph(tmp_path / "bus" / "a.png", 1)
    assert load_folder(tmp_path, "test").class_names == ("bus", "train")


def test_image_size_scales_the_shorter_side_and_takes_the_centre(tmp_path: Path) -> None:
    write_photograph(tmp_path / "a" / "wide.png", 0, 64, 32)
    write_photograph(tmp_path / "a" / "tall.png", 1, 16, 40)
    data = load_dataset(f"folder:{tmp_path}", "test", image_size=16)
    assert data.shape == (3, 16, 16)
    tall = np.asarray(photograph(1, 16, 40))[12:28].transpose(2, 0, 1)
    wide = photograph(0, 64, 32).resize((32, 16), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(data.images[0].numpy(), tall)
    np.testing.assert_array_equal(data.images[1].numpy(), np.asarray(wide)[:, 8:24].transpose(2, 0, 1))


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("1", 1), ("LA", 1), ("RGB", 3), ("RGBA", 3)])
def test_images_are_grey_only_if_all_files_are(tmp_path: Path, mode: str, channels: int) -> None:
    write_photograph(tmp_path / "a" / "first.png", 0, mode="L")
    write_photograph(tmp_path / "a" / "second.png", 1, mode=mode)
    data = load_folder(tmp_path, "test")
    assert data.shape == (channels, 40, 60)
    grey = np.asarray(photograph(0, 60, 40).convert("L"))
    for plane in data.images[0].numpy():
        np.testing.assert_array_equal(plane, grey)


@pytest.mark.parametrize("image_size", [None, 10])
def test_large_sets_stay_in_files_with_the_same_images(tmp_path: Path, image_size: int | None) -> None:
    for number in range(5):
        write_photograph(tmp_path / "ab"[number % 2] / f"{number}.png", number, 30, 20)
    memory = load_folder(tmp_path, "train", image_size)
    files = load_folder(tmp_path, "train", image_size, in_memory_bytes=5 * 3 * 100 - 1)
    assert isinstance(memory, ImageData)
    assert isinstance(files, ImageFiles)
    order = torch.tensor([[4, 0, 2]])
    for found, expected in zip(
        next(files.batches(order, slice(0, 3), 0)), next(memory.batches(order, slice(0, 3), 0)), strict=True
    ):
        assert torch.equal(found, expected)
    for name in ("num_classes", "name", "split", "shape", "class_names", "normalization", "file_names"):
        assert getattr(files, name) == getattr(memory, name)
    assert files.file_names is files.file_names, "a loop over a million images asks a million times"


def bad_folders(root: Path) -> dict[str, tuple[Path, str]]:
    empty, only_images, no_images, mixed, train_only, extra = (
        root / name for name in ("empty", "only_images", "no_images", "mixed", "train_only", "extra")
    )
    empty.mkdir()
    write_photograph(only_images / "a.png", 0)
    (no_images / "a").mkdir(parents=True)
    write_photograph(mixed / "a" / "x.png", 0, 10, 10)
    write_photograph(mixed / "a" / "y.png", 0, 11, 10)
    write_photograph(train_only / "train" / "a" / "x.png", 0)
    write_photograph(extra / "train" / "a" / "x.png", 0)
    write_photograph(extra / "test" / "b" / "x.png", 0)
    empty_class = root / "empty class"
    write_photograph(empty_class / "b" / "x.png", 0)
    (empty_class / "__MACOSX").mkdir()
    return {
        "absent": (root / "absent", "expected a folder, got nothing"),
        "file": (only_images / "a.png", "expected a folder, got a file"),
        "empty": (empty, "got no folders; make them"),
        "only images": (only_images, "got no folders; make them"),
        "no images": (no_images, "of a class, got none; add some or remove it"),
        "empty class": (empty_class, "of a class, got none; add some or remove it"),
        "sizes": (mixed, "got a/x.png of 10x10 and a/y.png of 11x10 pixels; give --image-size S"),
        "no test": (train_only, "expected test or val with class folders, got train alone"),
        "extra class": (extra, "expected the classes of the training folder alone, got b"),
    }


def test_a_relative_path_that_does_not_exist_is_reported_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data of a run that was trained in another folder, for instance: `folder:data` is then somewhere else."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder:data", "npz:data"):
        with pytest.raises(RequestError, match=re.escape(f"got nothing at {tmp_path / 'data'}; give ")):
            load_dataset(name, "test")


@pytest.mark.parametrize(
    "case", ["absent", "file", "empty", "only images", "no images", "empty class", "sizes", "no test", "extra class"]
)
def test_wrong_folder_is_one_line(tmp_path: Path, case: str) -> None:
    path, problem = bad_folders(tmp_path)[case]
    with pytest.raises(RequestError) as raised:
        load_dataset(f"folder:{path}", "test")
    assert problem in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_damaged_image_is_named(tmp_path: Path, content: bytes | None) -> None:
    write_photograph(tmp_path / "a" / "x.png", 0)
    path = write_photograph(tmp_path / "a" / "y.png", 1)
    path.write_bytes(path.read_bytes()[:-400] if content is None else content)
    with pytest.raises(
        WorkError, match=r"y\.png: expected a whole image, .*; replace or delete it, or pass --skip-unreadable$"
    ) as raised:
        load_folder(tmp_path, "test")
    assert "\n" not in str(raised.value)


def test_all_unreadable_files_are_listed_at_once(tmp_path: Path) -> None:
    write_photograph(tmp_path / "a" / "good.png", 0)
    for number in range(101):
        (tmp_path / "a" / f"head{number:03}.png").write_bytes(b"not an image")
    cut = write_photograph(tmp_path / "a" / "cut.png", 1)
    cut.write_bytes(cut.read_bytes()[:-400])
    with pytest.raises(WorkError, match="102 of 103 files cannot be used: a/cut") as raised:
        load_folder(tmp_path, "test")
    message = str(raised.value)
    assert "\n" not in message
    assert "a/head098.png (expected a whole image, found 12 bytes that cannot be decoded" in message
    assert "head099" not in message
    assert message.endswith(" and 2 more; replace or delete them, or pass --skip-unreadable")


@pytest.mark.parametrize("in_memory", [0, 10**9])
def test_unreadable_files_can_be_skipped(tmp_path: Path, in_memory: int) -> None:
    """The rest keep their labels and pixels; a note lists what is left out."""
    for number, name in enumerate(["ant/a.png", "ant/cut.png", "bee/b.png", "bee/z.png"]):
        path = write_photograph(tmp_path / name, number)
    cut = tmp_path / "ant" / "cut.png"
    cut.write_bytes(cut.read_bytes()[:-400])  # its header is whole
    path.write_bytes(b"not an image")
    data = load_folder(tmp_path, "test", skip_unreadable=True, in_memory_bytes=in_memory)
    assert data.labels.tolist() == [0, 1]
    expected = [np.asarray(photograph(number, 60, 40)).transpose(2, 0, 1) for number in (0, 2)]
    pixels = data.batch(torch.arange(2))[0] * 255
    np.testing.assert_array_equal(pixels.round().numpy(), np.stack(expected))
    assert data.file_names == ("ant/a.png", "bee/b.png"), "so that a row of certificates leads to its file"
    (note,) = data.notes
    assert f"{tmp_path}: 2 of 4 files are skipped: ant/cut.png (expected a whole image" in note
    assert "bee/z.png (" in note
    with pytest.warns(UserWarning, match="2 of 4 files are skipped") as warned:
        load_dataset(f"folder:{tmp_path}", "test", skip_unreadable=True)
    assert [(str(warning.message), warning.filename) for warning in warned] == [(note, __file__)]
    notes: list[str] = []
    load_dataset(f"folder:{tmp_path}", "test", skip_unreadable=True, on_note=notes.append)
    assert notes == [note]
    for name in ("ant/a.png", "bee/b.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(WorkError, match="4 of 4 files cannot be used"):
        load_folder(tmp_path, "test", skip_unreadable=True, in_memory_bytes=in_memory)


def test_notes_name_the_right_files_if_one_before_them_is_skipped(tmp_path: Path) -> None:
    for number, name in enumerate(["a.png", "b.png", "c.png"]):
        write_photograph(tmp_path / "ant" / name, number, mode="RGB" if number == 1 else "L")
    (tmp_path / "ant" / "a.png").write_bytes(b"not an image")
    _, coloured = load_folder(tmp_path, "test", skip_unreadable=True).notes
    assert "1 of 2 files is grey, because ant/b.png is in colour" in coloured


@pytest.mark.parametrize("announced", [3, 4])
def test_many_files_are_announced(
    tmp_path: Path, announced: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3):
        write_photograph(tmp_path / f"cat/{index}.png", index)
    monkeypatch.setattr("smoothcert.data.class_folders.ANNOUNCED", announced)
    assert len(load_folder(tmp_path, "test")) == 3
    line = f"note: reading the headers of 3 files in {tmp_path}\n"
    assert capsys.readouterr() == ("", line if announced == 3 else "")


def test_channels_can_be_chosen(tmp_path: Path) -> None:
    write_photograph(tmp_path / "a" / "grey.png", 0, mode="L")
    grey = load_folder(tmp_path, "test")
    coloured = load_folder(tmp_path, "test", channels=3)
    assert (grey.shape, coloured.shape, coloured.notes) == ((1, 40, 60), (3, 40, 60), ())
    first = torch.tensor([0])
    assert torch.equal(coloured.batch(first)[0], grey.batch(first)[0].expand(1, 3, 40, 60))
    write_photograph(tmp_path / "a" / "red.png", 1, mode="RGBA")
    data = load_dataset(f"folder:{tmp_path}", "test", channels=1)
    luminance = np.asarray(photograph(1, 60, 40).convert("L"))
    np.testing.assert_allclose(data.batch(torch.tensor([1]))[0][0, 0] * 255, luminance, atol=1)
    assert data.notes == (f"{tmp_path}: 1 of 2 files are in colour and are read as grey",)
    with pytest.raises(RequestError, match=r"channels: expected 1 \(grey\) or 3 \(RGB\), got 4"):
        load_folder(tmp_path, "test", channels=4)


def test_note_on_files_that_are_enlarged(tmp_path: Path) -> None:
    """The shorter side counts, which is scaled to the size."""
    (tmp_path / "ant").mkdir()
    for name, size in (("a", (60, 40)), ("b", (40, 90)), ("c", (39, 80))):
        Image.new("L", size, 128).save(tmp_path / "ant" / f"{name}.png")
    for side, count in ((39, 0), (40, 1), (41, 3)):
        notes = load_folder(tmp_path, "test", image_size=side).notes
        assert [note.partition(" enlarged to ")[0] for note in notes] == [
            f"{tmp_path}: {count} of 3 files {'is' if count == 1 else 'are'}"
        ] * (count > 0)


def test_notes_on_skipped_and_coloured_files(tmp_path: Path) -> None:
    for number in range(3):
        write_photograph(tmp_path / "a" / f"{number}.png", number, mode="L")
    assert load_folder(tmp_path, "test").notes == ()
    write_photograph(tmp_path / "b" / "colour.png", 3)
    for name in ("a/x.tif", "a/y.TIF", "b/z.jfif", "b/.hidden.gif"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "b" / "folder").mkdir()
    for in_memory in (0, 10**9):
        skipped, coloured = load_folder(tmp_path, "test", in_memory_bytes=in_memory).notes
        assert f"{tmp_path}: 4 files or folders are skipped (.tif, .jfif, folder)" in skipped
        assert "3 of 4 files are grey, because b/colour.png is in colour (mode RGB)" in coloured


def test_labels_follow_the_names_in_a_model_unless_the_user_gave_an_order(tmp_path: Path) -> None:
    for number, name in enumerate(["ant/a.png", "bee/b.png", "cat/c.png"]):
        write_photograph(tmp_path / name, number)
    found, given = (
        load_dataset(f"folder:{tmp_path}", "test", classes=names) for names in (None, ("bee", "cat", "ant"))
    )
    assert with_known_classes(found, ("cat", "dog", "bee", "ant")).labels.tolist() == [3, 2, 0]
    assert with_known_classes(given, ("cat", "dog", "bee", "ant")).labels.tolist() == [2, 0, 1]
    for names in (None, ("dog", "bee", "ant"), ("ant", "bee", "cat")):  # none, not all, the same
        assert with_known_classes(found, names) is found


def test_labels_follow_the_names_of_outputs(tmp_path: Path) -> None:
    for number, name in enumerate(["ant/a.png", "bee/b.png", "cat/c.png"]):
        write_photograph(tmp_path / name, number)
    (tmp_path / "classes.txt").write_text("dog\ncat\n\nbee\nant\n")
    names = read_class_names(tmp_path / "classes.txt")
    assert names == ("dog", "cat", "bee", "ant")
    data = load_dataset(f"folder:{tmp_path}", "test", classes=names)
    assert (data.labels.tolist(), data.num_classes, data.class_names) == ([3, 2, 1], 4, names)
    with pytest.raises(RequestError, match="got a list without bee, cat; add them, or remove those images"):
        load_dataset(f"folder:{tmp_path}", "test", classes=("ant", "dog"))
    with pytest.raises(RequestError, match=r"expected one output for each class of .*, got two called bee; rename"):
        load_dataset(f"folder:{tmp_path}", "test", classes=("ant", "bee", "cat", "bee"))
    np.savez(tmp_path / "own.npz", images=np.zeros((4, 5, 7), dtype=np.uint8), labels=[0, 3, 1, 2])
    with pytest.raises(
        RequestError, match=r"classes: expected a list of names, got 'classes\.txt'; use read_class_names"
    ):
        load_dataset(f"folder:{tmp_path}", "test", classes="classes.txt")
    assert load_dataset(f"npz:{tmp_path / 'own.npz'}", "test", classes=names).labels.tolist() == [0, 3, 1, 2]
    with pytest.raises(RequestError, match="expected at least the 4 classes"):
        load_dataset(f"npz:{tmp_path / 'own.npz'}", "test", classes=names[:3])
    numbers = ("2", "3", "0", "1", "none")
    assert load_dataset(f"npz:{tmp_path / 'own.npz'}", "test", classes=numbers).labels.tolist() == [2, 1, 3, 0]
    for content, problem in (("", "got none"), ("a\nb\na\n", "got a twice")):
        (tmp_path / "classes.txt").write_text(content)
        with pytest.raises(RequestError, match=problem):
            read_class_names(tmp_path / "classes.txt")
    (tmp_path / "classes.txt").write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "classes.txt", tmp_path / "none.txt", tmp_path):
        with pytest.raises(RequestError, match="expected "):
            read_class_names(path)


@pytest.mark.parametrize("name", ["folder:~nobody-here/x", "npz:~nobody-here/x"])
def test_unknown_users_are_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="~nobody-here/x: expected ~ or ~ and a known user"):
        load_dataset(name, "test")
    with pytest.raises(RequestError, match="expected ~ or ~ and a known user"):
        load_dataset("mnist", "test", Path("~nobody-here"))
    monkeypatch.setenv("SMOOTHCERT_DATA", "~nobody-here")
    with pytest.raises(RequestError, match="expected ~ or ~ and a known user"):
        default_folder()


def test_a_name_of_another_type_is_one_line() -> None:
    with pytest.raises(RequestError, match="dataset: expected a name, got list"):
        load_dataset(["mnist"], "test")  # type: ignore[arg-type]


def test_image_size_must_be_positive_and_is_for_folders(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="image_size: expected at least 1 pixel, got 0"):
        load_folder(tmp_path, "test", 0)
    for name in ("mnist-sample", f"npz:{tmp_path / 'a.npz'}"):
        with pytest.raises(RequestError, match="image_size: expected none for"):
            load_dataset(name, "test", image_size=32)
        with pytest.raises(RequestError, match=f"skip_unreadable: expected none for {name}"):
            load_dataset(name, "test", skip_unreadable=True)


@pytest.mark.parametrize("name", ["folder:", "npz:", "folder", "folders:x"])
def test_incomplete_names_list_the_forms(name: str) -> None:
    with pytest.raises(RequestError, match=rf"folder:PATH, npz:PATH, FILE.py:Name, got '{name}'"):
        load_dataset(name, "test")
