"""`smoothcert doctor`: tables, findings, figures, and the printed command that fine-tunes a network."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from smoothcert.certification.certificates import read_certificates
from smoothcert.cli.doctor import DoctorOptions
from smoothcert.models import own_model
from smoothcert.objectives import OBJECTIVES
from smoothcert.training.checkpoint import load_run

Cli = Callable[..., tuple[int, str, str]]
NETWORK = """
import torch
def bare():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))

def mean():
    model = bare()
    model[1].weight.data = torch.stack([-torch.ones(64), torch.ones(64)])
    model[1].bias.data = torch.tensor([32.0, -32.0])
    return model

def normed():
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(1), *bare())
    model[2].weight.data = torch.zeros(2, 64)
    model[2].weight.data[:, 0] = torch.tensor([-10.0, 10.0])
    model[2].bias.data = torch.tensor([5.0, -5.0])
    return model

def deep():
    scaled = torch.nn.Linear(64, 64)
    layers = [scaled, torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)]
    scaled.weight.data *= 10  # as after a normalisation by a standard deviation of 0.1
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)

def empty():
    with torch.device("meta"):
        return bare()

def swapped():
    model = mean()
    return lambda x: model(x).flip(1)
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Dark and bright images of 8x8 pixels, and weights of a network that looks at one pixel only.

    Its accuracy under noise of sigma is Phi(0.15 / sigma); that of the mean of all pixels is Phi(8 * 0.15 / sigma).
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK)
    labels = np.arange(200) % 2
    images = np.full((200, 8, 8), 0, np.uint8) + (255 * (0.35 + 0.3 * labels)).astype(np.uint8)[:, None, None]
    np.savez(tmp_path / "grey.npz", images=images, labels=labels)
    weight = torch.zeros(2, 64)
    weight[:, 0] = torch.tensor([-10.0, 10.0])
    torch.save({"state_dict": {"1.weight": weight, "1.bias": torch.tensor([5.0, -5.0])}}, tmp_path / "weights.pt")
    return tmp_path


ONE_PIXEL = ("--model", "net.py:bare", "--init", "weights.pt", "--dataset", "npz:grey.npz", "--device", "cpu")


def test_the_printed_command_fine_tunes_the_network(workplace: Path, run_cli: Cli) -> None:
    code, out, err = run_cli("doctor", *ONE_PIXEL, "--sigma", 0.5)
    assert code == 0, err
    printed = out
    assert "1. noise: the network is not robust to noise: clean accuracy 100%, under noise of sigma 0.5 6" in out
    assert "what to do: fine-tune it under noise, or put a denoiser in front of it" in out
    assert (workplace / "doctor/doctor.png").stat().st_size > 5_000
    rows = (workplace / "doctor/doctor.csv").read_text().splitlines()
    assert rows[:2] == ["sigma,accuracy", "0,1"]
    (command,) = [line for line in out.splitlines() if line.startswith("smoothcert train ")]
    words = shlex.split(command)[1:]
    code, _, err = run_cli(*words, "--device", "cpu")
    assert code == 0, err
    run = load_run(Path(words[words.index("--out") + 1]), "net.py:bare")
    assert (run.recipe.method, run.recipe.sigma, run.recipe.epochs) == ("consistency", 0.5, 20)
    assert run.provenance["init"]["file"] == "weights.pt"
    others = run.model[1].weight[:, 1:]  # were 0
    assert (others[1] - others[0]).mean() > 0.001, "brighter pixels speak for the bright class"

    # The commands of the second way: there are fewer images than in a usual batch.
    (command,) = [line for line in printed.splitlines() if line.startswith("smoothcert train-denoiser ")]
    code, _, err = run_cli(*shlex.split(command)[1:], "--model", "unet-small", "--set", "epochs=1", "--device", "cpu")
    assert code == 0, err
    (command,) = [line for line in printed.splitlines() if line.startswith("then: smoothcert certify ")]
    code, _, err = run_cli(*shlex.split(command)[2:], "--n", 100, "--max-images", 2, "--device", "cpu")
    assert code == 0, err

    code, out, err = run_cli("doctor", run.folder, "--model", "net.py:bare", "--device", "cpu")
    assert code == 0, err
    assert out.startswith(f"{run.folder.name} on 200 images of ")
    assert (run.folder / "doctor/doctor.png").exists()


