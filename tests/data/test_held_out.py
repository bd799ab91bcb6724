"""Held-out data sets: their two splits are the training images of the whole data set, divided at a known place."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cifar10 import LABELS, PIXELS, TRAIN, write_binary

import smoothcert as sc
from smoothcert.certification.subject import Subject
from smoothcert.data import DATASETS, load_dataset
from smoothcert.data.augmentation import flip_and_crop
from smoothcert.data.datasets import HELD_OUT, published_name, were_trained_on
from smoothcert.report.names import dataset_name, images_text
from smoothcert.training.denoiser import Denoiser

NAMES = [name for name in DATASETS if name.endswith(HELD_OUT)]


def test_splits_are_the_first_and_the_last_training_images() -> None:
    whole = load_dataset("mnist-sample", "train")
    train, test = (load_dataset("mnist-sample-held-out", split) for split in ("train", "test"))
    assert torch.equal(torch.cat([train.images, test.images]), whole.images)
    assert torch.equal(torch.cat([train.labels, test.labels]), whole.labels)
    assert (len(train), len(test)) == DATASETS["mnist-sample-held-out"].sizes == (8_000, 2_000)
    assert [(data.name, data.split) for data in (train, test)] == [
        ("mnist-sample-held-out", "train"),
        ("mnist-sample-held-out", "test"),
    ]


def test_only_training_images_are_augmented_and_normalization_and_classes_stay(tmp_path: Path) -> None:
    """The small files of CIFAR-10 are divided in the same ratio, 9 to 1, and are not called official."""
    write_binary(tmp_path)
    labels = np.concatenate([LABELS[name] for name in TRAIN])
    cut = len(labels) * 9 // 10
    train, test = (load_dataset("cifar10-held-out", split, tmp_path) for split in ("train", "test"))
    assert (train.augment, test.augment) == (flip_and_crop, None)
    assert DATASETS["cifar10-held-out"].augmented
    for data, part in ((train, slice(cut)), (test, slice(cut, None))):
        np.testing.assert_array_equal(data.images.numpy(), np.concatenate([PIXELS[name] for name in TRAIN])[part])
        assert data.labels.tolist() == labels[part].tolist()
        assert data.name == "cifar10-held-out (not the official files)"
        assert data.normalization == DATASETS["cifar10"].normalization
        assert data.class_names == DATASETS["cifar10"].class_names


@pytest.mark.parametrize("split", ["train", "test"])
def test_reports_read_the_images_that_are_certified(split: str) -> None:
    read = DATASETS["mnist-sample-held-out"].read
    assert read is not None
    stored, loaded = read(split, Path()), load_dataset("mnist-sample-held-out", split)  # type: ignore[arg-type]
    np.testing.assert_array_equal(stored.images, loaded.images.numpy())
    assert (stored.labels.tolist(), stored.name) == (loaded.labels.tolist(), loaded.name)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_the_training_images(name: str) -> None:
    whole = DATASETS[name.removesuffix(HELD_OUT)]
    assert sum(DATASETS[name].sizes) == whole.sizes[0]
    assert (DATASETS[name].shape, DATASETS[name].num_classes) == (whole.shape, whole.num_classes)


def test_names_in_reports_say_what_the_images_are() -> None:
    assert dataset_name("cifar10-held-out (not the official files)") == "held-out CIFAR-10 (not the official files)"
    assert images_text(500, "mnist-held-out", "test") == "500 held-out digits of MNIST"
    assert images_text(5, "npz:/a/mine-held-out", "test") == "5 test images of mine-held-out"
    assert [published_name(name) for name in ("mnist-sample-held-out", "cifar10-held-out (x)")] == ["mnist", "cifar10"]


@pytest.mark.parametrize(
    ("dataset", "split", "trained_on", "seen"),
    [
        ("mnist-held-out", "test", "mnist", True),
        ("mnist-held-out", "test", "mnist-held-out", False),
        ("mnist", "test", "mnist-held-out", False),
        ("mnist-held-out", "test", "mnist-sample", False),  # the first images, and the last ones
        ("mnist-held-out", "train", "mnist", False),
        ("mnist-sample-held-out", "test", "mnist", True),
        ("mnist-sample-held-out", "test", "mnist-held-out", True),
        ("npz:a-held-out", "test", "npz:a", False),
        ("npz:a", "all", "npz:a", True),
    ],
)
def test_images_that_a_network_was_trained_on_are_known(dataset: str, split: str, trained_on: str, seen: bool) -> None:
    assert were_trained_on(dataset, split, trained_on) is seen


def test_a_network_that_has_seen_the_held_out_images_is_reported(
    tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Certified with a warning and a line in the report; a network that has not seen them without either."""
    reports = {}
    for data in ("mnist-sample", "mnist-sample-held-out"):
        changes = {"model": "tiny", "dataset": data, "epochs": 1, "learning_rate_drops": ()}
        recipe = sc.preset("mnist/gaussian").model_copy(update=changes)
        run = tmp_path / data
        sc.train(recipe, out=run, device="cpu")
        options = ("--dataset", "mnist-sample-held-out", "--n", 100, "--max-images", 4, "--device", "cpu")
        code, output, errors = run_cli("certify", run, *options)
        assert code == 0, errors
        warned = "images that the network was trained on" in " ".join((output + errors).split())
        assert run_cli("report", run, "--out", run / "report", "--format", "md")[0] == 0
        reports[data] = (warned, "certified on images that it was trained on" in (run / "report/report.md").read_text())
    assert reports == {"mnist-sample": (True, True), "mnist-sample-held-out": (False, False)}
    with pytest.warns(UserWarning, match="on mnist-sample, so it knows the test images of mnist-sample-held-out"):
        sc.train(recipe, out=tmp_path / "again", init=tmp_path / "mnist-sample", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sc.train(recipe, out=tmp_path / "fresh", init=run, device="cpu")


def test_data_sets_of_all_networks_in_use_are_known(trained_run: Path) -> None:
    """Of a run, and of the denoiser in front of it, which may have seen other images."""
    subject, run = Subject.of(sc.load(trained_run)), sc.load(trained_run)
    assert subject.trained_on == ("mnist-sample",)
    other = replace(run, recipe=run.recipe.model_copy(update={"dataset": "mnist"}))
    denoiser = Denoiser(torch.nn.Identity(), trained_run, "unet", (1, 28, 28), 0.5, run=other)
    assert replace(subject, denoiser=denoiser).trained_on == ("mnist-sample", "mnist")
    assert Subject.of(run.model).trained_on == ()
