"""`smoothcert.train` and `smoothcert.load`: data of several kinds, callbacks, and the run that they return."""

import copy
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import digest, metrics, tiny_recipe
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import smoothcert as sc
from smoothcert import cli
from smoothcert.data import ImageData, Normalization, mnist
from smoothcert.errors import RequestError


class Digits(Dataset[tuple[Tensor, int]]):
    """The images of `data` as a user's data set, optionally with a random transform."""

    def __init__(self, data: ImageData, random: bool = False) -> None:
        self.data, self.random = data, random

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.data.images[index].float() / 255
        return image * torch.rand(()) if self.random else image, int(self.data.labels[index])


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(())


def test_torch_dataset_gives_the_weights_of_the_same_images(tmp_path: Path, tiny_data: ImageData) -> None:
    images = tiny_data.subset(torch.arange(128))
    run = sc.train(tiny_recipe(), Digits(images), str(tmp_path / "dataset"), device="cpu")
    sc.train(tiny_recipe(), images, tmp_path / "images", device="cpu")
    assert digest(tmp_path / "dataset") == digest(tmp_path / "images")
    assert run.recipe.dataset == "torch:Digits"
    assert (run.spec.shape, run.spec.num_classes, run.finished) == ((1, 28, 28), 10, True)
    assert not run.model.training


def test_random_transforms_are_repeated_on_resume(tmp_path: Path, tiny_data: ImageData) -> None:
    """Each epoch has other images; an interrupted run sees the same ones after it resumes."""

    class Stop(Exception):
        pass

    def stop(run: sc.Run, line: dict[str, Any]) -> None:
        raise Stop

    data = Digits(tiny_data.subset(torch.arange(128)), random=True)
    sc.train(tiny_recipe(), data, tmp_path / "whole", device="cpu")
    with pytest.raises(Stop):
        sc.train(tiny_recipe(), data, tmp_path / "cut", device="cpu", on_epoch=stop)
    sc.train(tiny_recipe(), data, tmp_path / "cut", device="cpu", resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_data_by_name_and_by_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_data: ImageData) -> None:
    monkeypatch.setattr(mnist, "load_sample", lambda split: tiny_data)
    named = sc.train(tiny_recipe(epochs=1), "mnist-sample", tmp_path / "named", device="cpu")
    sc.train(tiny_recipe(epochs=1), out=tmp_path / "recipe", device="cpu")
    assert named.recipe.dataset == "mnist-sample"
    assert digest(tmp_path / "named") == digest(tmp_path / "recipe")


def test_on_epoch_receives_the_run_and_the_metrics(tmp_path: Path, tiny_data: ImageData) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    run = sc.train(
        tiny_recipe(), tiny_data, tmp_path, device="cpu", on_epoch=lambda run, line: seen.append((run.epoch, line))
    )
    assert [epoch for epoch, _ in seen] == [1, 2]
    assert [line for _, line in seen] == metrics(tmp_path) == run.metrics


@pytest.mark.parametrize(
    ("on_epoch", "message"),
    [
        (lambda run: None, r"on_epoch: expected a function of \(run, metrics\), got one of \(run\); change its"),
        (lambda run, *, metrics: None, r"got one of \(run, \*, metrics\); change its parameters$"),
        (3, r"on_epoch: expected a function of \(run, metrics\), got int$"),
    ],
)
def test_wrong_on_epoch_is_refused_before_training(
    on_epoch: Any, message: str, tmp_path: Path, tiny_data: ImageData
) -> None:
    with pytest.raises(RequestError, match=message):
        sc.train(tiny_recipe(), tiny_data, tmp_path / "run", device="cpu", on_epoch=on_epoch)
    assert not (tmp_path / "run").exists()