def test_the_printed_command_adapts_a_network_with_batch_norm(workplace: Path, run_cli: Cli) -> None:
    words = ("--model", "net.py:normed", "--dataset", "npz:grey.npz", "--sigma", 0.5, "--device", "cpu")
    code, out, err = run_cli("doctor", *words)
    assert code == 0, err
    (command,) = [line for line in out.splitlines() if line.startswith("smoothcert adapt ")]
    code, out, err = run_cli(*shlex.split(command)[1:], "--device", "cpu")
    assert code == 0, err
    variance = float(load_file("adapted.safetensors")["0.running_var"])
    assert variance == pytest.approx(0.15**2 + 0.25, rel=0.05)  # of two shades, and of the noise
    again = DoctorOptions(model="net.py:normed", init=Path("adapted.safetensors"), sigma=0.5)
    assert str(again.adaptation(own_model("net.py:normed", 2))).endswith("--out adapted-adapted.safetensors")
    assert "smoothcert adapt" not in run_cli("doctor", *ONE_PIXEL, "--sigma", 0.5)[1]


def test_proposed_commands_are_about_the_images_that_were_examined(trained_run: Path) -> None:
    """Data that only the run names are left out, except where a new run is trained on them."""
    run, request = load_run(trained_run), DoctorOptions(run=trained_run, sigma=0.25)
    assert "--dataset" not in request.certification()
    assert "--dataset mnist-sample " in request.fine_tuning(run)
    request = replace(request, dataset="folder:photographs", image_size=28)
    for command in (request.certification(), request.fine_tuning(run), request.denoiser(run)):
        assert "--dataset folder:photographs --image-size 28" in command
    for command in (request.fine_tuning(run), request.denoiser(run)):
        assert "--channels 1" in command, "as the network takes them, whatever the files have"


