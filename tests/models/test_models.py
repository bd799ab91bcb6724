"""Networks: transcriptions of the published ones, parameter counts, normalisation inside the model."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothcert.data import Normalization
from smoothcert.errors import RequestError
from smoothcert.models import MODELS, Normalize, build_model


def conv_bn(channels_in: int, channels: int, kernel: int) -> int:
    return channels_in * channels * kernel**2 + 2 * channels


def cifar_resnet(blocks: int) -> int:
    """He et al.'s layout, counted by hand."""
    total = conv_bn(3, 16, 3) + 64 * 10 + 10
    for channels_in, channels in ((16, 16), (16, 32), (32, 64)):
        total += conv_bn(channels_in, channels, 3) + (2 * blocks - 1) * conv_bn(channels, channels, 3)
        total += conv_bn(channels_in, channels, 1) if channels_in != channels else 0
    return total


def densenet40() -> int:
    """Batch norm before each convolution has two parameters per input channel. Transitions only pool."""
    total, channels = 3 * 24 * 9, 24
    for _ in range(3):
        for _ in range(6):
            total += 2 * channels + channels * 48 + 2 * 48 + 48 * 12 * 9
            channels += 12
    return total + 2 * channels + channels * 10 + 10


EXPECTED_PARAMETERS = {
    "lenet": 20 * 25 + 20 + 50 * 500 + 50 + 800 * 500 + 500 + 500 * 10 + 10,
    "resnet20": cifar_resnet(3),
    "resnet110": cifar_resnet(18),
    "densenet40": densenet40(),
    "resnet50": 25_557_032 - 990 * 2049,  # the published count is for 1000 classes
}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "tiny"])
def test_parameter_count(name: str) -> None:
    assert name in EXPECTED_PARAMETERS, f"add the number of parameters of {name}, counted by hand"
    with torch.device("meta"):
        model = MODELS[name].build(10)
    assert sum(parameter.numel() for parameter in model.parameters()) == EXPECTED_PARAMETERS[name]


def test_published_sizes() -> None:
    assert round(EXPECTED_PARAMETERS["resnet110"] / 1e6, 2) == 1.73
    assert EXPECTED_PARAMETERS["densenet40"] == 211_978
    assert round((EXPECTED_PARAMETERS["resnet50"] + 990 * 2049) / 1e6, 1) == 25.6


Weights = Mapping[str, Tensor]


def convolved(w: Weights, name: str, x: Tensor, stride: int = 1) -> Tensor:
    """A convolution that keeps the size, up to its stride."""
    weight = w[f"{name}.weight"]
    return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)


def normed(w: Weights, name: str, x: Tensor) -> Tensor:
    mean, var, scale, shift = (
        w[f"{name}.{part}"].view(-1, 1, 1) for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * scale + shift


def classified(w: Weights, x: Tensor) -> Tensor:
    return x.mean((2, 3)) @ w["fc.weight"].T + w["fc.bias"]


def residual(w: Weights, x: Tensor, blocks: Sequence[int], layers: int, strided: int) -> Tensor:
    """Stages of blocks of `layers` convolutions, the `strided` of which halves the size, but not in the first stage."""
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = x
            for layer in range(1, layers + 1):
                y = convolved(w, f"{at}.conv{layer}", y, stride if layer == strided else 1)
                y = normed(w, f"{at}.bn{layer}", y)
                y = y.relu() if layer < layers else y
            if f"{at}.downsample.0.weight" in w:
                x = normed(w, f"{at}.downsample.1", convolved(w, f"{at}.downsample.0", x, stride))
            x = (x + y).relu()
    return classified(w, x)


def transcribed_cifar_resnet(w: Weights, x: Tensor, blocks: int) -> Tensor:
    return residual(w, normed(w, "bn1", convolved(w, "conv1", x)).relu(), [blocks] * 3, layers=2, strided=1)


def transcribed_resnet50(w: Weights, x: Tensor) -> Tensor:
    """The stride is in the 3x3 convolution, as in torchvision."""
    x = F.max_pool2d(normed(w, "bn1", convolved(w, "conv1", x, 2)).relu(), 3, stride=2, padding=1)
    return residual(w, x, (3, 4, 6, 3), layers=3, strided=2)


def transcribed_densenet40(w: Weights, x: Tensor) -> Tensor:
    x = convolved(w, "conv1", x)
    for block in (1, 2, 3):
        for layer in range(6):
            at = f"dense{block}.{layer}"
            y = convolved(w, f"{at}.conv1", normed(w, f"{at}.bn1", x).relu())
            x = torch.cat([x, convolved(w, f"{at}.conv2", normed(w, f"{at}.bn2", y).relu())], dim=1)
        x = F.avg_pool2d(x, 2) if block < 3 else x
    return classified(w, normed(w, "bn", x).relu())


TRANSCRIPTIONS: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "resnet20": partial(transcribed_cifar_resnet, blocks=3),
    "resnet110": partial(transcribed_cifar_resnet, blocks=18),
    "densenet40": transcribed_densenet40,
    "resnet50": transcribed_resnet50,
}


