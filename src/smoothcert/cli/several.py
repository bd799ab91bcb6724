"""`train ... then certify ...`: commands one after the other in one process, a worker of `smoothcert reproduce`.

Loading torch takes longer than a short command. The first command that fails ends the process with its exit code, and
so does the end of standard input: whoever started the process holds the other end, and is gone then.
"""

import os
import sys
import threading
from collections.abc import Sequence

from smoothcert.cli import main

THEN = "then"


def split(arguments: Sequence[str]) -> list[list[str]]:
    """The commands between the words `then`."""
    commands: list[list[str]] = [[]]
    for argument in arguments:
        if argument == THEN:
            commands.append([])
        else:
            commands[-1].append(argument)
    return commands


def end_with_input() -> None:
    """From now on the end of standard input ends this process, whatever it does: files are never half written."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_all(arguments: Sequence[str]) -> None:
    """Run the commands; the first that fails ends the process."""
    end_with_input()
    for command in split(arguments):
        sys.argv[1:] = command
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
