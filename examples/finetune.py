"""Fine-tune your own trained network for certification: start from its weights, train under noise, compare.

python examples/finetune.py     # less than a minute on a CPU
"""

import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import smoothcert as sc
from smoothcert.objectives import Consistency

SIGMA, RADIUS = 1.0, 0.5
TRAINED, TESTED = 4096, 40


def network() -> nn.Module:
    """Your network: images [n, 1, 28, 28] in [0, 1] -> logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def load(split: Literal["train", "test"]) -> Dataset[tuple[Tensor, ...]]:
    """Your data: a torch Dataset of (image, label)."""
    images = sc.load_dataset("mnist-sample", split)
    count = TRAINED if split == "train" else TESTED
    return TensorDataset(*images.batch(torch.arange(count)))


def train_without_noise(path: Path) -> None:
    """Stands for the training that you did already: it leaves the weights in `path`."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for x, y in DataLoader(load("train"), batch_size=64, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.save(model.state_dict(), path)


def certified_accuracy(smoothed: sc.SmoothedClassifier) -> float:
    """The share of test images that are certified for their label at RADIUS."""
    x, y = next(iter(DataLoader(load("test"), batch_size=TESTED)))
    certificates = smoothed.certify(x, n=1000, seed=0)
    return float(((certificates.prediction == y) & (certificates.radius >= RADIUS)).float().mean())


def main(folder: Path) -> tuple[float, float]:
    """Return the certified accuracy before and after fine-tuning."""
    weights, model = folder / "weights.pt", network()
    train_without_noise(weights)
    model.load_state_dict(torch.load(weights, weights_only=True))
    before = certified_accuracy(sc.SmoothedClassifier(model, sigma=SIGMA, num_classes=10))

    recipe = sc.TrainRecipe(
        dataset="mnist-sample",
        model="mine",
        sigma=SIGMA,
        objective=Consistency(num_noise=2, weight=5.0),
        epochs=3,
        batch_size=128,
        optimizer="adamw",
        learning_rate=2e-3,
        schedule="cosine",
        ema=0.98,
    )
    run = sc.train(
        recipe,
        load("train"),
        folder / "run",
        model=network(),
        init=weights,
        on_epoch=lambda run, metrics: print(f"epoch {run.epoch}: accuracy under noise {metrics['noisy_accuracy']:.1%}"),
    )
    after = certified_accuracy(run.smoothed())
    print(f"certified accuracy at L2 radius {RADIUS}: {before:.0%} before, {after:.0%} after fine-tuning")
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