def test_fine_tuning_on_few_images_helps_under_noise_and_keeps_the_clean_accuracy(
    workplace: Path, run_cli: Cli
) -> None:
    """A network without batch norm whose inputs are scaled up: at ten times the rate it ends at chance."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    pattern = torch.rand(64, generator=generator) - 0.5
    images = 0.5 + 0.2 * torch.outer(2.0 * labels - 1, pattern) + 0.05 * torch.randn(400, 64, generator=generator)
    pixels = (255 * images.clamp(0, 1)).to(torch.uint8)
    np.savez("few.npz", images=pixels[:200].view(-1, 8, 8).numpy(), labels=labels[:200].numpy())
    torch.manual_seed(0)
    network = own_model("net.py:deep", 2)
    optimizer = torch.optim.SGD(network.parameters(), 0.001, 0.9)
    for _ in range(60):
        torch.nn.functional.cross_entropy(network(pixels[:200, None] / 255), labels[:200]).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(network.state_dict(), "deep.pt")

    def accuracies(model: torch.nn.Module) -> list[float]:
        model.eval()
        noise = torch.randn(20, 200, 64, generator=torch.Generator().manual_seed(1))
        inputs = [pixels[200:] / 255 + sigma * noise for sigma in (0, 0.5)]
        return [float((model(x.flatten(0, 1)).argmax(1) == labels[200:].repeat(20)).float().mean()) for x in inputs]

    before = accuracies(network)
    arguments = ("--model", "net.py:deep", "--init", "deep.pt", "--dataset", "npz:few.npz", "--sigma", 0.5)
    code, out, err = run_cli("doctor", *arguments, "--device", "cpu")
    assert code == 0, err
    (command,) = [line for line in out.splitlines() if line.startswith("smoothcert train ")]
    assert run_cli(*shlex.split(command)[1:], "--device", "cpu")[0] == 0
    after = accuracies(load_run(Path("runs/net-consistency-0.5"), "net.py:deep").model)
    assert after[0] > before[0] - 0.05
    assert after[1] > before[1] + 0.05


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in ("catrs", "distillation")])
def test_every_objective_starts_from_the_weights_of_a_user(workplace: Path, run_cli: Cli, objective: str) -> None:
    settings = ("dataset=npz:grey.npz", "epochs=1", "batch_size=80", "learning_rate=0.001", "learning_rate_drops=[]")
    options = [word for field in settings for word in ("--set", field)]
    code, _, err = run_cli(
        *("train", "--preset", "cifar10/gaussian", "--objective", objective, "--model", "net.py:bare"),
        *("--init", "weights.pt", *options, "--out", "run", "--device", "cpu"),
    )  # fmt: skip
    assert code == 0, err
    weight = load_run(Path("run"), "net.py:bare").model[1].weight
    assert weight[1, 0] > 5  # the initial weight is 10
    assert weight.abs().sum() > 20  # of the others is 0


def test_a_healthy_network_is_sent_to_certification(workplace: Path, run_cli: Cli) -> None:
    torch.save(own_model("net.py:mean", 2).state_dict(), "mean.pt")
    arguments = ("--model", "net.py:bare", "--init", "mean.pt", "--dataset", "npz:grey.npz", "--device", "cpu")
    code, out, err = run_cli("doctor", *arguments, "--out", "figures")
    assert code == 0, err
    assert "wrote figures/doctor.png; nothing was found\n" in out
    _, few, _ = run_cli("doctor", *arguments, "--images", 20, "--out", "few")
    assert "wrote few/doctor.png; nothing was found, but 20 images show large faults only\n" in few
    (command,) = [line.partition("next: smoothcert ")[2] for line in out.splitlines() if line.startswith("next: ")]
    assert command == "certify --model net.py:bare --init mean.pt --dataset npz:grey.npz --sigma 0.25 --out runs/net"
    code, _, err = run_cli(*shlex.split(command), "--n", 100, "--max-images", 2, "--device", "cpu")
    assert code == 0, err
    rows = read_certificates(Path("runs/net/certificates/test-n100.tsv")).rows
    assert [row.correct for row in rows] == [True, True], "random weights are wrong for one of two classes"


def test_a_network_that_loses_some_accuracy_under_noise_may_be_fine_tuned(workplace: Path, run_cli: Cli) -> None:
    """Its accuracy at sigma 0.15 is Phi(1) = 84%: too good for the finding `noise`."""
    code, out, err = run_cli("doctor", *ONE_PIXEL, "--sigma", 0.15)
    assert code == 0, err
    *_, certification, fine_tuning = out.splitlines()
    assert certification.startswith("next: smoothcert certify ")
    text, _, command = fine_tuning.partition(": smoothcert ")
    assert text == "or fine-tune it under noise first, which usually certifies more"
    network = "train --dataset npz:grey.npz --method consistency --model net.py:bare --init weights.pt"
    assert command == f"{network} --sigma 0.15 --out runs/net-consistency-0.15"
    assert "fine-tune" not in run_cli("doctor", *ONE_PIXEL, "--sigma", 0.05)[1]


def test_names_of_outputs_correct_the_order_of_folders(workplace: Path, run_cli: Cli) -> None:
    """The folders are sorted by name, the outputs are not; one damaged file is skipped."""
    for number in range(40):
        level = 90 if number % 2 else 165
        name = "dark" if number % 2 else "bright"
        (workplace / "data" / name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), level).save(workplace / "data" / name / f"{number}.png")
    (workplace / "data/dark/bad.png").write_bytes(b"")
    arguments = ("doctor", "--model", "net.py:mean", "--dataset", "folder:data", "--device", "cpu")
    code, out, err = run_cli(*arguments)
    assert (code, "bad.png" in err) == (1, True)
    code, out, err = run_cli(*arguments, "--skip-unreadable")
    assert code == 0, err
    assert "1 of 41 files are skipped" in out
    assert (
        "1. label-order: the labels do not match the model's outputs: accuracy is 0%, and 100% if class 0 (bright)"
        in out
    )
    Path("names.txt").write_text("dark\nbright\n")
    code, out, err = run_cli(*arguments, "--skip-unreadable", "--classes", "names.txt")
    assert code == 0, err
    assert "nothing was found" in out
    assert "--classes names.txt --skip-unreadable" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give a run folder, or --model FILE.py:function (or --hub hf:NAME) --dataset NAME\n"),
        ("--model net.py:mean", "--dataset NAME; missing: --dataset NAME\n"),
        ("net.py", "net.py: expected a run folder, got a file; give the folder that holds model.safetensors"),
        ("weights.pt", "give weights of your own network as --model FILE.py:function --init weights.pt"),
        ("runs/nope", "runs/nope"),
        ("--model net.py:mean --hub hf:a --dataset npz:grey.npz", "give --model or --hub, not both"),
        ("--hub vit --dataset npz:grey.npz", "--hub: expected hf:NAME, timm:NAME"),
        (
            "--hub hf:a --dataset npz:grey.npz --init weights.pt",
            "--init: expected none with a run folder or --hub, which have weights; leave it out, or",
        ),
        ("--model net.py --dataset npz:grey.npz", "got net.py; add the name of the function after a colon"),
        ("--model net.pt --dataset npz:grey.npz", "after a colon; weights in a file are --init FILE"),
        ("--model net.py:mean --dataset npz:grey.npz --sigma -1", "sigma"),
        ("--model net.py:swapped --init weights.pt --dataset npz:grey.npz", "to return a torch module, got function"),
        ("--model net.py:empty --dataset npz:grey.npz", "got one on the device meta, without any; load them"),
        ("--model net.py:mean --dataset npz:nope.npz", "expected a file, got nothing at"),
        ("--model net.py:mean --dataset mnist-sample", "fails on inputs of shape [1, 28, 28]"),
    ],
)
def test_wrong_requests_are_one_line(workplace: Path, run_cli: Cli, arguments: str, message: str) -> None:
    code, _, err = run_cli("doctor", *shlex.split(arguments), *(["--device", "cpu"] if arguments else []))
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (workplace / "doctor").exists()
