import os
from pathlib import Path

import pytest

from smoothcert.errors import RequestError
from smoothcert.files import check_regular_file


def test_only_regular_files_are_accepted(tmp_path: Path) -> None:
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.write_text("")
    check_regular_file(file)
    check_regular_file(tmp_path / "absent")
    os.mkfifo(fifo)
    for path, kind in ((fifo, "a pipe"), (tmp_path, "a folder")):
        with pytest.raises(RequestError, match=kind):
            check_regular_file(path)
