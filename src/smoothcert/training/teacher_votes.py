"""The teacher in a recipe (CAT-RS): a network that is trained first, and whose votes for each image the loss uses.

Teacher and votes are in a folder next to the run, `teacher-<digest>`, named after the teacher's recipe and the data:
runs with the same teacher, for instance with other noise levels, share it. Votes that an interrupted run has counted
are kept, and the next one counts the rest.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from smoothcert.data import Images
from smoothcert.io.files import LockedError, check_regular_file, locked
from smoothcert.io.text import counted
from smoothcert.models.precision import resolve_precision, with_kernels
from smoothcert.noise import NOISES
from smoothcert.smoothing.votes import VoteCounter, default_batch_size
from smoothcert.training.checkpoint import DAMAGE, load_run, read_model_file, tensors_digest, write_tensors
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.run_folder import MODEL, RECIPE
from smoothcert.training.status import REPORT_SECONDS, TeacherVotesStatus

if TYPE_CHECKING:
    from smoothcert.training.run_in_progress import RunInProgress

SAVE_SECONDS = 30.0
"""Between two saves of the votes that have been counted."""


def teacher_shares(
    run: "RunInProgress", teacher: TrainRecipe, train: Callable[..., None]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the shares [images, classes] of the teacher's votes for each image of `run`, and where they come from.

    `train` of `training/loop.py` trains the teacher, unless that is done. While another run does it, this one waits.
    """
    recipe = run.recipe
    digest = run.data_digest
    group = run.group
    same = {"dataset": recipe.dataset, "image_size": recipe.image_size, "augment": teacher.augment or recipe.augment}
    teacher = teacher.model_copy(update=same)
    kept = {name: getattr(run.options, name) for name in ("device", "capture", "compiling", "on_progress", "on_note")}
    home = teacher_folder(teacher, digest, run.folder)
    path = home / f"votes-n{recipe.teacher_votes}.safetensors"
    with _one_run(home, run.options.on_note) if group.leads else nullcontext():
        group.wait()  # the other processes look for the teacher when the first one has the lock
        if group.leads and not path.exists():
            finished = (home / MODEL).exists() and read_model_file(home / MODEL).epoch == teacher.epochs
            epochs = f"{counted(teacher.epochs, 'epoch')}; --set teacher.epochs=N changes it"
            run.options.on_note(
                f"{run.folder}: first, its teacher {'' if finished else f'is trained ({epochs}) and '}casts "
                f"{recipe.teacher_votes:,} votes for each of {len(run.data):,} images, in {home}"
            )
        train(teacher, run.data, home, resume=(home / RECIPE).exists(), **kept)
    trained = load_run(home)
    about = {
        "data": digest,
        "weights_sha256": tensors_digest(trained.model.state_dict()),
        "sigma": teacher.sigma,
        "votes": recipe.teacher_votes,
    }
    votes = read_votes(path, about)
    if votes is None:
        votes = cast_votes(run, trained.model, teacher, path, about)
    provenance = {"folder": home.name, "votes_sha256": tensors_digest({"votes": votes})}
    return votes.to(torch.float32) / recipe.teacher_votes, provenance


@contextmanager
def _one_run(home: Path, on_note: Callable[[str], None]) -> Iterator[None]:
    """Wait, with a note, until no other run trains the teacher in `home`, and keep others from it meanwhile."""
    lock = home.with_name(f".{home.name}.lock")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, wait=False))
        except LockedError:
            on_note(f"{home}: another run trains this teacher; this run waits for it and then uses it")
            stack.enter_context(locked(lock, wait=True))
        yield


def teacher_folder(teacher: TrainRecipe, digest: str, folder: Path) -> Path:
    """Return the folder of a teacher next to the run folder `folder`."""
    fields = {**teacher.to_mapping(), "dataset": digest}
    identity = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return folder.resolve().parent / f"teacher-{identity[:12]}"


def cast_votes(
    run: "RunInProgress", model: nn.Module, teacher: TrainRecipe, path: Path, about: Mapping[str, Any]
) -> Tensor:
    """Return the votes int32 [images, classes] of `teacher` for the images of `run`, and write them to `path`."""
    unfinished = path.with_suffix(".unfinished")
    before = read_votes(unfinished, about)
    parts = [] if before is None else [before]
    first = done = sum(map(len, parts))
    started = saved = reported = time.perf_counter()
    for part in count_votes(model, teacher, run.data, run.recipe.teacher_votes, run.device, first):
        parts.append(part)
        done += len(part)
        now = time.perf_counter()
        if run.group.leads and (now - reported > REPORT_SECONDS or done == len(run.data)):
            run.options.on_progress(_status(run, done, (done - first) / max(now - started, 1e-9)))
            reported = time.perf_counter()
        if run.group.leads and now - saved > SAVE_SECONDS and done < len(run.data):
            write_votes(unfinished, torch.cat(parts), about)
            saved = time.perf_counter()
    votes = torch.cat(parts)
    write_votes(path, votes, about)
    unfinished.unlink(missing_ok=True)
    return votes


def _status(run: "RunInProgress", done: int, speed: float) -> TeacherVotesStatus:
    return TeacherVotesStatus(
        epoch=0,
        epochs=run.recipe.epochs,
        step=0,
        steps=run.steps,
        loss=math.nan,
        noisy_accuracy=None,
        images_per_second=speed,
        seconds_left=(len(run.data) - done) / speed,
        images=done,
        all_images=len(run.data),
    )


def count_votes(
    model: nn.Module, recipe: TrainRecipe, data: Images, votes: int, device: torch.device, first: int = 0
) -> Iterator[Tensor]:
    """Yield the votes int32 [some, classes] of a teacher, trained by `recipe`, for the images from `first` on.

    Images are not augmented. Their noise depends on the seed of the recipe and their position in `data` alone.
    """
    noise = NOISES[recipe.noise](recipe.sigma)
    size = default_batch_size(device, data.shape)
    network, dtype = with_kernels(model.to(device), resolve_precision(recipe.precision, device), device)
    counter = VoteCounter(network, noise, data.num_classes, size, dtype)
    for indices in torch.split(torch.arange(first, len(data), device="cpu"), max(1, size // votes)):
        if len(indices) == 0:  # torch.split of no images is one part
            return
        images, _ = data.batch(indices)
        seeds = [(recipe.seed, index) for index in indices.tolist()]
        counts = counter.count(images.to(device), seeds, "estimate", votes)
        yield torch.from_numpy(counts).to(torch.int32)


def write_votes(path: Path, votes: Tensor, about: Mapping[str, Any]) -> None:
    write_tensors(path, {"votes": votes}, {**about, "sha256": tensors_digest({"votes": votes})})


def read_votes(path: Path, about: Mapping[str, Any]) -> Tensor | None:
    """Read votes; None if there are none, other ones or damaged ones, which are then counted again."""
    check_regular_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            stored = json.loads(file.metadata()["smoothcert"])
            votes = file.get_tensor("votes")
        same = stored == {**about, "sha256": tensors_digest({"votes": votes})}
    except DAMAGE:  # a missing file is an OSError
        return None
    return votes if same else None