def test_own_network_receives_the_trained_weights(tmp_path: Path, tiny_data: ImageData) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    before = network[1].weight.detach().clone()
    run = sc.train(tiny_recipe(model="mine", epochs=1), tiny_data, tmp_path, model=network, device="cpu")
    assert run.model is network
    assert not torch.equal(network[1].weight, before)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TensorDataset(torch.zeros(64, 1, 28, 28)), "expected .image, label., got"),
        (
            TensorDataset(torch.zeros(64, 28, 28), torch.zeros(64)),
            r"expected an image \[c, h, w\], got",
        ),
        (
            TensorDataset(torch.full((64, 1, 28, 28), -1.0), torch.zeros(64)),
            r"expected pixels in \[0, 1\], got -1 to -1",
        ),
        (TensorDataset(torch.zeros(64, 1, 28, 28), torch.full((64,), -1)), "expected a label of at least 0, got -1"),
        (TensorDataset(torch.zeros(0, 1, 28, 28), torch.zeros(0)), "expected at least one item, got none"),
        (
            TensorDataset(torch.zeros(64, 1, 28, 28), torch.zeros(64).long()),
            "expected images of at least two classes, got",
        ),
        (Stream(), "expected a map-style torch Dataset .* got Stream"),
        (DataLoader(TensorDataset(torch.zeros(1))), "got DataLoader; a DataLoader has its data set in"),
        (3, "got int"),
    ],
)
def test_unusable_data_are_refused_in_one_line(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        sc.train(tiny_recipe(), data, tmp_path / "run", device="cpu")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,) * 3, (0.2,) * 3, r"expected a normalization of 1 channel, got mean \(0\.5, 0\.5, 0\.5\)"),
        ((0.5,), (), "give one number per channel"),
        ((0.5,), (0.0,), "with std above 0"),
        ((127.5,), (64.0,), r"divide numbers for pixels in 0\.\.255 by 255"),
        ((float("nan"),), (0.5,), r"pixels in \[0, 1\]"),
    ],
)
def test_a_normalization_that_does_not_fit_is_refused_before_training(
    tmp_path: Path, tiny_data: ImageData, mean: tuple[float, ...], std: tuple[float, ...], message: str
) -> None:
    """A run with it could not be read again."""
    with pytest.raises(RequestError, match=message):
        sc.train(
            tiny_recipe(),
            replace(tiny_data, normalization=Normalization(mean, std)),
            tmp_path / "run",
            device="cpu",
        )
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def certified(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> sc.Run:
    folder = Path(shutil.copytree(trained_run, tmp_path_factory.mktemp("api") / "run"))
    options = ["--n", "100", "--max-images", "12", "--device", "cpu", "--seed", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["smoothcert", "certify", str(folder), *options])
        with pytest.raises(SystemExit):
            cli.main()
    return sc.load(str(folder))


def test_certificates_of_a_run_are_a_table(certified: sc.Run, tmp_path: Path) -> None:
    table = certified.certificates
    radii = [row.certificate.radius if row.certificate.prediction == row.label else 0.0 for row in table]
    assert len(table) == 12
    assert table.acr == pytest.approx(sum(radii) / 12) == sc.read_certificates(table.path).acr
    assert repr(table) == f"CertificatesFile({table.path}: 12 images, ACR {table.acr:.3f}, one-sided bound)"
    for radius in (0.25, 0.5):
        assert table.certified_accuracy(radius) == sum(r >= radius for r in radii) / 12
    lines = table.plot(tmp_path / "curve.png").axes[0].get_lines()
    (line,) = [line for line in lines if line.get_drawstyle() == "steps-post"]
    assert min(line.get_xdata()) == 0
    assert max(line.get_ydata()) == pytest.approx(100 * sum(row.correct for row in table) / 12)
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_radii_are_numbers_of_any_kind_or_refused_in_one_line(certified: sc.Run, tmp_path: Path) -> None:
    expected = sc.report(certified, radii=(0, 0.5))
    for radii in (np.array([0, 0.5]), torch.tensor([0, 0.5])):
        assert sc.report(certified, radii=radii, out=tmp_path / "report", formats="md") == expected  # type: ignore[arg-type]
    assert (tmp_path / "report/report.md").exists()
    for wrong in (0.5, "0,0.5", [None]):
        with pytest.raises(RequestError, match=r"^radii: expected numbers, got .*; give for example"):
            sc.report(certified, radii=wrong)  # type: ignore[arg-type]
    for several in ((0, 0.5), np.zeros(12)):
        with pytest.raises(RequestError, match=r"^radius: expected one number, got .*; ask for one radius at a time"):
            certified.certificates.certified_accuracy(several)  # type: ignore[arg-type]


def test_to_pandas_has_one_row_per_image(certified: sc.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        with pytest.raises(RequestError, match=r"pip install 'smoothcert\[notebook\]'"):
            certified.certificates.to_pandas()
    pytest.importorskip("pandas")
    frame = certified.certificates.to_pandas()
    assert list(frame.index) == [row.index for row in certified.certificates]
    assert frame["radius"].tolist() == [row.certificate.radius for row in certified.certificates]
    empty = replace(certified.certificates, rows=()).to_pandas()
    assert (len(empty), list(empty.columns)) == (0, list(frame.columns))


def test_certificates_of_other_weights_give_a_warning(certified: sc.Run) -> None:
    """As after training has continued, or if the model was changed in memory."""
    changed = copy.deepcopy(certified)
    with torch.no_grad():
        next(changed.model.parameters()).mul_(2)
    with pytest.warns(UserWarning, match="is about other weights than those of the run now; certify again"):
        _ = changed.certificates


def test_several_certificates_files_need_a_name(certified: sc.Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(certified.folder, tmp_path / "run"))
    (file,) = (folder / "certificates").glob("*.tsv")
    for ending in (".tsv", ".json"):
        shutil.copy(file.with_suffix(ending), folder / "certificates" / f"other{ending}")
    run = replace(certified, folder=folder)
    with pytest.raises(RequestError, match="expected one certificates file, got other, "):
        _ = run.certificates
    assert run.read_certificates("other").acr == certified.certificates.acr
    with pytest.raises(RequestError, match="got nothing"):
        run.read_certificates("nothing")


def test_smoothed_has_the_noise_of_the_training(certified: sc.Run, tiny_data: ImageData) -> None:
    smoothed = certified.smoothed()
    images, _ = tiny_data.batch(torch.arange(2))
    assert len(list(smoothed.certify(images, n=100, seed=0))) == 2
    assert smoothed.noise.sigma == certified.recipe.sigma
    assert certified.smoothed(sigma=0.25).noise.sigma == 0.25


def test_python_of_the_documentation_runs(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert '"mnist/consistency", sigma=0.5' in source
    monkeypatch.setattr(sc, "preset", lambda name, sigma: tiny_recipe(epochs=1, sigma=sigma), raising=False)
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "training.md", "exec"), {"my_dataset": Digits(tiny_data)})
    assert float(capsys.readouterr().out) == metrics(tmp_path / "runs/a")[0]["loss"]


def test_own_network_is_not_recorded_as_that_of_the_preset(tmp_path: Path, tiny_data: ImageData) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    run = sc.train(tiny_recipe(), tiny_data, tmp_path / "run", model=network, device="cpu")
    assert run.recipe.model == "Sequential"
    with pytest.raises(RequestError, match=r"got Sequential, .*load\(PATH, model=network\), or .*--init"):
        sc.load(tmp_path / "run")
    assert sc.load(tmp_path / "run", model=network).finished
    with pytest.raises(RequestError, match=r"its weights do not fit the network Linear .*; give the network of its"):
        sc.load(tmp_path / "run", model=nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("mnist/gaussian", {}, "recipe: expected a TrainRecipe, got str"),
        (None, {"track": "tb"}, "track: expected one of"),
        (None, {"compile": False}, "compile: expected one of auto, always, never, got False"),
    ],
)
def test_wrong_arguments_are_refused(
    recipe: Any, options: dict[str, Any], message: str, tmp_path: Path, tiny_data: ImageData
) -> None:
    with pytest.raises(RequestError, match=message):
        sc.train(recipe or tiny_recipe(), tiny_data, tmp_path, device="cpu", **options)


