"""`smoothcert sweep`, and `train` without a preset: which runs are made, that none is trained twice, and refusals."""

import csv
import shlex
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import digest, metrics, without_times

from smoothcert.certification.certificates import read_certificates
from smoothcert.cli import sweeping
from smoothcert.cli.recipes import refuse_twice
from smoothcert.cli.sweeping import parse_grid
from smoothcert.data import ImageData, Split, datasets, load_dataset
from smoothcert.errors import RequestError
from smoothcert.papers.presets import preset
from smoothcert.papers.reproduce import estimate, work
from smoothcert.training.default_recipe import default_network, default_recipe, describe_choices
from smoothcert.training.loop import train
from smoothcert.training.recipe import load_train_recipe, with_overrides

Cli = Callable[..., tuple[int, str, str]]
FIXED = ["dataset=npz:few.npz", "epochs=1", "batch_size=32"]
SWEEP = [
    *("sweep", "--preset", "mnist/consistency", "--out", "sweep", "--device", "cpu", "--n", 50, "--max-images", 2),
    *(word for text in FIXED for word in ("--set", text)),
]


@pytest.fixture
def place(tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 64 images; reports have no figures, and nothing is measured for estimates."""
    few = tiny_data.subset(torch.arange(64))
    np.savez(tmp_path / "few.npz", images=few.images[:, 0].numpy(), labels=few.labels.numpy())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeping, "FORMATS", ("md", "csv"))
    monkeypatch.setattr(estimate, "_seconds_per_trained_input", lambda *network: 1.0)
    monkeypatch.setattr(estimate, "_seconds_per_vote", lambda *network: 1.0)
    return tmp_path


def test_interrupted_sweep_continues_and_trains_nothing_twice(
    run_cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when the third of four runs has written its recipe and nothing else."""
    calls: list[str] = []
    original = work.train_with_bar

    def interrupted_in_the_third_run(recipe, data, folder, **options):  # type: ignore[no-untyped-def]
        calls.append(folder.name)
        if len(calls) == 3:
            folder.mkdir()
            recipe.save(folder / "recipe.yaml")
            raise KeyboardInterrupt
        original(recipe, data, folder, **options)

    monkeypatch.setattr(work, "train_with_bar", interrupted_in_the_third_run)
    asked = (*SWEEP, "--set", "lambda=5,20", "--set", "seed=0,1")
    code, out, err = run_cli(*asked, "--dry-run")
    assert (code, list((place).glob("sweep/*"))) == (0, [])
    assert out.count("missing") == 4
    # 1 epoch of 64 images with 2 noises each, and 150 votes for each of 2 images.
    assert out.count("7 min 8 s") == 4
    assert "estimate for all, one after the other: 28 min 32 s" in " ".join(out.split())
    assert "fewer votes (--n) or images (--skip) take less" in out
    assert run_cli(*asked)[0] == 130
    code, out, err = run_cli(*asked)
    assert (code, err) == (0, "")
    assert out.count("warning: npz:few.npz has no split") == 1, "for all runs together"
    names = ["lambda5-seed0", "lambda5-seed1", "lambda20-seed0", "lambda20-seed1"]
    assert calls == [*names[:3], *names[2:]], "the first two runs are not trained again"
    with (place / "sweep/report/report.csv").open(newline="") as report:
        assert sorted(row["name"] for row in csv.DictReader(report)) == sorted(names)
    before = {path: path.stat().st_mtime_ns for path in place.glob("sweep/lambda*/*")}
    code, out, _ = run_cli(*asked)
    assert (code, len(calls), out.count("done")) == (0, 5, 4)
    assert {path: path.stat().st_mtime_ns for path in place.glob("sweep/lambda*/*")} == before
    # Certificates of another network, or without their settings, are not those of a run.
    certificates = [place / "sweep" / name / "certificates" for name in names]
    for file in ("test-n50.tsv", "test-n50.json"):
        shutil.copy(certificates[3] / file, place / file)
        shutil.copy(certificates[0] / file, certificates[3] / file)
    code, out, err = run_cli(*asked)
    assert (code, len(calls), out.count("done")) == (1, 5, 3)
    assert "certificates that were made with other settings (weights_sha256: " in " ".join(err.split())
    shutil.copy(place / "test-n50.tsv", certificates[3])
    (certificates[3] / "test-n50.json").unlink()
    assert "made with other settings (sigma: " in " ".join(run_cli(*asked)[2].split())
    shutil.copy(place / "test-n50.json", certificates[3])
    # The interrupted run is what its recipe gives alone.
    recipe = with_overrides(preset("mnist/consistency"), [*FIXED, "objective.weight=20"])
    assert load_train_recipe(place / "sweep" / names[2] / "recipe.yaml") == recipe
    train(recipe, load_dataset("npz:few.npz", "train"), place / "alone", device="cpu")
    assert digest(place / "alone") == digest(place / "sweep" / names[2])
    assert without_times(metrics(place / "alone")) == without_times(metrics(place / "sweep" / names[2]))
    assert len(read_certificates(place / "sweep" / names[3] / "certificates" / "test-n50.tsv").rows) == 2
    code, _, err = run_cli(*asked, "--set", "weight_decay=0.1")
    assert (code, err.count("\n")) == (2, 1)
    assert "holds a run of another recipe (weight_decay: the run has 0.0001, the request 0.1)" in err


def test_a_larger_sweep_uses_the_runs_of_a_smaller_one(run_cli: Cli, place: Path) -> None:
    """With a second field the runs have longer names; a damaged folder next to them changes nothing."""
    assert run_cli(*SWEEP, "--set", "seed=0,1")[0] == 0
    (place / "sweep/damaged").mkdir()
    (place / "sweep/damaged/recipe.yaml").write_text("epochs: [")
    before = {path: path.stat().st_mtime_ns for path in place.glob("sweep/seed?/*")}
    assert len(before) > 6
    code, _, err = run_cli(*SWEEP, "--set", "seed=0,1", "--set", "lambda=5,20")
    assert (code, err) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in place.glob("sweep/seed?/*")} == before
    names = {path.parent.name for path in place.glob("sweep/*/model.safetensors")}
    assert names == {"seed0", "seed1", "seed0-lambda20", "seed1-lambda20"}
    with (place / "sweep/report/report.csv").open(newline="") as report:
        assert {row["name"] for row in csv.DictReader(report)} == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "seed=0,x"], "seed: expected a valid integer"),
        (["--set", "seed=0,1", "--set", "objective.weigt=1"], "did you mean objective.weight"),
        (["--set", "model=lenet,lenett"], "did you mean lenet?"),
        (["--set", "seed=0,00"], "seed00 and seed0 are the same run"),
        (["--set", "seed=0,,1"], "got an empty one"),
        (["--set", "seed=0,1,0"], "--set seed=0,1,0: expected each value once, got 0 twice; remove one"),
        (["--set", "seed=0,1", "--set", "seed=2"], "seed is given twice; give all its values at once, as in KEY=a,b"),
        (["--set", "lambda=5,10", "--set", "objective.weight=2"], "objective.weight is given twice"),
        (["--set", "seed"], "expected key=value or key=a,b,c"),
        (["--set", "m=2,3"], "batch_size: expected a multiple of objective.num_noise = 3, got 32"),
        (["--sigma", ""], "sigma: expected comma-separated numbers, got nothing"),
        (["--sigma", "0.5,much"], "sigma: expected comma-separated numbers, got 0.5,much"),
        (["--sigma", "0.25,0.5,0.250"], "sigma: expected different noise levels, got 0.25,0.5,0.250; name each once"),
        (["--sigma", "0.25,0.2500001"], "sigma: expected different noise levels, got 0.25,0.2500001; name each once"),
        (["--skip", 0], "skip: expected at least 1"),
        (["--recipe", "x.yaml"], "give --preset or --recipe, not both"),
        (["--model", "lenet", "--set", "model=lenet,resnet20"], "got --model lenet as well; leave one out"),
        (["--set", "objective=gaussian,distillation"], "expected a method without a teacher, got distillation"),
    ],
)
def test_wrong_value_is_one_line_before_anything_is_trained(
    run_cli: Cli, place: Path, options: list[str], message: str
) -> None:
    code, out, err = run_cli(*SWEEP, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (place / "sweep").exists()


def test_a_file_as_the_folder_of_a_sweep_is_refused(run_cli: Cli, place: Path) -> None:
    code, out, err = run_cli("sweep", "--preset", "mnist/consistency", "--set", "seed=0,1", "--out", "few.npz")
    assert (code, out) == (2, "")
    assert "few.npz: expected a folder to write to, got a file; choose another --out" in err


def test_sweep_without_a_preset_reads_each_part_once_with_the_options_of_images(
    run_cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default recipe needs the training images, too. One of the files is no image."""
    for number, image in enumerate(load_dataset("npz:few.npz", "train").images[:8]):
        folder = place / "photos" / ("train" if number < 6 else "test") / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / f"{number}.png")
    (place / "photos/train/class0/broken.png").write_text("no image")
    read, load = list[str](), datasets._load

    def counted(name: str, split: Split, *rest: Any) -> Any:
        read.append(split)
        return load(name, split, *rest)

    monkeypatch.setattr(datasets, "_load", counted)
    asked = ("sweep", "--dataset", "folder:photos", "--method", "gaussian", "--sigma", "0.25,0.5", "--dry-run")
    code, _, err = run_cli(*asked, "--device", "cpu")
    assert code != 0
    assert "broken.png" in err
    read.clear()
    code, out, err = run_cli(*asked, "--device", "cpu", "--skip-unreadable")
    assert (code, err, out.count("missing")) == (0, "", 2)
    assert out.count("defaults without a preset") == 1, "they are the same for all noise levels"
    assert sorted(read) == ["test", "train"]


def test_values_of_a_grid() -> None:
    texts = ["seed=0,1", "learning_rate_drops=[1, 2],[3]", "objective={name: macer, weight: 3},gaussian", "a='x,y',z"]
    assert list(parse_grid(texts).values()) == [
        ["0", "1"],
        ["[1, 2]", "[3]"],
        ["{name: macer, weight: 3}", "gaussian"],
        ["'x,y'", "z"],
    ]


def test_train_without_a_preset(run_cli: Cli, place: Path) -> None:
    request = ("train", "--dataset", "npz:few.npz", "--method", "consistency", "--sigma", 0.5, "--epochs", 2)
    code, out, err = run_cli(*request, "--set", "lambda=3", "--device", "cpu")
    assert (code, err) == (0, "")
    assert (
        "note: defaults without a preset: model lenet, augment none, epochs 2, batch_size 16, learning_rate 0.00625"
        in out
    )
    recipe = load_train_recipe(place / "runs/few-consistency-0.5/recipe.yaml")
    assert (recipe.model, recipe.epochs, recipe.batch_size, recipe.schedule) == ("lenet", 2, 16, "cosine")
    assert recipe.to_mapping()["objective"]["weight"] == 3
    assert run_cli(*request, "--set", "lambda=3", "--resume", "--device", "cpu")[0] == 0
    code, out, _ = run_cli(*request, "--set", "lr=0.02", "--out", "faster", "--device", "cpu")
    assert code == 0
    assert load_train_recipe(place / "faster/recipe.yaml").learning_rate == 0.02
    assert "batch_size 16, learning_rate_warm_up 1," in out, "what --set chooses is no default"
    code, _, err = run_cli(*request, "--set", "lambda=4", "--resume", "--device", "cpu")
    assert code == 2
    assert "holds a run of another recipe" in err
    code, _, err = run_cli(*shlex.split(out.partition("next: smoothcert ")[2]), "--n", 50, "--max-images", 2)
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("option", "change"),
    [
        (("--dataset", "mnist-sample"), "dataset=npz:few.npz"),
        (("--model", "lenet"), "model=resnet20"),
        (("--method", "consistency"), "objective=gaussian"),
        (("--method", "consistency"), "objective.name=gaussian"),
        (("--epochs", 3), "epochs=2"),
        (("--sigma", 0.5), "sigma=0.25"),
        (("--image-size", 8), "image_size=9"),
    ],
)
def test_an_option_and_set_do_not_contradict_each_other(
    run_cli: Cli, place: Path, option: tuple[object, ...], change: str
) -> None:
    """With and without a preset; --set used to win silently, and the last --set over the first."""
    without_preset = {"--dataset": "mnist-sample", "--method": "gaussian"} | {option[0]: option[1]}
    for source in (("--preset", "mnist/gaussian", *option), tuple(chain(*without_preset.items()))):
        code, out, err = run_cli("train", *source, "--set", change, "--out", "run")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"--set {change}: expected one value for {change.partition('=')[0]}, got {option[0]} {option[1]}" in err
    code, _, err = run_cli("train", *source, "--set", "lr=0.1", "--set", "learning_rate=0.2", "--out", "run")
    assert (code, err) == (2, "smoothcert: --set learning_rate=0.2: learning_rate is given twice; leave one out\n")
    assert not (place / "run").exists()


def test_a_field_of_an_objective_is_not_the_field_of_the_recipe_with_its_name() -> None:
    """Of a user's own objective, say, whose teacher is averaged with a momentum."""
    refuse_twice({"epochs": 3}, ["objective.epochs=5", "objective.momentum=0.99", "momentum=0.9"])
    for twice in (["weight=1", "objective.lambda=2"], ["objective=gaussian", "objective.name=stability"]):
        with pytest.raises(RequestError, match="is given twice"):
            refuse_twice({}, twice)


def test_default_recipe_suits_the_images(tiny_data: ImageData) -> None:
    assert [default_network(shape) for shape in ((1, 28, 28), (3, 32, 32), (3, 64, 48), (3, 96, 96))] == [
        *("lenet", "resnet20", "resnet20", "resnet50")
    ]
    with pytest.raises(RequestError, match=r"no built-in network takes images of shape 1x32x32; .*--model"):
        default_network((1, 32, 32))
    for images, batch_size in ((256, 16), (200, 16), (9, 8), (3, 2)):
        recipe = default_recipe(tiny_data.subset(torch.arange(images)), "npz:x", 0.5, "gaussian")
        assert recipe.batch_size == batch_size
        assert recipe.learning_rate == pytest.approx(0.1 * batch_size / 256)
    assert default_recipe(tiny_data, "npz:x", 0.5, "smoothmix").batch_size == 16
    own = default_recipe(tiny_data, "npz:x", 0.5, "gaussian", model="net.py:build")
    assert own.learning_rate == pytest.approx(0.01 * 16 / 256)
    advice = "learning_rate 0.000625 (if your code loads trained weights; else try 0.00625)"
    assert advice in describe_choices(own, own, trained=False)
    assert "learning_rate 0.000625, " in describe_choices(own, own, trained=True)
    hub = own.model_copy(update={"model": "timm:resnet18"})  # which is always trained
    assert "learning_rate 0.000625, " in describe_choices(hub, hub, trained=False)
    larger = describe_choices(own, own.model_copy(update={"batch_size": 64}), trained=True)
    assert "learning_rate 0.000625 (for batch_size 16; else try 0.0025), " in larger
    set_both = own.model_copy(update={"batch_size": 64, "learning_rate": 0.1})
    assert "learning_rate 0" not in describe_choices(own, set_both, trained=True)
    with pytest.raises(RequestError, match="expected at least 4 training images, got 3"):
        default_recipe(tiny_data.subset(torch.arange(3)), "npz:x", 0.5, "smoothmix")
    with pytest.raises(RequestError, match=r"^objective: unknown method smoothmixx; did you mean smoothmix"):
        default_recipe(tiny_data, "npz:x", 0.5, "smoothmixx")
    with pytest.raises(RequestError, match=r"^sigma: expected greater than 0, got -1"):
        default_recipe(tiny_data, "npz:x", -1.0, "gaussian")