@pytest.mark.parametrize("name", TRANSCRIPTIONS)
def test_networks_are_the_published_ones(name: str) -> None:
    """Same names and shapes of weights do not make the same function: strides, pooling and ReLU have neither."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = MODELS[name].build(7).eval()
    weights = {
        # Vectors are those of batch norm and the last bias, away from the identity.
        key: 0.5 + torch.rand(t.shape, generator=generator)
        if t.ndim == 1
        else torch.randn(t.shape, generator=generator) / t[0].numel() ** 0.5
        for key, t in model.state_dict().items()
        if t.ndim
    }
    model.load_state_dict(weights, strict=False, assign=True)
    images = torch.rand(2, 3, 32, 32, generator=generator)
    with torch.no_grad():
        logits, expected = model(images), TRANSCRIPTIONS[name](weights, images)
    assert logits.shape == (2, 7)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_lenet_is_the_published_network() -> None:
    """Compare with a sequence of layers; without gradients the pooling is computed in another way."""
    torch.manual_seed(0)
    model = build_model("lenet", (1, 28, 28), 10)
    layers = torch.nn.Sequential(
        *(model.conv1, torch.nn.ReLU(), torch.nn.MaxPool2d(2), model.conv2, torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Flatten(), model.fc1, torch.nn.ReLU(), model.fc2),
    )
    images = torch.rand(5, 1, 28, 28)
    assert torch.equal(model(images), layers(images))
    with torch.no_grad():
        assert torch.equal(model(images), layers(images))


def test_resnets_have_the_parameter_names_of_released_checkpoints() -> None:
    with torch.device("meta"):
        names = set(build_model("resnet110", (3, 32, 32), 10).state_dict())
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.17.conv2.weight",
        "layer3.0.downsample.1.bias",
        "fc.bias",
    } <= names
    assert "layer1.0.downsample.0.weight" not in names
    with torch.device("meta"):
        names = set(build_model("resnet50", (3, 64, 64), 1000).state_dict())
    assert {"layer1.0.downsample.0.weight", "layer4.2.conv3.weight", "layer3.5.bn3.num_batches_tracked"} <= names
    assert len(names) == 320  # as in torchvision's state dict


@pytest.mark.parametrize(
    ("name", "layer", "outputs"),
    [
        ("resnet20", "layer3.0.conv1", 9 * 64),
        ("densenet40", "dense3.5.conv2", 9 * 12),
        ("resnet50", "layer1.0.conv3", 256),
    ],
)
def test_convolutions_start_at_their_published_scale(name: str, layer: str, outputs: int) -> None:
    """By the kernel size times the number of outputs, which is not that of inputs in these layers."""
    torch.manual_seed(0)
    weight = MODELS[name].build(10).get_parameter(f"{layer}.weight").detach()
    assert weight.shape[0] != weight.shape[1]
    assert float(weight.std()) == pytest.approx((2 / outputs) ** 0.5, rel=0.02)


def test_normalisation_takes_numbers_arrays_and_tensors() -> None:
    """A tensor is copied without a warning: it may change later, or need a gradient."""
    images = torch.rand(2, 3, 4, 4)
    mean, std = torch.tensor([0.4, 0.5, 0.6], requires_grad=True), torch.full((3, 1, 1), 0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = [Normalize(mean, std), Normalize(mean.tolist(), [0.25] * 3), Normalize(mean.detach().numpy(), std)]
    expected = (images - mean.detach().view(3, 1, 1)) / 0.25
    mean.data.zero_()
    std.zero_()
    for layer in layers:
        torch.testing.assert_close(layer(images), expected)
        assert not layer.mean.requires_grad


def test_normalisation_does_not_repeat_a_grey_channel() -> None:
    """Broadcasting would give all three channels the same noise, without a word."""
    layer = Normalize((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    with pytest.raises(RequestError, match=r"expected images with 3 channels.* got \[1, 2, 2\]; .*--channels 3"):
        layer(torch.rand(4, 1, 2, 2))
    assert Normalize((0.5,), (1.0,))(torch.rand(4, 3, 2, 2)).shape == (4, 3, 2, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_network_with_normalisation_can_be_scripted() -> None:
    layer, images = Normalize((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)), torch.rand(4, 3, 2, 2)
    assert torch.equal(torch.jit.script(nn.Sequential(layer))(images), layer(images))


def test_normalisation_is_the_first_layer_and_is_saved() -> None:
    torch.manual_seed(0)
    model = build_model("lenet", (1, 28, 28), 10, Normalization(mean=(0.25,), std=(0.5,)))
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(model(images), model[1]((images - 0.25) / 0.5))
    assert float(model.state_dict()["0.mean"]) == 0.25
    assert float(model.state_dict()["0.std"]) == 0.5


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(RequestError, match="did you mean lenet"):
        build_model("lenett", (1, 28, 28), 10)
    with pytest.raises(RequestError, match=r"lenet takes images of shape \(1, 28, 28\), the data has \(3, 32, 32\)"):
        build_model("lenet", (3, 32, 32), 10)
    with pytest.raises(RequestError, match=r"takes images of shape \(3, any, any\), the data has \(1, 28, 28\)"):
        build_model("resnet20", (1, 28, 28), 10)


def test_the_classifier_bias_of_densenet_starts_at_zero() -> None:
    assert not MODELS["densenet40"].build(10).get_parameter("fc.bias").any()


@pytest.mark.parametrize("name", ["resnet20", "densenet40", "resnet50"])
def test_logits_are_computed_in_float32_under_autocast(name: str) -> None:
    """From the same features as without autocast; in bf16 they would have 8 bits, and so would their gradients."""
    torch.manual_seed(0)
    model = build_model(name, (3, 32, 32), 10)
    last: list[tuple[Tensor, Tensor]] = []
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    layer.register_forward_hook(lambda module, inputs, output: last.append((inputs[0], output)))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.rand(2, 3, 32, 32))
    features, output = last[0]
    assert logits is output
    expected = features.double() @ layer.weight.double().T + layer.bias.double()
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-5)
    assert not torch.equal(logits, logits.bfloat16().float())
    (gradient,) = torch.autograd.grad(logits.square().sum(), layer.weight)
    torch.testing.assert_close(gradient, 2 * logits.detach().T @ features.detach(), rtol=1e-4, atol=1e-4)
