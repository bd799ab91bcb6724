"""Objectives outside the package, `package.module:Class`: trained with consent, certified without their code."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import Field, PrivateAttr
from tiny import metrics, tiny_recipe, without_times
from torch import Tensor, nn

from smoothcert.analysis.cost import training_costs
from smoothcert.data import ImageData
from smoothcert.errors import RequestError
from smoothcert.io.text import flattened
from smoothcert.objectives import (
    Adversary,
    Consistency,
    Gaussian,
    LossTerms,
    Objective,
    Progress,
    SmoothAdv,
    UnloadedObjective,
    name_in_recipes,
)
from smoothcert.objectives.base import Classifier
from smoothcert.training.checkpoint import load_run, tensors_digest
from smoothcert.training.first_loss import try_loss
from smoothcert.training.loop import train
from smoothcert.training.metrics import MEASUREMENTS
from smoothcert.training.recipe import load_train_recipe, with_overrides
from smoothcert.training.user_objective import load_objective

MODULE = """
from pydantic import Field, field_validator
from smoothcert.objectives import Gaussian, Objective

open("ran", "a").close()

class Mine(Gaussian):
    num_noise: int = Field(2, ge=1, description="copies")
    scale: float = Field(1.0, gt=0, description="of the loss")

    def loss(self, classifier, images, labels, noise, progress):
        terms = super().loss(classifier, images, labels, noise, progress)
        return terms._replace(loss=self.scale * terms.loss)

class Abstract(Objective):
    pass

class Fails(Gaussian):
    scale: float = 1.0

    @field_validator("scale")
    def check(cls, value):
        raise RuntimeError("broken")

number = 5
"""
LOSSES = """
from smoothcert.objectives import Gaussian

def method(change):
    def loss(self, classifier, images, labels, noise, progress):
        terms = Gaussian.loss(self, classifier, images, labels, noise, progress)
        return change(terms)
    return type("Method", (Gaussian,), {"loss": loss, "__module__": __name__})

Nothing = method(lambda terms: None)
Bare = method(lambda terms: terms.loss)
Unreduced = method(lambda terms: terms._replace(loss=terms.loss.expand(3)))
NotFinite = method(lambda terms: terms._replace(loss=terms.loss * float("nan")))
Infinite = method(lambda terms: terms._replace(loss=terms.loss + (terms.loss - terms.loss.detach()).sqrt()))
Detached = method(lambda terms: terms._replace(loss=terms.loss.detach()))
Listed = method(lambda terms: terms._replace(terms=[terms.loss]))
Numbers = method(lambda terms: terms._replace(terms={"penalty": 0.5}))
Taken = method(lambda terms: terms._replace(terms={"epoch": terms.loss}))
Flat = method(lambda terms: terms._replace(noisy_logits=terms.noisy_logits.flatten(0, 1)))
Fails = method(lambda terms: terms.los)
class Remembers(Gaussian):
    _steps: int = 0

    def loss(self, *arguments):
        self._steps += 1
        return super().loss(*arguments)
class Counts(Gaussian):
    def loss(self, *arguments):
        object.__setattr__(self, "steps", getattr(self, "steps", 0) + 1)
        return super().loss(*arguments)
from functools import cached_property
class Caches(Gaussian):
    @cached_property
    def half(self):
        return torch.full((), 0.5)

    def loss(self, *arguments):
        terms = super().loss(*arguments)
        return terms._replace(loss=self.half * terms.loss)
import torch
from pydantic import PrivateAttr
class Averages(Gaussian):
    _average: torch.Tensor = PrivateAttr(default_factory=lambda: torch.zeros(()))

    def loss(self, *arguments):
        terms = super().loss(*arguments)
        self._average.lerp_(terms.loss.detach(), 0.1)
        return terms
class Set(Gaussian):
    def __init__(self, scale=1.0):
        self.scale = scale
