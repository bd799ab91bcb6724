"""The device of a training run: memory layout, streams and settings of the libraries."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def weights_layout(own_network: bool) -> torch.memory_format:
    """Channels last, which is faster on GPUs and CPUs; a user's network keeps its layout, which it may rely on."""
    return torch.preserve_format if own_network else torch.channels_last


@contextmanager
def default_float32() -> Iterator[None]:
    """Make float32 torch's default type of real numbers in the body, also for a user who has chosen another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def training_device(device: torch.device) -> Iterator[None]:
    """On a GPU: use a new stream, as captured steps need, the fastest convolutions, and TF32 for matrix products."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    products = torch.backends.cuda.matmul
    saved = cudnn.benchmark, products.fp32_precision
    cudnn.benchmark = True
    products.fp32_precision = "tf32"
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.cuda.device(device), new_stream(device):
            yield
    finally:
        torch.cuda.synchronize(device)
        cudnn.benchmark, products.fp32_precision = saved


def new_stream(device: torch.device) -> AbstractContextManager[object]:
    """A context whose GPU work goes to a new stream; it can be entered several times. Does nothing on a CPU."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.synchronize(device)  # the new stream then sees all results of earlier work
    stream: AbstractContextManager[object] = torch.cuda.Stream(device)
    return torch.cuda.stream(stream)  # type: ignore[arg-type]
