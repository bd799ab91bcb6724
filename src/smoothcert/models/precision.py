"""How the base classifier is evaluated: precision and memory layout are part of f, so a certificate records them."""

import copy
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer

from smoothcert.classifier import image_layout, logits_of, scale_of, unmasked
from smoothcert.errors import RequestError
from smoothcert.io.text import error_line
from smoothcert.models.denoised import Denoised
from smoothcert.models.ensemble import Ensemble
from smoothcert.models.kernels import is_plain

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(precision: str, device: torch.device) -> Precision:
    """Turn `auto` into bf16 if the hardware multiplies it faster than float32, else fp32; refuse unknown names."""
    if precision == "auto" and device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if precision == "auto":
        return "bf16" if device.type == "cpu" and torch.cpu._is_amx_tile_supported() else "fp32"
    for name in DTYPES:
        if precision == name:
            return name
    raise RequestError(f"precision: expected one of auto, {', '.join(DTYPES)}, got {precision}")


def has_batch_norm(model: object) -> bool:
    """Say whether `model` is a module with a batch norm layer."""
    return isinstance(model, nn.Module) and any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )


_TRACING = threading.RLock()
"""Held while a model is traced: torch.fx replaces nn.Module.__call__ in the whole process for this time. The code of
the model, which runs then, may itself certify: a thread may hold it twice."""


class _OwnThreadTracer(Tracer):
    """Traces what its own thread computes; modules that other threads call meanwhile compute as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        in_own_thread = threading.get_ident() == self.thread
        return super().call_module(m, forward, args, kwargs) if in_own_thread else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        in_own_thread = threading.get_ident() == self.thread
        return super().getattr(attr, attr_val, parameter_proxy_cache) if in_own_thread else attr_val


FOLDED, REPEATED, CALLS = 0.05, 1e-3, 8
"""Largest difference of outputs, as a share of `scale_of` them, that is attributed to folding (GPUs round the inputs of
convolutions to 11 bits, in each of many layers), and to the order of additions in several calls; calls that are
tried."""


def fold_batch_norm(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Fold batch norm into convolutions: a faster `model` (in eval mode) with the same outputs up to rounding.

    A model that cannot be traced is returned unchanged, and so is one that gives other outputs for images of `shape`
    than its trace, in which numbers that Python computes (random ones, those of a counter) are constants.
    """
    if not has_batch_norm(model) or not all(is_plain(module) for module in model.modules()):
        return model
    from torch.fx.experimental.optimization import fuse  # a slow import, which few models need

    try:
        with _TRACING:
            graph = _OwnThreadTracer().trace(model)
            calls = [node.target for node in graph.nodes if node.op == "call_module"]
            if len(calls) != len(set(calls)):  # two batch norms would be folded into the weight of one module
                return model
            folded = fuse(GraphModule(model, graph), no_trace=True)
            # A traced module has a class of its own, which prints a traceback before it raises what the caller handles.
            type.__setattr__(type(folded), "__call__", nn.Module.__call__)
        draws = torch.Generator().manual_seed(0)
        image = torch.rand(1, *shape, device="cpu", generator=draws).to(next(model.parameters()))
        with torch.no_grad():
            traced, first = (logits_of(network(image)) for network in (folded, model))
            scale = scale_of(first[:, unmasked(first[0])] if first.ndim == 2 else first)  # a denoiser gives images
            pairs = [(traced, FOLDED), *((logits_of(model(image)), REPEATED) for _ in range(CALLS - 1))]
            same = all(torch.allclose(first, o, rtol=0, atol=share * scale, equal_nan=True) for o, share in pairs)
        return folded if same else model
    except Exception:  # tracing a user's forward may fail in any way, and the model works as it is
        return model


def at_precision(model: nn.Module, precision: Precision, device: torch.device, shape: tuple[int, ...]) -> nn.Module:
    """Copy `model` (for images of `shape`, (c, h, w)) in eval mode to `device`, with weights of `precision`.

    If the model can be traced, batch norm is folded into the convolutions before it. If the model can compute with it,
    the memory layout of the weights is channels last. Logits are float32 if a linear layer computes them. Each member
    of an ensemble, and a denoiser and its classifier, are converted separately.
    """
    # A subclass, or a hook, may compute something else from the parts: it is copied as any other module.
    if type(model) is Ensemble and is_plain(model):
        members = [at_precision(member, precision, device, shape) for member in model.members]
        return Ensemble(members, model.consensus).eval()
    if type(model) is Denoised and is_plain(model) and model.classifier is not None:
        parts = [at_precision(part, precision, device, shape) for part in (model.denoiser, model.classifier)]
        return Denoised(*parts).eval()
    try:
        with torch.no_grad():  # copies of TorchScript parameters would have a history
            copied = copy.deepcopy(model)
    except RuntimeError as error:
        reason = error_line(error, 120)
        raise RequestError(
            f"model: {type(model).__name__} cannot be copied ({reason}); remove what prevents copy.deepcopy"
        ) from error
    dtype = DTYPES[precision]
    if isinstance(copied, torch.jit.ScriptModule):  # which cannot be traced, and has no layers of ours
        return (copied.eval() if hasattr(copied, "training") else copied).to(device, dtype)
    evaluated = fold_batch_norm(copied.eval(), shape).requires_grad_(False).to(device, dtype)
    images = torch.zeros(2, *shape, device=device, dtype=dtype)
    evaluated = with_float32_logits(with_channels_last(evaluated, images), images)
    if device.type != "cuda":
        return evaluated
    from smoothcert.models.kernels.resnet_evaluation import fused_resnet  # registers an operator, which takes a while

    return fused_resnet(evaluated, model, dtype, device)


def with_kernels(model: nn.Module, precision: Precision, device: torch.device) -> tuple[nn.Module, torch.dtype]:
    """`model`, which is on `device`, as it votes during training, and the dtype of its images.

    A ResNet for CIFAR on a GPU is evaluated in `precision` by its kernels, many times faster; its weights are read now.
    Any other network is returned unchanged, for images in float32.
    """
    if device.type != "cuda":
        return model, torch.float32
    from smoothcert.models.kernels.resnet_evaluation import fused_resnet

    fused = fused_resnet(model, model, DTYPES[precision], device)
    return fused, torch.float32 if fused is model else DTYPES[precision]


def with_float32_logits(model: nn.Module, images: Tensor) -> nn.Module:
    """`model` with its last layer in float32, if that is a linear layer that gives the logits.

    In 16 bits the two largest logits of some votes are equal, and all of these votes would go to the lower class.
    """
    last = next((module for module in reversed(list(model.modules())) if type(module) is nn.Linear), None)
    if last is None or images.dtype == torch.float32:
        return model
    outputs: list[Tensor] = []
    hook = last.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        logits = logits_of(model(images.contiguous(memory_format=image_layout(model))))
    hook.remove()
    if len(outputs) == 1 and outputs[0] is logits:
        last.float().register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    return model


def with_channels_last(model: nn.Module, images: Tensor) -> nn.Module:
    """Change the layout of the weights to channels last, which is faster, if `model` can then compute `images`.

    A network that flattens by `view` cannot, and keeps its layout.
    """
    try:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            model(images.contiguous(memory_format=torch.channels_last))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return model
