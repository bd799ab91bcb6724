"""Certify the batches of a loader one after the other, with progress and into a file that can be resumed."""

import inspect
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from threading import Event
from typing import Any

import torch
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from smoothcert.certification.certificates import CertifiedImage, certificates_path, certificates_writer
from smoothcert.certification.file_parts import update_provenance
from smoothcert.certification.inputs import checked_inputs, noise_seeds
from smoothcert.certification.prepare import Prepared, prepare
from smoothcert.certification.settings import CertifySettings, images_at_once
from smoothcert.certification.smoothed_classifier import RuleOptions, SmoothedClassifier
from smoothcert.certification.subject import DIGEST_IMAGES, Subject
from smoothcert.data import UNSPLIT, Images
from smoothcert.data.images import in_parts, in_unit_interval
from smoothcert.data.torch_dataset import checked_length
from smoothcert.errors import RequestError
from smoothcert.io.compressed import plain_while_written
from smoothcert.io.console import terminal_bar
from smoothcert.io.results import ResultWriter, only_writer, stored_settings
from smoothcert.io.text import did_you_mean
from smoothcert.smoothing.certificate_batch import CertificateBatch
from smoothcert.training.checkpoint import tensors_digest

DATASET_BATCH = 32
"""Number of inputs per result for data that are not divided into batches."""


@dataclass(frozen=True)
class Batches:
    """Batches of (inputs, labels) in the order of a data set, what they are called and how many inputs they have."""

    batches: Iterable[object]
    name: str
    split: str = UNSPLIT
    inputs: int | None = None
    ordered: bool = True
    """Whether inputs come in the order of the data set, so that their position is their index."""

    @classmethod
    def of(cls, data: object) -> "Batches":
        """Batches of a DataLoader, a Dataset, images of `load_dataset` or any iterable of batches."""
        if isinstance(data, Images):
            parts = torch.split(torch.arange(len(data), device="cpu"), DATASET_BATCH)
            return cls((data.batch(part) for part in parts), data.name, data.split, len(data))
        if isinstance(data, Dataset):
            data = loader_of(data)
        if isinstance(data, DataLoader):
            plain = data.batch_sampler is None or type(data.batch_sampler) is BatchSampler
            sequential = isinstance(data.sampler, SequentialSampler) and plain
            dataset = data.dataset
            ordered = sequential or isinstance(dataset, IterableDataset)
            if isinstance(dataset, Images):
                return cls(data, dataset.name, dataset.split, len(dataset), ordered)
            return cls(collated(data), type(dataset).__name__, inputs=_length(dataset), ordered=ordered)
        if isinstance(data, Tensor | str) or not isinstance(data, Iterable):
            raise RequestError(
                f"data: expected a DataLoader, a Dataset or batches (inputs, labels), got {type(data).__name__}; "
                "use certify for a tensor, and load_dataset for the name of a data set"
            )
        if isinstance(data, tuple) and len(data) == 2 and getattr(data[1], "ndim", 0) == 1:  # labels, not inputs
            raise RequestError("data: expected batches (inputs, labels), got one such pair; give [(inputs, labels)]")
        return cls(data, type(data).__name__)


def loader_of(dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None) -> DataLoader[Any]:
    """A loader of `dataset` in its order, which draws nothing from the global generator of torch."""
    if not isinstance(dataset, IterableDataset):
        checked_length(dataset)
    generator = torch.Generator("cpu")
    return DataLoader(dataset, batch_size=DATASET_BATCH, collate_fn=collate, generator=generator)


def collated(loader: DataLoader[Any]) -> Iterator[object]:
    """The batches of `loader`; items of which torch makes no batch, such as images of Pillow, are a RequestError."""
    try:
        yield from loader
    except (TypeError, RuntimeError) as error:
        reason = re.search("(default_collate: |stack expects ).*", str(error))  # else it is a fault of the user's code
        if reason is None:
            raise
        raise RequestError(
            f"data: expected images as tensors of one size, got items that make no batch ({type(error).__name__}: "
            f"{reason[0][:160]}); convert or resize them in the data set, for example with "
            "torchvision.transforms.ToTensor()"
        ) from error


def _length(data: object) -> int | None:
    """The length of `data`, if it is known: an IterDataPipe of torch always has `__len__`, which may raise."""
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:
        return None


