"""A file of a user's project, checked by `mypy --strict`: it uses every public name of smoothcert."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import smoothcert as sc
from smoothcert.objectives import Consistency, Gaussian


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(images.flatten(1))
        return logits


def hugging_face_like(images: Tensor) -> dict[str, Tensor]:
    return {"logits": images.flatten(1)}


def certify(images: Tensor, labels: Tensor, out: Path) -> float:
    smoothed = sc.SmoothedClassifier(Network(), sigma=0.5, precision="bf16", strict=True).to("cpu").eval()
    probabilities: Tensor = smoothed(images)
    batch: sc.CertificateBatch = smoothed.certify(
        images, n=1_000, radii=(0.25, 0.5), seed=1, indices=range(len(images))
    )
    first: sc.Certificate = batch[0]
    part: sc.CertificateBatch = batch[1:][~batch[1:].abstained]
    radius: Tensor = part.to("cpu").radius
    classes: list[int] = [certificate.prediction for certificate in batch if certificate.prediction != sc.ABSTAIN]
    predicted: Tensor = sc.SmoothedClassifier(hugging_face_like, sigma=0.25).predict(images).prediction
    published: nn.Module = sc.load_hub("hf:google/vit-base-patch16-224")
    problems: list[str] = [finding.code for finding in sc.doctor(published, [(images, labels)], sigma=0.25).findings]
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    for result in smoothed.certify_loader(loader, n=1_000, bound="two-sided", out=out, progress=True):
        if result.labels is not None:
            print((result.prediction == result.labels).float().mean())
    print(problems, probabilities.shape, first.votes, radius, classes, predicted)
    return sum(row.radius_if_correct for row in sc.read_certificates(out).rows)


def train(images: Tensor, labels: Tensor) -> float:
    def show(run: sc.Run, metrics: dict[str, object]) -> None:
        print(run.folder, metrics["loss"])

    sc.TrainRecipe(dataset="mnist", model="lenet", sigma=0.5, objective=Gaussian())  # all other fields have defaults
    named = sc.TrainRecipe(dataset="mnist", model="lenet", sigma=0.5, objective="gaussian")
    copies: int = named.objective.num_noise
    fields = {"name": "consistency", "weight": 5.0}
    weighted = sc.TrainRecipe(dataset="mnist", model="lenet", sigma=0.5, objective=fields).objective
    assert isinstance(weighted, Consistency)
    print(copies, weighted.weight)
    sc.TrainRecipe(dataset="mnist", model="lenet", sigma=0.5, objective=5)  # type: ignore[arg-type]
    recipe: sc.TrainRecipe = sc.preset("mnist/consistency", sigma=0.5)
    data = TensorDataset(images, labels)
    run = sc.train(recipe, data, "runs/a", model=Network(), on_epoch=show)
    settings = sc.CertifySettings(n=1_000, radii=(0.25,))
    sc.certify_dataset(sc.load("runs/a").smoothed(), data, "a.tsv", settings, max_images=3)
    criterion = sc.losses.Consistency(sigma=0.5, weight=10)
    loss: Tensor = criterion(Network(), images, labels)
    torch.autograd.backward([loss])
    return run.certificates.acr + run.certificates.certified_accuracy(0.5)


def combine(run: sc.Run, images: Tensor) -> list[Tensor]:
    several = sc.RunEnsemble([run, sc.load("runs/b")], consensus=2).smoothed()
    pair = sc.SmoothedClassifier(sc.Ensemble([Network(), Network()]), sigma=0.25)
    cascade = sc.Cascade([sc.SmoothedClassifier(Network(), sigma=0.5), pair])
    return [several.certify(images).radius, cascade.certify(images, n=1_000).radius]


def table(runs: list[str]) -> list[object]:
    try:
        return [row["acr"] for row in sc.report(runs, radii=(0, 0.5), out="report", formats=("png",))]
    except (sc.RequestError, sc.WorkError) as error:
        print(error, sc.__version__)
        return []


def load() -> tuple[Tensor, Tensor]:
    data = sc.load_dataset("mnist-sample", "test")
    for result in sc.SmoothedClassifier(Network(), sigma=0.5).certify_loader(data, until_radius=0.25):
        print(len(result))
    return data.batch(torch.arange(len(data)))
