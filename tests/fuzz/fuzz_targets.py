"""The table of targets: a file format, how a valid file is damaged, which commands read it, what must hold if they do.

A new format or command is one line in TARGETS; options of commands are discovered automatically.
"""

import gzip
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
import yaml
from fuzz_mutations import CELLS, NESTED, NUMBERS, TEXTS, Mutator
from fuzz_runner import SECONDS, Outcome
from safetensors.torch import load_file
from scipy import stats

from smoothcert import cli
from smoothcert.training.recipe import TrainRecipe

CASE = Path("case")
"""Where the files of a case are, from the folder that tests run in."""
DAMAGED = "DAMAGED"
SHORT = 0.5
"""Seconds after which a command that was asked for much work is stopped."""

Arguments = list[str]
Oracle = Callable[[Outcome, Arguments], str]


@dataclass(frozen=True)
class Target:
    """`files`: folders of the base that a case starts from. `damage`: paths in it, and the Mutator's method for each.
    `commands`: command lines that read them, of which a case runs one. `oracle`: what is wrong though the command
    succeeded, "" if nothing. `may_write`: failed work leaves files, as training does. `long_work`: what was changed may
    ask for any amount of work, so that a command that does not end is stopped and not blamed. `apart`: the name of a
    command that no signal may be able to stop: its cases run in processes of their own."""

    name: str
    cases: int
    commands: Sequence[str | Callable[[Mutator], Arguments]]
    files: Sequence[str] = ("none",)
    damage: Sequence[tuple[str, str]] = ()
    oracle: Oracle = lambda outcome, arguments: ""
    may_write: bool = False
    long_work: bool = False
    apart: str = ""

    @property
    def warm_up(self) -> list[str]:
        """Valid commands that load what the cases, each in a process of its own, need."""
        return [BASE_COMMANDS[self.apart]] if self.apart else []

    @property
    def seconds(self) -> float:
        return SHORT if self.long_work else SECONDS

    def prepare(self, base: Path, mutator: Mutator) -> list[Path]:
        """Make the case's folder anew; the files that were damaged."""
        shutil.rmtree(CASE, ignore_errors=True)
        CASE.mkdir()
        for name in self.files:
            shutil.copytree(base / name, CASE / name, copy_function=_copy)
        if not self.damage:
            return []
        pattern, how = mutator.pick(self.damage)
        path = mutator.pick(sorted(CASE.glob(pattern)))
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(damaged(content, how, mutator))
        return [path]

    def arguments(self, number: int, mutator: Mutator, damaged: Sequence[Path]) -> Arguments:
        """The command line of a case; DAMAGED in it stands for the file that was damaged."""
        command = self.commands[number % len(self.commands)]
        if not isinstance(command, str):
            return command(mutator)
        return [str(damaged[0]) if part == DAMAGED else part for part in command.split()]


def _copy(source: str, target: str) -> None:
    """Large files are links: no command writes into a model or a state in place."""
    if source.endswith((".safetensors", ".pt", ".tar")):
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


def damaged(content: bytes, how: str, mutator: Mutator) -> bytes:
    if how == "gzip":
        if mutator.often(0.005):
            return gzip.compress(bytes(1 << 24), mtime=0) * 80  # 1.3 GB of zeros
        if mutator.often(0.5):
            return gzip.compress(mutator.bytes(gzip.decompress(content)), 1, mtime=0)
        how = "bytes"
    result: bytes = getattr(mutator, how)(content)
    return result


# Oracles


def impossible_rows(path: Path) -> str:
    """What no sampling could have given in a certificates file that was accepted."""
    try:
        settings = json.loads(path.with_suffix(".json").read_text("utf-8"))["settings"]
        sigma, alpha, noise = settings["sigma"], settings["alpha"], settings.get("noise", "gaussian")
        known = noise == "gaussian" and 0 < sigma < math.inf and 0 < alpha < 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = False
    lines = path.read_text("utf-8", "replace").split("\n")
    for line in lines[1:-1]:
        cells = line.split("\t")
        try:
            index, radius = int(cells[0]), float(cells[3])
            n0, n, count = map(int, cells[6:9])
            votes = [tuple(map(int, pair.split(":"))) for pair in cells[9].split(",") if pair]
        except (ValueError, IndexError):
            continue
        if min(index, n0, n, count, *(part for pair in votes for part in pair), 0) < 0:
            return "accepts a row with a negative index or number of votes"
        if count > n:
            return "accepts a row with more votes for a class than votes"
        if known and n and radius > sigma * stats.norm.isf(-math.expm1(math.log(alpha) / n)) * (1 + 1e-6):
            return "accepts a radius that its votes cannot show"
    return ""