def inputs_and_labels(batch: object) -> tuple[object, Tensor | None]:
    """The inputs and the labels, if any, of a batch; bytes with labels are images, which become floats in [0, 1]."""
    if isinstance(batch, Mapping):
        keys = list(map(str, batch))
        first, second = keys if len(keys) == 2 else ("image", "label")
        raise RequestError(
            f"data: expected batches (inputs, labels), got a mapping with the keys {', '.join(keys)[:80]}; "
            f"use a generator of pairs, such as ((b[{first!r}], b[{second!r}]) for b in loader)"
        )
    if not isinstance(batch, list | tuple):
        return batch, None
    if len(batch) == 1:  # of a TensorDataset without labels
        return batch[0], None
    if len(batch) != 2:
        raise RequestError(f"data: expected batches (inputs, labels), got {len(batch)} values; yield these two")
    inputs, labels = batch
    if not isinstance(inputs, Tensor):  # which `checked_inputs` refuses
        return inputs, None
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if not isinstance(labels, Tensor) or labels.dtype not in kinds or labels.shape != (len(inputs),):
        given = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        if isinstance(labels, int) or (isinstance(labels, Tensor) and labels.ndim == 0):
            raise RequestError(
                f"data: expected batches (inputs, labels), got one input with its label, {given}; give a DataLoader a "
                "batch_size, or DataLoader(pairs, batch_size=32) for a list of pairs"
            )
        raise RequestError(
            f"data: expected labels as a tensor of integers [{len(inputs)}], one per input, got {given}; convert them"
        )
    return (in_unit_interval(inputs) if inputs.dtype == torch.uint8 else inputs), labels


def certify_loader(
    smoothed: SmoothedClassifier,
    data: object,
    options: Mapping[str, Any],
    *,
    seed: int | None,
    out: str | Path | None,
    name: str | None,
    progress: bool,
) -> Iterator[CertificateBatch]:
    """See `SmoothedClassifier.certify_loader`."""
    if unknown := [key for key in options if key not in RuleOptions.__annotations__]:
        advice = "give it to certify_dataset" if unknown[0] in CertifySettings.model_fields else "correct the name"
        of_object = inspect.signature(SmoothedClassifier).parameters
        advice = "give it to SmoothedClassifier" if unknown[0] in of_object else advice
        raise RequestError(
            f"certify_loader: {unknown[0]}: expected an option of certify, got another; "
            f"{did_you_mean(unknown[0], RuleOptions.__annotations__, advice)}"
        )
    source = Batches.of(data)
    path = None if out is None else certificates_path(out)
    if path is not None and not source.ordered:
        raise RequestError("data: expected a loader in the order of its data set for a file; use shuffle=False")
    begun = Event()
    stream = _stream(smoothed, source, options, seed, path, name, progress, begun)
    if path is not None:
        weakref.finalize(stream, _warn_unless_begun, path, begun)
    return stream


def _warn_unless_begun(path: Path, begun: Event) -> None:
    """A call whose result nobody iterates over looks as if it wrote the file."""
    if not begun.is_set():
        warnings.warn(
            f"{path}: not written, because certify_loader certifies a batch when you ask for it; use "
            "`for batch in smoothed.certify_loader(...)`, or certify_dataset, which writes the whole file",
            stacklevel=3,
        )


