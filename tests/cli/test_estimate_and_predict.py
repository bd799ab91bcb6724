"""How long `certify` says it takes, and how `predict`, `attack` and `serve` take every classifier of `certify`."""

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import beta, norm
from torch import nn

from smoothcert.certification import estimate
from smoothcert.certification.attack_file import read_attacks
from smoothcert.certification.estimate import (
    FEWEST_IMAGES,
    SHORT,
    SKIPS,
    CertificationEstimate,
    cheaper_settings,
    faster_options,
)
from smoothcert.certification.settings import CertifySettings
from smoothcert.cli.predicting import IMAGES_AT_ONCE
from smoothcert.data import mnist
from smoothcert.models.ensemble import Ensemble
from smoothcert.noise import Gaussian
from smoothcert.smoothing.votes import VoteCounter
from smoothcert.training.checkpoint import load_run, write_new_run

Cli = Callable[..., tuple[int, str, str]]
SLOW = """
import time
import warnings
import torch

seen = 0

def build():
    def logits(images):
        global seen
        seen += len(images)
        if seen > 5000:
            raise KeyboardInterrupt
        time.sleep(0.001 * len(images))
        return torch.eye(10)[torch.zeros(len(images), dtype=torch.long)]
    return logits

def brightness(num_classes):
    # The class is 1 where the mean pixel is above 0.25: a half-space.
    def logits(images):
        above = images.flatten(1).mean(1) - 0.25
        return torch.stack([-above, above, *[above.new_full(above.shape, -9.0)] * (num_classes - 2)], 1)
    return logits

def interrupted(num_classes):
    def logits(images):
        if images.mean() > 0.9:
            raise KeyboardInterrupt
        return brightness(num_classes)(images)
    return logits

def warning(num_classes):
    def logits(images):
        if len(images) > 1:  # not the first look at its outputs
            warnings.warn("a pass")
        return brightness(num_classes)(images)
    return logits

def linear():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(SLOW)
    for name, level in (("dark", 0), ("bright", 255)):
        Image.new("L", (8, 8), level).save(tmp_path / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_long_certification_is_announced_with_a_cheaper_one(run_cli: Cli, place: Path) -> None:
    """A vote of this network takes a millisecond, and little more; the network interrupts the work after a while."""
    options = ("--dataset", "mnist-sample", "--sigma", 0.5, "--out", "runs/slow", "--device", "cpu")
    code, out, _ = run_cli("certify", "--model", "nets.py:build", *options)
    assert code == 130
    (line,) = (line for line in out.splitlines() if line.startswith("note: about "))
    found = re.fullmatch(
        r"note: about ([\d.]+) days on this machine \(2,000 images, 100,100 votes each, ([\d,]+) votes/s\); "
        r"--skip (\d+) --n (\d+): about (\d+) min (\d+) s",
        line,
    )
    assert found is not None, line
    days, speed, skip, n, minutes, seconds = (float(group.replace(",", "")) for group in found.groups())
    assert 400 <= speed <= 1000
    assert days == pytest.approx(2000 * 100_100 / speed / 86_400, abs=0.1)
    assert 60 * minutes + seconds == pytest.approx(math.ceil(2000 / skip) * (100 + n) / speed, rel=0.02)
    assert 60 * minutes + seconds <= SHORT


def test_the_estimate_of_one_image() -> None:
    text = CertificationEstimate(1, 100_100, 0.01).in_words(CertifySettings(), 1)
    assert "(1 image, 100,100 votes each, 100 votes/s)" in text


@pytest.mark.parametrize(
    ("classifier", "settings", "options"),
    [
        (nn.Flatten(), {}, ("--precision", "bf16", "--compile")),
        (nn.Flatten(), {"compiled": True}, ("--precision", "bf16")),
        (nn.Flatten(), {"dtype": torch.bfloat16}, ("--compile",)),
        (nn.Flatten(), {"dtype": torch.float16, "compiled": True}, ()),
        (Ensemble([nn.Flatten()] * 3, consensus=2), {"dtype": torch.bfloat16}, ()),
        (torch.flatten, {}, ()),
    ],
)
def test_the_estimate_names_options_that_are_faster_on_a_gpu(
    classifier: Any, settings: dict[str, Any], options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    counter = VoteCounter(classifier, Gaussian(0.5), 10, **settings)
    assert faster_options(counter, torch.device("cpu")) == ()
    assert faster_options(counter, torch.device("cuda")) == options
    text = CertificationEstimate(10_000, 100_100, 1e-5, options).in_words(CertifySettings(), 10_000)
    assert f"; {' '.join(options)} may be several times faster; --skip" in text or not options


@pytest.mark.parametrize(
    ("stalled", "sizes", "each"),
    [
        ((), [2, 4, 8, 16, 32, 64], 0.4 / 64),
        ((16, 64), [2, 4, 8, 16, 32, 64, 128], 0.72 / 128),
        ((128,), None, 0.4 / 64),
    ],
)
def test_a_measurement_that_was_held_up_does_not_count(
    monkeypatch: pytest.MonkeyPatch, stalled: tuple[int, ...], sizes: list[int] | None, each: float
) -> None:
    """A call takes 80 ms and 5 ms per input, and ten seconds more where another program holds it up."""
    measured: list[int] = []

    def timed(work: object, size: int, device: object) -> float:
        measured.append(size)
        return 0.08 + 0.005 * size + 10 * (size in stalled)

    monkeypatch.setattr(estimate, "_timed", timed)
    assert estimate.seconds_per_input(lambda size: None, 128, torch.device("cpu")) == pytest.approx(each)
    assert sizes is None or measured[::2] == sizes


@pytest.mark.parametrize("seconds_per_vote", [1e-6, 2e-5, 3e-4, 4e-3, 1.0])
def test_the_alternative_certifies_as_many_images_as_fit(seconds_per_vote: float) -> None:
    """Compared with all pairs of n and skip."""
    settings, images = CertifySettings(skip=2), 10_000
    times = {
        (n, 2 * skip): math.ceil(images / (2 * skip)) * (n + 100) * seconds_per_vote
        for n in (10_000, 1_000)
        for skip in SKIPS
    }
    short = [key for key, time in times.items() if time <= SHORT and math.ceil(images / key[1]) >= FEWEST_IMAGES]
    cheaper = cheaper_settings(settings, images, seconds_per_vote)
    if not short:
        assert cheaper is None
        return
    assert cheaper is not None
    n = max(n for n, _ in short)
    assert (cheaper[0].n, cheaper[0].skip) == (n, min(skip for votes, skip in short if votes == n))
    assert cheaper[1] == pytest.approx(times[cheaper[0].n, cheaper[0].skip])


def test_predict_attack_and_serve_with_weights_in_a_file(
    run_cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network whose function does not load its weights: the printed command certifies it with the same weights."""
    weight = torch.tensor([[-1.0], [1.0]]).expand(2, 64)
    torch.save({"1.weight": weight.contiguous(), "1.bias": torch.tensor([16.0, -16.0])}, "weights.pt")
    network = ("--model", "nets.py:linear", "--init", "weights.pt", "--sigma", 0.25, "--device", "cpu")
    code, out, err = run_cli("predict", *network, "dark.png", "bright.png", "--n", 100, "--format", "json")
    assert (code, err) == (0, "")
    assert [row["class"] for row in json.loads(out)["images"]] == [0, 1]
    images = np.stack([np.zeros((8, 8), np.uint8), np.full((8, 8), 255, np.uint8)])
    np.savez("two.npz", images=images, labels=np.array([0, 1]), class_names=np.array(["dark", "bright"]))
    np.savez("three.npz", images=images[[0, 1, 1]], labels=np.array([0, 1, 2]))
    (place / "names.txt").write_text("dark\nbright\n")
    few = ("--steps", 1, "--num-noise", 1, "--votes", 50, "--radii", 0.5, "--out", "out")
    code, out, err = run_cli("attack", *network, "--dataset", "npz:two.npz", "--classes", "names.txt", *few)
    assert (code, err) == (0, "")
    assert "│ 0.5    │ 100.0% " in out, "the boundary is 2 and 6 away"
    assert "next: smoothcert certify --model nets.py:linear --init weights.pt --dataset npz:two.npz" in out
    assert "--classes names.txt" in out
    pytest.importorskip("fastapi")
    services = list[Any]()
    monkeypatch.setattr("smoothcert.certification.serve.server.serve", lambda *given: services.append(given[0]))
    data = ("--dataset", "npz:two.npz", "--classes", "names.txt")
    assert run_cli("serve", *network, *data, "--port", 0)[0] == 0
    (served,) = services[0].models
    dark_and_bright = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 8, 8)
    votes = served.counter.count(dark_and_bright, [(0, 0), (0, 1)], "select", 9)
    assert (served.name, served.class_names, votes.tolist()) == ("nets", ("dark", "bright"), [[9, 0], [0, 9]])
    for wrong, message in (
        (("serve", *network, "--port", 0), "--image-size: missing; give the side of the images, or --dataset NAME"),
        (("serve", *network[:4]), "--sigma: missing; give the noise level for nets.py:linear"),
        (("serve", *network, "--image-size", -8), "'--image-size': expected at least 1, got -8"),
        (
            ("predict", *network, "dark.png", "--dataset", "npz:three.npz"),
            "expected logits of shape [1, 3], got [1, 2]",
        ),
    ):
        assert message in run_cli(*wrong)[2]


