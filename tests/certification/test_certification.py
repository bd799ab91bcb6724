"""A data set through CERTIFY: resume, kills, independence of order and batching, agreement with the plain API."""

import dataclasses
import errno
import fcntl
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import tiny  # noqa: F401 - processes that load the trained run need its network
import torch
from processes import CONTEXT, PATIENCE, kill_when, print_to, start_process

from smoothcert import SmoothedClassifier
from smoothcert.certification.certificates import CertifiedImage, read_certificates
from smoothcert.certification.certify_dataset import Certification, CertificationStatus, certify_dataset
from smoothcert.certification.checks import SETTINGS
from smoothcert.certification.prepare import Prepared
from smoothcert.certification.recertify import recertify
from smoothcert.certification.settings import SELECTION, CertifyRecipe, CertifySettings, images_at_once
from smoothcert.certification.shards import Selection, merge_certificates
from smoothcert.certification.subject import missing_classes
from smoothcert.classifier import image_layout
from smoothcert.data import ImageData
from smoothcert.distributed import Team
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.records import parse_recipe
from smoothcert.io.results import only_writer, read_settings, stored_settings, write_settings
from smoothcert.models.precision import at_precision, has_batch_norm
from smoothcert.noise import Gaussian
from smoothcert.smoothing.accuracy import NoiseAccuracy
from smoothcert.smoothing.certificate import Certificate
from smoothcert.smoothing.votes import BATCH_SIZE, VoteCounter, default_batch_size, fitting_batch_size
from smoothcert.training.checkpoint import load_run

CPU = torch.device("cpu")


def recipe(**changes: object) -> CertifyRecipe:
    return CertifyRecipe.model_validate({"sigma": 0.5, "n": 300, "seed": 5} | changes)


def comparable(rows: tuple[CertifiedImage, ...]) -> dict[int, tuple[object, ...]]:
    """Everything but the time."""
    return {row.index: (row.label, row.certificate) for row in rows}


def certify(
    run: Path, data: ImageData, path: Path, indices: list[int], **changes: object
) -> dict[int, tuple[object, ...]]:
    certify_dataset(load_run(run), data, path, recipe(**changes), indices=indices, device=CPU)
    return comparable(read_certificates(path).rows)


class Recorded(Certification):
    """Gives a row for each image without votes."""

    def rows(self, indices: Sequence[int]) -> list[CertifiedImage]:
        return [CertifiedImage(index, 0, Certificate(0, 0.5, 1, 1, 1, ((0, 1),)), 0.0) for index in indices]


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_processes_divide_the_missing_images_evenly(test_data: ImageData, processes: int) -> None:
    """Each missing image has one process, and the slowest process has at most one image more than another."""
    counter = VoteCounter(lambda images: images.flatten(1)[:, :2], Gaussian(0.5), 2)
    prepared, written = Prepared(counter, recipe(), (1, 28, 28), CPU), list[list[int]]()
    known = Recorded(prepared, test_data).rows([4, 10, 16])
    for rank in range(processes):
        rows: list[CertifiedImage] = []
        writer: Any = SimpleNamespace(append=rows.extend)
        work = Recorded(prepared, test_data, Team(rank, processes))
        work.append(range(0, 40, 2), writer, known, lambda status: None)
        written.append([row.index for row in rows])
    assert sorted(index for part in written for index in part) == [i for i in range(0, 40, 2) if i not in (4, 10, 16)]
    sizes = [len(part) for part in written]
    assert max(sizes) - min(sizes) <= 1


