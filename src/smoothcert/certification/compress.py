"""Compress finished certificates files in place."""

from pathlib import Path

from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.shards import missing_rows
from smoothcert.io.compressed import compress, existing_form, plain_form
from smoothcert.io.results import not_being_written


def compress_certificates(path: Path) -> str | None:
    """Replace the certificates file NAME.tsv by NAME.tsv.gz with the same content; return None if this was done.

    Otherwise return why the file is left as it is: it is compressed already, lacks images that its call selected, so
    that it can be continued, or has another ending. A damaged file is a WorkError.
    """
    with not_being_written(path, "compress it afterwards"):
        if existing_form(path) != plain_form(path):
            return "compressed already"
        file = read_certificates(path)
        if (missing := missing_rows(file)) is not None:
            return f"{missing}; continue it with `smoothcert certify`"
        if not path.name.endswith(".tsv"):
            return "its name does not end in .tsv"
        compress(path)
    return None