def test_a_missing_gpu_is_refused_before_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="device: cuda was asked for, but torch sees no GPU; use cpu"):
        sc.train(tiny_recipe(), "npz:nowhere.npz", tmp_path / "run", device="cuda")


def test_loading_a_run_leaves_the_random_numbers_of_the_user(trained_run: Path) -> None:
    before = torch.get_rng_state()
    sc.load(trained_run)
    assert torch.equal(torch.get_rng_state(), before)


def test_runs_are_reported_and_shown_in_one_line(certified: sc.Run) -> None:
    assert sc.report(certified) == sc.report([certified.folder]) == sc.report([certified])
    assert sc.report(certified.certificates) == sc.report(certified.certificates.path)
    shown = f"Run({certified.folder}: tiny on mnist-sample, method gaussian, gaussian noise, sigma 0.5, epoch "
    assert repr(certified).startswith(shown)
    assert "ACR" in repr(certified.certificates)
    assert len(repr(certified.certificates)) < 300


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_settings_of_torch_neither_change_a_run_nor_are_changed(
    trained_run: Path, tmp_path: Path, tiny_data: ImageData, dtype: torch.dtype
) -> None:
    recipe = tiny_recipe(epochs=1, learning_rate_drops=())
    sc.train(recipe, tiny_data, out=tmp_path / "usual", device="cpu")
    expected, weights = digest(tmp_path / "usual"), digest(trained_run)
    generator = torch.get_rng_state()
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        loaded = digest(trained_run)
        with torch.inference_mode():
            sc.train(recipe, tiny_data, out=tmp_path / "other", test_data=tiny_data, evaluate_every=1, device="cpu")
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert (loaded, digest(tmp_path / "other")) == (weights, expected)
    assert torch.equal(torch.get_rng_state(), generator)


def test_presets_are_recipes() -> None:
    recipe = sc.preset("mnist/consistency", sigma=0.5)
    assert isinstance(recipe, sc.TrainRecipe)
    assert (recipe.sigma, recipe.method) == (0.5, "consistency")


def test_a_folder_of_results_without_weights_says_what_can_be_read() -> None:
    results = Path(__file__).parents[2] / "results/cifar10/consistency-0.5"
    with pytest.raises(RequestError, match=r"holds no model\.safetensors.*read_certificates, `smoothcert report`"):
        sc.load(results)
