"""One-step denoising with a diffusion model (Carlini et al. 2022, https://arxiv.org/abs/2206.10550).

    t     = the smallest step with sqrt((1 - abar_t) / abar_t) >= 2 sigma
    x_t   = sqrt(abar_t) (2 (x + delta) - 1)
    x_0   = (x_t - sqrt(1 - abar_t) e) / sqrt(abar_t)     if the network predicts the noise e
          = the output                                    if it predicts the image
          = sqrt(abar_t) x_t - sqrt(1 - abar_t) v         if it predicts the velocity v
    image = (x_0, clipped to [-1, 1], + 1) / 2

A diffusion model works on images in [-1, 1], where noise of standard deviation sigma is 2 sigma. The noise that the
model expects at step t may be slightly larger than that; the certificate uses sigma, which is the noise that is added.
"""

import json
import math
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import error_line

PredictionType = Literal["epsilon", "sample", "v_prediction"]
WEIGHTS, SCHEDULE = "diffusion_pytorch_model.safetensors", "scheduler_config.json"


class DiffusionDenoiser(nn.Module):
    """Noisy images [n, c, h, w] in [0, 1] plus noise of `sigma` -> clean images in [0, 1], by one forward pass.

    `network(x_t, t)` is a diffusers UNet2DModel, or any module whose output has the prediction in `.sample`.
    `alphas_cumprod` [steps] is the schedule abar of its training. Additional output channels (a learned variance) are
    ignored. Everything but the network is computed in float32 at least.
    """

    def __init__(
        self, network: nn.Module, alphas_cumprod: Tensor, sigma: float, prediction_type: PredictionType = "epsilon"
    ) -> None:
        super().__init__()
        if prediction_type not in get_args(PredictionType):
            expected = ", ".join(get_args(PredictionType))
            raise RequestError(f"prediction_type: expected one of {expected}, got {prediction_type}; use another model")
        self.network, self.prediction_type = network, prediction_type
        self.timestep = timestep_of(alphas_cumprod, sigma)
        # Numbers, not buffers: these would be rounded together with the weights.
        self.alpha = float(alphas_cumprod[self.timestep])

    @property
    def settings(self) -> dict[str, Any]:
        """What the output depends on besides the weights."""
        return {"timestep": self.timestep, "alpha": self.alpha, "prediction_type": self.prediction_type}

    def forward(self, noisy: Tensor) -> Tensor:
        signal, noise = math.sqrt(self.alpha), math.sqrt(1 - self.alpha)
        wide = torch.promote_types(noisy.dtype, torch.float32)
        scaled = signal * (2 * noisy.to(wide) - 1)
        steps = torch.full((len(noisy),), self.timestep, device=noisy.device)
        output = self.network(scaled.to(noisy.dtype), steps).sample[:, : noisy.shape[1]].to(wide)
        if self.prediction_type == "epsilon":
            clean = (scaled - noise * output) / signal
        elif self.prediction_type == "sample":
            clean = output
        else:
            clean = signal * scaled - noise * output
        image: Tensor = ((clean.clamp(-1, 1) + 1) / 2).to(noisy.dtype)
        return image


def timestep_of(alphas_cumprod: Tensor, sigma: float) -> int:
    """Return the smallest step whose noise, relative to the image, is at least that of `sigma`."""
    levels = ((1 - alphas_cumprod.double()) / alphas_cumprod.double()).sqrt()
    enough = (levels >= 2 * sigma).nonzero().flatten()
    if not len(enough):
        raise RequestError(
            f"sigma: expected at most {float(levels.max()) / 2:.4g}, the largest noise of the diffusion model, "
            f"got {sigma:g}; choose a smaller --sigma"
        )
    return int(enough[0])


def part_folder(folder: Path, part: str, file: str) -> Path:
    """Return the folder of a part of a pipeline: its own folder, or the folder itself where the file is there."""
    return folder / part if (folder / part / file).is_file() or not (folder / file).is_file() else folder


def is_diffusion_model(folder: Path) -> bool:
    """Tell a folder that diffusers wrote from a run folder."""
    return (part_folder(folder, "unet", "config.json") / "config.json").is_file()


def load_diffusion_model(folder: Path, sigma: float) -> tuple[DiffusionDenoiser, tuple[int, int | None, int | None]]:
    """Load a UNet2DModel and its scheduler from a local `folder`; return the denoiser and the images that it takes.

    Weights are read from safetensors only; nothing is downloaded and no code of the folder is run.
    """
    try:
        from diffusers import DDPMScheduler, UNet2DModel
    except ImportError as error:
        raise RequestError(
            f"{folder}: a diffusion model needs the package diffusers; pip install 'smoothcert[diffusion]'"
        ) from error
    unet = part_folder(folder, "unet", "config.json")
    schedule = part_folder(folder, "scheduler", SCHEDULE)
    config = _read_json(unet / "config.json")
    settings = _read_json(schedule / SCHEDULE)
    if config.get("_class_name") != "UNet2DModel" or config.get("num_class_embeds") is not None:
        kind = f"{config.get('_class_name')}, {config.get('num_class_embeds') or 'no'} class embeddings"
        raise RequestError(f"{folder}: expected a UNet2DModel without classes, got {kind}; use another diffusion model")
    if "beta_schedule" not in settings and settings.get("trained_betas") is None:
        raise RequestError(
            f"{folder}: expected a scheduler with a beta schedule, got {settings.get('_class_name')}; use another model"
        )
    if not (unet / WEIGHTS).is_file():
        raise RequestError(
            f"{folder}: expected the weights in {WEIGHTS}, got none; save the model with safe_serialization=True"
        )
    try:
        network = UNet2DModel.from_pretrained(unet, use_safetensors=True, local_files_only=True)  # type: ignore[no-untyped-call,unused-ignore]
        scheduler = DDPMScheduler.from_config(settings)  # type: ignore[no-untyped-call,unused-ignore]
        alphas = scheduler.alphas_cumprod.clone()
    except Exception as error:  # a damaged folder may fail in any way
        raise WorkError(
            f"{folder}: the diffusion model cannot be loaded ({error_line(error, 150)}); restore it"
        ) from error
    denoiser = DiffusionDenoiser(network, alphas, sigma, settings.get("prediction_type", "epsilon"))
    size = config.get("sample_size")
    height, width = (size, size) if isinstance(size, int | None) else size
    return denoiser.eval(), (config["in_channels"], height, width)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read ({error.strerror}); give a folder with unet/ and scheduler/"
        ) from error
    except ValueError as error:
        raise WorkError(f"{path}: expected JSON, got something else ({error_line(error)}); restore it") from error
    if not isinstance(content, dict):
        raise WorkError(f"{path}: expected a mapping, got {type(content).__name__}; restore it")
    return content