"""
REFERENCE = "mine_objective.py:Mine"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an objective and a recipe that names it. The file "ran" appears when its code is imported."""
    (tmp_path / "mine_objective.py").write_text(MODULE)
    np.savez(tmp_path / "small.npz", images=tiny_data.images[:, 0].numpy(), labels=tiny_data.labels.numpy())
    fields = tiny_recipe(dataset="npz:small.npz", epochs=1, learning_rate_drops=()).to_mapping()
    fields["objective"] = {"name": REFERENCE, "scale": 0.5}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_code_that_only_a_file_names_does_not_run(project: Path, run_cli: Cli) -> None:
    (project / "downloaded").mkdir()
    (project / "downloaded/recipe.yaml").write_text((project / "recipe.yaml").read_text())
    for arguments in (
        ("--recipe", "recipe.yaml", "--out", "run"),
        ("--recipe", "recipe.yaml", "--out", "run", "--set", "objective.scale=2"),
        ("--out", "downloaded", "--resume"),
    ):
        code, _, errors = run_cli("train", *arguments, "--device", "cpu")
        assert code == 2
        assert f"its objective is the code {REFERENCE}; allow it with --objective {REFERENCE}" in errors
        assert len(errors.splitlines()) == 1
    recipe = load_train_recipe(project / "recipe.yaml")
    assert recipe.method == "Mine"
    with pytest.raises(RequestError, match="is not loaded; allow it with --objective"):
        train(recipe, None, project / "run", device="cpu")
    assert not (project / "ran").exists()
    assert not (project / "run").exists()


def test_allowed_code_keeps_the_hyper_parameters_of_the_file(project: Path, run_cli: Cli) -> None:
    allow = ("--objective", REFERENCE, "--device", "cpu")
    code, output, errors = run_cli("train", "--recipe", "recipe.yaml", "--out", "run", *allow)
    assert code == 0, errors
    assert output.rstrip().endswith("trained run; next: smoothcert certify run")
    recipe = load_run(project / "run").recipe
    assert recipe.to_mapping()["objective"] == {"name": REFERENCE, "num_noise": 2, "scale": 0.5}
    code, output, errors = run_cli("train", "--resume", "--out", "run", *allow)
    assert code == 0, errors
    assert "trained already, 1 of 1 epochs" in output


def test_a_method_that_extends_that_of_a_preset_does_not_silently_have_other_settings(
    project: Path, run_cli: Cli
) -> None:
    """Of mnist/consistency at sigma 0.5 the weight is 5, of the class Consistency 10: not a fair comparison."""
    (project / "more.py").write_text("from smoothcert.objectives import Consistency\nclass More(Consistency): pass\n")
    ask = ("train", "--preset", "mnist/consistency", "--sigma", 0.5, "--dataset", "npz:small.npz", "--epochs", 1)
    small = ("--set", "learning_rate_drops=[]", "--device", "cpu", "--objective", "more.py:More")
    code, output, errors = run_cli(*ask, *small, "--out", "run")
    assert (code, errors) == (0, "")
    assert "note: More has its own defaults: weight 10.0 (the preset: 5.0); --set changes them\n" in output
    assert load_run(project / "run").recipe.to_mapping()["objective"]["weight"] == 10
    assert "own defaults" not in run_cli(*ask, *small, "--set", "weight=7", "--out", "chosen")[1]
    assert "own defaults" not in run_cli(*ask, *small[:-2], "--set", "weight=7", "--out", "published")[1]


def test_an_interrupted_run_continues_exactly(project: Path, tiny_data: ImageData) -> None:
    """The objective of the file at scale 1 is Gaussian, so its weights are too."""
    recipe = with_overrides(load_train_recipe(project / "recipe.yaml"), ["epochs=2", "objective.scale=1"])
    gaussian = tiny_recipe(dataset="npz:small.npz", learning_rate_drops=(), objective=Gaussian(num_noise=2))
    train(gaussian, tiny_data, project / "gaussian", device="cpu")
    train(load_objective(recipe), tiny_data, project / "whole", device="cpu")

    class Stop(Exception):
        pass

    def stop(status: Any) -> None:
        if status.epoch == 1:
            raise Stop

    with pytest.raises(Stop):
        train(load_objective(recipe), tiny_data, project / "cut", device="cpu", on_progress=stop)
    assert load_run(project / "cut").epoch == 1
    train(load_objective(recipe), tiny_data, project / "cut", device="cpu", resume=True)
    digests = {tensors_digest(load_run(project / name).model.state_dict()) for name in ("gaussian", "whole", "cut")}
    assert len(digests) == 1
    other = load_objective(with_overrides(recipe, ["objective.scale=3"]))
    with pytest.raises(RequestError, match="holds a run of another recipe"):
        train(other, tiny_data, project / "cut", device="cpu", resume=True)


