"""Views of an image: the average against numpy, its certificates against a closed form, files, the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from smoothcert import Cascade, RequestError, SmoothedClassifier, Views, certify_dataset, read_certificates
from smoothcert.data import ImageData
from smoothcert.models import LeNet
from smoothcert.models.precision import at_precision
from smoothcert.models.views import ViewsName
from smoothcert.training.checkpoint import load_run

Cli = Callable[..., tuple[int, str, str]]
FEW = {"n": 60, "n0": 20, "seed": 7, "device": "cpu"}


def linear(width: int, classes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(width, classes))


def expected_logits(network: nn.Sequential, images: np.ndarray, views: ViewsName) -> np.ndarray:
    """The average over the views in float64, each made by numpy."""
    moves = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]
    made = {
        "mirror": [images, images[..., ::-1]],
        "shift": [np.roll(np.roll(images, down, axis=2), right, axis=3) for down, right in moves],
    }[views]
    weight, bias = (parameter.detach().double().numpy() for parameter in network[1].parameters())
    return np.mean([view.reshape(len(images), -1) @ weight.T + bias for view in made], axis=0)


@pytest.mark.parametrize("views", ["mirror", "shift"])
def test_logits_are_the_average_over_the_views(views: ViewsName) -> None:
    network = linear(2 * 3 * 5, 4)
    images = torch.rand(6, 2, 3, 5)
    expected = expected_logits(network, images.double().numpy(), views)
    assert np.allclose(Views(network, views)(images).detach().numpy(), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:inputs. expected values in")
@pytest.mark.parametrize("views", ["mirror", "shift"])
def test_certified_radii_are_below_the_exact_ones_of_the_average(views: ViewsName) -> None:
    """The average of a linear classifier is linear: its distance to the boundary is known, and the radius nears it."""
    network, classifier = linear(12, 2), Views(linear(12, 2), views)
    with torch.no_grad():
        columns = classifier(torch.eye(12).view(12, 1, 3, 4)) - classifier(torch.zeros(1, 1, 3, 4))
        offset = classifier(torch.zeros(1, 1, 3, 4))[0]
    direction, bias = (columns[:, 0] - columns[:, 1]).double(), float(offset[0] - offset[1])
    alone = (network[1].weight[0] - network[1].weight[1]).detach().double()
    assert (direction - alone).norm() > 0.1 * alone.norm()  # the views make another classifier
    for distance in (0.1, 0.4, 0.8):
        image = (distance * direction.norm() - bias) * direction / direction.norm() ** 2
        batch = image.float().view(1, 1, 3, 4)
        smoothed = SmoothedClassifier(classifier, sigma=0.5, num_classes=2)
        (certificate,) = smoothed.certify(batch, n=20_000, alpha=0.001, seed=1)
        assert certificate.predict == 0
        assert certificate.radius < distance
        share = norm.cdf(distance / 0.5)
        error = 6 * (share * (1 - share) / 20_000) ** 0.5
        assert certificate.radius > 0.5 * norm.ppf(share - error)


def test_a_copy_in_another_precision_has_the_same_views() -> None:
    network = Views(LeNet(10), "mirror").eval()
    images = torch.rand(3, 1, 28, 28)
    copied = at_precision(network, "fp32", torch.device("cpu"), (1, 28, 28))
    assert isinstance(copied, Views)
    assert torch.allclose(copied(images), network(images), atol=1e-5)
    assert not torch.allclose(copied(images), network.network(images), atol=1e-3)


def test_files_record_the_views_and_are_not_mixed_with_others(
    trained_run: Path, test_data: ImageData, tmp_path: Path
) -> None:
    run, path = load_run(trained_run), tmp_path / "a.tsv"
    certify_dataset(run, test_data, path, views="shift", max_images=4, **FEW)
    file = read_certificates(path)
    assert file.settings["views"] == "shift"
    assert file.settings["objective"] == "gaussian + views (shift)"
    with pytest.raises(RequestError, match="views: the file has 'shift'"):
        certify_dataset(run, test_data, path, max_images=5, **FEW)
    certify_dataset(Views(run.model, "shift"), test_data, tmp_path / "b.tsv", sigma=0.5, max_images=4, **FEW)
    assert [row.certificate for row in read_certificates(tmp_path / "b.tsv").rows] == [
        row.certificate for row in file.rows
    ]


def test_every_stage_of_a_cascade_sees_the_views(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    run = load_run(trained_run)
    wide, narrow = run.smoothed(), SmoothedClassifier(run.model, sigma=0.25, num_classes=10)
    by_hand = Cascade([SmoothedClassifier(Views(run.model, "mirror"), sigma=sigma) for sigma in (0.5, 0.25)])
    few = {"n": 60, "n0": 20, "seed": 7, "device": "cpu", "max_images": 6}
    one = certify_dataset(Cascade([wide, narrow]), test_data, tmp_path / "a.tsv", views="mirror", **few)
    other = certify_dataset(by_hand, test_data, tmp_path / "b.tsv", **few)
    assert [row.certificate for row in one.rows] == [row.certificate for row in other.rows]
    assert [member["views"] for member in one.settings["members"]] == ["mirror", "mirror"]


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(RequestError, match="views: expected one of mirror, shift, got flip"):
        Views(LeNet(10), "flip")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="expected a torch module, got function"):
        Views(lambda images: images, "mirror")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"expected images \[n, c, h, w\], got \[2, 3\]"):
        Views(nn.Linear(3, 2), "mirror")(torch.rand(2, 3))


def test_commands_certify_predict_and_report_views(trained_run: Path, tmp_path: Path, run_cli: Cli) -> None:
    folder, few = tmp_path / "out", ("--n", 60, "--n0", 20, "--max-images", 3, "--device", "cpu")
    assert run_cli("certify", trained_run, "--views", "mirror", *few, "--out", folder)[0] == 0
    (file,) = (folder / "certificates").glob("*.tsv")
    assert file.name == "test-n60-mirror.tsv"
    assert json.loads(file.with_suffix(".json").read_text())["settings"]["views"] == "mirror"
    code, _, error = run_cli("report", folder, "--out", tmp_path / "report", "--format", "md")
    assert (code, error) == (0, "")
    assert "views (mirror)" in (tmp_path / "report/report.md").read_text()
    code, _, error = run_cli("certify", trained_run, "--views", "flip", *few)
    assert code != 0
    assert "mirror" in error