def test_rows_equal_smoothed_classifier(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    """The same numbers as SmoothedClassifier gives for images 0, 1, 2 with the same seed."""
    rows = certify(trained_run, test_data, tmp_path / "a.tsv", [0, 1, 2])
    images, labels = test_data.batch(torch.arange(3))
    model = load_run(trained_run).model
    plain = SmoothedClassifier(model, sigma=0.5, batch_size=500).certify(images, n=300, seed=5, indices=range(3))
    assert [rows[i][1] for i in range(3)] == list(plain)
    assert [rows[i][0] for i in range(3)] == labels.tolist()
    assert any(certificate.radius > 0 for certificate in plain)


def test_order_and_resume_do_not_change_rows(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    """Seven images are more than one forward pass of the selection holds."""
    images = list(range(7))
    whole = certify(trained_run, test_data, tmp_path / "whole.tsv", images)
    backwards = certify(trained_run, test_data, tmp_path / "back.tsv", images[::-1])
    certify(trained_run, test_data, tmp_path / "parts.tsv", [3, 4])
    parts = certify(trained_run, test_data, tmp_path / "parts.tsv", images)
    assert whole == backwards == parts
    assert len(whole) == 7


def test_a_file_is_continued_without_doing_rows_again(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    certify(trained_run, test_data, path, [0, 1, 2])
    before = path.read_bytes()
    seen: list[CertificationStatus] = []
    run = load_run(trained_run)
    certify_dataset(run, test_data, path, recipe(), indices=[0, 1, 2, 3], device=CPU, on_progress=seen.append)
    assert path.read_bytes().startswith(before)
    assert [status.done for status in seen] == [3, 4]
    radii = [row.radius_if_correct for row in read_certificates(path).rows]
    assert seen[-1].average_certified_radius == pytest.approx(sum(radii) / 4)
    assert seen[-1].total == 4
    assert seen[-1].votes_per_second > 0
    certify_dataset(run, test_data, path, recipe(), indices=[3, 4], device=CPU, on_progress=seen.append)
    assert [(status.done, status.total) for status in seen[2:]] == [(1, 2), (2, 2)], "rows of other images do not count"
    assert seen[2].average_certified_radius == radii[3]


def test_other_settings_are_refused(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    certify(trained_run, test_data, tmp_path / "a.tsv", [0])
    for field, value in (("n", 400), ("alpha", 0.01), ("seed", 6), ("sigma", 0.25), ("batch_size", 250)):
        with pytest.raises(RequestError, match=f"{field}: the file has"):
            certify(trained_run, test_data, tmp_path / "a.tsv", [1], **{field: value})


def test_settings_record_model_data_and_statistics(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    certify(trained_run, test_data, tmp_path / "a.tsv", [0])
    stored = read_certificates(tmp_path / "a.tsv")
    expected = {"sigma": 0.5, "n0": 100, "n": 300, "alpha": 0.001, "precision": "fp32", "seed": 5, "batch_size": 500}
    assert {k: stored.settings[k] for k in expected} == expected
    assert stored.settings["noise"] == "gaussian"
    assert stored.settings["dataset"] == "mnist-sample"
    assert len(stored.settings["weights_sha256"]) == 64
    assert stored.provenance["versions"]["torch"] == torch.__version__
    assert stored.provenance["model"] == load_run(trained_run).provenance


KILLED = {"n": 500, "max_images": 12, "seed": 3, "batch_size": 100}


def certify_some(run: Path, path: Path, data: ImageData) -> None:
    # So slowly that it is killed in the middle.
    certify_dataset(load_run(run), data, path, device=CPU, **KILLED, on_progress=lambda status: time.sleep(0.1))


@pytest.mark.slow
def test_kill_loses_at_most_the_row_in_flight(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    path = run / "certificates" / "killed.tsv"
    kill_when(lambda: path.exists() and path.read_bytes().count(b"\n") >= 4, certify_some, run, path, test_data)
    kept = path.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    assert 3 <= kept.count(b"\n") - 1 < 12
    resumed = certify_dataset(load_run(run), test_data, path, device=CPU, **KILLED).rows
    whole = certify_dataset(load_run(run), test_data, run / "whole.tsv", device=CPU, **KILLED).rows
    assert path.read_bytes().startswith(kept)
    assert comparable(resumed) == comparable(whole)
    assert len(whole) == 12


def test_open_settings_come_from_the_resumed_file(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    """Seed, batch size and precision of an existing file are taken over; what is asked for is not overruled."""
    path = tmp_path / "a.tsv"
    certify(trained_run, test_data, path, [0], batch_size=300, precision="fp32", seed=77)
    stored = stored_settings(path)
    again = CertifySettings(sigma=0.5, n=300, precision="auto", seed=None).completed(stored, CPU, (1, 28, 28))
    assert (again.seed, again.batch_size, again.precision) == (77, 300, "fp32")
    settings = CertifySettings(sigma=0.5, precision="bf16", batch_size=100, seed=5)
    asked = settings.completed(stored, CPU, (1, 28, 28))
    assert (asked.seed, asked.batch_size, asked.precision) == (5, 100, "bf16")
    fresh = {CertifySettings(sigma=0.5).completed({}, CPU, (1, 28, 28)).seed for _ in range(3)}
    assert len(fresh) == 3


def test_selected_images() -> None:
    assert Selection(10, 4, None).indices == [0, 4, 8]
    assert Selection(10, 1, 3).indices == [0, 1, 2]
    for skip, most in ((0, None), (1, 0)):
        with pytest.raises(RequestError, match="expected at least 1"):
            Selection(10, skip, most)


@pytest.mark.parametrize("indices", [[0, 1, 0], [-1], [2000]])
def test_indices_that_do_not_name_different_images_are_refused(
    trained_run: Path, test_data: ImageData, tmp_path: Path, indices: list[int]
) -> None:
    with pytest.raises(RequestError, match="indices: expected different integers from 0 to 1999"):
        certify(trained_run, test_data, tmp_path / "a.tsv", indices)
    assert list(tmp_path.iterdir()) == []


def test_missing_classes_are_reported() -> None:
    """Where classes repeat every ten images, and where they come one after the other."""
    labels = torch.arange(1000) % 10
    data = ImageData(torch.zeros(1000, 1, 2, 2, dtype=torch.uint8), labels, 10, "interleaved", "test")
    warning = missing_classes(data, Selection(1000, 20, None).indices)
    assert warning is None, "too few to tell"
    warning = missing_classes(data, Selection(1000, 10, None).indices)
    assert "9 of 10 classes (1, 2, 3, 4, 5, ...) are missing from the 100 selected images" in str(warning)
    assert "5 of 10 classes (1, 3, 5, 7, 9)" in str(missing_classes(data, Selection(1000, 2, None).indices))
    assert missing_classes(data, Selection(1000, 3, None).indices) is None
    by_class = replace(data, labels=labels.sort().values)
    assert missing_classes(by_class, Selection(1000, 20, None).indices) is None
    assert "9 of 10" in str(missing_classes(by_class, Selection(1000, 1, 100).indices))
    named = replace(by_class, class_names=tuple("abcdefghij"))
    assert "9 of 10 classes (b, c, d, e, f, ...)" in str(missing_classes(named, Selection(1000, 1, 100).indices))
    three = replace(by_class, class_names=("a", "b\n", "c"))  # fewer names than classes
    assert "9 of 10 classes (b, c, 3, 4, 5, ...)" in str(missing_classes(three, Selection(1000, 1, 100).indices))


def test_a_shard_lacks_no_class_that_the_other_shards_have(tmp_path: Path) -> None:
    """The images of a shard are of one class, those of all shards together of ten."""
    pixels, notes = torch.zeros(600, 1, 2, 5, dtype=torch.uint8), list[str]()
    data, shard = ImageData(pixels, torch.arange(600) % 10, 10, "interleaved", "test"), recipe(n=20, shard=(1, 10))
    options: dict[str, Any] = {"name": "mine", "device": CPU, "on_warning": notes.append}
    file = certify_dataset(lambda images: images.flatten(1), data, tmp_path / "a.tsv", shard, **options)
    assert [row.label for row in file] == [0] * 60
    assert "missing" in str(missing_classes(data, [row.index for row in file]))
    assert not [note for note in notes if "missing" in note]


def test_classes_missing_by_chance_are_not_reported() -> None:
    """In 50 random orders of a hundred classes, and of ten classes of which one is rare."""
    torch.manual_seed(0)
    many, rare = torch.arange(10_000) % 100, torch.cat([torch.arange(9950) % 9, torch.full((50,), 9)])
    for labels, skip in ((many, 20), (many, 17), (rare, 50), (rare, 10)):
        warned = 0
        for _ in range(50):
            order = labels[torch.randperm(10_000)]
            data = ImageData(torch.zeros(10_000, 1, 1, 1, dtype=torch.uint8), order, 100, "shuffled", "test")
            warned += missing_classes(data, Selection(10_000, skip, None).indices) is not None
        assert warned <= 0.1 * 50


@pytest.mark.parametrize(("n", "images"), [(100_000, 1), (1_000, 5), (5_000, 2)])
def test_rows_are_written_often(n: int, images: int) -> None:
    assert images_at_once(recipe(n=n)) == images


def test_shards_merge_into_the_whole(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    whole = certify(trained_run, test_data, tmp_path / "whole.tsv", list(range(7)))
    for i in (1, 2, 3):
        certify(trained_run, test_data, tmp_path / f"{i}.tsv", Selection(7, 1, None, (i, 3)).indices)
    assert merge_certificates([tmp_path / f"{i}.tsv" for i in (1, 2, 3)], tmp_path / "merged.tsv") == 7
    merged = read_certificates(tmp_path / "merged.tsv")
    assert comparable(merged.rows) == whole
    assert [row.index for row in merged.rows] == list(range(7))
    with pytest.raises(RequestError, match="exists already"):
        merge_certificates([tmp_path / "1.tsv"], tmp_path / "merged.tsv")
    certify(trained_run, test_data, tmp_path / "other.tsv", [1], alpha=0.01)
    with pytest.raises(
        RequestError, match=r"other\.tsv: has other settings than .*1\.tsv \(alpha: this has 0\.01, that 0\.001\)"
    ):
        merge_certificates([tmp_path / "1.tsv", tmp_path / "other.tsv"], tmp_path / "x.tsv")


def test_a_contradicting_row_is_refused(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    for name in ("a", "b"):
        certify(trained_run, test_data, tmp_path / f"{name}.tsv", [0])
    path = tmp_path / "b.tsv"
    path.write_text(path.read_text().replace("0\t7\t", "0\t6\t").replace("\t1\t0:", "\t0\t0:"))
    with pytest.raises(WorkError, match=r"image 0 has another result.* certified first"):
        merge_certificates([tmp_path / "a.tsv", path], tmp_path / "x.tsv")


def test_recertify_equals_certifying_with_those_settings(
    trained_run: Path, test_data: ImageData, tmp_path: Path
) -> None:
    images = list(range(4))
    certify(trained_run, test_data, tmp_path / "a.tsv", images)
    for changes in ({"alpha": 1e-5}, {"alpha": 0.2}, {"alpha": 0.01, "bound": "two-sided"}):
        name = "-".join(map(str, changes.values()))
        fresh = certify(trained_run, test_data, tmp_path / f"{name}.tsv", images, **changes)
        assert recertify(str(tmp_path / "a.tsv"), tmp_path / f"{name}-re.tsv", **changes) == 4
        again = read_certificates(tmp_path / f"{name}-re.tsv")
        assert comparable(again.rows) == fresh
        assert again.settings["alpha"] == changes.get("alpha", 0.001)
        assert again.provenance["recertified_from"] == "a.tsv"


def test_recertify_reads_the_first_files(tmp_path: Path) -> None:
    """The numbers that docs/reading-a-certificate.md shows for image 20."""
    first = Path(__file__).parents[2] / "results/float32/consistency-0.5/certificates/test-n100000.tsv.gz"
    assert recertify(first, tmp_path / "a.tsv", alpha=1e-6) == 1000
    stored = read_certificates(tmp_path / "a.tsv")
    assert stored.settings["bound"] == "one-sided"
    assert [f"{row.certificate.radius:.3f}" for row in stored.rows if row.index == 20] == ["0.948"]


def test_recertify_refuses_sequential_files(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    certify(trained_run, test_data, tmp_path / "s.tsv", [0, 1], radii=(0.2,))
    with pytest.raises(RequestError, match="stopped by a sequential test"):
        recertify(tmp_path / "s.tsv", tmp_path / "x.tsv", alpha=0.01)
    (tmp_path / "theirs.tsv").write_text("idx\tlabel\tpredict\tradius\tcorrect\ttime\n0\t1\t1\t0.5\t1\t0:00:01\n")
    with pytest.raises(RequestError, match="stores no votes"):
        recertify(tmp_path / "theirs.tsv", tmp_path / "x.tsv", alpha=0.01)
    certify(trained_run, test_data, tmp_path / "bare.tsv", [0])
    (tmp_path / "bare.json").unlink()
    with pytest.raises(RequestError, match=r"bare\.tsv: expected its settings in bare\.json next to it"):
        recertify(tmp_path / "bare.tsv", tmp_path / "x.tsv", alpha=0.01)
    certify(trained_run, test_data, tmp_path / "a.tsv", [0])
    for changes, message in (({"alpha": 2.0}, "alpha: expected"), ({"bound": "three"}, "bound: expected")):
        with pytest.raises(RequestError, match=message):
            recertify(tmp_path / "a.tsv", tmp_path / "x.tsv", **changes)
    assert not (tmp_path / "x.tsv").exists()


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def narrow(images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        if len(images) > 100:
            raise torch.OutOfMemoryError
        return images.flatten(1)

    assert fitting_batch_size(narrow, 640, torch.zeros(1, 2, 2)) == 80
    assert seen == [640, 320, 160, 80]
    assert fitting_batch_size(lambda images: narrow(images.repeat(60, 1, 1, 1)), 2, torch.zeros(1, 2, 2)) == 1
    with pytest.raises(torch.OutOfMemoryError):  # not even one copy
        fitting_batch_size(lambda images: narrow(images.repeat(101, 1, 1, 1)), 2, torch.zeros(1, 2, 2))
    monkeypatch.setitem(BATCH_SIZE, "cpu", 500)
    assert default_batch_size(CPU, (1, 28, 28)) == 500
    assert 8 <= default_batch_size(CPU, (3, 224, 224)) < 20


def test_batch_norm_is_folded_and_recorded(tmp_path: Path) -> None:
    """The folded network votes as the network itself does."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        *(
            torch.nn.Conv2d(1, 4, 3),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(144, 3),
        )
    )
    network[1].running_mean.normal_()
    network[1].running_var.uniform_(0.5, 2)
    folded = at_precision(network, "fp32", CPU, (1, 8, 8))
    images = torch.rand(5, 1, 8, 8)
    assert not has_batch_norm(folded)
    assert torch.allclose(folded(images), network.eval()(images), atol=1e-5)
    data = ImageData(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 2]), 3, "made", "test")
    certify_dataset(network, data, tmp_path / "a.tsv", recipe(), name="mine", indices=[0, 1], device=CPU)
    assert read_certificates(tmp_path / "a.tsv").settings["batch_norm_folded"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"radii": (0.5, 0.2)}, "radii: expected rising"),
        ({"radii": (0.5,), "radius_loss": 0.1}, "choose one of the rules"),
        ({"radii": (0.5,), "bound": "two-sided"}, "expected one-sided together with radii"),
        ({"bound": "two-sided", "noise": "laplace"}, "expected one-sided for laplace"),
        ({"sound": True, "noise": "uniform"}, "sound: expected gaussian"),
        ({"noise": "cauchy"}, "noise: expected 'gaussian', .* got 'cauchy'"),
    ],
)
def test_rules_that_exclude_each_other_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_recipe(CertifySettings, changes, "certify")


def test_a_file_without_a_later_setting_is_continued_as_if_it_were_off(
    trained_run: Path, test_data: ImageData, tmp_path: Path
) -> None:
    path = tmp_path / "test.tsv"
    first = certify(trained_run, test_data, path, [0])
    stored = read_settings(path)
    later = ("label_aware", "compile", "radius_loss")
    settings = {name: value for name, value in stored["settings"].items() if name not in later}
    write_settings(path, settings, stored["provenance"])

    both = certify(trained_run, test_data, path, [0, 1])
    assert set(both) == {0, 1}
    assert both[0] == first[0]
    with pytest.raises(RequestError, match="label_aware: the file has None, the request True"):
        certify(trained_run, test_data, path, [2], label_aware=True)


def test_every_setting_is_off_by_default_or_as_old_as_the_files() -> None:
    """A later setting with another default would keep every earlier file from being continued."""
    first = {"n0", "n", "alpha", "precision", "bound", "skip", "shard"}
    on = {name for name, field in CertifySettings.model_fields.items() if field.default}
    assert on == first


def test_every_setting_is_checked_in_files_that_are_read() -> None:
    without_effect_on_reading = {"seed", "batch_size", "compile"}
    unchecked = set(CertifySettings.model_fields) - set(SETTINGS) - {*SELECTION} - without_effect_on_reading
    assert not unchecked, "add it to SETTINGS in certification/checks.py, and to RowLimits if radii depend on it"


def test_folding_skips_shared_layers_hooks_and_parametrized_weights() -> None:
    """Shared layers, hooks, a forward of its own and computed weights: the network is then evaluated as it is."""

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(1, 1, 3, padding=1)
            self.bn1, self.bn2 = torch.nn.BatchNorm2d(1), torch.nn.BatchNorm2d(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bn2(self.conv(self.bn1(self.conv(x)).relu())).flatten(1)

    def plain() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten())

    hooked, watched, patched, spectral = plain(), plain(), plain(), plain()
    patched.forward = partial(lambda forward, x: -forward(x), patched.forward)
    hooked.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2 - 1,))
    watched[0].register_forward_hook(lambda module, inputs, output: output * 3)
    spectral[0] = torch.nn.utils.parametrizations.spectral_norm(spectral[0])
    torch.manual_seed(0)
    for network in (Shared(), hooked, watched, patched, spectral):
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
        images = torch.rand(4, 1, 8, 8)
        expected = network.eval()(images)
        assert torch.allclose(at_precision(network, "fp32", CPU, (1, 8, 8))(images), expected, atol=1e-4)


@pytest.mark.parametrize(
    "same_votes",
    [
        lambda logits: logits,
        lambda logits: logits - 1000,
        lambda logits: torch.nn.functional.pad(logits, (0, 1), value=-1e9),
        lambda logits: torch.nn.functional.pad(logits, (0, 1), value=-math.inf),
    ],
)
@pytest.mark.parametrize(
    "shift", [lambda x: x.roll(random.randint(0, 7), -1), lambda x: x + 0.02 * x.roll(int(torch.randint(0, 8, ())), -1)]
)
def test_folding_does_not_freeze_the_random_numbers_of_a_network(
    shift: Callable[..., torch.Tensor], same_votes: Callable[..., torch.Tensor]
) -> None:
    """A trace has one shift for ever; the network draws one for each batch, which makes its votes dependent.

    A constant in all logits, or a class that never wins, changes no vote.
    """

    class Shifted(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return same_votes(super().forward(shift(x)))

    torch.manual_seed(0)
    network = Shifted(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten())
    with pytest.raises(RequestError, match="the same logits for the same inputs"):
        SmoothedClassifier(network, sigma=0.5).certify(torch.rand(1, 1, 8, 8), n=10)


def test_two_processes_cannot_write_one_file(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    for form in ("a.tsv", "a.tsv.gz"):  # of one file
        with only_writer(path), pytest.raises(RequestError, match="another process is writing it"):
            certify(trained_run, test_data, tmp_path / form, [0])
    assert not path.exists()
    assert len(certify(trained_run, test_data, path, [0])) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.tsv"]


def test_shards_with_different_seeds_merge(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    for i in (1, 2):
        certify(trained_run, test_data, tmp_path / f"{i}.tsv", Selection(4, 1, None, (i, 2)).indices, seed=i)
    assert merge_certificates([tmp_path / "1.tsv", tmp_path / "2.tsv"], tmp_path / "whole.tsv") == 4
    merged = read_certificates(tmp_path / "whole.tsv")
    assert merged.settings["seed"] is None
    assert merged.provenance["seeds"] == [1, 2]


class Viewing(torch.nn.Module):
    """Flattens by `view`, as many networks do: that fails on channels-last activations."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4 * 6 * 6, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        activations = self.convolution(images)
        return self.linear(activations.view(len(activations), -1))


def test_a_network_that_needs_contiguous_activations_is_certified(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Viewing()
    data = ImageData(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 2]), 3, "made", "test")
    certify_dataset(network, data, tmp_path / "a.tsv", recipe(), name="mine", indices=[0, 1], device=CPU)
    assert len(read_certificates(tmp_path / "a.tsv").rows) == 2
    assert image_layout(at_precision(network, "fp32", CPU, (3, 8, 8))) == torch.contiguous_format
    SmoothedClassifier(network, sigma=0.5, num_classes=3).certify(torch.rand(1, 3, 8, 8), n=100)


def test_resume_refuses_another_callable(tmp_path: Path) -> None:
    """It has no weights to tell by, so the classes of some images do."""
    data = ImageData(torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1) * 40, torch.zeros(6).long(), 2, "made", "test")

    def above(threshold: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda images: torch.cat([threshold - images.flatten(1), images.flatten(1) - threshold], dim=1)

    path = tmp_path / "a.tsv"
    certify_dataset(above(0.5), data, path, recipe(), name="mine", indices=[0, 1], device=CPU)
    certify_dataset(above(0.5), data, path, recipe(), name="mine", indices=[0, 1, 2], device=CPU)
    before = path.read_bytes()
    with pytest.raises(RequestError, match=r"other settings .classes_sha256"):
        certify_dataset(above(0.2), data, path, recipe(), name="mine", indices=[0, 1, 2, 3], device=CPU)
    assert path.read_bytes() == before
    assert len(read_certificates(path).rows) == 3


@pytest.mark.parametrize("change", ["one image more", "another label", "another image"])
def test_resume_refuses_changed_user_images(change: str, tmp_path: Path) -> None:
    images, labels = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1) * 40, torch.tensor([0, 0, 0, 1, 1, 1])

    def bright(images: torch.Tensor) -> torch.Tensor:
        return torch.cat([0.5 - images.flatten(1), images.flatten(1) - 0.5], dim=1)

    path = tmp_path / "a.tsv"
    certify_dataset(
        bright, ImageData(images, labels, 2, "npz:a", "test"), path, recipe(), name="mine", indices=[0, 1], device=CPU
    )
    if change == "one image more":
        images, labels = torch.cat([images[:1], images]), torch.cat([labels[:1], labels])
    elif change == "another label":
        labels = torch.tensor([0, 0, 1, 1, 1, 1])
    else:
        images = images.clone()
        images[5] += 9
    changed, before = ImageData(images, labels, 2, "npz:a", "test"), path.read_bytes()
    with pytest.raises(RequestError, match="images_sha256"):
        certify_dataset(bright, changed, path, recipe(), name="mine", indices=[0, 1, 2], device=CPU)
    assert path.read_bytes() == before


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS])
def test_certify_works_on_file_systems_without_locks(
    error: int, trained_run: Path, test_data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert len(certify(trained_run, test_data, tmp_path / "a.tsv", [0])) == 1


def test_a_lock_file_removed_by_its_holder_is_locked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes its file after the second process has opened it: that one must lock the next."""
    path, lock, tries = tmp_path / "a.tsv", fcntl.flock, []

    def removed_first(file: IO[str], operation: int) -> None:
        if not tries:
            (tmp_path / ".a.tsv.lock").unlink()
        tries.append(1)
        lock(file, operation)

    monkeypatch.setattr("fcntl.flock", removed_first)
    with only_writer(path), pytest.raises(RequestError, match="another process"), only_writer(path):
        pass
    assert len(tries) >= 3


def write_alone(path: Path, number: int, barrier: Barrier) -> None:
    print_to(path.with_name(f"process{number}"))
    barrier.wait(60)
    try:
        with only_writer(path):
            barrier.wait(60)
            print("wrote")
    except RequestError as error:
        print(error)
        barrier.wait(60)


def test_only_one_of_three_processes_writes_a_file(tmp_path: Path) -> None:
    path, barrier = tmp_path / "a.tsv", CONTEXT.Barrier(3)
    processes = [start_process(write_alone, path, number, barrier) for number in range(3)]
    for process in processes:
        process.join(PATIENCE)
    said = sorted(file.read_text() for file in tmp_path.glob("*.out"))
    assert said == [f"{path}: another process is writing it; wait for it, or choose another --name\n"] * 2 + ["wrote\n"]
    assert not list(tmp_path.glob("*a.tsv*"))


def end_within(path: Path) -> None:
    with only_writer(path):
        os._exit(9)


def test_a_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    process = start_process(end_within, tmp_path / "a.tsv")
    process.join(PATIENCE)
    assert process.exitcode == 9
    assert [path.name for path in tmp_path.iterdir()] == [".a.tsv.lock"]
    with only_writer(tmp_path / "a.tsv"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exists", [True, False])
def test_a_lock_that_is_a_symbolic_link_is_refused(exists: bool, tmp_path: Path) -> None:
    """A downloaded folder may contain one: what it points to is neither changed nor created."""
    (tmp_path / "run").mkdir()
    precious = tmp_path / "precious"
    if exists:
        precious.write_text("content")
    (tmp_path / "run" / ".a.tsv.lock").symlink_to(precious)
    expected = r"\.a\.tsv\.lock: expected no file or a lock file, got a symbolic link; remove it"
    with pytest.raises(RequestError, match=expected), only_writer(tmp_path / "run" / "a.tsv"):
        pass
    assert (precious.read_text() if precious.exists() else None) == ("content" if exists else None)


def test_radii_that_cannot_be_tested_leave_no_file(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    for radii in ((100.0,), (1e-20, 2e-20)):
        with pytest.raises(RequestError, match="radii: "):
            certify(trained_run, test_data, tmp_path / "new" / "a.tsv", [0], radii=radii)
    assert not (tmp_path / "new").exists()


def test_other_networks_are_evaluated_with_channels_last() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 3))
    fast = at_precision(network, "fp32", CPU, (3, 8, 8))
    assert image_layout(fast) == torch.channels_last
    assert image_layout(network) == torch.contiguous_format, "the user's own network is left as it is"
    images = torch.rand(5, 3, 8, 8)
    assert torch.allclose(fast(images), network(images), atol=1e-5)


def test_accuracy_and_selection_are_recorded_and_change_no_certificate(
    trained_run: Path, test_data: ImageData, tmp_path: Path
) -> None:
    seen: list[NoiseAccuracy] = []
    run, path = load_run(trained_run), tmp_path / "a.tsv"

    def call(max_images: int) -> None:
        certify_dataset(run, test_data, path, recipe(max_images=max_images), device=CPU, on_accuracy=seen.append)

    call(8)
    stored = read_certificates(path)
    assert stored.provenance["selection"] == {"images": 2000, "skip": 1, "max_images": 8, "shard": [1, 1]}
    assert stored.provenance["accuracy"] == dataclasses.asdict(seen[0])
    assert seen[0].images == 8
    images, labels = test_data.batch(torch.arange(8))
    assert seen[0].clean == pytest.approx(float((run.model(images).argmax(1) == labels).float().mean()))
    assert 0.3 < seen[0].noisy < 1
    smoothed = SmoothedClassifier(run.model, sigma=0.5, batch_size=500)
    certificates = smoothed.certify(images, n=300, seed=5, indices=range(len(images)))
    assert [row.certificate for row in stored.rows] == list(certificates)
    call(8)
    assert len(seen) == 1, "nothing is left to do"
    call(9)
    assert seen[1].images == 9
    assert read_certificates(path).provenance["accuracy"] == dataclasses.asdict(seen[1])
    assert read_certificates(path).provenance["selection"]["max_images"] == 9


def test_an_interruption_before_the_first_image_leaves_no_file(
    trained_run: Path, test_data: ImageData, tmp_path: Path
) -> None:
    def interrupt(status: CertificationStatus) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify_dataset(
            load_run(trained_run),
            test_data,
            tmp_path / "a.tsv",
            recipe(),
            indices=[0],
            device=CPU,
            on_progress=interrupt,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_out_of_memory_is_a_request_error_and_leaves_no_file(error: Exception, tmp_path: Path) -> None:
    data = ImageData(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1]), 4, "made", "test")

    def narrow(images: torch.Tensor) -> torch.Tensor:
        if len(images) > 100:
            raise error
        return images.flatten(1)

    with pytest.raises(RequestError, match=r"batch-size: 500 noisy images .* do not fit into memory; give a smaller"):
        certify_dataset(narrow, data, tmp_path / "a.tsv", recipe(), name="mine", indices=[0, 1], device=CPU)
    assert list(tmp_path.iterdir()) == []
    certify_dataset(narrow, data, tmp_path / "a.tsv", recipe(batch_size=50), name="mine", indices=[0, 1], device=CPU)


class Scaled(torch.nn.Module):
    """Forward code that depends on more than its weights."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.weight, self.sign = torch.nn.Parameter(torch.ones(1)), sign

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        score = self.sign * self.weight * (images.flatten(1).mean(1, keepdim=True) - 0.5)
        return torch.cat([-score, score], dim=1)


def test_resume_refuses_a_module_with_changed_code(tmp_path: Path) -> None:
    data = ImageData(torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1) * 40, torch.zeros(6).long(), 2, "made", "test")
    path = tmp_path / "a.tsv"
    certify_dataset(Scaled(1), data, path, recipe(), name="mine", indices=[0], device=CPU)
    certify_dataset(Scaled(1), data, path, recipe(), name="mine", indices=[0, 1], device=CPU)
    before = path.read_bytes()
    with pytest.raises(RequestError, match=r"other settings .classes_sha256"):
        certify_dataset(Scaled(-1), data, path, recipe(), name="mine", indices=[0, 1, 2], device=CPU)
    assert path.read_bytes() == before


def test_recertify_does_not_overwrite_files_of_the_user(
    trained_run: Path, test_data: ImageData, tmp_path: Path
) -> None:
    certify(trained_run, test_data, tmp_path / "a.tsv", [0])
    for folder in (Path(), tmp_path):
        with pytest.raises(RequestError, match="expected a file to write, got a folder"):
            recertify(tmp_path / "a.tsv", folder, alpha=0.01)
    for name, text in (("x.json", "{}"), ("x.tsv", "mine")):
        (tmp_path / name).write_text(text)
        with pytest.raises(RequestError, match=f"{name}: exists already"):
            recertify(tmp_path / "a.tsv", tmp_path / "x.tsv", alpha=0.01)
        assert (tmp_path / name).read_text() == text
        (tmp_path / name).unlink()


@pytest.mark.parametrize("lines", [0, 1])
def test_recertify_refuses_a_file_without_rows(
    lines: int, trained_run: Path, test_data: ImageData, tmp_path: Path
) -> None:
    certify(trained_run, test_data, path := tmp_path / "a.tsv", [0])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(RequestError, match=r"a\.tsv: expected certificates, got none; certify first"):
        recertify(path, tmp_path / "x.tsv", alpha=0.01)
    assert not (tmp_path / "x.json").exists()


def test_the_time_left_is_extrapolated() -> None:
    assert CertificationStatus(0, 10, 0.0, 0.0, 0.0).seconds_left is None
    assert CertificationStatus(4, 10, 0.0, 2.0, 100.0).seconds_left == 3.0


@pytest.mark.parametrize("field", ["n", "n0", "batch_size"])
def test_too_large_numbers_are_refused(field: str) -> None:
    for value in (10**9 + 1, 2**63 - 1):
        with pytest.raises(RequestError, match=f"{field}: expected at most 1000000000"):
            parse_recipe(CertifySettings, {field: value}, "certify")


@pytest.mark.parametrize("name", ["a", "a[b]"])
def test_parts_of_an_interrupted_team_are_continued_with_their_seed_and_versions(
    trained_run: Path, test_data: ImageData, tmp_path: Path, name: str
) -> None:
    """Two processes were killed before their parts were joined: the settings exist, the file does not."""
    path, part = tmp_path / f"{name}.tsv", tmp_path / f".{name}.part1.tsv"
    rows = certify(trained_run, test_data, path, [0, 1], seed=77)
    path.rename(part)
    stored = read_settings(path)
    versions = stored["provenance"]["versions"]
    first, second = ({**versions, "device": device} for device in ("of process 0", "of process 1"))
    for file, of_process in ((path, first), (part, second)):
        write_settings(file, stored["settings"], {"versions": of_process, "threads": 99})
    again = CertifySettings(sigma=0.5, n=300, precision="fp32")
    certify_dataset(load_run(trained_run), test_data, path, again, indices=[0, 1, 2], device=CPU)
    assert read_certificates(path).settings["seed"] == 77
    found = comparable(read_certificates(path).rows)
    assert len(found) == 3
    assert rows.items() <= found.items()
    provenance = read_certificates(path).provenance
    assert (provenance["versions"], provenance["threads"]) == (first, 99)
    assert provenance["other_versions"] == [second, versions]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{name}.json", f"{name}.tsv"]


def test_parts_of_other_settings_are_not_joined(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    """Their radii hold with another probability."""
    part = tmp_path / ".a.part1.tsv"
    certify(trained_run, test_data, part, [0, 1], alpha=0.01)
    before = part.read_bytes()
    with pytest.raises(RequestError, match=r"part1\.tsv: was made with other settings \(alpha: the file has 0\.01"):
        certify(trained_run, test_data, tmp_path / "a.tsv", [2])
    assert part.read_bytes() == before
    assert not (tmp_path / "a.tsv").exists()


class First(Team):
    """The first of two processes, which does not wait for the second."""

    def wait(self) -> None:
        pass

    def agree(self, value: Any) -> Any:
        return value


def test_a_team_that_continues_a_file_keeps_the_versions_of_its_rows(
    trained_run: Path, test_data: ImageData, tmp_path: Path
) -> None:
    path, run = tmp_path / "a.tsv", load_run(trained_run)
    rows = certify(trained_run, test_data, path, [0, 1])
    stored = read_settings(path)
    write_settings(path, stored["settings"], {"versions": {"torch": "earlier"}, "threads": 99})
    certify_dataset(run, test_data, path, recipe(), indices=[0, 1, 2, 3, 4], device=CPU, team=First(0, 2))
    file = read_certificates(path)
    assert [row.index for row in file] == [0, 1, 2, 4], "image 3 is for the second process"
    assert rows.items() <= comparable(file.rows).items()
    assert (file.provenance["versions"], file.provenance["threads"]) == ({"torch": "earlier"}, 99)
    assert file.provenance["other_versions"] == [stored["provenance"]["versions"]]


def test_default_settings_are_those_of_the_papers() -> None:
    settings = CertifySettings()
    assert (settings.n0, settings.n, settings.alpha) == (100, 100_000, 0.001)
