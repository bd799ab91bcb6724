"""A teacher next to the run: trained once, its votes cached, checked, and given to the loss of their images."""

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tiny import digest, metrics, tiny_recipe, without_times
from torch import Tensor

from smoothcert.data import ImageData
from smoothcert.errors import RequestError
from smoothcert.io.files import locked
from smoothcert.io.records import parse_recipe
from smoothcert.noise import NOISES
from smoothcert.objectives import CatRs, LossTerms, Objective
from smoothcert.smoothing.votes import VoteCounter
from smoothcert.training import teacher_votes
from smoothcert.training.checkpoint import load_run, read_model_file
from smoothcert.training.loop import train
from smoothcert.training.recipe import TrainRecipe, with_overrides
from smoothcert.training.run_folder import MODEL
from smoothcert.training.several_runs import train_together
from smoothcert.training.status import TeacherVotesStatus, TrainingStatus

VOTES = 40


def recipe(**changes: object) -> TrainRecipe:
    fields = {
        "objective": CatRs(num_noise=2, steps=1),
        "teacher": tiny_recipe(sigma=0.25, epochs=1, learning_rate_drops=()),
        "teacher_votes": VOTES,
    }
    return tiny_recipe(**(fields | changes))


@pytest.fixture(scope="module")
def images(tiny_data: ImageData) -> ImageData:
    return tiny_data.subset(torch.arange(192))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, images: ImageData) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    train(recipe(), images, folder / "run", device="cpu")
    return folder


def files_of_teacher(folder: Path) -> tuple[Path, Path]:
    (home,) = folder.glob("teacher-*")
    return home, home / f"votes-n{VOTES}.safetensors"


def test_resumed_run_with_a_teacher_equals_the_uninterrupted_run(trained: Path, images: ImageData) -> None:
    """The second run shares the teacher of the first one: its files are not written again."""
    home, votes = files_of_teacher(trained)
    before = {path: path.stat().st_mtime_ns for path in (votes, home / MODEL)}

    def interrupt(status: TrainingStatus) -> None:
        if status.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe(), images, trained / "half", device="cpu", on_progress=interrupt)
    assert not load_run(trained / "half").finished
    train(recipe(), images, trained / "half", device="cpu", resume=True)
    assert digest(trained / "half") == digest(trained / "run")
    assert without_times(metrics(trained / "half")) == without_times(metrics(trained / "run"))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert read_model_file(trained / "run" / MODEL).provenance["teacher"]["folder"] == home.name


def test_runs_side_by_side_use_their_teacher(trained: Path, images: ImageData) -> None:
    folders = [trained / "together-0", trained / "together-1"]
    assert not train_together([(recipe(), images, folder) for folder in folders], 2, device="cpu")
    assert {digest(folder) for folder in folders} == {digest(trained / "run")}


class Recorder(Objective):
    """Keeps the images and targets of each step."""

    uses_teacher: ClassVar[bool] = True
    seen: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def loss(self, classifier, images, labels, noise, progress) -> LossTerms:  # type: ignore[no-untyped-def]
        assert progress.targets is not None
        Recorder.seen.append((images.clone(), progress.targets.clone()))
        logits = classifier(images)
        return LossTerms(logits.logsumexp(1).mean(), {}, logits.unsqueeze(0))


def test_votes_follow_their_images_through_the_shuffle(trained: Path, images: ImageData) -> None:
    """Each image of each step comes with the shares of the teacher's votes for it, as counted one by one."""
    home, _ = files_of_teacher(trained)
    trained_teacher = load_run(home)
    noise = NOISES["gaussian"](0.25).sample((400, *images.shape), torch.Generator().manual_seed(0))
    Recorder.seen.clear()
    train(recipe(objective=Recorder(), epochs=1, learning_rate_drops=()), images, trained / "recorded", device="cpu")
    assert load_run(trained / "recorded").finished, "whose record names the objective, and does not load its code"
    steps = Recorder.seen[-3:]  # the calls before them try the loss before the run folder is made
    assert len(steps) == 3
    assert len({image.numpy().tobytes() for batch, _ in steps for image in batch}) == 192
    for batch, targets in steps:
        assert torch.allclose(targets.sum(1), torch.ones(64))
        for image, shares in list(zip(batch, targets, strict=True))[:8]:
            with torch.no_grad():
                again = torch.bincount(trained_teacher.model(image + noise).argmax(1), minlength=10) / 400
            assert (again - shares).abs().max() < 0.35  # five standard errors of 40 votes and 400 votes
    assert steps[0][1].unique(dim=0).shape[0] > 1


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_every_image_has_its_own_noise(
    images: ImageData, trained: Path, monkeypatch: pytest.MonkeyPatch, noise: str
) -> None:
    """Copies of one image in several groups: their votes are those of the library for (seed, position in the data)."""
    monkeypatch.setattr(teacher_votes, "default_batch_size", lambda device, shape: 90)  # three images at once
    model = load_run(files_of_teacher(trained)[0])
    model = replace(model, recipe=model.recipe.model_copy(update={"noise": noise}))
    copies = images.subset(torch.full((8,), 5))
    assert isinstance(model.recipe, TrainRecipe)
    parts = list(teacher_votes.count_votes(model.model, model.recipe, copies, 30, torch.device("cpu")))
    assert [len(part) for part in parts] == [3, 3, 2]
    votes = torch.cat(parts)
    batch, _ = copies.batch(torch.arange(8))
    counter = VoteCounter(model.model, NOISES[noise](0.25), 10)
    alone = [counter.count(batch[:1], [(model.recipe.seed, i)], "estimate", 30)[0].tolist() for i in range(8)]
    assert votes.tolist() == alone
    assert len(set(map(tuple, alone))) > 4


