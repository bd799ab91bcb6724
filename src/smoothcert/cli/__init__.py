"""The command line: parse, call, print. Exit codes: 0 done, 1 the work failed, 2 the request was wrong."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from threading import current_thread, main_thread
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text

from smoothcert import __version__
from smoothcert.cli.adapting import adapt
from smoothcert.cli.analyzing import analyze
from smoothcert.cli.attacking import attack
from smoothcert.cli.certification import certify, compress, merge, recertify
from smoothcert.cli.denoising import train_denoiser
from smoothcert.cli.doctor import doctor
from smoothcert.cli.listing import datasets, models, objectives, papers, presets
from smoothcert.cli.predicting import predict
from smoothcert.cli.quickstart import quickstart
from smoothcert.cli.registration import FILES, LISTS, PAPERS, START, add_command
from smoothcert.cli.reporting import report
from smoothcert.cli.reproducing import reproduce
from smoothcert.cli.serving import serve
from smoothcert.cli.sweeping import sweep
from smoothcert.cli.training import export, import_, train
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.console import PlainConsole, accept_any_terminal
from smoothcert.io.text import one_line

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
COMMANDS: tuple[tuple[str, Callable[..., None], str, str], ...] = (
    # name, function, panel of the help, example
    ("quickstart", quickstart, START, "quickstart"),
    ("train", train, START, "train --preset mnist/smoothmix --sigma 0.5 --out runs/a"),
    ("certify", certify, START, "certify runs/a --n 10k --skip 20"),
    ("doctor", doctor, START, "doctor --model mine.py:build --dataset folder:photos --sigma 0.25"),
    ("adapt", adapt, START, "adapt runs/a --sigma 0.25 --out runs/a-adapted"),
    ("train-denoiser", train_denoiser, START, "train-denoiser --dataset mnist --sigma 0.5 --out runs/denoiser"),
    ("predict", predict, START, "predict runs/a digit.png"),
    ("serve", serve, START, "serve runs/a --port 8000"),
    ("attack", attack, START, "attack runs/a --max-images 100"),
    ("report", report, START, "report runs/a runs/b --out report"),
    ("sweep", sweep, START, "sweep --preset mnist/consistency --set objective.weight=5,10,20 --set seed=0,1,2"),
    ("reproduce", reproduce, PAPERS, "reproduce smoothmix/table2 --quick"),
    ("papers", papers, PAPERS, "papers smoothmix/table2"),
    ("presets", presets, PAPERS, "presets mnist/smoothmix --sigma 1.0"),
    ("merge", merge, FILES, "merge shard1.tsv shard2.tsv --out whole.tsv"),
    ("recertify", recertify, FILES, "recertify runs/a/certificates/test-n100000.tsv --alpha 1e-4"),
    ("compress", compress, FILES, "compress runs/a"),
    ("import", import_, FILES, "import checkpoint.pth.tar --sigma 0.5 --out runs/b"),
    ("export", export, FILES, "export runs/a --out models/a"),
    ("datasets", datasets, LISTS, "datasets"),
    ("models", models, LISTS, "models"),
    ("objectives", objectives, LISTS, "objectives consistency"),
)
for command in COMMANDS:
    add_command(app, *command)
app.add_typer(analyze, name="analyze", rich_help_panel=PAPERS)


def print_version(asked: bool) -> None:
    if asked:
        print(f"smoothcert {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=print_version, is_eager=True, metavar=""
        ),
    ] = False,
) -> None:
    """Train image classifiers that can be certified by randomized smoothing, certify them, report the results."""


INTERRUPTED, TERMINATED = 130, 143
CONTINUED = {
    **dict.fromkeys(
        ("train", "train-denoiser"), "; finished epochs are kept: the same command with --resume continues"
    ),
    **dict.fromkeys(
        ("certify", "attack", "sweep", "reproduce", "quickstart"),
        "; finished work is kept: the same command continues it",
    ),
}
"""What the line of an interrupted command adds; the others have nothing to continue."""


def parser_message(error: typer.TyperException) -> str:
    """Return the message of the parser, with the value that it could not read if the message does not repeat it."""
    from pydantic import ValidationError

    from smoothcert.io.field_errors import in_plain_words

    context: Any = getattr(error, "ctx", None)
    if context and hasattr(error, "possibilities") and hasattr(error, "option_name"):
        # An unknown option. Without the dashes, which make short options similar.
        options = [option for parameter in context.command.params for option in parameter.opts]
        words = [option[2:] for option in options if option.startswith("--")]
        given = error.option_name.lstrip("-")
        near = get_close_matches(given, words)
        error.possibilities = [f"--{word}" for word in words if word.startswith(given) or word in near]
    message = error.format_message()
    if isinstance(error.__cause__, ValidationError):
        message = in_plain_words(message.replace("Value error, ", "", 1))
        value = error.__cause__.errors()[0]["input"]
        message += f", got {value}" if repr(value) not in message else ""
    if message.startswith("Missing") and context:
        message = f"{message.rstrip('.')}; `{context.command_path} --help` has an example"
    if message.startswith("Got unexpected extra") and context:
        message += f"; `{context.command_path} --help` lists what it takes"
    return message


@contextmanager
def recording_signals(interrupts: list[int]) -> Iterator[None]:
    """Add each Ctrl-C and each SIGTERM, which job schedulers send, to `interrupts`; both raise KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    usual: dict[int, object] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if os.environ.get("WORLD_SIZE", "1") != "1":
        del usual[signal.SIGTERM]  # torchrun ends workers by it, and one that waits for the others handles no signals
    # Other handlers, such as those of programs that ignore Ctrl-C, stay; only the main thread may set one.
    before = {number: signal.getsignal(number) for number in usual}
    replaced = [number for number in usual if before[number] is usual[number] and current_thread() is main_thread()]
    for number in replaced:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, before[number])


def with_expanded_home(word: str) -> str:
    """`~/runs/a` or `--out=~/runs/a` with the home folder: most shells leave the second as it is, some both."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{option}{equals}{os.path.expanduser(value)}"


def main() -> None:
    """Run a command; a wrong request or failed work prints one line, never a traceback."""
    accept_any_terminal()
    code: object = 0
    interrupts: list[int] = []
    try:
        with recording_signals(interrupts):
            words = list(map(with_expanded_home, sys.argv[1:]))
            code = app(args=words, standalone_mode=False, prog_name="smoothcert")
    except typer.TyperException as error:
        message = parser_message(error)
        # Without arguments the help has been printed, or it is the message; typer does not export this error.
        if not message or type(error).__name__ == "NoArgsIsHelpError":
            print(message)
            sys.exit(2)
        fail(message, 2)
    except (RequestError, WorkError) as error:
        # Compiled code may turn the interrupt into an error of its own, which looks like a damaged file.
        if not interrupts:
            fail(str(error), 2 if isinstance(error, RequestError) else 1)
        code = INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        fail(f"{error.filename or 'input/output'}: {error.strerror or error}", 1)
    if code == INTERRUPTED:
        line = "interrupted" + CONTINUED.get("".join(sys.argv[1:2]), "")
        fail(line, TERMINATED if signal.SIGTERM in interrupts else INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> NoReturn:
    """Print one line to standard error and exit."""
    line = Text("smoothcert: ", style="bold red") + Text(one_line(message), style="default")
    PlainConsole(stderr=True).print(line, soft_wrap=True)
    sys.exit(code)
