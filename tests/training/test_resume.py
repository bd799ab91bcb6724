"""Run folders: exact resume, killed processes, and damaged or changed files."""

import json
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from processes import kill_when
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import TinyNet, digest, metrics, tiny_recipe, without_times

from smoothcert.data import ImageData, Normalization
from smoothcert.errors import RequestError, WorkError
from smoothcert.training import loop
from smoothcert.training.checkpoint import InputSpec, load_run, tensors_digest
from smoothcert.training.loop import train
from smoothcert.training.metrics import METRICS, compress_metrics
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.resume import State, load_state, save_state
from smoothcert.training.run_folder import MODEL, RECIPE, STATE
from smoothcert.training.status import TrainingStatus

ROOT = Path(__file__).parents[2]


@pytest.fixture
def finished(trained_pair: Path, tmp_path: Path) -> Path:
    """A run of 2 epochs on `tiny_data`."""
    return Path(shutil.copytree(trained_pair / "finished", tmp_path / "finished"))


@pytest.fixture
def half(trained_pair: Path, tmp_path: Path) -> Path:
    """The same run, interrupted after its first epoch."""
    return Path(shutil.copytree(trained_pair / "half", tmp_path / "half"))


@pytest.fixture(scope="module")
def trained_pair(tmp_path_factory: pytest.TempPathFactory, tiny_data: ImageData) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    train(tiny_recipe(), tiny_data, folder / "finished", device="cpu")

    def interrupt(status: TrainingStatus) -> None:
        if status.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(), tiny_data, folder / "half", device="cpu", on_progress=interrupt)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused_and_unchanged(
    folder: Path, data: ImageData, match: str, recipe: TrainRecipe | None = None, resume: bool = True
) -> None:
    """Training in `folder` costs one line, and changes nothing in it."""
    before = contents(folder)
    with pytest.raises((RequestError, WorkError), match=match) as caught:
        train(recipe or tiny_recipe(), data, folder, resume=resume, device="cpu")
    assert "\n" not in str(caught.value)
    assert contents(folder) == before


def changed_state(folder: Path, **changes: object) -> None:
    state = torch.load(folder / STATE, weights_only=True)
    torch.save({k: v for k, v in {**state, **changes}.items() if v is not None}, folder / STATE)


def test_resumed_run_equals_uninterrupted_run(half: Path, finished: Path, tiny_data: ImageData) -> None:
    assert load_run(half).epoch == 1
    for _ in range(2):  # the second time the run is finished and nothing is left to do
        train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
        assert digest(half) == digest(finished)
        assert without_times(metrics(half)) == without_times(metrics(finished))


