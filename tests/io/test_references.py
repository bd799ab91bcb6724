"""Names of users' data and code: which of them mean the same."""

from pathlib import Path

import pytest

from smoothcert.io.references import full_name, same_reference


def test_names_of_the_same_data_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "linked").symlink_to(tmp_path)
    for start, end in (("", "mine.py:Grey"), ("folder:", "photos"), ("npz:", "a b.npz")):
        for path in ("./", "~/", "linked/", f"{tmp_path}/", f"../{tmp_path.name}/"):
            assert same_reference(f"{start}{end}", f"{start}{path}{end}")
    others = ("mine.py:Paths", "other/mine.py:Grey", "mine:Grey", "folder:Grey", "npz:mine.py", "mnist")
    for other in others:
        assert not same_reference("mine.py:Grey", other)
    assert not same_reference("folder:photos", "npz:photos")


@pytest.mark.parametrize("name", ["mnist", "package.module:Name", "hf:me/net", "folder:~nobody-here/x", "a\0.py:b", ""])
def test_names_without_a_path_that_can_be_resolved_stay(name: str) -> None:
    assert full_name(name) == name
