"""One-step denoising with a diffusion model, compared with a transcription of the formulas in float64."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smoothcert.errors import RequestError, WorkError
from smoothcert.models.diffusion import DiffusionDenoiser, timestep_of
from smoothcert.training.denoiser import load_denoiser

SIDE = 28
STEPS = 50


def save_model(folder: Path, *, outputs: int = 1, unet: dict[str, Any] | None = None, **schedule: Any) -> Path:
    """Save a tiny diffusion model with random weights as diffusers does."""
    from diffusers import DDPMScheduler, UNet2DModel  # which takes six seconds

    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"block_out_channels": (4, 8), "layers_per_block": 1, "norm_num_groups": 2, "add_attention": False}
    torch.manual_seed(0)
    network = UNet2DModel(SIDE, 1, outputs, **blocks, **sizes, **(unet or {}))  # type: ignore[arg-type]
    network.save_pretrained(folder / "unet")
    DDPMScheduler(num_train_timesteps=STEPS, beta_end=0.2, **schedule).save_pretrained(folder / "scheduler")
    return folder


def schedule_in_float64(kind: str) -> np.ndarray:
    """The products abar of the two schedules, from their definitions."""
    if kind == "linear":
        return np.cumprod(1 - np.linspace(1e-4, 0.2, STEPS))

    def remaining(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - remaining((i + 1) / STEPS) / remaining(i / STEPS), 0.999) for i in range(STEPS)]
    return np.cumprod(1 - np.array(betas))


@pytest.mark.parametrize(
    ("prediction", "kind", "outputs"),
    [
        ("epsilon", "linear", 1),
        ("epsilon", "linear", 2),
        ("sample", "squaredcos_cap_v2", 1),
        ("v_prediction", "linear", 1),
    ],
)
def test_the_denoiser_equals_the_formulas(tmp_path: Path, prediction: str, kind: str, outputs: int) -> None:
    sigma = 0.3
    folder = save_model(tmp_path, outputs=outputs, prediction_type=prediction, beta_schedule=kind)
    denoiser = load_denoiser(folder, sigma)
    noisy = torch.rand(3, 1, SIDE, SIDE) + sigma * torch.randn(3, 1, SIDE, SIDE)

    products = schedule_in_float64(kind)
    step = next(t for t in range(STEPS) if math.sqrt((1 - products[t]) / products[t]) >= 2 * sigma)
    signal, noise = math.sqrt(products[step]), math.sqrt(1 - products[step])
    x_t = signal * (2 * noisy.double().numpy() - 1)
    from diffusers import UNet2DModel

    network = UNet2DModel.from_pretrained(folder / "unet").double()
    with torch.no_grad():
        output = network(torch.from_numpy(x_t), step).sample.numpy()[:, :1]
        denoised = denoiser.model(noisy)
    image = {
        "epsilon": (x_t - noise * output) / signal,
        "sample": output,
        "v_prediction": signal * x_t - noise * output,
    }[prediction]
    expected = (np.clip(image, -1, 1) + 1) / 2
    assert denoiser.about()["timestep"] == step
    assert (expected == 0).any()  # some pixels are clipped
    np.testing.assert_allclose(denoised.numpy(), expected, atol=2e-5)


def test_a_perfect_prediction_restores_the_image() -> None:
    class Perfect(torch.nn.Module):
        def forward(self, x_t: torch.Tensor, steps: torch.Tensor) -> Any:
            scale = alphas[steps].view(-1, 1, 1, 1)
            return type("Output", (), {"sample": (x_t - scale.sqrt() * (2 * clean - 1)) / (1 - scale).sqrt()})

    alphas, clean = torch.linspace(0.99, 0.01, 30, dtype=torch.float64), torch.rand(2, 1, 5, 5, dtype=torch.float64)
    denoiser = DiffusionDenoiser(Perfect(), alphas, 0.25)
    torch.testing.assert_close(denoiser(clean + 0.25 * torch.randn_like(clean)), clean)


def test_a_trained_diffusion_model_removes_noise_of_the_given_sigma(tmp_path: Path) -> None:
    """The usual training: predict the noise in sqrt(abar) x + sqrt(1 - abar) noise, for images x in [-1, 1]."""
    from diffusers import UNet2DModel

    folder = save_model(tmp_path)
    network = UNet2DModel.from_pretrained(folder / "unet").train()
    generator = torch.Generator().manual_seed(0)

    def images(count: int) -> torch.Tensor:
        """Images 8x8 in [0, 1] of one grey level each, which the mean of the pixels estimates."""
        return torch.rand(count, 1, 1, 1, generator=generator).expand(-1, -1, 8, 8)

    products = torch.from_numpy(schedule_in_float64("linear")).float()
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(30):
        steps = torch.randint(0, STEPS, (16,), generator=generator)
        noise, left = torch.randn(16, 1, 8, 8, generator=generator), products[steps].view(-1, 1, 1, 1)
        x_t = left.sqrt() * (2 * images(16) - 1) + (1 - left).sqrt() * noise
        loss = (network(x_t, steps).sample - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.save_pretrained(folder / "unet")
    clean = images(200)
    noisy = clean + 0.3 * torch.randn(clean.shape, generator=generator)
    with torch.no_grad():
        errors = {s: float((load_denoiser(folder, s).model(noisy) - clean).square().mean()) for s in (0.1, 0.3, 0.9)}
    assert errors[0.3] < 0.3 * 0.3**2, "the noise has a mean square of 0.09"
    assert errors[0.3] < 0.7 * min(errors[0.1], errors[0.9]), "another sigma means another step and another scale"


@pytest.mark.parametrize("sigma", [0.05, 0.5, 1.0])
def test_the_step_is_the_first_with_enough_noise(sigma: float) -> None:
    alphas = torch.linspace(0.999, 0.01, 1000, dtype=torch.float64)
    step = timestep_of(alphas, sigma)
    levels = [math.sqrt((1 - float(a)) / float(a)) / 2 for a in alphas]
    assert levels[step] >= sigma > levels[step - 1]


def test_folders_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "good")
    config, weights = folder / "unet/config.json", folder / "unet/diffusion_pytorch_model.safetensors"
    with pytest.raises(RequestError, match=r"sigma: expected at most .*, got 50; choose a smaller"):
        load_denoiser(folder, 50.0)
    with pytest.raises(RequestError, match="sigma: expected a number above 0"):
        load_denoiser(folder)
    fields = json.loads(config.read_text())
    for change in ({"_class_name": "UNet2DConditionModel"}, {"num_class_embeds": 10}):
        config.write_text(json.dumps(fields | change))
        with pytest.raises(RequestError, match="expected a UNet2DModel without classes, got"):
            load_denoiser(folder, 0.3)
    config.write_text(json.dumps(fields | {"block_out_channels": [8, 16]}))
    with pytest.raises(WorkError, match="the diffusion model cannot be loaded"):
        load_denoiser(folder, 0.3)
    config.write_text(json.dumps(fields))
    weights.rename(weights.with_suffix(".bin"))  # pickles are never read
    with pytest.raises(RequestError, match=r"expected the weights in diffusion_pytorch_model.safetensors, got none"):
        load_denoiser(folder, 0.3)
    (folder / "scheduler/scheduler_config.json").write_text('{"_class_name": "FlowMatchEulerDiscreteScheduler"}')
    with pytest.raises(RequestError, match="expected a scheduler with a beta schedule, got FlowMatch"):
        load_denoiser(folder, 0.3)


def test_a_run_is_certified_behind_a_diffusion_model(
    tmp_path: Path, trained_run: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    folder = save_model(tmp_path / "diffusion")
    (folder / "unet").rename(tmp_path / "flat")  # files at the top of the folder, as some models have them
    (folder / "scheduler/scheduler_config.json").rename(tmp_path / "flat/scheduler_config.json")
    out = tmp_path / "certificates"
    code = tmp_path / "own.py"
    code.write_text(f"from smoothcert import load\ndef build():\n    return load({str(trained_run)!r}).model\n")
    words = ["certify", "--model", f"{code}:build", "--dataset", "mnist-sample", "--out", out, "--n", 8, "--n0", 4]
    words += ["--max-images", 1, "--batch-size", 4, "--denoiser", tmp_path / "flat", "--device", "cpu", "--seed", 1]
    status, _, error = run_cli(*words)
    assert (status, "expected a number above 0 for the diffusion model" in error) == (2, True)
    status, _, error = run_cli(*words, "--sigma", 0.3, "--precision", "bf16")
    assert status == 0, error
    stored = json.loads(next(out.rglob("*.json")).read_text())["settings"]
    assert stored["denoiser"]["prediction_type"] == "epsilon"
    assert stored["denoiser"]["sigma"] == stored["sigma"] == 0.3
