"""ImageNet: its layouts in small, labels and order, both kinds of development kit lists."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from photographs import write_photograph
from PIL import ExifTags, Image
from scipy.io import savemat

from smoothcert.certification.subject import data_settings
from smoothcert.data import DATASETS, load_dataset
from smoothcert.data.image_files import FileList
from smoothcert.data.imagenet import difference, load
from smoothcert.errors import RequestError, WorkError

WNIDS = ["n02119789", "n01440764", "n03000684"]  # by ILSVRC id, as the kit would have them: not sorted
SORTED = ["n01440764", "n02119789", "n03000684"]
TRUTH = [3, 1, 2, 1, 3]  # ILSVRC ids of validation images 1 to 5


def write_train(place: Path) -> None:
    for label, wnid in enumerate(SORTED):
        for number in range(2):
            write_photograph(
                place / "train" / wnid / f"{wnid}_{number}.JPEG", 10 * label + number, 300, 260 + 30 * number
            )


def write_sorted_val(place: Path) -> None:
    for number, identity in enumerate(TRUTH, 1):
        name = f"ILSVRC2012_val_{number:08}.JPEG"
        write_photograph(place / "val" / WNIDS[identity - 1] / name, 100 + number, 320, 270)


def write_flat_val(place: Path) -> None:
    for number in range(1, len(TRUTH) + 1):
        write_photograph(place / "val" / f"ILSVRC2012_val_{number:08}.JPEG", 100 + number, 320, 270)
    truth = place / "devkit" / "data" / "ILSVRC2012_validation_ground_truth.txt"
    truth.parent.mkdir(parents=True)
    truth.write_text("".join(f"{identity}\n" for identity in TRUTH))


def write_meta(path: Path, wnids: list[str]) -> None:
    """A meta.mat like the kit's: a struct array, in no particular order, with groups of classes at the end."""
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(float(identity), wnid, "some words", 0.0) for identity, wnid in enumerate(wnids, 1)][::-1]
    rows.append((float(len(wnids) + 1), "n00000001", "a group", 2.0))
    savemat(path, {"synsets": np.array(rows, dtype=fields)[:, None]})


