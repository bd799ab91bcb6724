"""Progress bars of training, certification, attacks and analyses, and notes above them; lines in a log file."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.progress import BarColumn, Progress

from smoothcert.io.console import PlainColumn, PlainConsole, leads

if TYPE_CHECKING:  # each command loads what it needs: certifying starts without the training libraries
    from smoothcert.data import Images
    from smoothcert.training.recipe import TrainRecipe


LINE_SECONDS = 60.0
"""Between two lines about one piece of work, where the output is no terminal, such as the log file of a cluster."""


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


def print_data_notes(console: PlainConsole, images: "Images", trained_on: Sequence[str] = ()) -> None:
    """Print what a user should know about `images`. `trained_on` are the data sets of the networks in use."""
    from smoothcert.data.datasets import UNSPLIT, were_trained_on

    for note in images.notes:
        console.note(note)
    name = next((name for name in trained_on if were_trained_on(images.name, images.split, name)), None)
    if name is None:
        return
    if images.split == UNSPLIT:
        reason, advice = "has no split", "give data with a test split"
    else:
        reason = f"consists of training images of {name}"
        advice = f"train on {images.name}, or choose the test images of {name}"
    console.warn(
        f"{images.name} {reason}: the certified accuracy is that of images that the network was trained on; {advice}"
    )


class Status(Protocol):
    """What training, certification and attacks report: how much is done of what, and as text more about it."""

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...


class StatusBar:
    """Shows each status that it is called with; without a terminal, it prints one per minute."""

    def __init__(self, bar: Progress, console: PlainConsole, name: str) -> None:
        self._bar = bar
        self._console = console
        self._name = name
        self._task = bar.add_task(name, total=None, now="")
        self._last_line = time.monotonic()
        self.note, self.warn = console.note, console.warn
        """Print above the bar."""

    def __call__(self, status: Status) -> None:
        self._bar.update(self._task, total=status.total, completed=status.done, now=str(status))
        redrawn = self._console.is_terminal or self._console.is_jupyter
        now = time.monotonic()
        if not redrawn and leads() and now - self._last_line >= LINE_SECONDS:
            self._console.print(f"{self._name}: {status}")
            self._last_line = now


@contextmanager
def status_bar(name: str, quiet: bool = False) -> Iterator[StatusBar]:
    """A bar for one piece of work; with `quiet`, only its warnings are printed."""
    console = PlainConsole(quiet=quiet)
    with _bar(console) as bar:
        yield StatusBar(bar, console, name)


@contextmanager
def status_bars(console: PlainConsole) -> Iterator[Callable[[str, Status], None]]:
    """One bar per name, to call with a name and a status; a bar appears with its first status."""
    bars: dict[str, StatusBar] = {}

    def show(name: str, status: Status) -> None:
        if name not in bars:
            bars[name] = StatusBar(bar, console, name)
        bars[name](status)

    with _bar(console) as bar:
        yield show


def train_with_bar(recipe: "TrainRecipe", data: "Images", folder: Path, **options: Any) -> None:
    """`train`, with a bar and with notes above it."""
    from smoothcert.training.loop import train

    with status_bar(f"train {folder.name}") as show:
        train(recipe, data, folder, on_progress=show, on_note=show.note, **options)


@contextmanager
def counting_bar(totals: Mapping[str, int]) -> Iterator[Callable[[str, int], None]]:
    """One bar per name in `totals`, to call with a name and the number that is done."""
    with _bar(PlainConsole()) as bar:
        tasks = {name: bar.add_task(name, total=total, now=f"0/{total}") for name, total in totals.items()}
        yield lambda name, done: bar.update(tasks[name], completed=done, now=f"{done}/{totals[name]}")
