"""The two errors that reach a user as one line: a wrong request and work that failed."""


class RequestError(ValueError):
    """The request was wrong: says what was expected, what was given and what to do. The CLI exits with 2."""


class WorkError(RuntimeError):
    """The request was right but the work failed (a corrupt file, a diverging loss). The CLI exits with 1."""
