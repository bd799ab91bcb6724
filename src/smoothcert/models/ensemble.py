"""Several networks as one classifier: the average of their logits, optionally without members that are not needed."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from smoothcert.classifier import image_layout, logits_of
from smoothcert.errors import RequestError

PARTS = 8
"""Members that only disagreements need are evaluated on parts of a batch, each this share of it."""


class Ensemble(nn.Module):
    """The average of the logits of `members`, all of them evaluated on the same input.

    With `consensus` k, only the first k members are evaluated where they agree: if each of them chooses the class that
    the average of their logits chooses, the output is that average; otherwise it is the average of all members.

    Any certificate of randomized smoothing holds for an ensemble as for a single network. Proof: members are in eval
    mode, so the logits of a member are a function of its input. Which members are evaluated, and therefore the class
    f(z) of the ensemble, depends on the input z alone, with or without consensus. All members of a vote see one noise
    draw, so the votes for an image x are f(x + noise_1), ..., f(x + noise_n) with independent noise: n independent
    draws of one random class. The confidence bounds and the radius of smoothing assume nothing else about f. An
    ensemble with consensus is another f than the one without, and a certificate of one says nothing about the other.

    Inputs with disagreements are padded to parts of a fixed size: the number of inputs in a forward pass changes the
    rounding of some kernels, and the class of an input must not depend on the other inputs of its batch.
    """

    def __init__(self, members: Iterable[nn.Module], consensus: int | None = None) -> None:
        super().__init__()
        members = tuple(members) if isinstance(members, Iterable) else (members,)
        if unknown := [type(member).__name__ for member in members if not isinstance(member, nn.Module)]:
            raise RequestError(f"members: expected torch modules, got {unknown[0]}; wrap it in an nn.Module")
        if len(members) < 2:
            raise RequestError(f"members: expected at least 2 networks, got {len(members)}")
        if consensus is not None and len(members) == 2:
            raise RequestError("consensus: expected at least 3 networks, got 2; leave it out: both are evaluated")
        if consensus is not None and not (hasattr(consensus, "__index__") and 2 <= consensus < len(members)):
            raise RequestError(
                f"consensus: expected at least 2 and fewer than the {len(members)} members, got {consensus!r}; "
                "without it all members are evaluated"
            )
        self.members = nn.ModuleList(members)
        self.consensus = consensus
        self._layouts = [image_layout(member) for member in members]

    def extra_repr(self) -> str:
        return "" if self.consensus is None else f"consensus={self.consensus}"

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the averaged logits [batch, classes]."""
        first = self.consensus or len(self.members)
        logits = [self._logits(i, inputs) for i in range(first)]
        total = torch.stack(logits).sum(0)
        average = total / first
        if self.consensus is None:
            return average
        classes = average.argmax(1)
        agree = torch.stack([part.argmax(1) == classes for part in logits]).all(0)
        open_rows = (~agree).nonzero().flatten()
        size = max(1, len(inputs) // PARTS)
        for start in range(0, len(open_rows), size):
            rows = open_rows[start : start + size]
            padded = torch.cat([rows, rows[:1].expand(size - len(rows))])
            part = inputs[padded]
            others = torch.stack([self._logits(i, part) for i in range(first, len(self.members))]).sum(0)
            average[rows] = ((total[padded] + others) / len(self.members))[: len(rows)]
        return average

    def _logits(self, member: int, inputs: Tensor) -> Tensor:
        """The logits of a member, at least float32, from inputs in the memory layout of its weights."""
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=self._layouts[member])
        logits = logits_of(self.members[member](inputs))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
