"""The `augment` of a recipe: same bits as the data set's own, resume, teachers, defaults, and notes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Killed, digest, killed_after_the_first_epoch, metrics, tiny_recipe, without_times
from torch import Tensor

from smoothcert.data import ImageData, images_from_dataset
from smoothcert.data.augmentation import flip_and_crop
from smoothcert.data.class_folders import load_folder
from smoothcert.papers.presets import preset
from smoothcert.training import api, loop
from smoothcert.training.augmentation import (
    default_augmentation,
    lacks_augmentation,
    with_augmentation,
    without_augmentation,
)
from smoothcert.training.default_recipe import default_recipe, describe_choices
from smoothcert.training.recipe import TrainRecipe, load_train_recipe, with_overrides
from smoothcert.training.resume import different_fields
from smoothcert.training.teacher_votes import teacher_folder

Cli = Callable[..., tuple[int, str, str]]
NOTE = "the recipe was made for cifar10, whose training images are flipped and cropped at random; those of "


@pytest.fixture
def augmented(tiny_data: ImageData) -> ImageData:
    return replace(tiny_data, augment=flip_and_crop)


def train(recipe: TrainRecipe, data: ImageData, folder: Path, **options: object) -> str:
    loop.train(recipe, data, folder, device="cpu", **options)
    return digest(folder)


def test_a_recipe_replaces_the_augmentation_of_the_data(
    tmp_path: Path, tiny_data: ImageData, augmented: ImageData
) -> None:
    """The same bits, whether flips and crops come from the data set or from the recipe."""
    folders = (tmp_path / str(number) for number in range(9))
    alone = train(tiny_recipe(), tiny_data, next(folders))
    flipped = train(tiny_recipe(), augmented, next(folders))
    assert flipped != alone
    for name, expected in (("flip-crop", flipped), ("none", alone)):
        for data in (tiny_data, augmented):
            assert train(tiny_recipe(augment=name), data, next(folders)) == expected
    assert train(tiny_recipe(augment="flip"), tiny_data, next(folders)) not in (alone, flipped)


def test_resumed_run_equals_the_uninterrupted_run(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(augment="flip-crop")
    whole = train(recipe, tiny_data, tmp_path / "whole")
    with pytest.raises(Killed):
        train(recipe, tiny_data, tmp_path / "half", on_epoch=killed_after_the_first_epoch)
    assert train(recipe, tiny_data, tmp_path / "half", resume=True) == whole
    assert without_times(metrics(tmp_path / "half")) == without_times(metrics(tmp_path / "whole"))


def test_another_augmentation_is_another_run(tmp_path: Path, tiny_data: ImageData) -> None:
    train(tiny_recipe(epochs=1, learning_rate_drops=()), tiny_data, tmp_path / "run")
    changed = tiny_recipe(epochs=1, learning_rate_drops=(), augment="crop")
    with pytest.raises(Exception, match=r"another recipe \(augment: the run has None, the request 'crop'\)"):
        train(changed, tiny_data, tmp_path / "run", resume=True)


def test_a_teacher_has_the_augmentation_of_the_run_unless_it_has_its_own(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = tiny_recipe(sigma=0.25, epochs=1, learning_rate_drops=())
    fields = {"objective": "catrs", "epochs": 1, "learning_rate_drops": (), "teacher_votes": 2}
    made = []
    monkeypatch.setattr(
        "smoothcert.training.teacher_votes.teacher_folder",
        lambda recipe, *place: made.append(recipe) or teacher_folder(recipe, *place),
    )
    for augment, of_teacher in ((None, None), ("crop", None), ("crop", "flip")):
        given = teacher.model_copy(update={"augment": of_teacher})
        recipe = tiny_recipe(**fields, teacher=given, augment=augment)
        train(recipe, tiny_data, tmp_path / f"{augment}-{of_teacher}")
    assert [recipe.augment for recipe in made] == [None, "crop", "flip"]
    assert len(list(tmp_path.glob("teacher-*"))) == 3


def test_recipes_without_it_stay_as_they_were() -> None:
    assert "augment" not in preset("mnist/catrs", 0.5).to_mapping()
    old = preset("mnist/catrs", 0.5).to_mapping()
    del old["teacher"]["augment"]
    assert not different_fields(TrainRecipe.model_validate(old), preset("mnist/catrs", 0.5))
    changed = with_overrides(preset("mnist/catrs", 0.5), ["teacher.augment=flip", "augment=none"]).to_mapping()
    assert (changed["augment"], changed["teacher"]["augment"]) == ("none", "flip")
    assert TrainRecipe.model_validate(changed).to_mapping() == changed


def colour(images: int = 64, side: int = 32) -> ImageData:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, side, side), generator=generator, dtype=torch.uint8)
    return ImageData(pixels, torch.arange(images) % 2, 2, "npz:colour.npz", "train")


def test_data_sets_whose_training_images_are_as_they_are() -> None:
    names = ["folder:photographs", "npz:colour.npz", "mnist", "mnist-sample", "cifar10", "imagenet", "pets.py:Pets"]
    assert list(map(without_augmentation, names)) == [True, True, True, True, False, False, False]


def test_default_for_own_data(tiny_data: ImageData, augmented: ImageData) -> None:
    assert default_augmentation(colour(), "npz:colour.npz") == "flip-crop"
    assert default_augmentation(tiny_data, "npz:digits.npz") == "none"
    two_channels = replace(colour(), images=colour().images[:, :2])
    assert default_augmentation(two_channels, "npz:spectra.npz") == "none"
    assert default_augmentation(tiny_data, "mnist") is None
    recipe = default_recipe(tiny_data, "mnist", 0.5, "gaussian")
    assert describe_choices(recipe, recipe, trained=False).startswith("model lenet, epochs ")
    assert default_augmentation(augmented, "npz:digits.npz") is None
    own = images_from_dataset([(torch.zeros(3, 8, 8), 0), (torch.ones(3, 8, 8), 1)])  # type: ignore[arg-type]
    assert default_augmentation(own, "pets.py:Pets") is None, "it may have transforms of its own"


def test_large_and_small_folders_get_the_same_augmentation(tmp_path: Path) -> None:
    from PIL import Image

    for label, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        for number in range(3):
            pixels = np.random.default_rng((label, number)).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    order = torch.tensor([[4, 0, 2], [5, 1, 3]])

    def batches(**options: int) -> Iterator[Tensor]:
        data = load_folder(tmp_path, "train", **options)
        assert lacks_augmentation(data)
        assert default_augmentation(data, data.name) == "flip-crop"
        return (images for images, _ in with_augmentation(data, "flip-crop").batches(order, slice(1, 3), 9))

    for large, small in zip(batches(in_memory_bytes=0), batches(), strict=True):
        assert torch.equal(large, small)


def test_commands_choose_and_report_it(tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = colour()
    np.savez("colour.npz", images=data.images.numpy(), labels=data.labels.numpy())
    few = ("--dataset", "npz:colour.npz", "--sigma", 0.5, "--device", "cpu", "--epochs", 1)
    code, out, err = run_cli("train", *few, "--method", "gaussian", "--out", "own")
    assert (code, err) == (0, "")
    assert "model resnet20, augment flip-crop, " in out
    assert load_train_recipe(Path("own/recipe.yaml")).augment == "flip-crop"
    from_preset = ("--preset", "cifar10/gaussian", "--model", "resnet20", *few, "--set", "batch_size=32")
    code, out, err = run_cli("train", *from_preset, "--out", "plain")
    assert (code, err) == (0, "")
    assert out.count(f"note: {NOTE}npz:colour.npz are used as they are: --set augment=flip-crop changes this") == 1
    assert "augment" not in Path("plain/recipe.yaml").read_text()
    code, out, err = run_cli("train", "--resume", "--out", "plain", "--device", "cpu")
    assert (code, NOTE in out) == (0, False), "the run continues as it was made"
    for choice in ("flip-crop", "none"):
        code, out, err = run_cli("train", *from_preset, "--set", f"augment={choice}", "--out", choice)
        assert (code, err, NOTE in out) == (0, "", False)
        assert load_train_recipe(Path(choice) / "recipe.yaml").augment == choice
    assert digest(Path("plain")) == digest(Path("none")) != digest(Path("flip-crop"))
    code, _, err = run_cli("train", *from_preset, "--set", "augment=true", "--out", "other")
    assert (code, err) == (
        2,
        "smoothcert: --set: augment: expected 'flip-crop', 'flip', 'crop' or 'none', got True\n",
    )
    planned = ("sweep", *from_preset, "--dry-run", "--out", "sweep")
    assert run_cli(*planned)[1].count(NOTE) == 1
    assert run_cli(*planned, "--set", "augment=none,flip-crop")[1].count(NOTE) == 0


def test_python_reports_it(tmp_path: Path) -> None:
    recipe = preset("cifar10/gaussian", 0.5).model_copy(update={"model": "resnet20", "epochs": 1, "batch_size": 32})
    recipe = recipe.model_copy(update={"learning_rate_drops": ()})
    data, notes = colour(), []
    api.train(recipe, data, tmp_path / "a", device="cpu", on_note=notes.append)
    assert [note.startswith(f"{NOTE}npz:colour.npz are used as they are") for note in notes] == [True]
    notes.clear()
    for number, (change, images) in enumerate(
        [({"augment": "none"}, data), ({}, replace(data, augment=flip_and_crop)), ({"dataset": "mnist"}, data)]
    ):
        changed = recipe.model_copy(update=change)
        api.train(changed, images, tmp_path / str(number), device="cpu", on_note=notes.append)
    assert notes == []
