"""The console, the options and the checks that commands share."""

import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.table import Column, Table

from smoothcert.data.datasets import DatasetReader, refuse_absent_data, refuse_data_code
from smoothcert.errors import RequestError
from smoothcert.io.console import PlainConsole
from smoothcert.io.text import parse_count, printable
from smoothcert.training.choices import Bound, Compiling, NoiseName
from smoothcert.training.run_folder import check_run_folder, weights_in

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.classifier import Classifier
    from smoothcert.data import Images, Split
    from smoothcert.training.checkpoint import Run

console = PlainConsole()
Number = TypeVar("Number", int, float)

Data = Annotated[
    Path | None,
    typer.Option(help="Folder of the data sets.", envvar="SMOOTHCERT_DATA", show_default="a user cache folder"),
]
DATASET = "Data set: see `smoothcert datasets`; or your own: folder:PATH, npz:PATH or FILE.py:Name."
"""The help of --dataset."""
OwnNetwork = Annotated[
    str | None, typer.Option("--model", help="Your own network: package.module:function or FILE.py:function.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace files in the folder that smoothcert did not write.")]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Overrides = Annotated[list[str], typer.Option("--set", help="key=value: overrides a field of the recipe.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
CompileTraining = Annotated[
    Compiling, typer.Option("--compile", help="torch.compile the network on a GPU; auto: if it saves time.")
]
BoundName = Annotated[
    Bound, typer.Option(help="Two-sided also bounds the second class; randomized draws one number per image.")
]
NOISE_LEVEL = "Standard deviation of the noise, for pixels in [0, 1]."
"""The help of --sigma."""
Sigma = Annotated[float | None, typer.Option(help=NOISE_LEVEL, show_default="the run's")]
Noise = Annotated[NoiseName | None, typer.Option(help="Kind of noise.", show_default="the run's")]
Alpha = Annotated[float, typer.Option(help="Largest probability that a certificate is wrong.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the noise, for tests and replays.", show_default="fresh")]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to compute.")]


def count_option(*names: str, **settings: Any) -> Any:
    """Return a typer option that takes a count (see `parse_count`)."""
    return typer.Option(*names, parser=parse_count, metavar="<count>", **settings)


Epochs = Annotated[
    int | None, count_option("--epochs", help="Passes over the training images.", show_default="the recipe's")
]
Votes = Annotated[int, count_option("--n", "--votes", help="Votes per image. More votes prove larger radii.")]
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


def optional(option: str, value: object) -> list[object]:
    """Return an option with its value, as words of a command line; nothing for None."""
    return [] if value is None else [option, value]


def data_option(folder: Path | None) -> list[object]:
    """Return --data with its folder, as words of a command line; nothing if the environment names the folder."""
    named = os.environ.get("SMOOTHCERT_DATA")
    return [] if named and folder == Path(named) else optional("--data", folder)


def check_file_name(name: str) -> None:
    """Refuse a --name that is not the plain name of a file."""
    plain = name.isprintable() and Path(name).name == name and "\\" not in name
    if not name or not plain or name[0] in ".-":
        raise RequestError(
            f"--name: expected a file's name without folders, control characters and a leading dot or dash, "
            f"got '{printable(name)}'; choose another"
        )


def parse_radii(text: str | None) -> list[float] | None:
    """Return the radii of a comma-separated list; None for None."""
    values = parse_numbers("radii", text, float)
    if not all(0 <= value < math.inf for value in values):
        raise RequestError(f"radii: expected comma-separated numbers >= 0, such as 0,0.5,1.0, got {str(text)[:60]}")
    return None if text is None else list(values)


def parse_numbers(option: str, text: str | None, kind: type[Number]) -> tuple[Number, ...]:
    """Return the numbers of a comma-separated list; () for None."""
    try:
        return () if text is None else tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise RequestError(f"{option}: expected comma-separated numbers, got {str(text)[:60] or 'nothing'}") from error


@dataclass(frozen=True)
class ImageOptions:
    """The options that say how images are read."""

    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side of the images, for folder:PATH and image files.")
    ] = None
    channels: Annotated[
        int | None, typer.Option(help="For folder:PATH: 1 (grey) or 3 (RGB).", show_default="as the files")
    ] = None
    classes: Annotated[
        Path | None, typer.Option(help="Text file: one class name per line, in the order of the model's outputs.")
    ] = None
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="For folder:PATH: leave out files that cannot be read.")
    ] = False
    data: Data = None

    @cached_property
    def load(self) -> DatasetReader:
        """Reads data sets with these options, each part once."""
        classes = None
        if self.classes is not None:
            from smoothcert.data import read_class_names

            classes = read_class_names(self.classes)
        return DatasetReader(self.data, classes, self.channels, self.skip_unreadable)

    def words(self) -> list[object]:
        """Return how image files are read, as words of a command line; without their size."""
        words = [*optional("--channels", self.channels), *optional("--classes", self.classes)]
        words += ["--skip-unreadable"] if self.skip_unreadable else []
        return words + data_option(self.data)


