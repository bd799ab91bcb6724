"""`smoothcert.certify_dataset` as a user calls it: models, torch data, paths, and agreement with the command line."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny import ListDataset
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import smoothcert as sc
from smoothcert.certification.attack import attack_dataset
from smoothcert.certification.attack_recipe import AttackRecipe
from smoothcert.certification.certificates import CertifiedImage
from smoothcert.certification.model_provenance import unfinished
from smoothcert.data import images_from_dataset, load_folder, mnist
from smoothcert.training.checkpoint import load_run

FEW = {"n": 50, "n0": 20, "seed": 3, "device": "cpu"}


def bright(images: torch.Tensor) -> torch.Tensor:
    """Class 1 for images above 1/2, of three classes."""
    score = images.flatten(1).mean(1, keepdim=True) - 0.5
    return torch.cat([-score, score, torch.full_like(score, -9)], dim=1)


@pytest.fixture
def dataset() -> TensorDataset:
    levels = torch.tensor([0.1, 0.3, 0.7, 0.9]).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    return TensorDataset(levels, torch.tensor([0, 0, 1, 1]))


def comparable(file: "sc.certification.certificates.CertificatesFile") -> list[CertifiedImage]:
    return [CertifiedImage(row.index, row.label, row.certificate, 0.0) for row in file.rows]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ((), {}),
        (("--radii", "0.25,0.5"), {"radii": (0.25, 0.5)}),
        (("--radius-loss", "0.3", "--skip", "500"), {"radius_loss": 0.3, "skip": 500}),
        (("--sound", "--shard", "2/2"), {"sound": True, "shard": (2, 2)}),
    ],
)
def test_api_and_command_line_give_the_same_file(
    options: tuple[str, ...],
    settings: dict[str, Any],
    trained_run: Path,
    tmp_path: Path,
    run_cli: Callable[..., tuple[int, str, str]],
) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    fixed = ("--n", 50, "--n0", 20, "--seed", 3, "--device", "cpu", "--max-images", 4, "--name", "a")
    assert run_cli("certify", run, *fixed, *options)[0] == 0
    one = sc.read_certificates(str(run / "certificates" / "a.tsv"))
    data, path = mnist.load_sample("test"), str(tmp_path / "b.tsv")
    other = sc.certify_dataset(load_run(run), data, path, max_images=4, **FEW, **settings)
    assert comparable(one) == comparable(other)
    assert one.settings == other.settings
    assert one.provenance == other.provenance


def test_warnings_of_the_command_line_are_warnings_in_python(
    trained_run: Path, tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Other noise than that of training, too few votes for a radius, an accuracy at chance."""
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    options = ("--n", 50, "--n0", 20, "--seed", 3, "--device", "cpu", "--max-images", 30, "--sigma", 3, "--radius", 9)
    code, out, _ = run_cli("certify", run, *options)
    printed = [line.removeprefix("warning: ") for line in out.splitlines() if line.startswith("warning: ")]
    settings = {**FEW, "max_images": 30, "sigma": 3, "wanted_radius": 9}
    with pytest.warns(UserWarning, match="votes cannot certify radius 9") as caught:
        sc.certify_dataset(load_run(run), mnist.load_sample("test"), tmp_path / "b.tsv", **settings)
    assert (code, [str(warning.message) for warning in caught]) == (0, printed)
    assert {warning.filename for warning in caught} == {__file__}
    for part in ("hides images", "was trained with gaussian noise at sigma 0.5, not", "not robust to this noise"):
        assert part in " ".join(printed)
    with pytest.warns(UserWarning, match=r"at sigma 0.5, not with gaussian noise at sigma 0\.25") as caught:
        list(load_run(run).smoothed(0.25).certify_loader(mnist.load_sample("test").subset(torch.arange(2)), n=50))
    assert [warning.filename for warning in caught] == [__file__]
    load_run(run).smoothed()


def test_settings_objects_and_keywords_are_the_same(dataset: TensorDataset, tmp_path: Path) -> None:
    settings = sc.CertifySettings(sigma=0.25, n=50, n0=20, seed=3)
    one = sc.certify_dataset(bright, dataset, tmp_path / "a.tsv", settings, device="cpu")
    other = sc.certify_dataset(bright, dataset, tmp_path / "b.tsv", sigma=0.25, **FEW)
    changed = sc.certify_dataset(bright, dataset, tmp_path / "c.tsv", settings, alpha=0.01, device="cpu")
    assert (comparable(one), one.settings) == (comparable(other), other.settings)
    assert changed.settings == {**one.settings, "alpha": 0.01}
    assert one.settings["model"] == "bright"