def test_resumed_run_with_adamw_and_average_equals_uninterrupted_run(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(optimizer="adamw", schedule="cosine", ema=0.9, learning_rate=0.002)

    def interrupt(status: TrainingStatus) -> None:
        if status.epoch == 1:
            raise KeyboardInterrupt

    train(recipe, tiny_data, tmp_path / "whole", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tiny_data, tmp_path / "cut", device="cpu", on_progress=interrupt)
    train(recipe, tiny_data, tmp_path / "cut", device="cpu", resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    assert without_times(metrics(tmp_path / "cut")) == without_times(metrics(tmp_path / "whole"))
    state = load_state(tmp_path / "cut")
    assert state is not None
    assert state.average is not None
    assert tensors_digest(state.average) == digest(tmp_path / "cut") != tensors_digest(state.model)
    (tmp_path / "cut" / MODEL).unlink()
    train(recipe, tiny_data, tmp_path / "cut", device="cpu", resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole"), "the average is written again from the state"
    changed_state(tmp_path / "cut", average=None)
    refused_and_unchanged(tmp_path / "cut", tiny_data, "do not fit the network", recipe)


EPOCHS = 6


def train_epochs(data: ImageData, folder: Path) -> None:
    """So slowly that it is killed in the middle."""
    train(tiny_recipe(epochs=EPOCHS), data, folder, device="cpu", on_progress=lambda status: time.sleep(0.2))


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_weights(tmp_path: Path, tiny_data: ImageData) -> None:
    path = tmp_path / "killed" / METRICS
    kill_when(lambda: path.exists() and len(path.read_text().splitlines()) >= 2, train_epochs, tiny_data, path.parent)
    assert 1 <= load_run(tmp_path / "killed").epoch < EPOCHS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the killed process: the order of sums depends on it
    for name in ("killed", "whole"):
        train(tiny_recipe(epochs=EPOCHS), tiny_data, tmp_path / name, resume=True, device="cpu")
    torch.set_num_threads(threads)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert without_times(metrics(tmp_path / "killed")) == without_times(metrics(tmp_path / "whole"))
    assert not list((tmp_path / "killed").glob(".*.tmp"))


def test_existing_run_is_not_overwritten(finished: Path, tiny_data: ImageData) -> None:
    refused_and_unchanged(finished, tiny_data, "holds a run already; continue it with --resume", resume=False)
    refused_and_unchanged(finished, tiny_data, "epochs: the run has 2, the request 3", tiny_recipe(epochs=3))


@pytest.mark.parametrize("left", [MODEL, STATE, "attacks"])
def test_a_folder_with_one_useful_file_of_a_run_is_not_overwritten(half: Path, tiny_data: ImageData, left: str) -> None:
    for name in {MODEL, STATE, METRICS} - {left}:
        (half / name).unlink()
    (half / left).touch()
    refused_and_unchanged(half, tiny_data, "holds a run already", tiny_recipe(learning_rate=0.001), resume=False)


def test_a_run_that_diverged_at_once_is_replaced(finished: Path, tmp_path: Path, tiny_data: ImageData) -> None:
    """From initial weights, whose state is saved before the first epoch; and with weights that the last step ruins."""
    weights, one_step = finished / MODEL, tiny_data.subset(torch.arange(64))
    for data, rate, what in ((tiny_data, 1e8, "loss"), (one_step, 1e15, "weights")):
        out, slow = tmp_path / what, tiny_recipe(epochs=1)
        with pytest.raises(WorkError, match=f"{what} diverged .*no epoch was saved: train again into the same --out"):
            train(tiny_recipe(learning_rate=rate), data, out, init=weights, device="cpu")
        train(slow, data, out, device="cpu")
        train(slow, data, tmp_path / "elsewhere" / what, device="cpu")
        assert digest(out) == digest(tmp_path / "elsewhere" / what)
        assert len(metrics(out)) == 1


def test_damaged_model_is_refused(finished: Path) -> None:
    path = finished / MODEL
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(WorkError, match=r"model\.safetensors: damaged") as caught:
        load_run(finished)
    assert "\n" not in str(caught.value)


def test_finished_run_without_state_is_not_trained_again(finished: Path, tiny_data: ImageData) -> None:
    (finished / STATE).unlink()
    before, notes, module = contents(finished), list[str](), TinyNet(10)
    train(tiny_recipe(), tiny_data, finished, resume=True, device="cpu", on_note=notes.append, model=module)
    assert contents(finished) == before
    assert notes == [f"{finished}: trained already, 2 of 2 epochs"]
    assert tensors_digest(module.state_dict()) == digest(finished)


def test_compressed_metrics_of_a_finished_run_stay_compressed(finished: Path, tiny_data: ImageData) -> None:
    assert compress_metrics(finished / METRICS, 2)
    before, notes = contents(finished), list[str]()
    train(tiny_recipe(), tiny_data, finished, resume=True, device="cpu", on_note=notes.append)
    assert contents(finished) == before
    assert notes == [f"{finished}: trained already, 2 of 2 epochs"]


def test_metrics_beyond_the_last_epoch_of_a_finished_run_are_removed(finished: Path, tiny_data: ImageData) -> None:
    """A training of more epochs may have been stopped before the state of the third one was saved."""
    before = (finished / METRICS).read_text()
    (finished / METRICS).write_text(before + json.dumps(metrics(finished)[1] | {"epoch": 2}) + "\n")
    train(tiny_recipe(), tiny_data, finished, resume=True, device="cpu")
    assert (finished / METRICS).read_text() == before


def test_unfinished_run_without_state_is_refused(half: Path, tiny_data: ImageData) -> None:
    (half / STATE).unlink()
    refused_and_unchanged(half, tiny_data, r"state\.pt is gone, so the run cannot continue after its 1 of 2 epochs")


def test_metrics_of_several_epochs_without_state_are_refused(half: Path, tiny_data: ImageData) -> None:
    for name in (STATE, MODEL):
        (half / name).unlink()
    line = metrics(half)[0]
    (half / METRICS).write_text("".join(json.dumps(line | {"epoch": epoch}) + "\n" for epoch in range(3)))
    refused_and_unchanged(half, tiny_data, r"after its 3 of 2 epochs")


def test_first_epoch_is_repeated_if_its_state_is_missing(finished: Path, half: Path, tiny_data: ImageData) -> None:
    for name in (STATE, MODEL):
        (half / name).unlink()
    train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
    assert digest(half) == digest(finished)
    assert without_times(metrics(half)) == without_times(metrics(finished))


@pytest.mark.parametrize("left", ["none", "of the epoch before"])
def test_missing_model_is_written_again_from_the_state(
    finished: Path, half: Path, tiny_data: ImageData, left: str
) -> None:
    """A process that is killed between writing state and model leaves such folders."""
    before = (finished / MODEL).read_bytes()
    (finished / MODEL).unlink()
    if left != "none":
        shutil.copy(half / MODEL, finished / MODEL)
    train(tiny_recipe(), tiny_data, finished, resume=True, device="cpu")
    assert (finished / MODEL).read_bytes() == before


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("left", [(STATE,), (MODEL,), (METRICS,), (STATE, MODEL, METRICS)])
def test_folder_without_recipe_is_refused(
    half: Path, tiny_data: ImageData, left: tuple[str, ...], resume: bool
) -> None:
    for name in contents(half):
        if name not in left:
            (half / name).unlink()
    way = (
        r" \(the model has it: in Python, load\(.*\)\.recipe\.save\(Path\(.*recipe\.yaml'\)\)\)"
        if MODEL in left
        else ""
    )
    refused_and_unchanged(
        half, tiny_data, rf"but no recipe\.yaml; restore recipe\.yaml{way}, or", tiny_recipe(sigma=0.25), resume
    )


def test_a_lost_recipe_is_restored_from_the_model(half: Path) -> None:
    """As docs/training.md says."""
    before = (half / RECIPE).read_bytes()
    (half / RECIPE).unlink()
    load_run(half).recipe.save(half / RECIPE)
    assert (half / RECIPE).read_bytes() == before


def test_resume_refuses_changed_training_data(half: Path, tiny_data: ImageData) -> None:
    labels, images = tiny_data.labels.clone(), tiny_data.images.clone()
    labels[7] = (labels[7] + 1) % 10
    images[7, 0, 14, 14] ^= 1
    for data in (replace(tiny_data, labels=labels), replace(tiny_data, images=images)):
        refused_and_unchanged(half, data, "the training data have changed since its state was saved")


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": (1,)},
        {"epoch": 0.5},
        {"epoch": True},
        {"epoch": 2**40},
        {"epoch": -1},
        {"epoch": 2},
        {"epoch": None},
        {"model": 3},
        {"model": {"a": 3}},
        {"model": None},
        {"optimizer": None},
        {"optimizer": 3},
        {"optimizer": {"state": 3}},
        {"optimizer": {"state": {0: {"momentum_buffer": 3}}}},
        {"optimizer": {"state": {0: 3}}},
        {"optimizer": {"state": {0: {"momentum_buffer": torch.zeros(())}}}},
        {"about": 3},
        {"about": "3"},
        {"about": "{"},
        {"about": '{"recipe": 3}'},
        {"about": '{"data": 3}'},
        {"about": None},
    ],
    ids=str,
)
def test_state_with_wrong_types_is_refused(half: Path, tiny_data: ImageData, changes: dict[str, object]) -> None:
    changed_state(half, **changes)
    match = r"state\.pt: damaged|state\.pt: expected at most|state\.pt was saved after 2 epochs, .* holds 1|do not fit"
    refused_and_unchanged(half, tiny_data, match)


def test_truncated_state_is_refused_and_kept(half: Path, tiny_data: ImageData) -> None:
    content = (half / STATE).read_bytes()
    lengths = (0, 1, 10, 1000, len(content) // 2, len(content) - 2000, len(content) - 1)
    for damaged in (b"not a checkpoint", *(content[:length] for length in lengths)):
        (half / STATE).write_bytes(damaged)
        refused_and_unchanged(half, tiny_data, r"state\.pt: damaged")


class WritesAFile:
    """Writes the file `marker` when it is unpickled the ordinary way."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.marker), "w")


def test_code_in_a_state_does_not_run(half: Path, tiny_data: ImageData, tmp_path: Path) -> None:
    changed_state(half, further=WritesAFile(tmp_path / "marker"))
    refused_and_unchanged(half, tiny_data, r"state\.pt: damaged")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", [STATE, MODEL])
def test_a_folder_in_place_of_a_file_is_refused(half: Path, name: str) -> None:
    """As pipes and devices are, which would be read for ever."""
    (half / name).unlink()
    (half / name).mkdir()
    with pytest.raises(RequestError, match=rf"{name}: expected a file, got a folder"):
        load_state(half) if name == STATE else load_run(half)


def test_a_changed_bit_in_a_weight_is_refused(half: Path, tiny_data: ImageData) -> None:
    *_, weight = (tensor for tensor in load_run(half).model.state_dict().values() if tensor.ndim == 2)
    for name in (STATE, MODEL):
        content = bytearray((half / name).read_bytes())
        content[content.index(weight.numpy().tobytes()) + 2] ^= 1
        (half / name).write_bytes(content)
    refused_and_unchanged(half, tiny_data, r"state\.pt: damaged")
    with pytest.raises(WorkError, match=r"model\.safetensors: damaged .*the weights have changed"):
        load_run(half)


def test_resume_refuses_an_edited_recipe(half: Path, tiny_data: ImageData) -> None:
    edited = tiny_recipe(sigma=0.25)
    edited.save(half / RECIPE)
    refused_and_unchanged(half, tiny_data, r"sigma: the run has 0\.5, the request 0\.25", edited)
    (half / MODEL).unlink()
    refused_and_unchanged(half, tiny_data, r"state\.pt says .*sigma: the run has 0\.5", edited)


def test_resume_accepts_more_epochs_in_the_recipe(finished: Path, tmp_path: Path, tiny_data: ImageData) -> None:
    """The trained epochs are the beginning of the longer run."""
    longer = tiny_recipe(epochs=3)
    refused_and_unchanged(finished, tiny_data, r"the request 3\); .* edit recipe\.yaml, or choose another", longer)
    longer.save(finished / RECIPE)
    train(longer, tiny_data, finished, resume=True, device="cpu")
    train(longer, tiny_data, tmp_path / "longer", device="cpu")
    assert digest(finished) == digest(tmp_path / "longer")
    assert load_run(finished).recipe == longer


def test_more_epochs_of_a_cosine_schedule_are_reported(tmp_path: Path, tiny_data: ImageData) -> None:
    """The learning rates of the trained epochs depend on the number of all epochs."""
    notes, run = list[str](), tmp_path / "run"
    short, longer = (tiny_recipe(schedule="cosine", epochs=epochs) for epochs in (1, 2))
    train(short, tiny_data, run, device="cpu", on_note=notes.append)
    longer.save(run / RECIPE)
    for _ in range(2):
        train(longer, tiny_data, run, resume=True, device="cpu", on_note=notes.append)
    assert notes[0].startswith(f"{run}: epochs 0 to 0 had the learning rates of a cosine schedule over 1 ")
    assert [note for note in notes if "cosine schedule" in note] == notes[:1]


@pytest.mark.parametrize(
    "line",
    [
        '{"epoch": 0, "lo',
        '{"epoch": 0, "loss": 1.0}',
        "[1]",
        '{"epoch": 5, "loss": 1.0}',
        '{"loss": 1}',
        "\udcff",
        "1e999",
    ],
)
def test_damaged_metrics_are_refused_with_the_line_number(finished: Path, tiny_data: ImageData, line: str) -> None:
    lines = (finished / METRICS).read_bytes().splitlines()
    (finished / METRICS).write_bytes(b"\n".join([lines[0], line.encode("utf-8", "surrogateescape"), lines[1], b""]))
    refused_and_unchanged(finished, tiny_data, r"metrics\.jsonl, line 2: (damaged|expected epoch 1)")


def test_incomplete_last_line_of_metrics_is_dropped(half: Path, finished: Path, tiny_data: ImageData) -> None:
    with (half / METRICS).open("a") as file:
        file.write('{"epoch": 1, "lo')
    train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
    assert without_times(metrics(half)) == without_times(metrics(finished))


def test_missing_lines_of_metrics_are_refused_and_a_missing_file_is_noted(finished: Path, tiny_data: ImageData) -> None:
    (finished / METRICS).write_text((finished / METRICS).read_text().splitlines()[0] + "\n")
    refused_and_unchanged(finished, tiny_data, r"state\.pt was saved after 2 epochs, but metrics\.jsonl holds 1")
    (finished / METRICS).unlink()
    notes: list[str] = []
    train(tiny_recipe(), tiny_data, finished, resume=True, device="cpu", on_note=notes.append)
    assert any("metrics.jsonl is gone" in note for note in notes)


@pytest.mark.parametrize("key", ["recipe", "provenance", "epoch", "input"])
def test_model_with_wrong_metadata_is_refused(finished: Path, tiny_data: ImageData, key: str) -> None:
    with safe_open(finished / MODEL, framework="pt") as file:
        about = json.loads(file.metadata()["smoothcert"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for value in (None, 3, "a", [1], {}, -1, 10**40):
        changed = {k: v for k, v in {**about, key: value}.items() if v is not None}
        if key == "provenance" and value == {}:
            continue
        save_file(tensors, finished / MODEL, metadata={"smoothcert": json.dumps(changed)})
        with pytest.raises(WorkError, match=r"model\.safetensors: ") as caught:
            load_run(finished)
        assert "\n" not in str(caught.value)
        refused_and_unchanged(finished, tiny_data, r"model\.safetensors: ")
    save_file(tensors, finished / MODEL)
    with pytest.raises(WorkError, match=r"model\.safetensors: damaged or not a smoothcert model"):
        load_run(finished)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", [1, 28]),
        ("shape", [1, 0, 28]),
        ("shape", [1, 28, 28.0]),
        ("num_classes", 0),
        ("num_classes", True),
        ("num_classes", 10**9),
        ("normalization", {"mean": [0.5, 0.5], "std": [0.5]}),
        ("normalization", {"mean": [0.5], "std": [float("nan")]}),
        ("class_names", ["a", "b"]),
    ],
)
def test_an_input_that_no_model_has_is_refused(field: str, value: object) -> None:
    names = None if field == "num_classes" else ("a", "b", "c")
    spec = asdict(InputSpec((1, 28, 28), 3, Normalization((0.5,), (0.2,)), names))
    assert asdict(InputSpec.from_mapping(spec)) == spec
    with pytest.raises((ValueError, TypeError)):
        InputSpec.from_mapping(spec | {field: value})


def test_temporary_files_of_killed_processes_are_removed(half: Path, tiny_data: ImageData) -> None:
    for name in (RECIPE, STATE, MODEL, METRICS):
        (half / f".{name}.abcd1234.tmp").write_text("half of it")
    (half / ".mine.tmp").write_text("not ours")
    train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
    assert [path.name for path in half.glob(".*")] == [".mine.tmp"]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """As on a full disk: no file can grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("longest", "epochs"),
    [(60.0, [1, 5]), (0.0, [1, 2, 3, 4, 5])],
    ids=["the next save is after 6.7 s", "longest pause"],
)
def test_saving_takes_a_small_share_of_the_time(
    tmp_path: Path,
    tiny_data: ImageData,
    monkeypatch: pytest.MonkeyPatch,
    longest: float,
    epochs: list[int],
) -> None:
    """Epochs of the tiny network take some hundredths of a second."""
    saved = []

    def slow_save_state(folder: Path, state: State) -> None:
        saved.append(state.epoch)
        time.sleep(0.2)
        save_state(folder, state)

    monkeypatch.setattr(loop, "save_state", slow_save_state)
    monkeypatch.setattr(loop, "SAVE_SECONDS", longest)
    train(tiny_recipe(epochs=5), tiny_data, tmp_path / "run", device="cpu")
    assert saved == epochs


def test_full_disk_keeps_the_last_saved_epoch(half: Path, finished: Path, tiny_data: ImageData) -> None:
    before = contents(half)
    for size in (50_000, 200_000):
        with (
            file_size_limit(size),
            pytest.raises(WorkError, match=r"could not be written to .*File too large") as caught,
        ):
            train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
        assert "\n" not in str(caught.value)
        after = contents(half)
        assert {name: after[name] for name in (STATE, MODEL)} == {name: before[name] for name in (STATE, MODEL)}
        assert set(after) == set(before), "no temporary files"
    train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
    assert digest(half) == digest(finished)


def test_resume_refuses_a_changed_network(tmp_path: Path, tiny_data: ImageData) -> None:
    def build(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, width), torch.nn.Linear(width, 10))

    train(tiny_recipe(model="mine", epochs=1), tiny_data, tmp_path / "run", model=build(4), device="cpu")
    with pytest.raises(RequestError, match="do not fit the network"):
        train(
            tiny_recipe(model="mine", epochs=1), tiny_data, tmp_path / "run", model=build(5), resume=True, device="cpu"
        )


def test_second_process_in_a_folder_is_refused(finished: Path, tmp_path: Path, tiny_data: ImageData) -> None:
    recipe, folder = tiny_recipe(epochs=2), tmp_path / "run"

    def second(status: TrainingStatus) -> None:
        with pytest.raises(RequestError, match=r"another process is writing it; .* choose another --out"):
            train(recipe, tiny_data, folder, device="cpu", resume=True)

    train(recipe, tiny_data, folder, device="cpu", on_progress=second)
    assert [line["epoch"] for line in metrics(folder)] == [0, 1]
    assert digest(folder) == digest(finished)
    assert not list(folder.glob(".*"))
