"""`python -m smoothcert`, the form that torchrun starts: `torchrun --nproc-per-node 2 -m smoothcert train ...`."""

from smoothcert.cli import main

if __name__ == "__main__":
    main()
