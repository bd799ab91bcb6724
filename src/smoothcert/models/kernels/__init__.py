"""GPU kernels that replace torch's layers in 16-bit precision, and the checks that decide where they are used."""

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
"""Channel counts of the convolutions that have kernels."""


def is_plain(module: nn.Module) -> bool:
    """True if the module has no hooks, forward of its own or parametrized weights, which the kernels would bypass."""
    computed = isinstance(module, nn.Conv2d) and not isinstance(module._parameters.get("weight"), nn.Parameter)
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) or computed)


def has_kernels(convolution: nn.Module) -> bool:
    """True for a 3x3 convolution with stride and padding 1 and 16, 32 or 64 input and output channels."""
    if type(convolution) is not nn.Conv2d or convolution.groups != 1 or convolution.padding_mode != "zeros":
        return False
    steps = (convolution.kernel_size, convolution.stride, convolution.padding, convolution.dilation)
    channels = (convolution.in_channels, convolution.out_channels)
    return channels in [(c, c) for c in CHANNELS] and steps == ((3, 3), (1, 1), (1, 1), (1, 1))


def apply_to(layers: Sequence[tuple[nn.Module, nn.Module]], x: Tensor) -> bool:
    """True if kernels can replace these (convolution, batch norm) pairs for x [n, c, h, w].

    In training they compute all gradients. In evaluation they compute the gradient of x only, so the parameters must
    be frozen, and they are not used inside torch.compile.
    """
    norms = [norm for _, norm in layers if type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats]
    alike = len(norms) == len(layers) and len({(norm.training, norm.eps, norm.momentum) for norm in norms}) == 1
    plain = all(is_plain(module) for layer in layers for module in layer)
    known = all(has_kernels(convolution) and convolution.bias is None for convolution, _ in layers)
    if not (alike and plain and known) or norms[0].momentum is None:
        return False
    if norms[0].training:
        return x.numel() > 4 * x.shape[1]  # a single value per channel has no variance; a strided layer may come first
    parameters = (parameter for layer in layers for module in layer for parameter in module.parameters())
    frozen = not any(parameter.requires_grad for parameter in parameters)
    return x.requires_grad and frozen and not torch.compiler.is_compiling()


def kernel_dtype(x: Tensor) -> torch.dtype | None:
    """The 16-bit dtype in which the kernels compute a layer with input x; None if they are not used."""
    if x.device.type != "cuda" or x.numel() >= 2**31:  # the kernels use 32-bit offsets
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) and kernels_work(x.device.index or 0) else None


def kernels_work(gpu: int) -> bool:
    """True if Triton can build kernels (it needs a C compiler) and this GPU can run them."""
    return triton is not None and _tried(gpu)


# The effect of torch.compiler.assume_constant_result without importing the compiler, which takes a second.
kernels_work._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _tried(gpu: int) -> bool:
    def build() -> None:
        with torch.cuda.device(gpu):
            triton.jit(_one)[(1,)](torch.empty(1, device="cuda"))

    return can_build(gpu, build, "networks run more slowly, without our own kernels: Triton cannot build")


def can_build(gpu: int, build: Callable[[], None], consequence: str) -> bool:
    """True if the GPU can run kernels and `build` succeeds; if it fails, warn with the consequence and the reason."""
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
    """The CUDA source in the file `name`, preceded by the definitions that all CUDA kernels share."""
    folder = Path(__file__).parent
    return (folder / "matrix_instructions.cuh").read_text() + (folder / name).read_text()


def _one(out):  # type: ignore[no-untyped-def]
    """A minimal kernel that tests whether Triton works."""
    tl.store(out, 1.0)
