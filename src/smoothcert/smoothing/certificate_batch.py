"""Certificates of a batch of inputs, as tensors and as records."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from smoothcert.io.text import radius_text
from smoothcert.smoothing.certificate import ABSTAIN, Certificate


@dataclass(frozen=True, eq=False, repr=False)
class CertificateBatch(Sequence[Certificate]):
    """The certificates of k inputs: a sequence of `Certificate` whose columns are tensors on one device.

    An integer index gives a record; a slice, a list of positions or a boolean mask gives a smaller batch.
    """

    records: tuple[Certificate, ...]
    prediction: Tensor
    """int64 [k]: the class, or ABSTAIN (-1)."""
    radius: Tensor
    """float64 [k] (float32, rounded down, on devices without float64): 0 where abstained."""
    counts: Tensor
    """int64 [k, classes]: the votes of each class among the n fresh votes."""
    labels: Tensor | None = None
    """int64 [k]: the true classes, where they are known."""
    indices: tuple[int, ...] | None = None
    """Position of each input in its data set, where it is known."""

    @classmethod
    def of(
        cls,
        records: Sequence[Certificate],
        num_classes: int,
        device: torch.device | str = "cpu",
        *,
        labels: Tensor | None = None,
        indices: Sequence[int] | Tensor | None = None,
    ) -> "CertificateBatch":
        """The batch of `records`, with its tensors on `device`."""
        device = torch.device(device)
        counts = torch.zeros(len(records), num_classes, dtype=torch.int64, device="cpu")
        for row, record in zip(counts, records, strict=True):
            for c, votes in record.votes:
                row[c] = votes
        radius = torch.tensor([record.radius for record in records], dtype=torch.float64, device="cpu")
        return cls(
            tuple(records),
            torch.tensor([record.prediction for record in records], dtype=torch.int64, device=device),
            (rounded_down(radius) if device.type == "mps" else radius).to(device),  # mps has no float64
            counts.to(device),
            None if labels is None else labels.to(device),
            None if indices is None else tuple(int(index) for index in indices),
        )

    @property
    def abstained(self) -> Tensor:
        """bool [k]: no class could be proved."""
        return self.prediction == ABSTAIN

    @property
    def n(self) -> Tensor:
        """int64 [k]: the number of fresh votes of each input."""
        return self.counts.sum(1)

    def to(self, device: torch.device | str) -> "CertificateBatch":
        """The same certificates with their tensors on `device`."""
        return CertificateBatch.of(self.records, self.counts.shape[1], device, labels=self.labels, indices=self.indices)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Certificate]:
        return iter(self.records)

    @overload
    def __getitem__(self, index: int) -> Certificate: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | Tensor) -> "CertificateBatch": ...
    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> "Certificate | CertificateBatch":
        if isinstance(index, int):
            return self.records[index]
        places = torch.arange(len(self), device="cpu")[index.cpu() if isinstance(index, Tensor) else index]
        if places.ndim == 0:
            return self.records[int(places)]
        which = places.tolist()
        device = self.prediction.device
        return CertificateBatch.of(
            [self.records[i] for i in which],
            self.counts.shape[1],
            device,
            labels=None if self.labels is None else self.labels[places.to(device)],
            indices=None if self.indices is None else [self.indices[i] for i in which],
        )

    def __repr__(self) -> str:
        shown = []
        for r in self.records[:10]:
            radius = f", radius {radius_text(r.radius)}" if r.n0 else ""  # `predict` draws no n0 votes
            answer = "abstained" if r.prediction == ABSTAIN else f"class {r.prediction}{radius}"
            coin = "" if r.coin is None else f", randomized bound with coin {r.coin:.3f}"
            shown.append(f"  {answer}, {r.count:,} of {r.n:,} votes{coin}")
        rest = [f"  ... and {len(self) - 10} more"] if len(self) > 10 else []
        return "\n".join([f"CertificateBatch of {len(self)}:", *shown, *rest])


def rounded_down(radius: Tensor) -> Tensor:
    """Radii (float64, >= 0) in float32; none becomes larger."""
    single = radius.float()
    return torch.where(single.double() > radius, torch.nextafter(single, single.new_zeros(())), single)
