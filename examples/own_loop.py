"""Your own training loop with a loss of smoothcert: a CNN, AdamW and a DataLoader. Then certify the network.

python examples/own_loop.py     # less than a minute on a CPU
"""

from typing import Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smoothcert as sc

SIGMA, EPOCHS = 0.5, 2


def load(split: Literal["train", "test"]) -> TensorDataset:
    """Images [n, 1, 28, 28] in [0, 1] and labels [n]. Replace this by your own data."""
    images = sc.load_dataset("mnist-sample", split)
    return TensorDataset(*images.batch(torch.arange(len(images))))


def main() -> float:
    """Return the certified accuracy at radius 0.25."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 6 * 6, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = sc.losses.Consistency(sigma=SIGMA, weight=10)  # instead of nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        for x, y in DataLoader(load("train"), batch_size=64, shuffle=True):
            loss = criterion(model, x, y)  # instead of criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, kl {criterion.terms['kl'].item():.4f}")

    x, y = load("test")[:20]
    certificates = sc.SmoothedClassifier(model, sigma=SIGMA, num_classes=10).certify(x, n=1000)
    robust = float(((certificates.prediction == y) & (certificates.radius >= 0.25)).float().mean())
    print(f"certified accuracy at L2 radius 0.25: {robust:.0%} of {len(y)} images")
    return robust


if __name__ == "__main__":
    main()