def _checked(batches: Iterable[object], strict: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The inputs and labels of each batch; inputs of another shape than those of the first batch are refused."""
    shape = None
    for inputs, labels in map(inputs_and_labels, batches):
        checked = checked_inputs(inputs, strict=strict)
        shape = shape or checked.shape[1:]
        if checked.shape[1:] != shape:
            raise RequestError(
                f"data: expected batches [n, {', '.join(map(str, shape))}] like the first, got "
                f"{list(checked.shape)}; resize the inputs"
            )
        yield checked, labels


def _stream(
    smoothed: SmoothedClassifier,
    source: Batches,
    options: Mapping[str, Any],
    seed: int | None,
    path: Path | None,
    name: str | None,
    progress: bool,
    begun: Event,
) -> Iterator[CertificateBatch]:
    begun.set()
    batches = _checked(source.batches, smoothed.strict)
    first = list(islice(batches, 1))
    if not first:
        raise RequestError("data: expected at least one batch, got none; check the data set and the loader")
    example = first[0][0].to(smoothed.device or first[0][0].device)
    _, prepared = prepare(smoothed, example, options, seed=seed, stored={} if path is None else stored_settings(path))
    if prepared.shape != example.shape[1:]:  # the classifier takes it for one image only
        raise RequestError(
            f"data: expected batches [n, {', '.join(map(str, prepared.shape))}], got {list(example.shape)}; "
            "give a DataLoader a batch_size, or add a batch dimension with x[None]"
        )
    if (text := prepared.unreachable()) is not None:
        warnings.warn(text, stacklevel=2)
    position = 0
    with ExitStack() as stack:
        file = None
        if path is not None:
            while sum(len(inputs) for inputs, _ in first) < DIGEST_IMAGES and (more := next(batches, None)) is not None:
                first.append(more)
            some = torch.cat([inputs for inputs, _ in first])[:DIGEST_IMAGES]
            file = stack.enter_context(_opened_file(path, Subject.of(smoothed, name), source, prepared, some))
        bar = stack.enter_context(terminal_bar(MofNCompleteColumn(), TimeRemainingColumn(), shown=progress))
        task = bar.add_task("certify", total=source.inputs)
        for inputs, labels in chain(first, batches):
            indices = range(position, position + len(inputs))
            rows = _certified_rows(prepared, inputs, labels, indices, source.ordered, file)
            position += len(inputs)
            bar.update(task, completed=position)
            yield CertificateBatch.of(
                [rows[index].certificate for index in indices],
                prepared.counter.num_classes,
                inputs.device,
                labels=labels,
                indices=indices if source.ordered else None,
            )


class _File:
    """The certificates file of a stream: the rows that it already has, and a writer of new ones."""

    def __init__(self, writer: ResultWriter[CertifiedImage], provenance: Mapping[str, Any]) -> None:
        self.writer = writer
        self.provenance = provenance
        self.changed = False
        self.existing = {row.index: row for row in writer.done}

    def append(self, rows: Sequence[CertifiedImage]) -> None:
        """Add rows; before the first of them, versions and hardware are recorded if they have changed."""
        if not self.changed:
            update_provenance(self.writer.path, self.provenance, more=True)
            self.changed = True
        self.writer.append(rows)


@contextmanager
def _opened_file(path: Path, subject: Subject, source: Batches, prepared: Prepared, some: Tensor) -> Iterator[_File]:
    """Open or resume the file `path`, which `some` of the inputs [n, ...] identify together with its settings."""
    settings = {
        **subject.about(some, prepared.device, prepared.recipe.batch_size),
        **{"dataset": source.name, "split": source.split, "images_sha256": tensors_digest({"inputs": some})},
        **prepared.settings(subject.classifier),
    }
    provenance = subject.provenance(prepared.device)
    with (
        only_writer(path, "choose another out"),
        plain_while_written(path) as plain,
        certificates_writer(plain, settings, provenance) as writer,
    ):
        yield _File(writer, provenance)


def _certified_rows(
    prepared: Prepared,
    inputs: Tensor,
    labels: Tensor | None,
    indices: Sequence[int],
    ordered: bool,
    file: _File | None,
) -> dict[int, CertifiedImage]:
    """The rows of one batch, by index: those that the file has, and new ones, which are written to it."""
    if file is not None and labels is None:
        raise RequestError("data: expected batches (inputs, labels) for a certificates file, got inputs alone")
    existing = {} if file is None else file.existing
    rows = {index: existing[index] for index in indices if index in existing}
    seeds = noise_seeds(inputs, prepared.recipe.seed, indices if ordered else None)
    known = _checked_labels(labels, len(inputs), prepared.counter.num_classes, rows, indices[0])
    for part in in_parts([index for index in indices if index not in rows], images_at_once(prepared.recipe)):
        places = [index - indices[0] for index in part]
        of_part = [known[i] for i in places], part, [seeds[i] for i in places]
        fresh = prepared.rows(inputs[places], *of_part, time.perf_counter())
        rows |= {row.index: row for row in fresh}
        if file is not None:
            file.append(fresh)
    return rows


def _checked_labels(
    labels: Tensor | None, inputs: int, classes: int, rows: Mapping[int, CertifiedImage], position: int
) -> list[int]:
    """The labels, -1 for inputs without one; labels of no class, or others than those of `rows`, are refused."""
    if labels is None:
        return [-1] * inputs
    known: list[int] = labels.tolist()
    if not all(0 <= label < classes for label in known):
        raise RequestError(
            f"data: expected labels from 0 to {classes - 1}, got {min(known)} to {max(known)}; number the classes as "
            "the outputs of the classifier"
        )
    for index, row in rows.items():
        if row.label != (label := known[index - position]):
            raise RequestError(
                f"out: the file has label {row.label} for input {index}, the data {label}; choose another"
            )
    return known