@dataclass(frozen=True)
class NetworkOptions(ImageOptions):
    """The options that name a network that is no run, the user's own or a published one, and its data set."""

    model: OwnNetwork = None
    hub: Annotated[
        str | None,
        typer.Option(help="A published classifier: hf:NAME, timm:NAME, hf:FOLDER or timm:FOLDER, from the cache."),
    ] = None
    init: Annotated[
        Path | None,
        typer.Option(help="Weights of --model: .safetensors or a PyTorch checkpoint.", rich_help_panel="Network"),
    ] = None
    dataset: Annotated[str | None, typer.Option(help=DATASET, show_default="the run's")] = None

    def check(self, runs: Sequence[Path], needed: Mapping[str, object] | None = None) -> None:
        """Refuse wrong paths, and --init without own code, before torch is imported, which takes seconds.

        A network that is no run needs a data set and the options `needed`, such as {"--sigma S": None}, if given.
        """
        if not runs and needed is not None:
            network = {"--model FILE.py:function (or --hub hf:NAME)": self.network, "--dataset NAME": self.dataset}
            options = {**network, **needed}
            missing = [option for option, value in options.items() if value is None]
            named = f"; missing: {', '.join(missing)}" if len(missing) < len(options) else ""
            if missing:
                raise RequestError(f"give a run folder, or {' '.join(options)}{named}")
        for folder in runs:
            check_run_folder(folder)
        if self.init is not None and (runs or self.hub is not None):
            instead = "leave it out" if runs else "leave it out, or give the name of --hub as --model"
            raise RequestError(f"--init: expected none with a run folder or --hub, which have weights; {instead}")
        if self.init is not None:
            weights_in(self.init)
        refuse_absent_data(self.dataset)

    def chosen_data(self, run: "Run | None") -> tuple[str, int | None]:
        """Return the data set and the size of its images; what is not given is that of the training of `run`.

        Code that only the run names is refused.
        """
        if run is None:
            return str(self.dataset), self.image_size
        if self.dataset is None:
            refuse_data_code(run.folder, run.recipe.dataset)
        dataset = self.dataset or run.recipe.dataset
        return dataset, self.image_size or run.reading(dataset).get("image_size")

    def images(self, run: "Run | None", split: "Split" = "test") -> "Images":
        """Return the images; for a run with the channels of its network, and with labels in the order of its classes.

        --init may be a run, too. --channels and --classes win.
        """
        from smoothcert.data import with_known_classes
        from smoothcert.models import check_own_code
        from smoothcert.training.checkpoint import class_names_of

        if run is None:
            check_own_code(str(self.network))
        dataset, image_size = self.chosen_data(run)
        channels = None if run is None else run.reading(dataset).get("channels")
        images = self.load(dataset, split, image_size, channels)
        return with_known_classes(images, class_names_of(self.init) if run is None else run.spec.class_names)

    def own_network(self, num_classes: int | None, on_note: Callable[[str], None]) -> "Classifier":
        """Return the network of --model or --hub, with the weights of --init."""
        from smoothcert.training.initial_weights import own_model_with_weights

        return own_model_with_weights(str(self.network), num_classes, self.init, on_note)

    def network_and_images(self, run: "Run | None", split: "Split", device: str) -> "tuple[Classifier, Images]":
        """Return the network on `device`, and the images; print what a user should know about both."""
        from torch import nn

        from smoothcert.distributed import find_device
        from smoothcert.report.progress import print_data_notes

        torch_device = find_device(device)
        images = self.images(run, split)
        print_data_notes(console, images)
        network = self.own_network(images.num_classes, console.note) if run is None else run.model
        return network.to(torch_device) if isinstance(network, nn.Module) else network, images

    @property
    def network(self) -> str | None:
        """The reference of --model or --hub; both, and other kinds of hubs, are refused."""
        if self.hub is None:
            return self.model
        if self.model is not None:
            raise RequestError("give --model or --hub, not both")
        if not self.hub.startswith(("hf:", "timm:")):
            expected = "hf:NAME, timm:NAME, hf:FOLDER or timm:FOLDER"
            raise RequestError(f"--hub: expected {expected}, got {self.hub}; add hf: or timm:")
        return self.hub

    def network_words(self) -> list[object]:
        """Return the network as words of a command line."""
        return [*optional("--hub", self.hub), *optional("--model", self.model), *optional("--init", self.init)]

    def words(self) -> list[object]:
        """Return the data set and how its images are read, as words of a command line."""
        return [*optional("--dataset", self.dataset), *optional("--image-size", self.image_size), *super().words()]