def test_run_waits_while_another_one_trains_its_teacher(images: ImageData, trained: Path, tmp_path: Path) -> None:
    home = files_of_teacher(trained)[0].name
    notes: list[str] = []
    with ExitStack() as other_run:
        other_run.enter_context(locked(tmp_path / f".{home}.lock", wait=False))

        def end_the_other_run(note: str) -> None:
            notes.append(note)
            other_run.close()

        train(recipe(epochs=1), images, tmp_path / "run", device="cpu", on_note=end_the_other_run)
    assert notes == [
        f"{tmp_path / home}: another run trains this teacher; this run waits for it and then uses it",
        f"{tmp_path / 'run'}: first, its teacher is trained (1 epoch; --set teacher.epochs=N changes it) and casts 40 "
        f"votes for each of 192 images, in {tmp_path / home}",
    ]
    assert digest(tmp_path / home) == digest(trained / home)
    assert not list(tmp_path.glob(".*.lock"))


def test_a_finished_teacher_only_casts_other_votes(images: ImageData, trained: Path, tmp_path: Path) -> None:
    folder, notes = Path(shutil.copytree(trained, tmp_path / "copy")), list[str]()
    train(recipe(epochs=1, teacher_votes=7), images, folder / "more", device="cpu", on_note=notes.append)
    assert notes[0].startswith(f"{folder / 'more'}: first, its teacher casts 7 votes for each of 192 images, in ")


def test_interrupted_votes_are_continued(
    images: ImageData, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress counts all images; the second run counts those after the first save, and the file is the same."""
    for name in ("REPORT_SECONDS", "SAVE_SECONDS"):
        monkeypatch.setattr(teacher_votes, name, -1.0)
    monkeypatch.setattr(teacher_votes, "default_batch_size", lambda device, shape: 80 * VOTES)
    shutil.copytree(trained, tmp_path / "copy")
    home, votes = files_of_teacher(tmp_path / "copy")
    whole = votes.read_bytes()
    votes.unlink()
    seen: list[TrainingStatus] = []

    def interrupt(status: TrainingStatus) -> None:
        seen.append(status)
        if status.done == 160:
            raise KeyboardInterrupt

    folder = tmp_path / "copy/later"
    with pytest.raises(KeyboardInterrupt):
        train(recipe(), images, folder, device="cpu", on_progress=interrupt)
    assert [(status.done, status.total) for status in seen] == [(80, 192), (160, 192)]
    assert str(seen[0]).startswith("votes of the teacher 80/192 images ")
    assert not votes.exists()

    seen.clear()
    train(recipe(), images, folder, device="cpu", resume=True, on_progress=seen.append)
    voted = [status.done for status in seen if isinstance(status, TeacherVotesStatus)]
    assert voted == [160, 192], "the first 80 were saved"
    assert votes.read_bytes() == whole
    assert sorted(path.name for path in home.glob("votes*")) == [votes.name]
    assert digest(folder) == digest(trained / "run")


def test_damaged_votes_are_counted_again(trained: Path, images: ImageData, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    _, votes = files_of_teacher(tmp_path / "copy")
    whole = votes.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-5], b"text"):
        votes.write_bytes(damaged)
        train(recipe(epochs=1), images, tmp_path / "copy" / f"other{len(damaged)}", device="cpu")
        assert votes.read_bytes() == whole


def test_recipe_with_a_teacher_is_written_and_read_again() -> None:
    stored = recipe().to_mapping()
    assert parse_recipe(TrainRecipe, stored, "recipe") == recipe()
    changed = with_overrides(recipe(), ["teacher.epochs=3", "teacher_votes=7"])
    assert changed.teacher is not None
    assert (changed.teacher.epochs, changed.teacher_votes) == (3, 7)
    assert not {"teacher", "teacher_votes"} & set(tiny_recipe().to_mapping())


@pytest.mark.parametrize(
    "override", ["objective=gaussian", "teacher.model=module:function", "teacher.objective=module:Class"]
)
def test_teachers_that_cannot_be_used_are_refused(override: str) -> None:
    with pytest.raises(RequestError, match="teacher: expected"):
        with_overrides(recipe(), [override])


def test_runs_with_the_same_name_of_other_data_do_not_share_a_teacher(tmp_path: Path) -> None:
    """A folder of images may have changed: the digest of the data counts, not their name."""
    teacher = tiny_recipe()
    first, second = (teacher_votes.teacher_folder(teacher, 64 * letter, tmp_path / "run") for letter in "ab")
    assert first != second
    moved = teacher.model_copy(update={"dataset": "npz:elsewhere.npz"})
    assert teacher_votes.teacher_folder(moved, 64 * "a", tmp_path / "run") == first
