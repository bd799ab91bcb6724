"""One valid file of each format, made once: small, and the same bytes in every session on a machine."""

import contextlib
import gzip
import io
import json
import re
import shutil
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from fuzz_runner import call
from PIL import Image
from tiny import tiny_recipe
from torch import nn

from smoothcert.data import load_dataset, mnist
from smoothcert.models import LeNet
from smoothcert.training import loop as training
from smoothcert.training.checkpoint import load_run, save_weights
from smoothcert.training.metrics import METRICS
from smoothcert.training.status import TrainingStatus

DATA = "npz:digits.npz"
EPOCHS = 2


class _Stop(Exception):
    pass


def make_base(base: Path) -> None:
    """Below `base`: run (trained, certified, attacked), shards, begun (1 of EPOCHS epochs), and data of each format.

    The present folder becomes that of `digits.npz`, which the recipes name.
    """
    _make_digits(Path("digits.npz"))
    _make_run(base / "run")
    _make_begun(base / "begun")
    _make_images(base)
    _make_archives(base)
    (base / "recipe").mkdir()
    shutil.copy(base / "begun" / "recipe.yaml", base / "recipe" / "recipe.yaml")
    _make_checkpoint(base / "checkpoint")
    (base / "npz").mkdir()
    shutil.copy("digits.npz", base / "npz" / "own.npz")
    (base / "none").mkdir()


def normed() -> nn.Module:
    """A network with batch norm, for commands that need one."""
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(784, 10))


def _make_digits(path: Path) -> None:
    arrays = {}
    for split, count in (("train", 40), ("test", 20)):
        data = mnist.load_sample(split)  # type: ignore[arg-type]
        arrays[f"{split}_images"] = data.images[:count, 0].numpy()
        arrays[f"{split}_labels"] = data.labels[:count].numpy().astype(np.uint8)
    np.savez(path, **arrays)


def _make_run(folder: Path) -> None:
    data = mnist.load_sample("train").subset(torch.arange(1024))
    recipe = tiny_recipe(dataset=DATA)
    training.train(recipe, data, folder, device="cpu")
    run = load_run(folder)
    save_weights(replace(run, provenance=_undated(dict(run.provenance))))
    _same_seconds(folder / METRICS)
    certify = ("certify", str(folder), "--n", "100", "--n0", "10", "--seed", "1", "--device", "cpu")
    _succeed(*certify, "--max-images", "12", "--name", "test")
    attack = ("attack", str(folder), "--steps", "1", "--num-noise", "2", "--n", "100", "--radii", "0.5,1")
    _succeed(*attack, "--max-images", "6", "--seed", "1", "--device", "cpu")
    shards = folder.with_name("shards")
    for shard in ("1/2", "2/2"):
        _succeed(*certify, "--max-images", "8", "--shard", shard, "--name", f"shard{shard[0]}")
    shards.mkdir()
    for path in sorted((folder / "certificates").glob("shard*")):
        path.rename(shards / path.name)
    for path in (*folder.rglob("*.tsv"), *shards.glob("*.tsv")):
        _same_time(path)


def _succeed(*arguments: str) -> None:
    outcome = call(arguments, seconds=60)
    assert outcome.code == 0, (arguments, outcome)


def _undated(provenance: dict[str, object]) -> dict[str, object]:
    """Without the versions of this machine and this commit."""
    return provenance | {"versions": {"smoothcert": "1", "torch": "2", "device": "cpu (x)"}}


def _same_time(table: Path) -> None:
    text = table.read_text()
    text = re.sub(r"\d:\d\d:\d\d(\.\d+)?", "0:00:00.010000", text)
    if table.parent.name == "attacks":
        text = re.sub(r"\t[0-9.e-]+\n", "\t0.01\n", text)
    table.write_text(text)
    settings = table.with_suffix(".json")
    stored = json.loads(settings.read_text())
    stored["provenance"] = _undated(stored["provenance"])
    settings.write_text(json.dumps(stored, indent=2) + "\n")


def _same_seconds(metrics: Path) -> None:
    lines = [json.loads(line) | {"seconds": 0.5} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _make_begun(folder: Path) -> None:
    """A run that was stopped after its first epoch."""

    def stop(status: TrainingStatus) -> None:
        if status.epoch == 1:
            raise _Stop

    recipe = tiny_recipe(dataset=DATA, epochs=EPOCHS, batch_size=40)
    with contextlib.suppress(_Stop):
        training.train(recipe, load_dataset(DATA, "train"), folder, device="cpu", on_progress=stop)
    _same_seconds(folder / METRICS)
    for left in folder.glob(".*"):
        left.unlink()


def _make_images(base: Path) -> None:
    data = mnist.load_sample("test")
    folder = base / "images"
    folder.mkdir()
    grey = Image.fromarray(data.images[0, 0].numpy())
    grey.save(folder / "grey.png")
    grey.convert("RGBA").save(folder / "alpha.png")
    grey.convert("P").save(folder / "palette.png")
    Image.fromarray(data.images[0, 0].numpy().astype(np.uint16) * 257).save(folder / "deep.png")
    grey.save(folder / "grey.jpg", exif=_turned())
    grey.save(folder / "grey.bmp")
    grey.save(folder / "grey.tiff", compression="tiff_lzw")
    grey.save(folder / "grey.gif")
    grey.save(folder / "grey.webp")
    for split in ("train", "test"):
        for label in range(2):
            own = base / "folders" / split / f"class{label}"
            own.mkdir(parents=True)
            for name in ("grey.png", "grey.jpg", "grey.bmp"):
                shutil.copy(folder / name, own / name)
    shutil.copy(folder / "grey.tiff", base / "folders" / "test" / "class0" / "grey.tiff")


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _make_archives(base: Path) -> None:
    """MNIST's idx files, CIFAR-10's binary files and its archive, with few images."""
    data = mnist.load_sample("test")
    images, labels = data.images[:10, 0].numpy(), data.labels[:10].numpy().astype(np.uint8)
    folder = base / "idx" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images_idx = struct.pack(">4I", 2051, 10, 28, 28) + images.tobytes()
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(images_idx, mtime=0))
    labels_idx = struct.pack(">2I", 2049, 10) + labels.tobytes()
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels_idx, mtime=0))
    record = bytes([3]) + bytes(range(256)) * 12
    binary = base / "cifar" / "cifar-10-batches-bin"
    binary.mkdir(parents=True)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            (binary / name).write_bytes(record * 2)
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = 2 * len(record)
            tar.addfile(member, io.BytesIO(record * 2))
    (base / "cifar-archive").mkdir()
    archive = base / "cifar-archive" / "cifar-10-binary.tar.gz"
    archive.write_bytes(gzip.compress(packed.getvalue(), mtime=0))


def _make_checkpoint(folder: Path) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    contents = {"arch": "lenet", "epoch": 90, "state_dict": {f"1.{k}": v for k, v in LeNet(10).state_dict().items()}}
    torch.save(contents, folder / "checkpoint.pth.tar")
