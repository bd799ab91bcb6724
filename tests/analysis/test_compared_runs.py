"""What is compared must be comparable: the same images, the same noise; and what is smoothed is a mean."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from half_space import untrained_run
from PIL import Image

from smoothcert.analysis.compared_runs import (
    NOISE_BLOCK,
    ComparedRuns,
    UnrestrictedAttack,
    adversarial_examples,
    default_attack,
    load_compared_runs,
    names_of,
    smoothed,
)
from smoothcert.attacks import smoothed_pgd
from smoothcert.data import mnist
from smoothcert.errors import RequestError
from smoothcert.training.checkpoint import load_run

CPU = torch.device("cpu")


def test_runs_are_loaded_with_their_noise_and_names(two_runs: list[Path]) -> None:
    compared = load_compared_runs(two_runs, CPU)
    assert [run.name for run in compared.runs] == ["run0", "run1"]
    assert compared.title == "MNIST sample, tiny"
    assert (compared.noise.sigma, compared.data.name, compared.data.split) == (0.5, "mnist-sample", "test")
    assert load_compared_runs(two_runs, CPU, sigma=0.25).noise.sigma == 0.25
    first, second = (run.classifier(torch.zeros(1, 1, 28, 28)) for run in compared.runs)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": 1.0}, "expected sigma 0.5 .* got sigma 1.0; choose the noise level of the comparison with --sigma"),
        ({"dataset": "mnist"}, "expected dataset mnist-sample .* got dataset mnist"),
        ({"noise": "laplace"}, "expected noise gaussian .* got noise laplace"),
    ],
)
def test_runs_that_do_not_compare_are_refused(
    two_runs: list[Path], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    other = untrained_run(tmp_path / "other", **change)
    with pytest.raises(RequestError, match=message):
        load_compared_runs([*two_runs, other], CPU)


def test_runs_of_several_data_sets_compare_on_a_given_one(two_runs: list[Path], tmp_path: Path) -> None:
    """Both are digits; images of another shape are refused."""
    other = untrained_run(tmp_path / "other", dataset="mnist")
    compared = load_compared_runs([other, *two_runs], CPU, dataset="mnist-sample")
    assert (len(compared.runs), compared.data.name) == (3, "mnist-sample")
    np.savez(tmp_path / "small.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.arange(2))
    with pytest.raises(RequestError, match="its model takes images"):
        load_compared_runs([other, *two_runs], CPU, dataset=f"npz:{tmp_path / 'small.npz'}")


def test_runs_of_several_sigmas_compare_at_a_given_one(two_runs: list[Path], tmp_path: Path) -> None:
    other = untrained_run(tmp_path / "other", sigma=1.0)
    assert load_compared_runs([*two_runs, other], CPU, sigma=0.5).noise.sigma == 0.5


def test_runs_of_one_folder_compare_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grey images of the runs are made of colour files."""
    monkeypatch.chdir(tmp_path)
    for name in map(str, range(10)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), (int(name), 200, 100)).save(tmp_path / "photos" / name / "a.png")
    names = {"folder:photos": "run0", "folder:./photos": "run1"}
    runs = [untrained_run(tmp_path / out, dataset=name, image_size=28) for name, out in names.items()]
    for run in runs:
        assert load_run(run).reading("folder:photos") == {"image_size": 28, "channels": 1}
        assert load_run(run).reading("mnist") == {}
    data = load_compared_runs(runs, CPU).data
    assert (data.shape, len(data)) == ((1, 28, 28), 10)


def test_names_are_distinct(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "x", tmp_path / "b" / "x", tmp_path / "y"]
    assert names_of(folders) == ["a/x", "b/x", "y"]
    assert names_of(folders[1:]) == ["x", "y"]
    with pytest.raises(RequestError, match="each run once"):
        names_of([tmp_path / "y", tmp_path / "a" / ".." / "y"])


@pytest.mark.parametrize(("sigma", "expected"), [(0.25, (2, 1.0)), (0.5, (4, 1.0)), (1.0, (8, 1.0))])
def test_the_default_attack_is_that_of_the_paper(sigma: float, expected: tuple[int, float]) -> None:
    assert default_attack(mnist.load_sample("test"), sigma) == expected


def test_other_data_are_attacked_as_cifar10(half_spaces: ComparedRuns) -> None:
    assert default_attack(half_spaces.data, 0.5) == (4, 1.0)


def test_noise_depends_on_image_seed_and_stage_alone(half_spaces: ComparedRuns) -> None:
    def noise(indices: list[int], n: int = 50, seed: int = 0, stage: str = "estimate") -> torch.Tensor:
        return torch.cat(list(half_spaces.noise_blocks(indices, n, seed, stage)))  # type: ignore[arg-type]

    both = noise([3, 1])
    assert both.shape == (50, 2, 1, 4, 4)
    assert torch.equal(both[:, 1], noise([1])[:, 0])
    assert torch.equal(both[: 2 * NOISE_BLOCK], noise([3, 1], 2 * NOISE_BLOCK))
    for other in (noise([3, 1], seed=1), noise([3, 1], stage="select"), noise([1, 3])):
        assert not (both == other).any()
    flat = both.flatten()
    assert len(flat.unique()) > 0.99 * len(flat)


def test_smoothed_is_the_mean_over_noises(half_spaces: ComparedRuns) -> None:
    images, _ = half_spaces.images([0, 1])
    blocks = list(half_spaces.noise_blocks([0, 1], 50, 0, "estimate"))
    network = half_spaces.runs[0].classifier
    confidence, votes = smoothed(network, images, blocks)
    for i in range(2):
        logits = [network(images[i : i + 1] + noise)[0] for noise in torch.cat(blocks)[:, i]]
        mean = sum(z.softmax(0) for z in logits) / 50
        torch.testing.assert_close(confidence[i], mean.double(), atol=1e-6, rtol=0)
        chosen = [int(z.argmax()) for z in logits]
        assert votes[i].tolist() == [chosen.count(0) / 50, chosen.count(1) / 50]


def test_adversarial_examples_are_the_last_iterates(half_spaces: ComparedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = UnrestrictedAttack(steps=2, step_size=0.4, num_noise=8)
    run = half_spaces.runs[1]
    images, labels = half_spaces.images([0, 1, 3])
    noise = torch.cat(list(half_spaces.noise_blocks([0, 1, 3], 8, 5, "select")))
    *_, expected = smoothed_pgd(run.classifier, images, labels, noise, steps=2, step_size=0.4)
    seen: list[torch.Tensor] = []

    def recorded(classifier: Any, images: Any, labels: Any, noise: torch.Tensor, **options: Any) -> Any:
        seen.append(noise)
        return smoothed_pgd(classifier, images, labels, noise, **options)

    monkeypatch.setattr("smoothcert.analysis.compared_runs.smoothed_pgd", recorded)
    monkeypatch.setattr("smoothcert.analysis.compared_runs.GRADIENT_BATCH", 16)  # two images at once
    found = adversarial_examples(half_spaces, run, [0, 1, 3], attack, 5)
    torch.testing.assert_close(found, expected)
    # The gradient of a half-space does not depend on the noise, which must not be that of the evaluation.
    assert torch.equal(torch.cat(seen, dim=1), noise)
