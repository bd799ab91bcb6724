"""The command line: parse, call, print. Exit codes: 0 done, 1 the work failed, 2 the request was wrong."""

import codecs
import io
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer
from rich.text import Text

from smoothcert import __version__
from smoothcert.cli.analyzing import analyze
from smoothcert.cli.attacking import attack
from smoothcert.cli.certification import certify, merge, recertify
from smoothcert.cli.doctor import doctor
from smoothcert.cli.listing import datasets, models, objectives, presets
from smoothcert.cli.predicting import predict
from smoothcert.cli.reporting import quickstart, report
from smoothcert.cli.reproducing import reproduce
from smoothcert.cli.training import import_, train
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.console import PlainConsole
from smoothcert.io.text import one_line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "quickstart": quickstart,
    "train": train,
    "certify": certify,
    "doctor": doctor,
    "merge": merge,
    "recertify": recertify,
    "attack": attack,
    "predict": predict,
    "report": report,
    "reproduce": reproduce,
    "import": import_,
    "presets": presets,
    "datasets": datasets,
    "models": models,
    "objectives": objectives,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(analyze, name="analyze")


def print_version(asked: bool) -> None:
    if asked:
        print(f"smoothcert {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Train image classifiers that can be certified by randomized smoothing, certify them, show the result."""


INTERRUPTED = 130


def parser_message(error: typer.TyperException) -> str:
    """Return the message of the parser, with the value that it could not read if the message does not repeat it."""
    from pydantic import ValidationError

    message = error.format_message()
    if isinstance(error.__cause__, ValidationError):
        message = message.replace("Value error, ", "", 1)
        value = error.__cause__.errors()[0]["input"]
        message += f", got {value}" if repr(value) not in message else ""
    return message


PLAIN = str.maketrans({"–": "-", "—": "-", "−": "-", "×": "x", "σ": "s", "α": "a", "…": "."})


def replace_characters(error: UnicodeError) -> tuple[str, int]:
    """Handle an encoding error: replace what the terminal cannot show by one similar character, or by `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end].translate(PLAIN)
    return "".join(c if c.isascii() else "?" for c in characters), error.end


codecs.register_error("smoothcert", replace_characters)


def accept_any_terminal() -> None:
    """Print to terminals that are not UTF-8: rich draws tables in ASCII there, and other characters are replaced."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="smoothcert")


def main() -> None:
    """Run a command; a wrong request or failed work prints one line, never a traceback."""
    accept_any_terminal()
    code: object = 0
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        message = parser_message(error)
        # Without arguments the help has been printed, or it is the message; typer does not export this error.
        if not message or type(error).__name__ == "NoArgsIsHelpError":
            print(message)
            sys.exit(2)
        fail(message, 2)
    except RequestError as error:
        fail(str(error), 2)
    except WorkError as error:
        fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        fail(f"{error.filename or 'input/output'}: {error.strerror or error}", 1)
    if code == INTERRUPTED:
        fail("interrupted; finished work is kept: the same command continues it (train: add --resume)", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> NoReturn:
    """Print one line to standard error and exit."""
    line = Text("smoothcert: ", style="bold red") + Text(one_line(message), style="default")
    PlainConsole(stderr=True).print(line, soft_wrap=True)
    sys.exit(code)
