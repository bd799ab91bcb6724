"""One network that looks at an image in several ways: the average of its logits over mirrored or shifted copies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from smoothcert.classifier import image_layout, logits_of
from smoothcert.errors import RequestError

ViewsName = Literal["mirror", "shift"]
View = Callable[[Tensor], Tensor]


def _same(images: Tensor) -> Tensor:
    return images


def _mirrored(images: Tensor) -> Tensor:
    return images.flip(-1)


def _shifted(rows: int, columns: int) -> View:
    """Move images by whole pixels; what leaves on one side comes in on the other, so that noise stays noise."""
    return lambda images: images.roll((rows, columns), (-2, -1))


VIEWS: Mapping[ViewsName, Sequence[View]] = {
    "mirror": (_same, _mirrored),
    "shift": (_same, _shifted(1, 0), _shifted(-1, 0), _shifted(0, 1), _shifted(0, -1)),
}
"""mirror: the image and its mirror image (left and right exchanged); shift: the image, and moved by one pixel up, down,
left and right."""


class Views(nn.Module):
    """The average of the logits of `network` for several views of each image [n, c, h, w]: see `VIEWS`.

    It is an ensemble of one network with itself. A network that was trained on mirrored images answers them about as
    well, but not with the same logits, and the average is more stable under noise. A vote costs as many forward passes
    as there are views, two for "mirror" and five for "shift".

    Any certificate of randomized smoothing holds for this module as for a single network. Proof: a view is a fixed
    permutation of the pixels, and `network` is in eval mode, so the average is a function of the input z alone: one
    base classifier f. The votes for an image x are f(x + noise_1), ..., f(x + noise_n) with independent noise, because
    all views of a vote are made of one noisy image. The confidence bounds and the radius of smoothing assume nothing
    else about f. The radius is about x itself, not about its views.
    """

    def __init__(self, network: nn.Module, views: ViewsName) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise RequestError(
                f"network: expected a torch module, got {type(network).__name__}; wrap it in an nn.Module"
            )
        if views not in VIEWS:
            raise RequestError(f"views: expected one of {', '.join(VIEWS)}, got {views}")
        self.network, self.views = network, views
        self._layout = image_layout(network)

    def extra_repr(self) -> str:
        return f"views={self.views}"

    def forward(self, images: Tensor) -> Tensor:
        """Return the averaged logits [n, classes]."""
        if images.ndim != 4:
            raise RequestError(f"views: expected images [n, c, h, w], got {list(images.shape)}; leave the views out")
        logits = [self._logits(view(images)) for view in VIEWS[self.views]]
        return torch.stack(logits).mean(0)

    def _logits(self, images: Tensor) -> Tensor:
        """The logits of one view, at least float32, from images in the memory layout of the weights."""
        logits = logits_of(self.network(images.contiguous(memory_format=self._layout)))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