def test_overrides_choose_code_and_its_fields(project: Path) -> None:
    chosen = with_overrides(tiny_recipe(), [f"objective={REFERENCE}", "objective.scale=3", "objective.num_noise=4"])
    loaded = load_objective(chosen)
    assert loaded.objective.model_dump(exclude_none=True) == {"num_noise": 4, "scale": 3.0}
    assert loaded.images_per_step == 16
    assert loaded.to_mapping() == chosen.to_mapping()
    defaults = load_objective(with_overrides(tiny_recipe(), [f"objective={REFERENCE}"]))
    assert defaults.objective.model_dump(exclude_none=True) == {"num_noise": 2, "scale": 1.0}
    assert load_objective(tiny_recipe()) == tiny_recipe()
    assert hash(chosen) == hash(with_overrides(chosen, []))


@pytest.mark.parametrize(
    ("reference", "overrides", "message"),
    [
        ("mine_objective.py:Missing", [], "expected a class Missing in mine_objective.py, got none"),
        ("no_such_file.py:Mine", [], "objective: expected a Python file, got .*no_such_file.py, which does not exist"),
        ("no_such_module_here:Mine", [], "objective: expected package.module:Class or FILE.py:Class, got no_such"),
        ("mine_objective.py:number", [], "to be a subclass of smoothcert.objectives.Objective, got int"),
        ("os:PathLike", [], "to be a subclass of smoothcert.objectives.Objective, got PathLike"),
        ("os:abort", [], "to be a subclass of smoothcert.objectives.Objective, got builtin_function"),
        ("mine_objective.py:Abstract", [], r"to define loss\(\), got a class without it"),
        ("mine_objective.py:Fails", ["objective.scale=2"], r"Fails failed \(RuntimeError: broken\)"),
        (REFERENCE, ["objective.scale=0"], r"objective\.scale: expected greater than 0, got 0"),
        (REFERENCE, ["objective.scael=1"], r"objective\.scael: unknown key; did you mean objective\.scale"),
        (REFERENCE, ["objective.num_noise=3"], r"batch_size: expected a multiple of objective\.num_noise = 3, got 64"),
        (REFERENCE, ["objective.num_noise=0"], r"objective\.num_noise: expected at least 1, got 0"),
        (":Mine", [], "objective: unknown method :Mine"),
        ("mine.Mine", [], "objective: unknown method mine.Mine; expected one of .*, or your own as FILE.py:Class"),
        ("mi\x1bne:A", [], "objective"),
    ],
)
def test_wrong_references_and_fields_are_refused_in_one_line(
    project: Path, reference: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        load_objective(with_overrides(tiny_recipe(), [f"objective={reference}", *overrides]))
    assert "\n" not in str(caught.value)


class Inline(Consistency):
    """A subclass of a built-in method, used from Python."""

    extra: float = Field(1.0, description="unused")


def test_a_class_in_place_of_an_objective_is_explained() -> None:
    with pytest.raises(
        RequestError, match=r"objective: expected an object, got the class Inline; give Inline\(\.\.\.\)"
    ):
        tiny_recipe().model_copy(update={"objective": Inline})


def test_objects_are_recorded_by_the_path_of_their_class(tmp_path: Path, tiny_data: ImageData) -> None:
    """The name of the base class would load another method."""
    objective = Inline(weight=2.0, adversary=Adversary(steps=1))
    recipe = tiny_recipe(objective=objective, epochs=1, learning_rate_drops=())
    assert name_in_recipes(recipe.objective) == f"{__name__}:Inline"
    assert recipe.method == "Inline"
    train(recipe, tiny_data, tmp_path / "run", device="cpu")
    stored = load_run(tmp_path / "run").recipe
    assert isinstance(stored.objective, UnloadedObjective)
    assert stored.to_mapping() == recipe.to_mapping()
    loaded = load_objective(stored)
    assert isinstance(loaded.objective, Inline)
    assert loaded.to_mapping() == recipe.to_mapping()
    (cost,) = training_costs([tmp_path / "run"])
    assert cost.method == "Inline"
    fields = flattened(objective.model_dump(mode="json", exclude_none=True))
    assert cost.hyperparameters == ", ".join(f"{name} {value}" for name, value in fields.items())


def test_recipes_with_code_are_read_without_torch(project: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from smoothcert.training.recipe import load_train_recipe;"
        " load_train_recipe(Path('recipe.yaml')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_losses_take_any_objective() -> None:
    from smoothcert import losses

    class Doubled(Objective):
        def loss(self, *arguments: Any) -> Any:
            terms = Gaussian().loss(*arguments)
            return terms._replace(loss=2 * terms.loss)

    weight, noise = torch.ones(3, 4), torch.zeros(1, 5, 3)
    batch = (lambda rows: rows @ weight, torch.rand(5, 3), torch.arange(5) % 4)
    single, double = losses.Gaussian(sigma=1.0), losses.Loss(Doubled(), sigma=1.0)
    assert double(*batch, noise=noise) == 2 * single(*batch, noise=noise)


class Attacks(Objective):
    """An objective with the attack of a published one."""

    adversary: Adversary = Adversary(steps=1)

    def loss(self, *arguments: Any) -> LossTerms:
        return SmoothAdv(num_noise=1, adversary=self.adversary).loss(*arguments)


def test_losses_warn_about_an_attack_of_any_objective() -> None:
    from smoothcert import losses

    model, labels = nn.Linear(3, 4), torch.arange(5) % 4
    losses.Loss(Attacks(), sigma=1.0)(model, torch.rand(5, 3), labels)
    with pytest.warns(UserWarning, match="the attack of .*Attacks clips to"):
        losses.Loss(Attacks(), sigma=1.0)(model, 3 * torch.ones(5, 3), labels)


class LateTerm(Gaussian):
    """An objective with one more term from epoch 1 on."""

    late: bool = True
    term: str = "size"

    def in_epoch(self, epoch: float) -> "LateTerm":
        return self if epoch >= 1 else self.model_copy(update={"late": False})

    def loss(self, *arguments: Any) -> LossTerms:
        result = super().loss(*arguments)
        more = {self.term: result.noisy_logits.square().mean()} if self.late else {}
        return result._replace(terms={**more, **result.terms})


def test_a_term_may_start_at_a_later_epoch(tmp_path: Path, tiny_data: ImageData) -> None:
    """Other terms keep their names; without the late one, all numbers are the same."""
    plain, late = tmp_path / "plain", tmp_path / "late"
    train(tiny_recipe(objective=Gaussian()), tiny_data, plain, device="cpu")
    train(tiny_recipe(objective=LateTerm()), tiny_data, late, device="cpu")
    assert set(metrics(plain)[0]) <= {*MEASUREMENTS, "cross_entropy"}, "an objective may not use these names"
    lines = without_times(metrics(late))
    assert ["size" in line for line in lines] == [False, True]
    assert lines[1].pop("size") > 0
    assert lines == without_times(metrics(plain))
    with pytest.raises(RequestError, match="objective: expected terms with names of their own, got 'epoch'"):
        train(tiny_recipe(objective=LateTerm(term="epoch")), tiny_data, tmp_path / "taken", device="cpu")
    assert [line["epoch"] for line in metrics(tmp_path / "taken")] == [0]


def test_the_trial_of_a_loss_leaves_the_network_as_it_was(tiny_data: ImageData) -> None:
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Dropout(), nn.Linear(784, 10)).eval()
    before, drawn = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    try_loss(tiny_recipe(objective=Inline()), tiny_data, network, 16)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module.training for module in network.modules())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


