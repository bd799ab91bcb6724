"""The program: `smoothcert ...`, or `python -m smoothcert ...`, which is the form that torchrun starts."""

import sys


def main() -> None:
    """Run the command line. An interrupt during the imports prints one line too."""
    try:
        from smoothcert.cli import main as run

        run()
    except KeyboardInterrupt:
        print("smoothcert: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
