"""Shards: the images of each, and merges, which refuse incomplete shards."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smoothcert.certification.certificates import CertifiedImage, certificates_writer, read_certificates
from smoothcert.certification.shards import Selection, merge_certificates, other_versions
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.results import only_writer
from smoothcert.smoothing.certificate import Certificate

SETTINGS = {"sigma": 0.5, "n": 10, "alpha": 0.001, "seed": 1}


def row(index: int) -> CertifiedImage:
    return CertifiedImage(index, 3, Certificate(-1, 0.0, 5, 10, 6, ((3, 6), (1, 4))), 0.5)


def shards(folder: Path, parts: int, images: int = 20, **selection: int) -> list[Path]:
    paths = []
    for part in range(1, parts + 1):
        chosen = Selection(images, shard=(part, parts), **selection)
        path = folder / f"test-shard{part}of{parts}.tsv"
        with certificates_writer(path, SETTINGS, {"selection": chosen.to_mapping()}) as writer:
            writer.append([row(i) for i in chosen.indices])
        paths.append(path)
    return paths


def without_lines(path: Path, count: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-count]))


def test_selections_are_recorded_and_read_back() -> None:
    selection = Selection(10_000, 20, 300, (2, 8))
    assert selection.indices == list(range(20, 6000, 160))
    stored = json.loads(json.dumps({"selection": selection.to_mapping()}))
    assert Selection.from_provenance(stored) == selection
    for damage in (
        {},
        {"selection": 3},
        {"selection": {"images": "x", "skip": 1, "max_images": None, "shard": [1, 1]}},
        {"selection": {"images": 10, "skip": 0, "max_images": None, "shard": [1, 1]}},
        {"selection": {"images": 10**12, "skip": 1, "max_images": None, "shard": [1, 1]}},  # too many to list
    ):
        assert Selection.from_provenance(damage) is None


def test_all_shards_merge(tmp_path: Path) -> None:
    assert merge_certificates(shards(tmp_path, 8), tmp_path / "all.tsv") == 20
    merged = read_certificates(tmp_path / "all.tsv")
    assert [r.index for r in merged.rows] == list(range(20))
    assert merged.provenance["selection"] == Selection(20).to_mapping()


@pytest.mark.parametrize("changes", [{"votes": ((3, 5), (1, 5)), "count": 5}, {"n0": 6}])
def test_two_certificates_of_an_image_are_not_merged(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The same one may be in both files; with a choice between two, the better one would be taken."""
    for name, second in (
        ("a", row(4)),
        ("b", row(4)),
        ("c", replace(row(4), certificate=replace(row(4).certificate, **changes))),
    ):
        with certificates_writer(tmp_path / f"{name}.tsv", SETTINGS, {}) as writer:
            writer.append([row(3), second])
    assert merge_certificates([tmp_path / "a.tsv", tmp_path / "b.tsv"], tmp_path / "same.tsv") == 2
    with pytest.raises(WorkError, match=r"c\.tsv: image 4 has another result than in an earlier file"):
        merge_certificates([tmp_path / "a.tsv", tmp_path / "c.tsv"], tmp_path / "other.tsv")
    assert not (tmp_path / "other.tsv").exists()


def test_shards_without_images_need_not_be_merged(tmp_path: Path) -> None:
    paths = shards(tmp_path, 5, images=3)
    assert merge_certificates(paths[:3], tmp_path / "all.tsv") == 3
    with pytest.raises(RequestError, match="incomplete: shard 3 of 5 is missing; certify"):
        merge_certificates(paths[:2], tmp_path / "two.tsv")


def test_a_merged_file_does_not_record_the_accuracy_of_one_shard(tmp_path: Path) -> None:
    paths = shards(tmp_path, 2)
    for path in paths:
        stored = json.loads(path.with_suffix(".json").read_text())
        stored["provenance"] |= {"accuracy": {"images": 10}, "threads": 2}
        path.with_suffix(".json").write_text(json.dumps(stored))
    merge_certificates([str(path) for path in paths], str(tmp_path / "all.tsv"))
    provenance = read_certificates(tmp_path / "all.tsv").provenance
    assert "accuracy" not in provenance
    assert (provenance["threads"], provenance["merged"]) == (2, 2)


@pytest.mark.parametrize(("absent", "rows"), [(1, 17), (3, 17), (8, 18)])
def test_a_missing_shard_is_named(tmp_path: Path, absent: int, rows: int) -> None:
    paths = shards(tmp_path, 8)
    del paths[absent - 1]
    with pytest.raises(RequestError, match=f"shard {absent} of 8 is missing"):
        merge_certificates(paths, tmp_path / "all.tsv")
    assert not (tmp_path / "all.tsv").exists()
    notes: list[str] = []
    assert merge_certificates(paths, tmp_path / "all.tsv", partial=True, on_note=notes.append) == rows
    missing = f"shard {absent} of 8 is missing"
    assert missing in notes[0]
    provenance = read_certificates(tmp_path / "all.tsv").provenance
    assert provenance["incomplete"] == [missing]
    assert "selection" not in provenance


