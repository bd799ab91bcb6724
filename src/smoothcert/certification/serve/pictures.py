"""Pictures for the page: noisy copies that voted, and a change that the certificate covers."""

import base64
import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from smoothcert.attacks.smoothed_pgd import smoothed_pgd
from smoothcert.certification.serve.engine import Job, system_seed
from smoothcert.certification.serve.service import ServedModel
from smoothcert.smoothing.votes import block_keys

LARGEST_TILE = 64
"""Side, in pixels, to which pictures of larger images are reduced."""
ATTACK_NOISE, ATTACK_STEPS, ATTACK_VOTES = 16, 8, 200


def data_url(images: Tensor) -> str:
    """Images [k, c, h, w] in [0, 1], clamped, next to each other in one PNG file."""
    step = -(-max(images.shape[2:]) // LARGEST_TILE)
    pixels = (images[:, :, ::step, ::step].clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    strip = np.concatenate(list(pixels.transpose(0, 2, 3, 1)), axis=1)
    file = io.BytesIO()
    Image.fromarray(strip[:, :, 0] if strip.shape[2] == 1 else strip[:, :, :3]).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def noisy_copies(job: Job, n: int, size: int, copies: int) -> dict[str, Any]:
    """The first voters of the look that began after `n` votes and drew `size`, and the class that each one chose."""
    block = job.counter.block(job.image.device, size)
    number = n // job.block
    noise = torch.empty(block, *job.image.shape, device=job.image.device)
    job.counter.noise.fill(noise, block_keys(job.seed, "estimate", number + 1)[number])
    noisy = noise[:copies] + job.image
    return {"picture": data_url(noisy), "classes": job.counter.classes(noisy).tolist()}


def worst_change(job: Job, model: ServedModel) -> dict[str, Any] | None:
    """An image at the certified distance that gradient ascent finds to be bad for the class, and its votes.

    None if nothing is certified, or for another norm than that of the attack.
    """
    certificate = job.certificate()
    if certificate.abstained or job.counter.noise.norm != "L2":
        return None
    image = job.image[None]
    label = torch.tensor([certificate.prediction], device=job.image.device)
    generator = torch.Generator(job.image.device)
    generator.manual_seed(system_seed()[0])
    noise = job.counter.noise.sample((ATTACK_NOISE, *image.shape), generator)
    attack = smoothed_pgd(
        lambda x: job.counter.classifier(x.to(job.counter.dtype)),
        image,
        label,
        noise,
        steps=ATTACK_STEPS,
        step_size=certificate.radius / 4,
        max_norm=certificate.radius,
    )
    *_, changed = attack
    votes = job.counter.count(changed, [system_seed()], "predict", ATTACK_VOTES)[0]
    return {
        "picture": data_url(changed),
        "distance": float(torch.linalg.vector_norm(changed - image)),
        "class": int(votes.argmax()),
        "votes": int(votes.max()),
        "of": ATTACK_VOTES,
    }
