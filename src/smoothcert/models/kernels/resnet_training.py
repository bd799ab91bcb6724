"""All layers of a stage of a CIFAR ResNet in training, forward and backward in one kernel launch each.

The kernels are CUDA C++ (`resnet_training.cu`), built when they are first used. A block keeps two images on the chip,
and all blocks run at the same time, because batch norm needs the statistics of all images after each layer. A batch
therefore has at most two images per multiprocessor; `residual_layers` computes other batches by its own kernels.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smoothcert.models.kernels import can_build, cuda_source

ROWS = {(16, 32): 8, (32, 16): 4, (64, 8): 2}
"""(channels, image width) -> rows per warp."""
THREADS, KERNELS = 512, ("forward", "backward", "weight_gradients", "evaluation", "evaluation_gradient")


def fits(x: Tensor, training: bool) -> bool:
    """True if the kernels can compute images like x [n, h, w, c]. In training, all of them must fit on the chip."""
    if x.device.type != "cuda" or x.shape[1] != x.shape[2] or (x.shape[3], x.shape[2]) not in ROWS or not len(x):
        return False
    multiprocessors = usable_multiprocessors(x.device.index or 0, x.dtype)
    at_once = len(x) % 2 == 0 and len(x) // 2 <= min(multiprocessors, 160)
    return multiprocessors > 0 and (at_once or not training)


def usable_multiprocessors(gpu: int, dtype: torch.dtype) -> int:
    """The number of multiprocessors; 0 if the kernels for `dtype` cannot be built or this GPU cannot run them."""
    return _multiprocessors(gpu) if _multiprocessors(gpu) and kernels_build(gpu, dtype) else 0


# Without this mark, torch.compile would trace the caches. It calls marked functions while tracing. Their arguments must
# not be tensors: to get their values, it would run all layers before, and update running statistics twice.
usable_multiprocessors._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _multiprocessors(gpu: int) -> int:
    about: Any = torch.cuda.get_device_properties(gpu)
    enough = torch.cuda.get_device_capability(gpu) >= (9, 0) and about.shared_memory_per_block_optin >= 220_000
    return int(about.multi_processor_count) if enough else 0


@cache
def kernels_build(gpu: int, dtype: torch.dtype) -> bool:
    """True if the kernels for `dtype` can be built."""

    def build() -> None:
        _driver()
        sizes = [(channels, width, name) for channels, width in ROWS for name in KERNELS]
        with ThreadPoolExecutor() as pool:
            for job in [pool.submit(_kernel, *size, dtype, gpu) for size in sizes]:
                job.result()

    return can_build(gpu, build, "ResNets are trained more slowly, without our CUDA kernels")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _kernel(channels: int, width: int, name: str, dtype: torch.dtype, gpu: int) -> tuple[Any, int]:
    """A kernel, and the bytes of shared memory that it needs."""
    rows = ROWS[channels, width]
    macros = {"CHANNELS": channels, "WIDTH": width, "ROWS": rows, "HALF": int(dtype == torch.float16)}
    options = [f"-D{macro}={value}" for macro, value in (macros | {"KERNEL": KERNELS.index(name)}).items()]
    shared = shared_bytes(name, channels, width)
    with torch.cuda.device(gpu):
        torch.cuda.mem_get_info()  # a thread has no CUDA context before its first call
        kernel = torch.cuda._compile_kernel(cuda_source("resnet_training.cu"), name, nvcc_options=options)
        kernel.set_shared_memory_config(shared)
    return kernel, shared


def shared_bytes(name: str, channels: int, width: int) -> int:
    """Bytes of shared memory per block of the kernel `name`; must match the layout in `resnet_training.cu`."""
    rows = ROWS[channels, width]
    image = channels * 2 * ((width + 2) * (width + 1) + 1)  # with a border of zeros
    if name == "weight_gradients":
        return 2 * image * {32: 3, 16: 5, 8: 2 * 4}[width]
    if name == "evaluation":
        return 4 * image
    if name == "evaluation_gradient":
        return 4 * image + rows * THREADS * 16
    numbers = 16 * 32 + THREADS // channels * (2 * channels + 2)  # exchanged between warps and blocks
    if name == "forward":
        return 4 * image + 4 * (numbers + 2 * channels)
    return 2 * image + 2 * rows * THREADS * 16 + 4 * (numbers + 8 * channels)


def _launch(name: str, x: Tensor, grid: tuple[int, int], *arguments: Tensor | int | float) -> None:
    """Launch the kernel `name` for images like x; `forward` and `backward` need all blocks to run at the same time."""
    kernel, shared = _kernel(x.shape[3], x.shape[2], name, x.dtype, x.device.index or 0)
    with torch.cuda.device_of(x):
        if name not in ("forward", "backward"):
            kernel((*grid, 1), (THREADS, 1, 1), list(arguments), shared)
            return
        values: list[Any] = [_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = _driver().cuLaunchCooperativeKernel(
            kernel.func, *grid, 1, THREADS, 1, 1, ctypes.c_uint(shared), stream, pointers
        )
    if status:
        raise RuntimeError(f"the kernel {name} could not be launched (CUDA error {status})")


def _c_value(argument: Tensor | int | float) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def fragments(weights: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    """Weights [layers, out, 3, 3, in] in the order in which the kernels read them; `transposed` for gradients."""
    if transposed:
        weights = weights.permute(0, 4, 2, 3, 1).flip(2, 3)
    layers, channels = weights.shape[:2]
    parts = weights.reshape(layers, channels // 16, 2, 8, 3, 3, channels // 16, 2, 4, 2)
    return parts.permute(1, 0, 5, 6, 4, 3, 8, 2, 7, 9).to(dtype, memory_format=torch.contiguous_format).contiguous()


@torch.library.custom_op("smoothcert::trained_stage", mutates_args=("means", "variances", "batches"))
def trained_stage(
    x: Tensor,
    shortcut: Tensor | None,
    weights: list[Tensor],
    gammas: list[Tensor],
    betas: list[Tensor],
    means: list[Tensor],
    variances: list[Tensor],
    batches: list[Tensor],
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [n, h, w, c] -> the outputs of all layers [layers, n, h, w, c], their convolutions and ReLU masks in
    the order of the kernels, and statistics [layers, 3, c]. Updates the running statistics as batch norm does."""
    outs, ys, masks, statistics = _trained_stage_like(x, shortcut, weights)
    added = x if shortcut is None else shortcut
    tensors = (x, added, fragments(torch.stack(weights), x.dtype), torch.stack(gammas), torch.stack(betas))
    results = (outs, ys, masks, statistics, _pairs(x))
    _launch("forward", x, (len(x) // 2, 1), *tensors, *results, len(weights), int(shortcut is not None), epsilon)
    torch._foreach_lerp_(means, list(statistics[:, 0].unbind()), momentum)
    torch._foreach_lerp_(variances, list(statistics[:, 2].unbind()), momentum)
    torch._foreach_add_(batches, 1)
    return outs, ys, masks, statistics


@trained_stage.register_fake
def _trained_stage_like(
    x: Tensor, shortcut: Tensor | None, weights: list[Tensor], *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layers = len(weights)
    blocks = len(x) // 2
    rows = ROWS[x.shape[3], x.shape[2]]
    return (
        x.new_empty((layers, *x.shape)),
        x.new_empty((layers, blocks, rows, THREADS, 8)),
        x.new_empty((layers, blocks, max(rows // 4, 1), THREADS), dtype=torch.int32),
        x.new_empty((layers, 3, x.shape[3]), dtype=torch.float32),
    )


@torch.library.custom_op("smoothcert::trained_stage_gradient", mutates_args=())
def trained_stage_gradient(
    gradient: Tensor,
    x: Tensor,
    outs: Tensor,
    ys: Tensor,
    masks: Tensor,
    statistics: Tensor,
    weights: list[Tensor],
    gammas: list[Tensor],
    has_shortcut: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients with respect to x, the shortcut (or nothing), the weights [layers, c, 3, 3, c], and beta and gamma
    together [layers, 2, c]."""
    layers = len(weights)
    images, *_, channels = x.shape
    for_x, for_shortcut, _, totals = stage_gradients_like(
        gradient, x, outs, ys, masks, statistics, weights, gammas, has_shortcut
    )
    for_ys = torch.empty_like(outs)
    upper = gradient.to(x.dtype).contiguous()
    tensors = (upper, ys, masks, statistics, torch.stack(gammas))
    transposed = fragments(torch.stack(weights), x.dtype, transposed=True)
    results = (for_ys, for_x, for_shortcut if has_shortcut else for_x, totals, _pairs(x))
    _launch("backward", x, (images // 2, 1), *tensors, transposed, *results, layers, int(has_shortcut))
    splits = _splits(images // 2 if x.shape[2] == 8 else images, layers, _multiprocessors(x.device.index or 0))
    shares = 16 // (channels // 16) ** 2
    sums = x.new_empty((layers, splits * shares, channels, 3, 3, channels), dtype=torch.float32)
    _launch("weight_gradients", x, (splits, layers), x, outs, for_ys, sums, images)
    return for_x, for_shortcut, sums.sum(1), totals


@trained_stage_gradient.register_fake
def stage_gradients_like(
    gradient: Tensor, x: Tensor, outs: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The shapes of what `trained_stage_gradient` returns: torch.compile asks for these without computing anything."""
    layers = len(outs)
    channels = x.shape[3]
    has_shortcut = others[-1]
    return (
        torch.empty_like(x),
        x.new_empty(x.shape if has_shortcut else (0,)),
        x.new_empty((layers, channels, 3, 3, channels), dtype=torch.float32),
        x.new_empty((layers, 2, channels), dtype=torch.float32),
    )


def evaluated_stage(x: Tensor, shortcut: Tensor | None, weights: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """The output of the last layer and all ReLU masks. Batch norm is folded into weights [layers, c, 3, 3, c] and
    biases [layers, c]."""
    out = torch.empty_like(x)
    blocks = -(-len(x) // 2)
    layers = len(weights)
    rows = ROWS[x.shape[3], x.shape[2]]
    masks = x.new_empty((layers, blocks, max(rows // 4, 1), THREADS), dtype=torch.int32)
    tensors = (x, x if shortcut is None else shortcut, fragments(weights, x.dtype), biases.contiguous(), out, masks)
    _launch("evaluation", x, (blocks, 1), *tensors, layers, int(shortcut is not None), len(x))
    return out, masks


def evaluated_stage_gradient(
    gradient: Tensor, masks: Tensor, weights: Tensor, has_shortcut: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and the shortcut, if there is one, in the type of `gradient`."""
    for_x = torch.empty_like(gradient)
    for_shortcut = torch.empty_like(gradient) if has_shortcut else None
    tensors = (gradient, masks, fragments(weights, gradient.dtype, transposed=True), for_x)
    added = for_x if for_shortcut is None else for_shortcut
    numbers = (len(weights), int(has_shortcut), len(gradient))
    _launch("evaluation_gradient", gradient, (-(-len(gradient) // 2), 1), *tensors, added, *numbers)
    return for_x, for_shortcut


def _pairs(x: Tensor) -> Tensor:
    """The buffer through which blocks exchange sums."""
    return torch.zeros((2, len(x) // 2, x.shape[3], 2), dtype=torch.float32, device=x.device)


@cache
def _splits(passes: int, layers: int, multiprocessors: int) -> int:
    """The number of blocks per layer that minimises the estimated time of the last multiprocessor."""

    def seconds(splits: int) -> float:
        waves = -(-layers * splits // multiprocessors)
        return waves * (-(-passes // splits) + 0.5)  # starting and ending a block takes about as long as half an image

    return min(range(1, min(passes, 32) + 1), key=seconds)
