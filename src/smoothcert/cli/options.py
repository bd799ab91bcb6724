"""The console, the options and the checks that commands share."""

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import typer
from rich.table import Column, Table

from smoothcert.errors import RequestError
from smoothcert.io.console import PlainConsole
from smoothcert.io.text import printable
from smoothcert.training.choices import Bound as Bound
from smoothcert.training.choices import Compiling as Compiling
from smoothcert.training.choices import InputLayer as InputLayer
from smoothcert.training.choices import NoiseName as NoiseName

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.data import Images, Split

console = PlainConsole()
Number = TypeVar("Number", int, float)

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Data folder.", envvar="SMOOTHCERT_DATA", show_default="a user cache folder"),
]
Classes = Annotated[
    Path | None,
    typer.Option("--classes", help="Text file: one class name per line, in the order of the model's outputs."),
]
Hub = Annotated[
    str | None,
    typer.Option("--hub", help="A published classifier: hf:NAME, timm:NAME, hf:FOLDER or timm:FOLDER, from its cache."),
]
Denoiser = Annotated[
    Path | None,
    typer.Option("--denoiser", help="Denoiser in front: a folder of train-denoiser, or of a diffusers UNet2DModel."),
]
DatasetName = Annotated[
    str | None, typer.Option("--dataset", help="Data set: see `smoothcert datasets`.", show_default="the recipe's")
]
ImageSize = Annotated[int | None, typer.Option("--image-size", help="Side of the images, for folder:PATH.")]
OwnNetwork = Annotated[
    str | None, typer.Option("--model", help="Your own network: package.module:function or FILE.py:function.")
]
Weights = Annotated[
    Path | None,
    typer.Option("--init", help="Weights of --model: .safetensors or a PyTorch checkpoint.", rich_help_panel="Network"),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files in the folder that smoothcert did not write.")]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Overrides = Annotated[list[str], typer.Option("--set", help="key=value: overrides a field of the recipe.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
CompileTraining = Annotated[Compiling, typer.Option("--compile", help="torch.compile on a GPU; auto: if it pays.")]
BoundName = Annotated[Bound, typer.Option(help="Two-sided bounds the runner-up too; randomized draws a coin.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the noise, for tests and replays.", show_default="fresh")]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to compute.")]


def parse_count(value: str | int) -> int:
    """Return a count that may be written as 100000, 100_000, 100k, 2M or 1e5."""
    text = re.sub(r"(?<=\d)_(?=\d)", "", str(value).strip().lower())
    number = re.fullmatch(r"(-?\d{1,30}(?:\.\d{1,6})?)(?:e(\d{1,2}))?([km]?)", text, re.ASCII)
    count = Fraction(number[1]) * 10 ** (int(number[2] or 0) + {"": 0, "k": 3, "m": 6}[number[3]]) if number else None
    if count is None or count.denominator != 1:
        raise ValueError("expected a whole number, such as 100000, 100k or 1e5")
    return int(count)


def count_option(*names: str, **settings: Any) -> Any:
    """Return a typer option that takes a count (see `parse_count`)."""
    return typer.Option(*names, parser=parse_count, metavar="<count>", **settings)


Epochs = Annotated[
    int | None, count_option("--epochs", help="Passes over the training images.", show_default="the recipe's")
]
Votes = Annotated[int, count_option("--n", "--votes", help="Votes that bound the class's probability.")]
Skip = Annotated[int, count_option(help="Certify every SKIP-th image.")]
MaxImages = Annotated[int | None, count_option(help="Certify at most this many images.")]


def show_table(titles: Sequence[str | Column], rows: Iterable[Iterable[str]], **options: Any) -> None:
    """Print a table."""
    table = Table(*titles, **options)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def command_line(*words: object) -> str:
    """Return a smoothcert command, quoted for a shell."""
    return shlex.join(["smoothcert", *map(str, words)])


def optional(option: str | None, value: object) -> list[object]:
    """Return an option with its value, as words of a command line; nothing for None."""
    return [] if value is None else [value] if option is None else [option, value]


def check_own_weights(init: Path | None, own_network: bool) -> None:
    """Refuse --init without a network of the user's own code."""
    if init is not None and not own_network:
        raise RequestError("--init: expected none with a run folder or --hub, which have weights; leave it out")


def check_dataset(name: str | None) -> None:
    """Refuse a path of user data that does not exist, before torch is imported."""
    kind, _, path = (name or "").partition(":")
    wanted = {"folder": "a folder", "npz": "a file"}.get(kind)
    if wanted and path and not path.startswith("~") and not Path(path).exists():
        raise RequestError(f"{name}: expected {wanted}, got none; give a path that exists")


def chosen_model(model: str | None, hub: str | None) -> str | None:
    """Return the reference of the network that --model or --hub names; refuse both, and other kinds of hubs."""
    if hub is None:
        return model
    if model is not None:
        raise RequestError("give --model or --hub, not both")
    if not hub.startswith(("hf:", "timm:")):
        raise RequestError(f"--hub: expected hf:NAME, timm:NAME, hf:FOLDER or timm:FOLDER, got {hub}; add hf: or timm:")
    return hub


def check_name(name: str) -> None:
    """Refuse a --name that is not the plain name of a file."""
    plain = name.isprintable() and Path(name).name == name and "\\" not in name
    if not name or not plain or name[0] in ".-":
        raise RequestError(
            f"--name: expected a file's name without folders, control characters and a leading dot or dash, "
            f"got '{printable(name)}'; choose another"
        )


def parse_radii(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if min(values) < 0 or not all(map(math.isfinite, values)):
        raise RequestError(
            f"radii: expected comma-separated numbers >= 0, such as 0,0.5,1.0, got {text[:60] or 'nothing'}"
        )
    return values


def no_network(options: Mapping[str, object]) -> RequestError:
    """Return the error of a request without a run folder and without some of `options`, such as {"--sigma S": None}."""
    missing = [option for option, value in options.items() if value is None]
    named = f"; missing: {', '.join(missing)}" if len(missing) < len(options) else ""
    return RequestError(f"give a run folder, or {' '.join(options)}{named}")


def parse_numbers(option: str, text: str | None, kind: type[Number]) -> tuple[Number, ...]:
    """Return the numbers of a comma-separated list; () for None."""
    try:
        return () if text is None else tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise RequestError(f"{option}: expected comma-separated numbers, got {text or 'nothing'}") from error


class Load(Protocol):
    """Returns a part of a data set with images of one size."""

    def __call__(self, name: str, split: "Split", image_size: int | None, channels: int | None = None) -> "Images": ...


@dataclass(frozen=True)
class ImageOptions:
    """The options that say how images are read."""

    image_size: ImageSize = None
    channels: Annotated[
        int | None, typer.Option(help="For folder:PATH: 1 (grey) or 3 (RGB).", show_default="as the files")
    ] = None
    classes: Classes = None
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="For folder:PATH: leave out files that cannot be read.")
    ] = False
    data: Data = None

    def loader(self) -> Load:
        """Return `load_dataset` with these options, of which --channels wins; each data set is read once."""

        @cache
        def load(name: str, split: "Split", image_size: int | None, channels: int | None = None) -> "Images":
            from smoothcert.data import load_dataset, read_class_names, silent

            return load_dataset(
                *(name, split, self.data),
                image_size=image_size,
                classes=None if self.classes is None else read_class_names(self.classes),
                channels=self.channels or channels,
                skip_unreadable=self.skip_unreadable,
                on_note=silent,
            )

        return load

    def words(self) -> list[object]:
        """Return how image files are read, as words of a command line; without their size."""
        words = [*optional("--channels", self.channels), *optional("--classes", self.classes)]
        words += ["--skip-unreadable"] if self.skip_unreadable else []
        return words + optional("--data", self.data)