class WithoutNoise(Gaussian):
    own_noise: float = 0.0

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        drawn = self.own_noise * torch.randn_like(noise)
        return super().loss(classifier, images, labels, drawn, progress)


class LateNoise(Gaussian):
    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        return super().loss(classifier, images, labels, progress.warmup * noise, progress)


@pytest.mark.parametrize(
    ("objective", "noted"),
    [
        (WithoutNoise(num_noise=2), True),
        (WithoutNoise(num_noise=2, own_noise=0.5), True),
        (LateNoise(num_noise=2), False),
        (Inline(), False),
    ],
)
def test_a_loss_that_does_not_use_the_noise_gets_a_note(
    objective: Objective, noted: bool, tiny_data: ImageData
) -> None:
    """Also with dropout; not if all logits are 0 at first, nor if the noise is used in later epochs."""
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Dropout(), nn.Linear(784, 10))
    nn.init.zeros_(network[3].weight)
    notes: list[str] = []
    try_loss(tiny_recipe(objective=objective), tiny_data, network, 16, on_note=notes.append)
    assert [f"{name_in_recipes(objective)}.loss() does not use its argument noise" in note for note in notes] == (
        [True] if noted else []
    )


class Constants(Gaussian):
    _weights: Tensor = PrivateAttr(default_factory=lambda: torch.ones(10))
    _scaled: Any = PrivateAttr(default_factory=lambda: lambda loss: 2 * loss)

    def loss(self, *arguments: Any) -> LossTerms:
        terms = super().loss(*arguments)
        return terms._replace(loss=self._scaled(terms.loss))