def test_loaders_datasets_and_smoothed_classifiers_are_certified(dataset: TensorDataset, tmp_path: Path) -> None:
    smoothed = sc.SmoothedClassifier(bright, sigma=0.25, num_classes=3)
    files = [
        sc.certify_dataset(smoothed, DataLoader(dataset, batch_size=3), tmp_path / "a.tsv", **FEW),
        sc.certify_dataset(bright, dataset, tmp_path / "b.tsv", sigma=0.25, **FEW),
    ]
    assert comparable(files[0]) == comparable(files[1])
    assert [(row.label, row.certificate.prediction) for row in files[0].rows] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert files[0].settings["num_classes"] == 3, "the outputs of the model, not the labels of the data"
    assert files[0].settings["dataset"] == "TensorDataset"


def test_a_module_in_train_mode_is_certified_as_in_eval_mode_and_left_as_it_was(
    dataset: TensorDataset, tmp_path: Path
) -> None:
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4, 3))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    trained, evaluated = (
        sc.certify_dataset(network.train(mode), dataset, tmp_path / f"{mode}.tsv", sigma=0.5, **FEW)
        for mode in (True, False)
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert comparable(trained) == comparable(evaluated)
    assert trained.settings == evaluated.settings


def test_a_smoothed_classifier_keeps_its_forward_passes(dataset: TensorDataset, tmp_path: Path) -> None:
    smoothed = sc.SmoothedClassifier(bright, sigma=0.25, batch_size=7, compile=True)
    for given, size in (({}, 7), ({"batch_size": 9}, 9)):
        file = sc.certify_dataset(smoothed, dataset, tmp_path / f"{size}.tsv", **FEW, **given)
        assert (file.settings["batch_size"], file.settings["compile"]) == (size, True)
    result = smoothed.certify(dataset.tensors[0], n=50, n0=20, seed=3, indices=range(4))
    assert [row.certificate for row in sc.read_certificates(tmp_path / "7.tsv")] == list(result)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ListDataset([{"image": torch.zeros(1, 2, 2), "label": 0}]), r"expected \(image, label\), got dict"),
        (
            DataLoader(ListDataset([{"image": torch.zeros(1, 2, 2), "label": 0}])),
            r"expected \(image, label\), got dict",
        ),
        (ListDataset([torch.zeros(1, 2, 2)]), r"expected \(image, label\), got Tensor"),
        (DataLoader(ListDataset([(torch.zeros(1, 2, 2), 0)]), shuffle=True), "shuffle=False"),
        (DataLoader(ListDataset([(torch.zeros(1, 2, 2), 0)]), collate_fn=lambda items: {"x": items}), "collate_fn"),
        ([], "at least one item"),
    ],
)
def test_data_without_pairs_are_refused(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(sc.RequestError, match=message) as caught:
        sc.certify_dataset(bright, data, tmp_path / "a.tsv", sigma=0.25, **FEW)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class _Centred(nn.Linear):
    """Computes in float32, whatever the precision of its weights."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward((images - torch.tensor([0.5])).flatten(1))


def test_a_network_that_cannot_compute_in_the_precision_costs_one_line(dataset: TensorDataset, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    for model in (_Centred(4, 3), lambda x: network(x)):
        with pytest.raises(sc.RequestError, match=r"must have the same dtype.*precision fp32"):
            sc.certify_dataset(model, dataset, tmp_path / "a.tsv", sigma=0.5, precision="bf16", **FEW)
        assert not list(tmp_path.iterdir())
    recipe = AttackRecipe(sigma=0.5, radii=(0.5,), precision="bf16", seed=1)
    with pytest.raises(sc.RequestError, match=r"must have the same dtype.*precision fp32"):
        attack_dataset(
            _Centred(4, 2), images_from_dataset(dataset), [0], recipe, tmp_path / "b.tsv", torch.device("cpu")
        )


def test_wrong_settings_cost_one_line(dataset: TensorDataset, tmp_path: Path) -> None:
    for fields, message in (
        ({}, "certify: sigma: missing; it must be given"),
        ({"sigma": 0.25, "n": 0}, "certify: n: expected at least 1, got 0"),
        ({"sigma": 0.25, "votes": 5}, "certify: votes: unknown key"),
        ({"sigma": 1.1e6}, "certify: sigma: expected at most 1000000"),
        ({"sigma": 0.25, "radius_loss": 1e300}, "certify: radius_loss: expected at most 1000000"),
        ({"sigma": 0.25, "skip": 0}, "certify: skip: expected at least 1"),
    ):
        with pytest.raises(sc.RequestError, match=message):
            sc.certify_dataset(bright, dataset, tmp_path / "a.tsv", device="cpu", **fields)
    with pytest.raises(sc.RequestError, match=r"out: expected the path of a file .* \.tsv or \.tsv\.gz, got c\.json"):
        sc.certify_dataset(bright, dataset, "c.json", sigma=0.25, **FEW)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": {"n": 50}}, r"settings: expected CertifySettings, got dict; use CertifySettings\(n=\.\.\.\)"),
        ({"name": 5}, "name: expected a text, got 5; give what the file calls the classifier"),
        ({"model": "runs/a"}, r"model: expected a callable on batches, got str; give a model, such as load\(RUN\)"),
        ({"model": torch.nn.Identity}, "model: expected a callable on batches, got the class Identity"),
        ({"denoiser": torch.nn.Identity()}, r"denoiser: expected a denoiser, got Identity; use load_denoiser"),
        ({"device": None}, "device: expected auto, cpu, cuda or mps, got None$"),
        ({"device": 1}, "device: expected auto, cpu, cuda or mps, got 1; choose a GPU by CUDA_VISIBLE_DEVICES=1"),
    ],
)
def test_arguments_of_another_type_cost_one_line(
    arguments: dict[str, Any], message: str, dataset: TensorDataset, tmp_path: Path
) -> None:
    with pytest.raises(sc.RequestError, match=message):
        sc.certify_dataset(**{"model": bright, "data": dataset, "out": tmp_path / "a.tsv", "sigma": 0.25, **arguments})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fields",
    [
        *({"sigma": sigma, "noise": noise} for sigma in (1e-300, 1e6) for noise in ("gaussian", "laplace", "uniform")),
        *({"alpha": alpha, "bound": bound} for alpha in (1e-300, 1 - 1e-16) for bound in ("two-sided", "randomized")),
        *({"radius_loss": loss} for loss in (1e-300, 1e6)),
        {"radii": (1e-5, 5.0)},
    ],
)
def test_extreme_settings_that_are_accepted_give_a_file_that_is_read(
    dataset: TensorDataset, tmp_path: Path, fields: dict[str, Any]
) -> None:
    settings = {"sigma": 0.25, **FEW, **fields, "on_warning": lambda text: None}
    first, again = (sc.certify_dataset(bright, dataset, tmp_path / "a.tsv", **settings) for _ in range(2))
    assert len(first) == 4
    assert list(first) == list(again)


def test_data_that_do_not_know_their_length_are_certified(dataset: TensorDataset) -> None:
    class Pipe(IterableDataset[Any]):
        """As torch's IterDataPipes."""

        def __iter__(self) -> Any:
            return iter(dataset)

        def __len__(self) -> int:
            raise TypeError("Pipe instance doesn't have valid length")

    batches = sc.SmoothedClassifier(bright, sigma=0.25).certify_loader(DataLoader(Pipe(), 2), n=50, n0=20, seed=3)
    assert [batch.indices for batch in batches] == [(0, 1), (2, 3)]


def test_a_file_is_continued_with_other_batches(tmp_path: Path) -> None:
    levels, out = torch.linspace(0.1, 0.9, 130).view(130, 1, 1, 1), tmp_path / "a.tsv"
    data = TensorDataset(levels, (levels.flatten() > 0.5).long())
    settings: dict[str, Any] = {"n": 10, "n0": 10, "seed": 3, "out": out}
    stream = sc.SmoothedClassifier(bright, sigma=0.25).certify_loader(DataLoader(data, 120), **settings)
    assert len(next(stream)) == 120
    stream.close()
    smoothed = sc.SmoothedClassifier(bright, sigma=0.25)
    assert [len(batch) for batch in smoothed.certify_loader(DataLoader(data, 50), **settings)] == [50, 50, 30]
    assert [row.index for row in sc.read_certificates(out)] == list(range(130))


def test_rows_of_other_versions_are_recorded(
    dataset: TensorDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def certify(images: int, loader: bool) -> Any:
        smoothed, path = sc.SmoothedClassifier(bright, sigma=0.25), tmp_path / f"{loader}.tsv"
        if not loader:
            return sc.certify_dataset(smoothed, dataset, path, max_images=images, **FEW).provenance
        batches = smoothed.certify_loader(DataLoader(dataset, 2), out=path, n=50, n0=20, seed=3)
        _ = list(itertools.islice(batches, images // 2))
        batches.close()
        return sc.read_certificates(path).provenance

    for loader in (False, True):
        first = certify(2, loader)["versions"]
        with monkeypatch.context() as patch:
            patch.setattr("smoothcert.certification.subject.versions", lambda device: {"torch": "other"})
            assert "other_versions" not in certify(2, loader), "it computes nothing"
            provenance = certify(4, loader)
        assert (provenance["versions"], provenance["other_versions"]) == (first, [{"torch": "other"}])


def test_a_part_of_a_data_set_does_not_continue_a_file_of_the_whole(tmp_path: Path) -> None:
    """Its images are numbered from 0: image 0 of the part is another one."""
    whole = mnist.load_sample("test")

    def ten_classes(images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(bright(images), (0, 7), value=-9)

    sc.certify_dataset(ten_classes, whole, tmp_path / "a.tsv", indices=[0], sigma=0.25, **FEW)
    with pytest.raises(sc.RequestError, match="split: the file has 'test', the request 'part of test'"):
        sc.certify_dataset(ten_classes, whole.subset(torch.arange(5, 9)), tmp_path / "a.tsv", sigma=0.25, **FEW)


def test_files_that_are_scaled_otherwise_do_not_continue_a_file(tmp_path: Path) -> None:
    """The network takes images of any size; images that are not in memory are identified by their files."""
    for name, grey in (("a", 0), ("b", 255)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("L", (8, 8), grey).save(tmp_path / "photos" / name / "1.png")
    small, large = (load_folder(tmp_path / "photos", "test", size, in_memory_bytes=0) for size in (2, 4))

    def two_classes(images: torch.Tensor) -> torch.Tensor:
        return bright(images)[:, :2]

    sc.certify_dataset(two_classes, small, tmp_path / "a.tsv", indices=[0], sigma=0.25, **FEW)
    with pytest.raises(sc.RequestError, match="images_sha256"):
        sc.certify_dataset(two_classes, large, tmp_path / "a.tsv", sigma=0.25, **FEW)
    assert len(sc.certify_dataset(two_classes, small, tmp_path / "a.tsv", sigma=0.25, **FEW)) == 2


def test_data_that_have_changed_do_not_continue_a_file(dataset: TensorDataset, tmp_path: Path) -> None:
    sc.certify_dataset(bright, dataset, tmp_path / "a.tsv", sigma=0.25, max_images=2, **FEW)
    changed = TensorDataset(dataset.tensors[0] / 2, dataset.tensors[1])
    with pytest.raises(sc.RequestError, match="images_sha256"):
        sc.certify_dataset(bright, changed, tmp_path / "a.tsv", sigma=0.25, **FEW)
    assert len(sc.certify_dataset(bright, dataset, tmp_path / "a.tsv", sigma=0.25, **FEW).rows) == 4


def test_a_file_records_the_epoch_of_its_weights(trained_run: Path, tmp_path: Path) -> None:
    run, data = load_run(trained_run), mnist.load_sample("test")
    for epoch, remarks in ((1, ["certified after 1 of its 2 epochs"]), (2, [])):
        path = tmp_path / f"{epoch}.tsv"
        file = sc.certify_dataset(replace(run, epoch=epoch), data, path, max_images=1, **FEW)
        assert file.provenance["epoch"] == epoch
        assert unfinished(file.provenance, run.recipe.epochs) == remarks


def test_a_run_certifies_torch_data_without_its_highest_class(trained_run: Path, tmp_path: Path) -> None:
    """The images of a Dataset give the certificates of the same images in a data set of smoothcert."""
    data, run = mnist.load_sample("test"), load_run(trained_run)
    pairs = TensorDataset(*data.batch(torch.arange(3)))
    assert max(label for _, label in pairs) < 9
    files = [
        sc.certify_dataset(run, d, tmp_path / f"{i}.tsv", max_images=3, **FEW) for i, d in enumerate((data, pairs))
    ]
    assert comparable(files[0]) == comparable(files[1])
