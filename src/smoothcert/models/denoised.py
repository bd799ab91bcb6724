"""A denoiser in front of a classifier."""

from typing import Any

from torch import Tensor, nn

from smoothcert.classifier import image_layout
from smoothcert.errors import RequestError


class Denoised(nn.Module):
    """classifier(denoiser(x)): the noise of smoothing is added to x first, then the denoiser removes what it can.

    Any certificate of randomized smoothing holds for this module as for a single network. Proof: the denoiser is in
    eval mode and draws no random numbers, so its output is a function of its input alone. Denoiser and classifier
    together are therefore one base classifier f, and the votes for an image x are f(x + noise_1), ..., f(x + noise_n)
    with independent noise. The confidence bounds and the radius of smoothing assume nothing else about f: a poor
    denoiser gives small radii, never wrong ones. The radius is about the image x before the denoiser.

    `denoiser` maps images [n, c, h, w] to images of the same shape, `classifier` maps these to logits.
    """

    def __init__(self, denoiser: nn.Module, classifier: nn.Module | None) -> None:
        super().__init__()
        for name, part in (("denoiser", denoiser), ("classifier", classifier)):
            if not isinstance(part, nn.Module | None):
                raise RequestError(
                    f"{name}: expected a torch module, got {type(part).__name__}; wrap it in an nn.Module"
                )
        self.denoiser, self.classifier = denoiser, classifier
        self._layout = None if classifier is None else image_layout(classifier)

    def classify(self, images: Tensor) -> Any:
        """Return what the classifier gives for clean or denoised images, in the memory layout of its weights."""
        assert self.classifier is not None
        assert self._layout is not None
        return self.classifier(images.contiguous(memory_format=self._layout))

    def forward(self, noisy: Tensor) -> Any:
        return self.classify(self.denoiser(noisy))
