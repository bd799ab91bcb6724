"""Training one network on the answers of others: `smoothcert train --teacher RUN`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Killed, digest, killed_after_the_first_epoch, metrics, tiny_recipe, without_times
from torch import Tensor, nn

import smoothcert as sc
from smoothcert.classifier import logits_under_noise
from smoothcert.data import ImageData
from smoothcert.errors import RequestError
from smoothcert.models.ensemble import Ensemble
from smoothcert.objectives import Distillation, LossTerms, Objective, Progress
from smoothcert.training.checkpoint import tensors_digest
from smoothcert.training.loop import train
from smoothcert.training.recipe import TrainRecipe

Cli = Callable[..., tuple[int, str, str]]


def student(**changes: Any) -> TrainRecipe:
    return tiny_recipe(objective=Distillation(), **changes)


def linear_teacher(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).eval()


def test_the_loss_equals_the_formula() -> None:
    """KL(teacher || student) for each noise and image, added up in plain Python; the teacher gets no gradient."""
    torch.manual_seed(0)
    images, noise = torch.rand(3, 1, 2, 2, dtype=torch.float64), torch.randn(2, 3, 1, 2, 2, dtype=torch.float64)
    model, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(4, 5)).double() for _ in range(2))
    divergences, cross_entropies = [], []
    for draw in noise:
        for image, delta in zip(images, draw, strict=True):
            answers = [net((image + delta)[None])[0].softmax(0).tolist() for net in (teacher, model)]
            divergences.append(sum(g * math.log(g / f) for g, f in zip(*answers, strict=True)))
            cross_entropies.append(-math.log(answers[1][0]))
    progress = Progress(0.5, torch.ones(()), torch.ones(()), torch.zeros(3), teacher=teacher)
    terms = Distillation().loss(model, images, torch.zeros(3, dtype=torch.int64), noise, progress)
    assert terms.loss.item() == pytest.approx(sum(divergences) / len(divergences), rel=1e-9)
    assert terms.terms["cross_entropy"].item() == pytest.approx(sum(cross_entropies) / len(cross_entropies), rel=1e-9)
    terms.loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in model.parameters())


class Own(Objective):
    """An objective of a user that asks the teacher."""

    num_noise: int = 2

    def loss(self, *arguments: Any) -> LossTerms:
        return Distillation().loss(*arguments)


class Halved(Distillation):
    """Distillation of a user: half of the loss, from the logits."""

    def loss(self, classifier: Any, images: Tensor, labels: Tensor, noise: Tensor, progress: Any) -> LossTerms:
        logits, answers = (logits_under_noise(network, images, noise) for network in (classifier, progress.teacher))
        result = self.from_logits(logits, answers)
        return result._replace(loss=result.loss / 2)


@pytest.mark.parametrize("objective", [Distillation(), Own()])
def test_the_loss_leaves_a_teacher_in_train_mode_as_it_is(objective: Objective) -> None:
    """Batch norm in train mode would answer by the batch and change its statistics."""
    torch.manual_seed(0)
    teacher, model = (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5)).train() for _ in range(2))
    inputs, noise = torch.rand(3, 4), torch.randn(2, 3, 4)
    criterion, before = sc.losses.Loss(objective, sigma=0.5), tensors_digest(teacher.state_dict())
    loss = criterion(model, inputs, torch.zeros(3, dtype=torch.int64), noise=noise, teacher=teacher)
    assert teacher[0].training
    assert tensors_digest(teacher.state_dict()) == before
    answers = [net((inputs + noise).flatten(0, 1)) for net in (teacher.eval(), model)]
    expected = nn.functional.kl_div(*(logits.log_softmax(1) for logits in answers[::-1]), None, None, "batchmean", True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_student_learns_the_teacher_and_not_the_labels(tmp_path: Path, tiny_data: ImageData) -> None:
    """The labels are moved by one class: the student still answers as the teacher."""
    longer: dict[str, Any] = {"epochs": 8, "learning_rate_drops": ()}
    teacher = sc.train(tiny_recipe(**longer), tiny_data, tmp_path / "teacher", device="cpu").model
    wrong = ImageData(tiny_data.images, (tiny_data.labels + 1) % 10, 10, "moved", "train")
    train(student(**longer), wrong, tmp_path / "student", classifier=teacher, device="cpu")
    learner = sc.load(tmp_path / "student").model
    images, labels = tiny_data.batch(torch.arange(len(tiny_data)))
    with torch.no_grad():
        answers, learnt = teacher(images).argmax(1), learner(images).argmax(1)
    agreement, by_label = float((answers == learnt).double().mean()), float((labels + 1 == learnt).double().mean())
    assert agreement > 0.7
    assert by_label < 0.3
    assert metrics(tmp_path / "student")[-1]["kl"] < 0.5 * metrics(tmp_path / "student")[0]["kl"]


def test_a_resumed_student_equals_an_uninterrupted_one(tmp_path: Path, tiny_data: ImageData) -> None:
    members = [linear_teacher(0), linear_teacher(1)]
    teacher, recipe = Ensemble(members), student(epochs=2)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    before = tensors_digest(teacher.state_dict())
    train(recipe, tiny_data, whole, device="cpu", classifier=teacher)
    with pytest.raises(Killed):
        train(recipe, tiny_data, parts, device="cpu", classifier=teacher, on_epoch=killed_after_the_first_epoch)
    with pytest.raises(RequestError, match=r"training started with \(Ensemble .*got Sequential"):
        train(recipe, tiny_data, parts, device="cpu", classifier=members[0], resume=True)
    before_refusals = (parts / "state.pt").read_bytes()
    with pytest.raises(RequestError, match=r"training started with \(Ensemble .*got none; give the same --teacher"):
        train(recipe, tiny_data, parts, device="cpu", resume=True)
    assert (parts / "state.pt").read_bytes() == before_refusals
    train(recipe, tiny_data, parts, device="cpu", classifier=teacher, resume=True)
    assert digest(whole) == digest(parts)
    assert without_times(metrics(whole)) == without_times(metrics(parts))
    assert tensors_digest(teacher.state_dict()) == before
    recorded = sc.load(whole).provenance["classifier"]
    assert [member["weights_sha256"] for member in recorded["members"]] == [
        tensors_digest(member.state_dict()) for member in members
    ]


def test_a_finished_student_needs_no_teacher_to_resume(tmp_path: Path, tiny_data: ImageData) -> None:
    """It ends as other finished runs do; a model that is lost is written again, with the recorded teacher."""
    out, notes = tmp_path / "run", list[str]()
    train(student(epochs=1), tiny_data, out, device="cpu", classifier=linear_teacher(0))
    before = sc.load(out)
    (out / "model.safetensors").unlink()
    train(student(epochs=1), tiny_data, out, device="cpu", resume=True, on_note=notes.append)
    assert notes == [f"{out}: trained already, 1 of 1 epochs"]
    assert sc.load(out).about() == before.about()
    assert sc.load(out).provenance == before.provenance
    with pytest.raises(RequestError, match=r"expected the classifier that its training started with"):
        train(student(epochs=1), tiny_data, out, device="cpu", resume=True, classifier=linear_teacher(1))
    with pytest.raises(RequestError, match=r"expects a trained network, got none; give --teacher RUN"):
        train(student(epochs=1), tiny_data, tmp_path / "new", device="cpu", resume=True)
    assert not (tmp_path / "new").exists()


def test_an_ensemble_with_consensus_is_another_teacher(tmp_path: Path, tiny_data: ImageData) -> None:
    """Its weights are those of the one without, its answers are not."""
    members, out = [linear_teacher(seed) for seed in range(3)], tmp_path / "run"
    train(student(epochs=1), tiny_data, out, device="cpu", classifier=Ensemble(members))
    with pytest.raises(RequestError, match=r"\(Ensemble (\w+)\), got Ensemble with consensus 2 \1; give the same"):
        train(student(epochs=1), tiny_data, out, device="cpu", classifier=Ensemble(members, 2), resume=True)


def test_a_preset_for_random_weights_names_the_one_for_trained_weights(run_cli: Any, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    weights.touch()
    options = ("--dataset", "mnist-sample", "--init", weights, "--out", tmp_path / "run")
    note = "mnist/distillation has the learning rates for random weights; with --init give mnist/distillation-finetune"
    for name, printed in (("mnist/distillation", True), ("mnist/distillation-finetune", False)):
        code, out, _ = run_cli("train", "--preset", name, *options)
        assert (code, note in out) == (1, printed), "these weights are damaged"
    assert "random weights" not in run_cli("train", "--preset", "mnist/distillation", *options[:2], *options[4:])[1]


def test_an_objective_derived_from_distillation_has_the_teacher(tmp_path: Path, tiny_data: ImageData) -> None:
    """Half of the loss at twice the rate are the same steps, if nothing else acts on the weights."""
    own, out = {"objective": Halved(), "learning_rate": 0.02}, tmp_path / "own"
    for name, fields in (("built-in", {"objective": Distillation(), "learning_rate": 0.01}), ("own", own)):
        recipe = tiny_recipe(**fields, epochs=1, weight_decay=0)
        train(recipe, tiny_data, tmp_path / name, device="cpu", classifier=linear_teacher(0))
    (built_in,), (halved,) = (metrics(tmp_path / name) for name in ("built-in", "own"))
    assert halved["kl"] == pytest.approx(built_in["kl"], rel=1e-5)
    assert halved["loss"] == pytest.approx(built_in["loss"] / 2, rel=1e-5)
    notes = list[str]()
    train(recipe, tiny_data, out, device="cpu", resume=True, on_note=notes.append)
    assert notes == [f"{out}: trained already, 1 of 1 epochs"]
    with pytest.raises(RequestError, match="expects a trained network, got none; give --teacher RUN"):
        train(recipe, tiny_data, tmp_path / "new", device="cpu")


def test_wrong_teachers_are_refused(tmp_path: Path, tiny_data: ImageData) -> None:
    out, teacher = tmp_path / "run", linear_teacher(0)
    with pytest.raises(
        RequestError, match=r"expects a trained network, got none; give --teacher RUN \(Python: classifier=\)"
    ):
        train(student(), tiny_data, out, device="cpu")
    with pytest.raises(RequestError, match=r"expected none for gaussian, got one; only distillation"):
        train(tiny_recipe(), tiny_data, out, device="cpu", classifier=teacher)
    for given in ("runs/a", [teacher], lambda images: teacher(images)):
        expected = rf"classifier: expected an nn.Module, got {type(given).__name__}; give load\(RUN\).model"
        with pytest.raises(RequestError, match=expected):
            train(student(), tiny_data, out, device="cpu", classifier=given)
    three = nn.Sequential(nn.Flatten(), nn.Linear(784, 3))
    with pytest.raises(RequestError, match=r"gives \[2, 3\] for 2 images, expected logits \[2, 10\]"):
        train(student(), tiny_data, out, device="cpu", classifier=three)
    assert not out.exists()
    for given, name in (("runs/a", "str"), (None, "none")):
        with pytest.raises(RequestError, match=f"teacher: expected a trained classifier, got {name}; pass teacher="):
            sc.losses.Distillation(sigma=0.5)(teacher, torch.rand(2, 1, 28, 28), torch.tensor([0, 1]), teacher=given)
    with pytest.raises(RequestError, match=r"teacher_logits: expected the shape \[2, 2, 10\], got \[2, 2, 3\]"):
        sc.losses.Distillation(sigma=0.5)(teacher, torch.rand(2, 1, 28, 28), torch.tensor([0, 1]), teacher=three)
    with pytest.raises(RequestError, match=r"teacher_logits: expected the shape \[2, 3, 10\], got \[1, 3, 10\]"):
        sc.losses.distillation(torch.zeros(2, 3, 10), torch.zeros(1, 3, 10))


def test_the_gradient_of_distillation_is_that_of_the_student_alone() -> None:
    """(F - G) / (noises x images) with respect to the student's logits, whether or not the teacher's need one."""
    student, teacher = (torch.randn(2, 3, 5, requires_grad=True) for _ in range(2))
    sc.losses.distillation(student, teacher).backward()
    assert teacher.grad is None
    torch.testing.assert_close(student.grad, (student.softmax(-1) - teacher.softmax(-1)).detach() / 6)


def test_the_command_line_takes_one_teacher_or_several(
    tmp_path: Path, tiny_data: ImageData, trained_run: Path, run_cli: Cli
) -> None:
    other = tmp_path / "other"
    train(tiny_recipe(dataset="mnist-sample", sigma=0.25, epochs=1), tiny_data, other, device="cpu")
    np.savez(tmp_path / "few.npz", images=tiny_data.images.numpy(), labels=tiny_data.labels.numpy())
    common = ["train", "--dataset", f"npz:{tmp_path / 'few.npz'}", "--method", "distillation", "--sigma", 0.5]
    common += ["--device", "cpu", "--epochs", 1]
    status, output, error = run_cli(*common, "--teacher", trained_run, "--teacher", other, "--out", tmp_path / "s")
    assert status == 0, error
    assert "was trained with gaussian noise at sigma 0.25, not with gaussian noise at sigma 0.5" in output + error
    recorded = sc.load(tmp_path / "s").provenance["classifier"]
    assert (len(recorded["members"]), recorded["folders"]) == (2, [trained_run.name, "other"])
    status, _, error = run_cli("train", "--resume", "--out", tmp_path / "s", "--teacher", other, "--device", "cpu")
    assert status == 2
    started = f"Ensemble {recorded['weights_sha256'][:12]} of {trained_run.name}, other"
    assert f"started with ({started}), got TinyNet {digest(other)[:12]} of other; give the same --teacher" in error
    trained = [*common, "--resume", "--out", tmp_path / "s"]
    status, _, error = run_cli(*trained, "--teacher", trained_run, "--teacher", other.rename(tmp_path / "moved"))
    assert status == 0, error
    status, _, error = run_cli(*common, "--teacher", tmp_path / "none", "--out", tmp_path / "t")
    assert status == 2
    assert str(tmp_path / "none") in error
    assert not (tmp_path / "t").exists()


def test_teachers_for_other_images_are_refused_and_of_other_data_are_named(
    tmp_path: Path, trained_run: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shapes = {"digits": (8, 28, 28, 10), "small": (8, 14, 14, 10), "three": (8, 28, 28, 3)}
    for name, (count, height, width, classes) in shapes.items():
        pixels, labels = np.zeros((count, height, width), np.uint8), np.arange(count) % classes
        np.savez(f"{name}.npz", images=pixels, labels=labels, class_names=[str(label) for label in range(classes)])
    student = ["train", "--sigma", 0.5, "--device", "cpu", "--epochs", 1, "--set", "batch_size=8"]
    student += ["--model", "lenet", "--method", "distillation", "--dataset"]
    for name, part in (("small", "has (1, 14, 14) of 10"), ("three", "has (1, 28, 28) of 3")):
        status, _, error = run_cli(*student, f"npz:{name}.npz", "--teacher", trained_run, "--out", "student")
        assert status == 2
        assert f"{trained_run}: its model takes images (1, 28, 28) of 10 classes" in error
        assert part in error
        assert not Path("student").exists()
    status, output, error = run_cli(*student, "npz:digits.npz", "--teacher", trained_run, "--out", "other")
    assert status == 0, error
    assert f"{trained_run} was trained on mnist-sample, not on npz:digits.npz" in " ".join((output + error).split())


def test_the_command_line_refuses_wrong_teachers(
    tmp_path: Path, tiny_data: ImageData, trained_run: Path, run_cli: Cli
) -> None:
    def refusal(*options: object, method: str = "distillation") -> str:
        common = ["--dataset", "mnist-sample", "--method", method, "--sigma", 0.5, "--epochs", 1]
        status, _, error = run_cli("train", *common, "--set", "batch_size=512", *options, "--out", tmp_path / "out")
        assert status == 2, error
        assert not (tmp_path / "out").exists()
        return error

    teacher: list[object] = ["--teacher", trained_run]
    assert "--teacher: expected --method distillation with it, got gaussian" in refusal(*teacher, method="gaussian")
    assert "--teacher: expected different runs" in refusal(*teacher, *teacher)
    small = ImageData(tiny_data.images[:, :, ::4, ::4].repeat(1, 3, 1, 1), tiny_data.labels, 10, "small", "train")
    train(tiny_recipe(epochs=1, model="resnet20"), small, tmp_path / "small", device="cpu")
    other: list[object] = ["--teacher", tmp_path / "small"]
    assert "--teacher: expected the same images for all members" in refusal(*teacher, *other)


def test_a_teacher_may_be_the_users_own_network_if_the_student_is(
    tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naming the code with --model is consent to run it; the code of another network is refused."""
    monkeypatch.chdir(tmp_path)
    network = "nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))"
    Path("net.py").write_text(f"from torch import nn\n\ndef small(num_classes):\n    return {network}\n")
    common = ["--dataset", "mnist-sample", "--sigma", 0.5, "--epochs", 1, "--set", "batch_size=512"]
    status, _, error = run_cli("train", *common, "--method", "gaussian", "--model", "net.py:small", "--out", "teacher")
    assert status == 0, error
    learn = ["train", *common, "--method", "distillation", "--teacher", "teacher"]
    status, _, error = run_cli(*learn, "--out", "other")
    assert status == 2
    assert "its network is the code net.py:small, and --model names that of the student" in error
    status, output, error = run_cli(*learn, "--model", "net.py:small", "--out", "student")
    assert status == 0, error
    assert "was trained on" not in output + error, "the data are those of the student"
    recorded = sc.load("student", code="net.py:small").provenance["classifier"]
    assert recorded["weights_sha256"] == tensors_digest(sc.load("teacher", code="net.py:small").model.state_dict())