@pytest.mark.parametrize("below", ["imagenet", "ILSVRC2012", "."])
def test_class_folders(tmp_path: Path, below: str) -> None:
    write_train(tmp_path / below)
    write_sorted_val(tmp_path / below)
    train, test = (load_dataset("imagenet", split, tmp_path, on_note=lambda text: None) for split in ("train", "test"))
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert [train.files[index].parent.name for index in (0, 2, 4)] == SORTED
    assert test.labels.tolist() == [0, 1, 1, 2, 2]
    assert [int(test.files[index].stem[-8:]) for index in range(5)] == [3, 2, 4, 1, 5]
    for data, split in ((train, "train"), (test, "test")):
        assert (data.split, data.num_classes, data.shape) == (split, 3, (3, 224, 224))
        assert data.class_names == tuple(SORTED)
        assert data.normalization == DATASETS["imagenet"].normalization
        assert data.random_parts == (split == "train")
        assert DATASETS["imagenet"].augmented, "the notes about missing augmentation do not read the images"
    assert (DATASETS["imagenet"].shape, DATASETS["imagenet"].num_classes) == ((3, 224, 224), 1000)
    assert train.normalization.mean == (0.485, 0.456, 0.406)
    assert train.normalization.std == (0.229, 0.224, 0.225)


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_images_are_not_turned_by_their_metadata(tmp_path: Path, orientation: int) -> None:
    """They equal those of torchvision's ImageFolder, Resize(256) and CenterCrop(224), which ignore the orientation."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    photograph = np.random.default_rng(0).integers(0, 256, (270, 320, 3), dtype=np.uint8)
    paths = [tmp_path / folder / SORTED[0] / "ILSVRC2012_val_00000001.JPEG" for folder in ("train", "val")]
    for path in paths:
        path.parent.mkdir(parents=True)
        Image.fromarray(photograph).save(path, "JPEG", exif=exif)
    train, test = (load_dataset("imagenet", split, tmp_path, on_note=lambda text: None) for split in ("train", "test"))
    with Image.open(paths[0]) as image:
        plain = image.convert("RGB").resize((303, 256), Image.Resampling.BILINEAR).crop((40, 16, 264, 240))
    expected = np.asarray(plain).transpose(2, 0, 1)
    for data in (train, test):
        np.testing.assert_array_equal(data.read(0, None).numpy(), expected)
    # A random crop is that of the same pixels without metadata.
    crop = train.read(0, 5)
    with Image.open(paths[0]) as image:
        image.convert("RGB").save(paths[0], "PNG")
    assert torch.equal(train.read(0, 5), crop)


CLASSES = [f"n{number:08}" for number in range(1000)]


def validation_names(name: str) -> list[str]:
    """The paths of a whole validation set; image k is of class k modulo 1,000."""
    return [f"{CLASSES[k % 1000]}/{name.format(k)}" for k in range(1, 50_001)]


def difference_of(names: list[str]) -> str | None:
    labels = torch.tensor([int(name[1:9]) for name in names])
    return difference("test", FileList.of(Path("val"), names), labels, CLASSES)


def test_a_whole_validation_set_is_the_official_one() -> None:
    assert difference_of(validation_names("ILSVRC2012_val_{:08}_n01751748.jpg")) is None


def test_another_validation_set_is_not_the_official_one() -> None:
    names = validation_names("ILSVRC2012_val_{:08}.JPEG")
    for changed, problem in (
        (names[1:], "got 49,999 of 1,000 classes;"),
        ([name for name in names if CLASSES[3] not in name], "got 49,950 of 999 classes;"),
        (
            [*names[:-1], f"{CLASSES[0]}/copy.JPEG"],
            "got 50,000 of 1,000 classes, 1 with other names, or the number of another;",
        ),
        ([*names[:-1], names[999]], "got 50,000 of 1,000 classes, 1 with other names, or the number of another;"),
    ):
        assert f"{problem} image numbers are not those of published certificates" in str(difference_of(changed))


def test_a_part_of_the_training_set_is_not_the_official_one() -> None:
    def found(images: int, classes: int) -> str | None:
        labels = torch.arange(images) % classes
        return difference("train", FileList(Path(), np.empty(images, "S1")), labels, CLASSES)

    assert found(1_281_167, 1000) is None
    assert str(found(1_281_166, 1000)).endswith("got 1,281,166 of 1,000 classes")
    assert str(found(1_281_167, 999)).endswith("got 1,281,167 of 999 classes")


def test_results_name_and_identify_an_incomplete_copy(tmp_path: Path) -> None:
    write_sorted_val(tmp_path)
    before = load("test", tmp_path)
    (tmp_path / "val" / WNIDS[2] / "ILSVRC2012_val_00000001.JPEG").unlink()
    after = load("test", tmp_path)
    (note,) = after.notes
    assert note.startswith(f"{tmp_path / 'val'}: expected the 50,000 validation images")
    assert "\n" not in note
    settings = [data_settings(data) for data in (before, after)]
    assert [record["dataset"] for record in settings] == ["imagenet (not the official set)"] * 2
    assert settings[0]["images_sha256"] != settings[1]["images_sha256"]
    assert "images_sha256" not in data_settings(replace(after, name="imagenet"))


def test_workers_give_the_same_tensors(tmp_path: Path) -> None:
    write_train(tmp_path)
    write_sorted_val(tmp_path)
    for split, order in (("train", [[5, 0], [2, 3], [1, 4]]), ("test", [[4, 1], [0, 2]])):
        alone, workers = (
            list(replace(load(split, tmp_path), workers=number).batches(torch.tensor(order), slice(0, 2), seed=3))
            for number in (0, 2)
        )
        for (images, labels), (expected_images, expected_labels) in zip(workers, alone, strict=True):
            assert images.shape == (2, 3, 224, 224)
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)
        centre = load(split, tmp_path).batch(torch.tensor(order[0]))[0]
        assert torch.equal(alone[0][0], centre) == (split == "test")


@pytest.mark.parametrize("with_train", [True, False])
def test_flat_validation_set_equals_the_sorted_one(tmp_path: Path, with_train: bool) -> None:
    flat, folders = tmp_path / "flat", tmp_path / "folders"
    write_flat_val(flat)
    write_sorted_val(folders)
    for place in (flat, folders) if with_train else ():
        for wnid in SORTED:
            write_photograph(place / "train" / wnid / "a.JPEG", 0)
    write_meta(flat / "devkit" / "data" / "meta.mat", WNIDS)
    found, expected = load("test", flat), load("test", folders)
    assert found.labels.tolist() == expected.labels.tolist() == [0, 1, 1, 2, 2]
    names = [[data.files[index].name for index in range(5)] for data in (found, expected)]
    assert names[0] == names[1]
    assert found.class_names == expected.class_names
    assert found.num_classes == 3


def test_flat_set_without_the_kit_is_one_line(tmp_path: Path) -> None:
    write_flat_val(tmp_path)
    with pytest.raises(RequestError, match=r"got no meta\.mat; .* <wnid> folders") as raised:
        load("test", tmp_path)
    assert "\n" not in str(raised.value)
    data = tmp_path / "devkit" / "data"
    write_meta(data / "meta.mat", WNIDS)
    (data / "ILSVRC2012_validation_ground_truth.txt").unlink()
    with pytest.raises(RequestError, match=r"got no ILSVRC2012_validation_ground_truth\.txt"):
        load("test", tmp_path)


@pytest.mark.parametrize(
    ("truth", "problem"),
    [
        ("3\n1\n2\n1\n", r"expected a line for ILSVRC2012_val_00000005\.JPEG, found 4 lines"),
        ("3\n1\n2\n1\n4\n", r"expected ILSVRC ids in 1\.\.3, found 1\.\.4"),
        ("0\n1\n2\n1\n3\n", r"found 0\.\.3"),
        ("", "found an empty file"),
        ("a b c", "expected one number per line"),
    ],
)
def test_wrong_ground_truth(tmp_path: Path, truth: str, problem: str) -> None:
    write_flat_val(tmp_path)
    write_meta(tmp_path / "devkit" / "data" / "meta.mat", WNIDS)
    (tmp_path / "devkit" / "data" / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)
    with pytest.raises(WorkError, match=problem):
        load("test", tmp_path)


def test_damaged_meta(tmp_path: Path) -> None:
    write_flat_val(tmp_path)
    (tmp_path / "devkit" / "data" / "meta.mat").write_bytes(b"damaged")
    with pytest.raises(WorkError, match=r"meta\.mat: expected the classes of ILSVRC2012") as raised:
        load("test", tmp_path)
    assert "\n" not in str(raised.value)
    write_meta(tmp_path / "devkit" / "data" / "meta.mat", ["n02119789", "goldfish", "n03000684"])
    with pytest.raises(WorkError, match=r"meta\.mat: expected wnids such as n01440764, found others"):
        load("test", tmp_path)


def test_classes_that_training_does_not_have(tmp_path: Path) -> None:
    write_sorted_val(tmp_path)
    write_photograph(tmp_path / "train" / "n01440764" / "a.JPEG", 0)
    with pytest.raises(
        RequestError, match="expected the classes of the training folder alone, got n02119789 and n03000684"
    ):
        load("test", tmp_path)
    flat = tmp_path / "flat"
    write_flat_val(flat)
    write_meta(flat / "devkit" / "data" / "meta.mat", WNIDS)
    write_photograph(flat / "train" / "n01440764" / "a.JPEG", 0)
    with pytest.raises(
        RequestError, match=r"val_00000001\.JPEG: expected a class of the training folder, got n03000684"
    ):
        load("test", flat)


def test_a_validation_set_with_fewer_classes_keeps_the_labels_of_training(tmp_path: Path) -> None:
    write_train(tmp_path)
    write_photograph(tmp_path / "val" / "n03000684" / "a.JPEG", 0)
    test = load("test", tmp_path)
    assert test.labels.tolist() == [2]
    assert test.num_classes == 3


@pytest.mark.parametrize("split", ["train", "test"])
def test_absent_is_one_line_with_the_layout(tmp_path: Path, split: str) -> None:
    (tmp_path / "train" / "cats").mkdir(parents=True)
    (tmp_path / "val").mkdir()
    with pytest.raises(RequestError) as raised:
        load(split, tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    layout = "train/<wnid>/*.JPEG" if split == "train" else "val/<wnid>/*.JPEG or val/ILSVRC2012_val_*.JPEG with"
    for word in (str(tmp_path / "imagenet"), layout, "https://image-net.org"):
        assert word in message


def test_class_folders_without_images(tmp_path: Path) -> None:
    (tmp_path / "train" / "n01440764").mkdir(parents=True)
    with pytest.raises(RequestError, match="in its 1 class folders, got none"):
        load("train", tmp_path)