def certificates_are_possible(outcome: Outcome, arguments: Arguments) -> str:
    """Of all files that the command read or wrote."""
    named = [Path(argument) for argument in arguments if argument.endswith(".tsv")]
    named += [path for argument in arguments for path in sorted(Path(argument).glob("certificates/*.tsv"))]
    return next((problem for path in named if path.is_file() and (problem := impossible_rows(path))), "")


def trained_whole(outcome: Outcome, arguments: Arguments) -> str:
    """A run that is said to be trained has all its epochs, each once, and finite weights."""
    folder = Path(arguments[arguments.index("--out") + 1])
    if "trained" not in outcome.out:
        return "succeeds without a word"
    epochs = yaml.safe_load((folder / "recipe.yaml").read_text("utf-8"))["epochs"]
    lines = [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    if lines != list(range(epochs)):
        return "says trained with other epochs in metrics.jsonl than the recipe's"
    return finite_weights(folder)


def finite_weights(folder: Path) -> str:
    weights = load_file(folder / "model.safetensors")
    return "" if all(bool(torch.isfinite(t).all()) for t in weights.values()) else "accepts weights that are not finite"


def imported_finite(outcome: Outcome, arguments: Arguments) -> str:
    return finite_weights(Path(arguments[arguments.index("--out") + 1]))


def new_certificates(outcome: Outcome, arguments: Arguments) -> str:
    """A certificates file is there and has rows that can be."""
    folder = Path(arguments[arguments.index("--out") + 1] if "--out" in arguments else arguments[1])
    tables = sorted((folder / "certificates").glob("*.tsv"))
    if not tables or not any(len(table.read_text("utf-8").splitlines()) > 1 for table in tables):
        return "certifies nothing"
    return next((problem for table in tables if (problem := impossible_rows(table))), "")


# Commands

FEW = "--n 20 --n0 5 --max-images 2 --batch-size 20 --seed 1 --device cpu"
OWN = f"certify --model fuzz_networks:first_pixels --sigma 0.5 --out case/out --name new {FEW}"
RESUME = "train --out case/begun --resume --device cpu"
TRAIN = "train --out case/new --device cpu"
ATTACK = "attack case/run --steps 1 --num-noise 1 --n 20 --radii 0.5 --max-images 1 --seed 1 --device cpu --name new"
CONTINUE_ATTACK = "attack case/run --steps 1 --num-noise 2 --n 100 --radii 0.5,1 --max-images 6 --seed 1 --device cpu"
REPORT = "report case/run --out case/report --format"
PREDICT = "predict case/run --n 20 --device cpu"
DRY = "reproduce smoothmix/table1 --dry-run --quick --device cpu --out"
CERTIFY_RUN = f"certify case/run --name new {FEW}"
CONTINUE = "certify case/run --n 100 --n0 10 --seed 1 --max-images 12 --name test --device cpu"
FIGURE = "--n 5 --device cpu --out case/out --format svg"


def option_values() -> list[str]:
    numbers = [str(value) for value in NUMBERS]
    lists = ["0,1", "0.5,", ",", "1,0", "0.5,0.5", "1/2", "0/1", "²/8", "3/2", "1/0", "1/99999999999999999999", "1e5"]
    words = [
        "png",
        "md,html",
        "two-sided",
        "laplace",
        "uniform",
        "bf16",
        "fp16",
        "cuda",
        "cuda:9",
        "cpu",
        "auto",
        "meta",
    ]
    paths = ["case", "/dev/null", "case/none/x/y", "/proc/1/mem", "a" * 300, "..", ".", "mnist-sample", "torch:zeros"]
    texts = [text for text in (*TEXTS, *CELLS) if "\x00" not in text]  # no argument can have one
    return [*numbers, *lists, *words, *paths, *texts]


OPTION_VALUES = option_values()
BASE_COMMANDS: dict[str, str] = {
    "train": f"{TRAIN} --recipe case/recipe/recipe.yaml",
    "certify": CERTIFY_RUN,
    "adapt": "adapt --model fuzz_files:normed --dataset npz:digits.npz --sigma 0.5 --out case/new.safetensors",
    "merge": "merge case/shards/shard1.tsv case/shards/shard2.tsv --out case/new.tsv",
    "recertify": "recertify case/run/certificates/test.tsv --out case/new.tsv",
    "attack": ATTACK,
    "predict": f"{PREDICT} case/images/grey.png",
    "report": f"{REPORT} csv",
    "reproduce": f"{DRY} case/new",
    "import": "import case/checkpoint/checkpoint.pth.tar --out case/new --sigma 0.5",
    "export": "export case/run --out case/new",
    "compress": "compress case/run",
    "doctor": "doctor case/run --images 4 --out case/out",
    "sweep": "sweep --recipe case/recipe/recipe.yaml --set seed=0,1 --out case/new --dry-run",
    "papers": "papers smoothmix/table2",
    "presets": "presets mnist/gaussian",
    "datasets": "datasets",
    "models": "models",
    "objectives": "objectives gaussian",
    "analyze margins": f"analyze margins case/run {FIGURE}",
    "analyze interpolate": f"analyze interpolate case/run --points 3 --steps 1 --num-noise 1 {FIGURE}",
    "analyze mixing": f"analyze mixing case/run --steps 1 --num-noise 1 --max-images 1 {FIGURE}",
    "analyze cost": "analyze cost case/run --out case/out --format svg",
    "analyze input-dependent-noise": "analyze input-dependent-noise --max-dimension 100 --out case/out --format svg",
}
"""A valid command line for each command; the test of options checks that none is missing."""
NOT_FUZZED = ("quickstart", "serve", "train-denoiser")
"""Work for minutes, or until they are stopped."""
COUNTING = ("certify", "attack", "predict", "analyze")
OPTION_CASES = {"certify": 12, "train": 8, "report": 4, "reproduce": 4, "analyze": 3}


def command_options() -> dict[str, list[tuple[str, bool]]]:
    """The options of every command: (name, whether it takes no value)."""
    found: dict[str, list[tuple[str, bool]]] = {}
    tree = typer.main.get_command(cli.app) if isinstance(cli.app, typer.Typer) else cli.app
    for name, command in tree.commands.items():  # type: ignore[attr-defined]
        for inner, one in getattr(command, "commands", {"": command}).items():
            options = [(o.opts[0], bool(o.is_flag)) for o in one.params if o.opts[0].startswith("--")]
            found[f"{name} {inner}".strip()] = [option for option in options if option[0] != "--help"]
    return found


def with_other_options(name: str, options: Sequence[tuple[str, bool]]) -> Callable[[Mutator], Arguments]:
    """The command with one to three options or arguments changed, added or dropped."""

    def command(mutator: Mutator) -> Arguments:
        arguments = BASE_COMMANDS[name].split()
        first = len(name.split())
        for _ in range(mutator.pick((1, 1, 1, 2, 3))):
            kind = mutator.random.randrange(12)
            if kind == 0 and len(arguments) > first:
                del arguments[mutator.random.randrange(first, len(arguments))]
            elif kind == 1 and len(arguments) > first:
                arguments[mutator.random.randrange(first, len(arguments))] = str(mutator.pick(OPTION_VALUES))
            elif not options:
                arguments.append(str(mutator.pick(OPTION_VALUES)))
            else:
                option, flag = mutator.pick(options)
                arguments += [option] if flag else [option, str(mutator.pick(OPTION_VALUES))]
        unwanted = ("--compile", "--capture")  # minutes of a compiler, and no GPU
        kept = [argument for argument in arguments if argument not in unwanted]
        return kept if "--device" not in kept else kept + ["--device", "cpu"] * mutator.often(0.9)

    return command


def with_other_fields(mutator: Mutator) -> Arguments:
    """`train` with fields of the recipe set to other values."""
    fields = [*TrainRecipe.model_fields, "objective.name", "objective.num_noise", "objective.x", "x", "", "a.b.c"]
    chosen = []
    for _ in range(mutator.pick((1, 1, 2))):
        value = mutator.pick((*NUMBERS, *TEXTS, "[1, 2]", "{}", "null", "[", "*a", "&a [*a]", "!!python/name:os.abort"))
        value = mutator.nest(NESTED) if mutator.often(0.03) else value
        text = str(value).replace("\x00", "")[:120_000]
        chosen += ["--set", f"{mutator.pick(fields)}={text}" if mutator.often(0.95) else text]
    return [*f"{TRAIN} --recipe case/recipe/recipe.yaml".split(), *chosen]


CERTIFICATES_COMMANDS = (
    f"{REPORT} md,csv",
    "recertify case/run/certificates/test.tsv --out case/new.tsv --alpha 0.01",
    "merge case/run/certificates/test.tsv --out case/new.tsv",
    CONTINUE,
    f"{REPORT} csv",
    "recertify case/run/certificates/test.tsv --out case/new.tsv --bound two-sided",
    ATTACK,
    f"{REPORT} html,tex",
)
MODEL_COMMANDS = (
    *(CERTIFY_RUN, f"{PREDICT} case/images/grey.png", CERTIFY_RUN, ATTACK, f"{REPORT} md", CERTIFY_RUN),
    *(
        "analyze cost case/run --out case/out --format svg",
        f"{DRY} case",
        "report case/run --out case/report --format csv",
    ),
)
TARGETS: tuple[Target, ...] = (
    Target(
        *("certificates-tsv", 20, CERTIFICATES_COMMANDS),
        files=("run",),
        damage=(("run/certificates/test.tsv", "table"),),
        oracle=certificates_are_possible,
    ),
    Target(
        *("certificates-json", 18, CERTIFICATES_COMMANDS),
        files=("run",),
        damage=(("run/certificates/test.json", "json"),),
        oracle=certificates_are_possible,
    ),
    Target(
        *("shards", 15, (BASE_COMMANDS["merge"],)),
        files=("shards",),
        damage=(("shards/*.tsv", "table"), ("shards/*.json", "json")),
        oracle=certificates_are_possible,
    ),
    Target(
        *("attacks", 12, (f"{REPORT} md,csv", CONTINUE_ATTACK, f"{REPORT} csv")),
        files=("run",),
        damage=(("run/attacks/pgd.tsv", "table"), ("run/attacks/pgd.json", "json")),
    ),
    Target(
        *("recipe-yaml", 10, (BASE_COMMANDS["train"],)),
        files=("recipe",),
        damage=(("recipe/recipe.yaml", "yaml"),),
        oracle=trained_whole,
        may_write=True,
        long_work=True,
    ),
    Target(
        *("recipe-of-a-run", 8, (RESUME, f"{DRY} case", RESUME)),
        files=("begun", "recipe"),
        damage=(("begun/recipe.yaml", "yaml"),),
        oracle=lambda outcome, arguments: trained_whole(outcome, arguments) if "--resume" in arguments else "",
        may_write=True,
        long_work=True,
    ),
    Target(
        *("set", 12, (with_other_fields,)),
        files=("recipe",),
        oracle=trained_whole,
        may_write=True,
        long_work=True,
    ),
    Target(
        *("model-safetensors", 14, MODEL_COMMANDS),
        files=("run", "images"),
        damage=(("run/model.safetensors", "safetensors"),),
    ),
    Target(
        *("state-pt", 10, (RESUME,)),
        files=("begun",),
        damage=(("begun/state.pt", "torch_file"),),
        oracle=trained_whole,
        may_write=True,
    ),
    Target(
        *("metrics-jsonl", 7, (RESUME, f"{REPORT} csv", "analyze cost case/run --out case/out --format svg", RESUME)),
        files=("begun", "run"),
        damage=(("*/metrics.jsonl", "text"), ("*/metrics.jsonl", "metrics")),
        oracle=lambda outcome, arguments: trained_whole(outcome, arguments) if "--resume" in arguments else "",
        may_write=True,
    ),
    Target(
        *("metrics-figure", 2, (f"{REPORT} png", f"{REPORT} html,svg")),
        files=("run",),
        damage=(("run/metrics.jsonl", "metrics"),),
    ),
    Target(
        *(
            "checkpoint",
            6,
            (BASE_COMMANDS["import"], BASE_COMMANDS["import"] + " --dataset mnist-sample --arch lenet"),
        ),
        files=("checkpoint",),
        damage=(("checkpoint/checkpoint.pth.tar", "torch_file"),),
        oracle=imported_finite,
    ),
    Target(
        *("npz", 15, (f"{OWN} --dataset npz:case/npz/own.npz",)),
        files=("npz",),
        damage=(("npz/own.npz", "npz"),),
        oracle=new_certificates,
    ),
    Target(
        *(
            "class-folders",
            10,
            (f"{OWN} --dataset folder:case/folders", f"{OWN} --dataset folder:case/folders --image-size 9"),
        ),
        files=("folders",),
        damage=(("folders/test/*/*.png", "png"), ("folders/test/*/*", "bytes")),
        oracle=new_certificates,
    ),
    Target(
        *("images", 12, (f"{PREDICT} {DAMAGED}", f"{PREDICT} {DAMAGED} --resize")),
        files=("run", "images"),
        damage=(("images/*.png", "png"), ("images/*.png", "png"), ("images/*", "bytes")),
    ),
    Target(
        *("idx", 8, (f"{OWN} --dataset mnist --data case/idx",)),
        files=("idx",),
        damage=(("idx/MNIST/raw/*", "gzip"),),
        oracle=new_certificates,
    ),
    Target(
        *("cifar-batches", 5, (f"{OWN} --dataset cifar10 --data case/cifar",)),
        files=("cifar",),
        damage=(("cifar/*/test_batch.bin", "bytes"),),
        oracle=new_certificates,
    ),
    Target(
        *("cifar-archive", 6, (f"{OWN} --dataset cifar10 --data case/cifar-archive",)),
        files=("cifar-archive",),
        damage=(("cifar-archive/*.gz", "gzip"),),
        oracle=new_certificates,
        may_write=True,
    ),
)


def option_targets() -> Iterator[Target]:
    for name, options in command_options().items():
        if name in NOT_FUZZED:
            continue
        yield Target(
            f"options-{name.replace(' ', '-')}",
            OPTION_CASES.get(name.split()[0], 6) if options else 3,
            (with_other_options(name, options),),
            files=("recipe", "run", "shards", "images", "checkpoint"),
            may_write=name == "train",
            long_work=True,
            apart=name if name.startswith(COUNTING) else "",
        )