def test_a_shard_that_lacks_rows_is_refused(tmp_path: Path) -> None:
    paths = shards(tmp_path, 2)
    without_lines(paths[1], 4)
    with pytest.raises(RequestError, match=r"test-shard2of2\.tsv lacks 4 of its 10 images"):
        merge_certificates(paths, tmp_path / "all.tsv")
    paths[1].write_text(paths[1].read_text()[:-5])
    with pytest.raises(RequestError, match=r"test-shard2of2\.tsv lacks 5 of its 10 images"):
        merge_certificates(paths, tmp_path / "all.tsv")


def test_a_torn_file_whose_selection_is_not_known_is_refused(tmp_path: Path) -> None:
    with certificates_writer(tmp_path / "a.tsv", SETTINGS, {}) as writer:
        writer.append([row(0), row(1)])
    (tmp_path / "a.tsv").write_text((tmp_path / "a.tsv").read_text()[:-5])
    with pytest.raises(RequestError, match=r"a\.tsv ends in the middle of a row"):
        merge_certificates([tmp_path / "a.tsv"], tmp_path / "all.tsv")


def test_files_that_are_no_shards_do_not_become_the_selection_of_the_first(tmp_path: Path) -> None:
    for name, selection in (("a", Selection(20, max_images=3)), ("b", Selection(20, skip=4))):
        with certificates_writer(tmp_path / f"{name}.tsv", SETTINGS, {"selection": selection.to_mapping()}) as writer:
            writer.append([row(i) for i in selection.indices])
    assert merge_certificates([tmp_path / "a.tsv", tmp_path / "b.tsv"], tmp_path / "all.tsv") == 7
    assert "selection" not in read_certificates(tmp_path / "all.tsv").provenance


def test_more_shards_than_images_are_complete(tmp_path: Path) -> None:
    assert merge_certificates(shards(tmp_path, 4, images=2), tmp_path / "all.tsv") == 2


def test_shards_of_other_selections_are_refused(tmp_path: Path) -> None:
    for name, most in (("a", 10), ("b", 12)):
        (tmp_path / name).mkdir()
        shards(tmp_path / name, 2, max_images=most)
    paths = [tmp_path / "a" / "test-shard1of2.tsv", tmp_path / "b" / "test-shard2of2.tsv"]
    with pytest.raises(RequestError, match="chose other images"):
        merge_certificates(paths, tmp_path / "all.tsv")
    (tmp_path / "c").mkdir()
    with pytest.raises(RequestError, match=r"chose other images .* 3 shards"):
        merge_certificates([paths[0], *shards(tmp_path / "c", 3)], tmp_path / "all.tsv")


def test_a_shard_that_is_being_written_is_refused(tmp_path: Path) -> None:
    paths = shards(tmp_path, 2)
    with only_writer(paths[1]), pytest.raises(RequestError, match=r"shard2of2\.tsv: another process is writing it"):
        merge_certificates(paths, tmp_path / "all.tsv")
    assert merge_certificates(paths, tmp_path / "all.tsv") == 20


def test_files_of_the_user_are_not_overwritten(tmp_path: Path) -> None:
    paths = shards(tmp_path, 2)
    for text in ("{}", "my notes"):
        (tmp_path / "all.json").write_text(text)
        with pytest.raises(RequestError, match=r"all\.json: exists already"):
            merge_certificates(paths, tmp_path / "all.tsv")
        assert (tmp_path / "all.json").read_text() == text
    assert not (tmp_path / "all.tsv").exists()


def test_files_without_settings_are_not_merged(tmp_path: Path) -> None:
    """They may be of different classifiers, noise levels or data."""
    header = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
    files = [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    for index, file in enumerate(files):
        file.write_text(f"{header}{index}\t1\t1\t0.5\t1\t0:00:01\n")
    with pytest.raises(RequestError, match=r"a\.tsv: expected its settings in a\.json next to it, got none"):
        merge_certificates(files, tmp_path / "out.tsv")
    assert not (tmp_path / "out.tsv").exists()


def test_versions_of_all_shards_are_recorded() -> None:
    old, new = {"torch": "2.11"}, {"torch": "2.12"}
    assert other_versions([{"versions": old}, {"versions": old}, {}]) == {}
    continued = {"versions": old, "other_versions": [new]}
    assert other_versions([continued, {"versions": old}, {"versions": new}]) == {"other_versions": [new]}
    assert other_versions([{"versions": new}, continued]) == {"other_versions": [old]}
