"""Where networks use Triton kernels of our own in place of torch's: on a GPU, in 16 bits, if Triton can build them."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from smoothcert.io.text import error_line

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's builds for CPUs come without Triton
    triton = None


CHANNELS = (16, 32, 64)
"""Of the convolutions that there are kernels for."""


def is_plain(module: nn.Module) -> bool:
    """Without hooks or computed weights, which would be lost or misplaced where it is not called itself."""
    computed = isinstance(module, nn.Conv2d) and not isinstance(module._parameters.get("weight"), nn.Parameter)
    return not (module._forward_hooks or module._forward_pre_hooks or computed)


def has_kernels(convolution: nn.Module) -> bool:
    """Whether there are kernels for it: 3x3, stride and padding 1, and 16, 32 or 64 channels in and out."""
    if type(convolution) is not nn.Conv2d or convolution.groups != 1 or convolution.padding_mode != "zeros":
        return False
    steps = (convolution.kernel_size, convolution.stride, convolution.padding, convolution.dilation)
    channels = (convolution.in_channels, convolution.out_channels)
    return channels in [(c, c) for c in CHANNELS] and steps == ((3, 3), (1, 1), (1, 1), (1, 1))


def apply_to(layers: Sequence[tuple[nn.Module, nn.Module]], x: Tensor) -> bool:
    """Whether convolutions and batch norms have kernels that give all that can be asked of them for x [n, c, h, w]:
    gradients of everything in training; else of x alone, not while compiling."""
    norms = [norm for _, norm in layers if type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats]
    alike = len(norms) == len(layers) and len({(norm.training, norm.eps, norm.momentum) for norm in norms}) == 1
    plain = all(is_plain(module) for layer in layers for module in layer)
    known = all(has_kernels(convolution) and convolution.bias is None for convolution, _ in layers)
    if not (alike and plain and known) or norms[0].momentum is None:
        return False
    if norms[0].training:
        return x.numel() > 4 * x.shape[1]  # one number a channel has no variance, and a stride may come first
    parameters = (parameter for layer in layers for module in layer for parameter in module.parameters())
    frozen = not any(parameter.requires_grad for parameter in parameters)
    return x.requires_grad and frozen and not torch.compiler.is_compiling()


def kernel_dtype(x: Tensor) -> torch.dtype | None:
    """The type of 16 bits that a layer with input x computes in, if our kernels are to do it; else None."""
    if x.device.type != "cuda" or x.numel() >= 2**31:  # they count in 32 bits
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) and kernels_work(x.device.index or 0) else None


def kernels_work(gpu: int) -> bool:
    """Whether Triton can build kernels here, for which it needs a C compiler, and that GPU can run them."""
    return triton is not None and _tried(gpu)


# What torch.compiler.assume_constant_result does, without the second that importing the compiler takes.
kernels_work._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _tried(gpu: int) -> bool:
    def build() -> None:
        with torch.cuda.device(gpu):
            triton.jit(_one)[(1,)](torch.empty(1, device="cuda"))

    return can_build(gpu, build, "networks run without their own kernels, slower: Triton cannot build")


def can_build(gpu: int, build: Callable[[], None], consequence: str) -> bool:
    """Whether that GPU can run kernels and `build` succeeds; if it fails, warn of the consequence and the reason."""
    if torch.cuda.get_device_capability(gpu) < (8, 0):
        return False
    try:
        build()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(f"{consequence} ({error_line(error, 200)})", stacklevel=3)
        return False
    return True


def cuda_source(name: str) -> str:
    """The source of the CUDA kernels in that file, with what they share in front."""
    folder = Path(__file__).parent
    return (folder / "matrix_instructions.cuh").read_text() + (folder / name).read_text()


def _one(out):  # type: ignore[no-untyped-def]
    """The least kernel."""
    tl.store(out, 1.0)
