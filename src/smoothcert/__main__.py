"""The program: `smoothcert ...`, or `python -m smoothcert ...`, which is the form that torchrun starts."""

import signal
import sys


def main() -> None:
    """Run the command line. An interrupt during the imports prints one line too, one after the end prints nothing."""
    try:
        from smoothcert.cli import main as run

        run()
    except KeyboardInterrupt:
        print("smoothcert: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        # The work has ended. A second Ctrl-C would print a traceback of the libraries that the interpreter leaves.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
