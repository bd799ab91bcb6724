"""Progress bars of training, certification, attacks and analyses, and notes above them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress

from smoothcert.io.console import PlainColumn, PlainConsole, leads
from smoothcert.io.references import same_reference
from smoothcert.io.text import duration, rate

if TYPE_CHECKING:  # each command loads what it needs: certifying starts without the training libraries
    from smoothcert.certification.attack import AttackStatus
    from smoothcert.certification.certify_dataset import CertificationStatus
    from smoothcert.data import Images
    from smoothcert.training.loop import TrainingStatus
    from smoothcert.training.recipe import TrainRecipe


@contextmanager
def _bar(console: PlainConsole) -> Iterator[Progress]:
    """A bar that is updated on a terminal; elsewhere its last state is printed once, by one of several processes.

    Work that ends before the first progress, such as a refused request, leaves no bar.
    """
    columns = (PlainColumn("{task.description}"), BarColumn(bar_width=10), PlainColumn("{task.fields[now]}"))
    bar = Progress(*columns, console=console, disable=not leads())
    bar.start()
    try:
        yield bar
    finally:
        if any(task.completed for task in bar.tasks):
            bar.stop()
        else:
            bar.live.transient = True
            bar.live.stop()  # bar.stop would end the line of a bar, which is not there


def print_data_notes(console: PlainConsole, images: "Images", trained_on: str | None = None) -> None:
    """Print what a user should know about `images`. `trained_on` is the data set of the network that is certified."""
    from smoothcert.data import UNSPLIT

    for note in images.notes:
        console.note(note)
    if images.split == UNSPLIT and trained_on is not None and same_reference(trained_on, images.name):
        console.warn(
            f"{images.name} has no split: the certified accuracy is that of images that the network was trained on; "
            "give data with a test split"
        )


def train_with_bar(recipe: "TrainRecipe", data: "Images", folder: Path, **options: Any) -> None:
    """`train`, showing epoch, loss, accuracy if known, images/s and the time left, and notes above the bar."""
    from smoothcert.training.loop import train

    console = PlainConsole()
    with _bar(console) as bar:
        task = bar.add_task(f"train {folder.name}", total=None, now="")

        def show(status: "TrainingStatus") -> None:
            accuracy = "" if status.noisy_accuracy is None else f"noisy acc {status.noisy_accuracy:.1%} "
            now = f"epoch {status.epoch + 1}/{status.epochs} loss {status.loss:.3f} {accuracy}"
            # The speed is last: a narrow terminal cuts the end.
            now += f"{duration(status.seconds_left)} left {rate(status.images_per_second)} img/s"
            done = status.epoch * status.steps + status.step
            bar.update(task, total=status.epochs * status.steps, completed=done, now=now)

        train(recipe, data, folder, on_progress=show, on_note=console.note, **options)


class CertificationBar:
    """Shows images done, running ACR, images/s, votes/s and the time left."""

    def __init__(self, bar: Progress, console: PlainConsole, name: str, images: int) -> None:
        self._bar, self._task = bar, bar.add_task(f"certify {name}", total=images, now="")
        self.note = console.note
        """Prints a note above the bar."""
        self.warn = PlainConsole(stderr=True).warn if console.quiet else console.warn
        """Prints a warning above the bar, or on standard error if there is none."""

    def __call__(self, status: "CertificationStatus") -> None:
        left = status.seconds_left
        now = f"{status.done}/{status.total} ACR {status.average_certified_radius:.3f}"
        now += f" {duration(left)} left" if left else ""
        if status.images_per_second:  # none if the file was complete
            now += f" {rate(status.images_per_second)} img/s {rate(status.votes_per_second)} votes/s"
        self._bar.update(self._task, total=status.total, completed=status.done, now=now)


@contextmanager
def certification_bar(name: str, images: int, quiet: bool = False) -> Iterator[CertificationBar]:
    """A bar to call with each status of a certification; with `quiet`, only its warnings are printed."""
    console = PlainConsole(quiet=quiet)
    with _bar(console) as bar:
        yield CertificationBar(bar, console, name, images)


@contextmanager
def attack_bar(name: str, images: int) -> Iterator["Callable[[AttackStatus], None]"]:
    """A bar to call with each status of an attack: images done, how many withstood everything, and contradictions."""
    with _bar(PlainConsole()) as bar:
        task = bar.add_task(f"attack {name}", total=images, now="")

        def show(status: "AttackStatus") -> None:
            loud = f" {status.contradictions} CONTRADICTIONS" if status.contradictions else ""
            now = f"{status.done}/{status.total} withstood {status.withstood}"
            bar.update(task, completed=status.done, now=f"{now} {rate(status.images_per_second)} img/s{loud}")

        yield show


@contextmanager
def counting_bar(totals: Mapping[str, int]) -> Iterator[Callable[[str, int], None]]:
    """One bar per name in `totals`, to call with a name and the number that is done."""
    with _bar(PlainConsole()) as bar:
        tasks = {name: bar.add_task(name, total=total, now=f"0/{total}") for name, total in totals.items()}
        yield lambda name, done: bar.update(tasks[name], completed=done, now=f"{done}/{totals[name]}")