def test_an_ensemble_is_certified_predicted_attacked_and_served(
    run_cli: Cli, trained_run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of one network vote as that network does."""
    runs = [shutil.copytree(trained_run, place / name) for name in "ab"]
    digit, options = mnist.load_sample("test").images[0, 0].numpy(), ("--ensemble", "--device", "cpu")
    Image.fromarray(digit).save("digit.png")
    code, out, err = run_cli("predict", *runs, "digit.png", *options, "--n", 100, "--format", "json")
    assert (code, err) == (0, "")
    alone = run_cli("predict", runs[0], "digit.png", "--device", "cpu", "--n", 100, "--format", "json")[1]
    assert json.loads(out)["images"][0]["class"] == json.loads(alone)["images"][0]["class"]
    assert "got 2; --ensemble makes one classifier of them" in run_cli("attack", *runs)[2]
    assert run_cli("certify", *runs, *options, "--n", 50, "--max-images", 1)[0] == 0
    few = ("--steps", 1, "--num-noise", 1, "--votes", 50, "--radii", 0.5)
    code, _, err = run_cli("attack", *runs, *options, *few)
    assert code == 0, err
    (attacked,) = read_attacks(place / "ensemble-a-b/attacks/pgd.tsv").rows
    assert attacked.certified_radius is not None, "the certificates of the ensemble are compared"
    pytest.importorskip("fastapi")
    monkeypatch.setattr("smoothcert.certification.serve.server.serve", lambda *given: None)
    code, out, err = run_cli("serve", *runs, *options, "--port", 0)
    assert "serving ensemble-a-b (gaussian noise" in out, err
    assert "pixels in 0..255" not in out + err
    _, out, err = run_cli("serve", *runs, *options, "--port", 0, "--sigma", 64)
    assert "if it is meant for pixels in 0..255, give 64/255 = 0.251" in out + err


def test_all_commands_that_use_a_run_say_what_certify_says_about_it(
    run_cli: Cli, trained_run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished training, an edited recipe.yaml, noise of another level, and too few votes where they are drawn."""
    run = load_run(trained_run)
    write_new_run(replace(run, folder=place / "run", epoch=1), run.model.state_dict())
    recipe = place / "run/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("sigma: 0.5", "sigma: 0.25"))
    Image.fromarray(mnist.load_sample("test").images[0, 0].numpy()).save("digit.png")
    unfinished = "note: run has trained 1 of 2 epochs"
    edited = "warning: run/recipe.yaml: is not the recipe of the network (sigma: the file has 0.25, the network 0.5)"
    large = "warning: sigma 64 hides images in [0, 1] completely"
    other = "warning: run was trained with gaussian noise at sigma 0.5, not with gaussian noise at sigma 64"
    few_votes = "warning: n = 9 votes cannot certify any image at alpha 0.001: all abstain; n = 10 can"

    def said(*words: object) -> list[str]:
        code, out, err = run_cli(*words, "--device", "cpu")
        assert code == 0, err
        return [line for line in (out + err).splitlines() if line.startswith(("note: run", "warning:"))]

    def check(lines: list[str], *expected: str) -> None:
        assert len(lines) == len(expected), lines
        assert all(any(line.startswith(text) for line in lines) for text in expected), lines

    about = (unfinished, edited)
    for format_ in ("table", "json"):
        predicted = ("predict", "run", "digit.png", "--format", format_)
        check(said(*predicted, "--n", 10), *about)
        check(said(*predicted, "--n", 9, "--sigma", 64), *about, large, other, few_votes)
    attacked = ("attack", "run", "--max-images", 1, "--steps", 1, "--num-noise", 1, "--votes", 50, "--radii", 0.5)
    check(said(*attacked), *about)
    check(said(*attacked, "--sigma", 64, "--name", "large"), *about, large, other)
    certified = ("certify", "run", "--max-images", 1, "--n0", 5)
    check(said(*certified, "--n", 10), *about)
    check(said(*certified, "--n", 9, "--sigma", 64), *about, large, other, few_votes)
    check(said("doctor", "run", "--images", 10), *about)
    check(said("analyze", "margins", "run", "--n", 10), *about)
    pytest.importorskip("fastapi")
    monkeypatch.setattr("smoothcert.certification.serve.server.serve", lambda *given: None)
    check(said("serve", "run", "--port", 0), *about)
    check(said("serve", "run", "--port", 0, "--sigma", 64), *about, large, other)


def test_predict_with_your_own_network(run_cli: Cli, place: Path) -> None:
    """Its classes are half-spaces: the radius is known. No run folder is needed."""
    (place / "names.txt").write_text("dark\nbright\nneither\n")
    named = ("predict", "--model", "nets.py:brightness", "--classes", "names.txt")
    asked = (*named, "--sigma", 0.25, "--n", "1k")
    code, out, err = run_cli(*asked, "dark.png", "bright.png", "--device", "cpu", "--format", "json")
    assert (code, err) == (0, "note: no --init: the weights are those that nets.py:brightness returns\n")
    result = json.loads(out)
    ceiling = 0.25 * norm.isf(beta.ppf(0.999, 1, 1000))
    assert result["largest_radius"] == pytest.approx(ceiling)
    assert [(row["image"], row["class"], row["name"]) for row in result["images"]] == [
        ("dark.png", 0, "dark"),
        ("bright.png", 1, "bright"),
    ]
    # The boundaries are 0.25 * sqrt(64) = 2 and 6 away, at least 8 sigma: all votes agree.
    assert [row["radius"] for row in result["images"]] == pytest.approx([ceiling, ceiling])
    code, out, err = run_cli(*asked, "dark.png", "bright.png", "--device", "cpu", "--format", "csv")
    (first, second) = csv.DictReader(io.StringIO(out))
    assert (first["image"], first["name"], first["votes"], second["class"]) == ("dark.png", "dark", "0: 1000", "1")
    assert float(first["radius"]) == result["images"][0]["radius"], "no digit is rounded up"
    assert float(first["largest_radius"]) == result["largest_radius"]
    code, out, err = run_cli(*asked, "dark.png", "--bound", "two-sided", "--device", "cpu", "--format", "json")
    assert json.loads(out)["largest_radius"] == json.loads(out)["images"][0]["radius"] < ceiling
    code, out, err = run_cli(*asked, "dark.png", "--sound", "--device", "cpu", "--format", "json")
    (row,) = json.loads(out)["images"]
    assert json.loads(out)["sound"] is True
    assert json.loads(out)["largest_radius"] == row["radius"] < ceiling
    assert row["radius"] == pytest.approx(ceiling)
    code, out, err = run_cli(*asked, "dark.png", "--sound", "--device", "cpu")
    assert "gives this class to every image of bytes closer than this in L2" in out, "integer noise is for no others"
    code, out, err = run_cli(*asked, "dark.png", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "0 dark" in out
    assert "gives this class to every image closer than this in L2" in out
    assert "is the most that n = 1,000 votes can show; it is reached here: raise --n for more" in out
    code, _, err = run_cli(*named, "--sigma", 64, "--n", "1k", "dark.png", "--device", "cpu")
    assert (code, err.splitlines()[0][:34]) == (0, "warning: sigma 64 hides images in ")
    for wrong, message in (
        (("predict", "dark.png"), "dark.png: expected a run folder, got a file"),
        (("predict", "--model", "nets.py:brightness", "dark.png"), "--sigma: missing"),
        (("predict", "--model", "nets.py:brightness", "--sigma", 0.5, "dark.png"), "takes num_classes"),
        (("predict", "--model", "nets.py:brightness", "--sigma", 0.5, "nowhere.png"), "nowhere.png: no such file"),
        ((*asked[:-2], "--image-size", 4, "dark.png"), "expected an image of 4x4 pixels, got 8x8"),
        ((*asked, "--dataset", "mnist", "--image-size", 4, "dark.png"), "expected none with mnist, which has them"),
        ((*asked, "--resize", "dark.png"), "--resize: expected --image-size S with it, the side of the images that"),
        ((*asked, "--skip-unreadable", "dark.png"), "--skip-unreadable: expected --dataset folder:PATH"),
        ((*asked, "."), ".: expected an image file, got a folder; give its files, such as ./*.png"),
        ((*asked[:-2], "dark.png", "."), ".: expected an image file, got a folder; give its files, such as ./*.png"),
    ):
        code, _, err = run_cli(*wrong)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


def test_predict_prints_csv_while_it_works(run_cli: Cli, place: Path) -> None:
    (place / "names.txt").write_text("dark\nbright\nneither\n")
    network = ("--model", "nets.py:interrupted", "--sigma", 0.25, "--classes", "names.txt", "--n", 100)
    images = ["dark.png"] * IMAGES_AT_ONCE + ["bright.png"]
    code, out, err = run_cli("predict", *network, *images, "--device", "cpu", "--format", "csv")
    assert (code, err.splitlines()[-1]) == (130, "smoothcert: interrupted"), "nothing is left to continue"
    assert [row["name"] for row in csv.DictReader(io.StringIO(out))] == ["dark"] * IMAGES_AT_ONCE


def test_predict_prints_each_warning_once(run_cli: Cli, place: Path) -> None:
    (place / "names.txt").write_text("dark\nbright\n")
    network = ("--model", "nets.py:warning", "--sigma", 3, "--classes", "names.txt", "--n", 10)
    code, _, err = run_cli("predict", *network, *["dark.png"] * (2 * IMAGES_AT_ONCE), "--device", "cpu")
    assert (code, err.count("warning: a pass\n"), err.count("warning: sigma 3 hides")) == (0, 1, 1)


def test_classes_in_another_order_than_those_of_a_run_are_refused(run_cli: Cli, place: Path) -> None:
    sample = mnist.load_sample("test")
    images, labels = sample.images[:64, 0].numpy(), sample.labels[:64].numpy() % 3
    np.savez("three.npz", images=images, labels=labels, class_names=np.array(["a", "b", "c"]))
    train = ("train", "--dataset", "npz:three.npz", "--method", "gaussian", "--sigma", 0.5, "--epochs", 1)
    assert run_cli(*train, "--out", "run", "--device", "cpu")[0] == 0
    Image.fromarray(images[0]).save("digit.png")
    (place / "names.txt").write_text("b\na\nc\n")
    code, _, err = run_cli("predict", "run", "digit.png", "--classes", "names.txt", "--device", "cpu")
    assert code == 2
    assert err == "smoothcert: --classes: expected the order of run, a, b and c, got b, a and c; leave --classes out\n"
    (place / "names.txt").write_text("a\nb\nc\n")
    assert run_cli("predict", "run", "digit.png", "--classes", "names.txt", "--n", 10, "--device", "cpu")[0] == 0


@pytest.mark.parametrize("order", [1, -1])
def test_an_ensemble_has_the_class_names_that_one_member_knows(
    order: int, run_cli: Cli, trained_run: Path, place: Path
) -> None:
    run, names = load_run(trained_run), tuple("abcdefghij")
    for name, known in {"unknown": None, "named": names}.items():
        changed = replace(run, folder=place / name, spec=replace(run.spec, class_names=known))
        write_new_run(changed, run.model.state_dict())
    Image.fromarray(mnist.load_sample("test").images[0, 0].numpy()).save("digit.png")
    asked = ("predict", *("unknown", "named")[::order], "digit.png", "--ensemble", "--n", 100, "--device", "cpu")
    code, out, _ = run_cli(*asked, "--format", "json")
    (found,) = json.loads(out)["images"]
    assert (code, found["name"]) == (0, names[found["class"]])
    (place / "names.txt").write_text("\n".join(names[::-1]))
    code, _, err = run_cli(*asked, "--classes", "names.txt")
    assert (code, "--classes: expected the order of" in err) == (2, True)


def test_predict_of_a_run_in_json(run_cli: Cli, trained_run: Path, place: Path) -> None:
    run = Path(shutil.copytree(trained_run, place / "run"))
    Image.fromarray(mnist.load_sample("test").images[0, 0].numpy()).save("digit.png")
    code, out, err = run_cli("predict", run, "digit.png", "--n", 100, "--format", "json", "--device", "cpu")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["images"]
    assert sum(row["votes"].values()) == 100
    assert row["radius"] <= json.loads(out)["largest_radius"]
    assert run_cli("predict", run)[2] == f"smoothcert: expected image files after {run}, got none; name some\n"
    for option in ("--image-size=28", "--channels=1", "--dataset=mnist"):
        assert "expected none with a run folder" in run_cli("predict", run, "digit.png", option)[2]
    assert "expected --dataset folder:PATH" in run_cli("predict", run, "digit.png", "--skip-unreadable")[2]
    assert "and --ensemble for several runs" in run_cli("predict", run, run, "digit.png")[2]
    missing = run_cli("predict", "missing", "digit.png", "--model", "networks:Linear", "--sigma", 0.5)[2]
    assert missing == "smoothcert: missing: no such file; give a run folder or an image file\n"
    for option, value, expected in (
        ("sigma", -1.0, "greater than 0"),
        ("alpha", 0.0, "at least 1e-300"),
        ("n", 0, "at least 1"),
    ):
        wrong = run_cli("predict", run, "digit.png", f"--{option}", value, "--device", "cpu")
        assert wrong == (2, "", f"smoothcert: {option}: expected {expected}, got {value}\n"), (
            "without a warning before it"
        )
    code, _, err = run_cli("predict", run, "digit.png", "--n", 100, "--sigma", 1.0, "--device", "cpu")
    noise = "gaussian noise at sigma"
    assert (code, err) == (0, f"warning: {run} was trained with {noise} 0.5, not with {noise} 1\n")
