"""A small residual U-Net that removes noise from images: the denoiser that `smoothcert train-denoiser` trains."""

import torch.nn.functional as F
from torch import Tensor, nn

MULTIPLE = 4
"""Images are padded to a multiple of this many pixels: both levels of the network halve the resolution."""


class ResidualBlock(nn.Module):
    """x + two convolutions of x, without normalisation layers, so that it does the same in training and evaluation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        correction: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + correction


class UNet(nn.Module):
    """Noisy images [n, channels, h, w] of any size -> their estimated clean images, of the same shape.

    The network computes what is added to the noisy image. Its last layer starts at zero, so the network starts as the
    identity. It works at a half and at a quarter of the resolution, with `width` and 2 * `width` channels.
    """

    def __init__(self, channels: int, width: int, blocks: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(4 * channels, width, 3, padding=1)
        self.before = nn.Sequential(*(ResidualBlock(width) for _ in range(blocks)))
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.coarse = nn.Sequential(*(ResidualBlock(2 * width) for _ in range(blocks)))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.after = nn.Sequential(*(ResidualBlock(width) for _ in range(blocks)))
        self.tail = nn.Conv2d(width, 4 * channels, 3, padding=1)
        nn.init.zeros_(self.tail.weight)
        nn.init.zeros_(self.tail.bias)  # type: ignore[arg-type]

    def forward(self, noisy: Tensor) -> Tensor:
        height, width = noisy.shape[-2:]
        x = noisy
        missing = (-width % MULTIPLE, -height % MULTIPLE)
        if any(missing):
            x = F.pad(x, (0, missing[0], 0, missing[1]), mode="replicate")
        fine = self.before(self.head(F.pixel_unshuffle(x, 2)))
        coarse = self.coarse(self.down(fine))
        correction = F.pixel_shuffle(self.tail(self.after(fine + self.up(coarse))), 2)
        return noisy + correction[..., :height, :width]
