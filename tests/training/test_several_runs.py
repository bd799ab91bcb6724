"""Several runs in one process: same results as alone, failures, turns."""

from pathlib import Path

import pytest
import torch
from tiny import TinyNet, digest, metrics, tiny_recipe
from torch import Tensor

from smoothcert.data import ImageData
from smoothcert.errors import RequestError
from smoothcert.models import MODELS, ModelSpec
from smoothcert.training.checkpoint import load_run
from smoothcert.training.loop import train
from smoothcert.training.several_runs import STEPS_AHEAD, Pace, train_together
from smoothcert.training.status import TrainingStatus


def test_runs_side_by_side_equal_runs_alone(tmp_path: Path, tiny_data: ImageData) -> None:
    recipes = [tiny_recipe(seed=seed, epochs=1) for seed in range(3)]
    jobs = [(recipe, tiny_data, tmp_path / f"together{recipe.seed}") for recipe in recipes]
    assert train_together(jobs, 2, device="cpu") == {}
    for recipe in recipes:
        train(recipe, tiny_data, tmp_path / f"alone{recipe.seed}", device="cpu")
        assert digest(tmp_path / f"together{recipe.seed}") == digest(tmp_path / f"alone{recipe.seed}")


class Huge(TinyNet):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images + torch.empty(2**50))


def test_failing_runs_do_not_stop_the_others(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "huge", ModelSpec("more than fits into memory", (1, 28, 28), Huge))
    (tmp_path / "blocked").write_text("a file where the run folder should be")
    jobs = [
        (tiny_recipe(batch_size=512), tiny_data, tmp_path / "large"),
        (tiny_recipe(epochs=1), tiny_data, tmp_path / "blocked"),
        (tiny_recipe(model="huge"), tiny_data, tmp_path / "huge"),
        (tiny_recipe(epochs=1), tiny_data, tmp_path / "good"),
    ]
    failures = train_together(jobs, 2, device="cpu")
    assert set(failures) == {tmp_path / "large", tmp_path / "blocked", tmp_path / "huge"}
    assert isinstance(failures[tmp_path / "large"], RequestError)
    assert str(failures[tmp_path / "huge"]).endswith("a smaller batch_size or objective.num_noise, or fewer --jobs")
    assert load_run(tmp_path / "good").finished


def test_host_stays_at_most_steps_ahead_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        done = False

        def record(self) -> None:
            events.append(self)

        def query(self) -> bool:
            return self.done

    events: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pace, on_cpu = Pace(torch.device("cuda")), Pace(torch.device("cpu"))
    for step in range(STEPS_AHEAD):
        assert not pace.far_ahead(), step
        pace.stepped()
        on_cpu.stepped()
    assert pace.far_ahead()
    assert not on_cpu.far_ahead()
    events[-1].done = True
    assert pace.far_ahead(), "streams do their work in order: only the oldest counts"
    events[0].done = True
    assert not pace.far_ahead()
    pace.stepped()
    assert pace.far_ahead()
    events[1].done = True
    assert not pace.far_ahead(), "one step done, one may be asked for"


def test_run_that_joins_during_an_epoch_is_counted(tmp_path: Path, tiny_data: ImageData) -> None:
    """The first ends with the second's first epoch; the third takes its place after the second's next has begun."""
    runs = [(tiny_recipe(epochs=epochs), tiny_data, tmp_path / str(i)) for i, epochs in enumerate((1, 2, 1))]
    assert train_together(runs, 2, device="cpu") == {}
    assert [line["runs_at_once"] for line in metrics(tmp_path / "1")] == [2, 2]


def test_interrupted_runs_unlock_their_folders(tmp_path: Path, tiny_data: ImageData) -> None:
    runs = [(tiny_recipe(epochs=2, seed=seed), tiny_data, tmp_path / str(seed)) for seed in range(3)]

    def interrupt(folder: Path, status: TrainingStatus) -> None:
        if folder.name == "1":
            raise KeyboardInterrupt

    try:
        train_together(runs, 3, device="cpu", on_progress=interrupt)
    except KeyboardInterrupt:  # while it is alive, so are the frames that it went through
        assert train_together(runs, 3, device="cpu") == {}
    for seed in range(3):
        assert [line["epoch"] for line in metrics(tmp_path / str(seed))] == [0, 1]


def test_fast_runs_do_not_wait_for_a_slow_one(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is far ahead until the other has ended."""
    recipe, ended = tiny_recipe(epochs=2), []

    class SlowFirst:
        made = 0

        def __init__(self, device: torch.device) -> None:
            self.slow, self.steps = SlowFirst.made == 0, 0
            SlowFirst.made += 1

        def far_ahead(self) -> bool:
            return self.slow and self.steps > 0 and "quick" not in ended

        def stepped(self) -> None:
            self.steps += 1

    def look(folder: Path, status: TrainingStatus) -> None:
        if (status.epoch + 1, status.step) == (status.epochs, status.steps):
            ended.append(folder.name)

    monkeypatch.setattr("smoothcert.training.several_runs.Pace", SlowFirst)
    runs = [(recipe, tiny_data, tmp_path / name) for name in ("slow", "quick")]
    assert train_together(runs, 2, device="cpu", on_progress=look) == {}
    assert ended == ["quick", "slow"]
    assert load_run(tmp_path / "slow").provenance["runs_at_once"] == 2
    train(recipe, tiny_data, tmp_path / "alone", device="cpu")
    for name, numbers in (("slow", [2, 1]), ("quick", [2, 2]), ("alone", [1, 1])):
        device = load_run(tmp_path / name).provenance["versions"]["device"]
        conditions = [(line["runs_at_once"], line["device"]) for line in metrics(tmp_path / name)]
        assert conditions == [(number, device) for number in numbers], (
            f"{name}: the second epoch of the slow one was alone"
        )