@dataclass(frozen=True)
class ClassifierOptions(NetworkOptions):
    """The options that name a classifier: run folders as one, or a network that is no run; a denoiser in front."""

    ensemble: Annotated[bool, typer.Option("--ensemble", help="All run folders as one classifier.")] = False
    consensus: Annotated[
        int | None, typer.Option(help="Evaluate this many members of --ensemble, and the others where these disagree.")
    ] = None
    denoiser: Annotated[
        Path | None, typer.Option(help="Denoiser in front: a folder of train-denoiser, or of a diffusers UNet2DModel.")
    ] = None

    @property
    def kind(self) -> str:
        """How several runs are one classifier: "ensemble", of certify also "cascade", or "" for each run alone."""
        return "ensemble" if self.ensemble else ""

    def check(self, runs: Sequence[Path], needed: Mapping[str, object] | None = None, *, several: bool = False) -> None:
        """Also refuse options that do not fit together, and runs that are not one classifier unless `several` may be
        given."""
        if len(runs) > 1 and not self.kind and not several:
            raise RequestError(f"expected one run folder, got {len(runs)}; --ensemble makes one classifier of them")
        if self.kind and len(runs) < 2:
            raise RequestError(f"--{self.kind}: expected at least two run folders, got {len(runs)}; name its members")
        if self.consensus is not None and not self.ensemble:
            raise RequestError(f"--consensus: expected none without --ensemble, got {self.consensus}; leave it out")
        super().check(runs, needed)

    def check_noise_level(self, runs: Sequence[Path], sigma: float | None) -> None:
        """Refuse a network that is no run without a noise level; runs and denoisers have one."""
        if not runs and sigma is None and self.denoiser is None:
            raise RequestError(f"--sigma: missing; give the noise level for {self.network}, for instance --sigma 0.25")

    def network_words(self) -> list[object]:
        words = [*(["--ensemble"] if self.ensemble else []), *optional("--consensus", self.consensus)]
        return [*words, *super().network_words(), *optional("--denoiser", self.denoiser)]


def folder_name(model: str) -> str:
    """Return a name for folders of a network: of the file or module of its code, or of the published classifier."""
    code, _, function = model.rpartition(":")
    source = function if code in ("hf", "timm") else code.removesuffix(".py").replace(".", "/")
    return Path(source).name or "mine"