def test_a_loss_may_use_constants(tiny_data: ImageData) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    try_loss(tiny_recipe(objective=Constants()), tiny_data, network, 16)


class Cell(Gaussian):
    def loss(self, *arguments: Any) -> LossTerms:
        raise RuntimeError("no such layer")


def test_a_loss_of_a_notebook_fails_in_one_line(tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class has no file."""
    monkeypatch.setattr(Cell, "__module__", "__notebook__")
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with pytest.raises(RequestError, match=r"Cell\.loss\(\) failed \(RuntimeError: no such layer\)"):
        try_loss(tiny_recipe(objective=Cell()), tiny_data, network, 16)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "to return LossTerms(loss, terms, noisy_logits), got NoneType"),
        ("Bare", "got Tensor"),
        ("Unreduced", "to return a loss of shape [], got [3]; take its mean"),
        ("Detached", "a loss with a gradient, got one without"),
        ("NotFinite", "to return a finite loss, got nan before the first step; look for log(0), 0/0 and overflow"),
        ("Infinite", "to have finite gradients, got others for "),
        ("Listed", "terms as a dict of tensors, got list"),
        ("Numbers", "tensors of shape [] as terms, got float for 'penalty'"),
        ("Taken", "terms with names of their own, got 'epoch', which metrics.jsonl has already; rename it"),
        ("Flat", "noisy_logits of shape [num_noise, 64, 10] or None, got [64, 10]"),
        (
            "Fails",
            "losses.py:Fails.loss() failed in line 20 (AttributeError: 'LossTerms' object has no attribute 'los'",
        ),
        ("Averages", "to keep nothing from step to step, got another _average, which --resume could not restore"),
        ("Remembers", "to keep nothing from step to step, got another _steps, which --resume could not restore"),
        ("Counts", "to keep nothing from step to step, got another steps, which --resume could not restore"),
        ("Set", "scale: expected no assignment to self, got one; declare `scale: float = 1.0`"),
    ],
)
def test_a_wrong_loss_is_refused_before_anything_is_written(
    project: Path, run_cli: Cli, name: str, message: str
) -> None:
    (project / "losses.py").write_text(LOSSES)
    code, _, errors = run_cli(
        "train", "--recipe", "recipe.yaml", "--objective", f"losses.py:{name}", "--out", "run", "--device", "cpu"
    )
    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert not (project / "run").exists()


def test_a_loss_may_cache_what_does_not_change(project: Path, run_cli: Cli) -> None:
    (project / "losses.py").write_text(LOSSES)
    recipe = ("--recipe", "recipe.yaml", "--objective", "losses.py:Caches")
    code, out, errors = run_cli("train", *recipe, "--epochs", 1, "--out", "run", "--device", "cpu")
    assert (code, errors) == (0, "")
    assert "does not use" not in out
