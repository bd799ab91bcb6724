"""Published checkpoints: each layout gives the source's logits, code in files does not run, wrong files are refused."""

import argparse
import re
import resource
import shlex
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_recipe
from torch import Tensor, nn

from smoothcert.data import DATASETS, ImageData, mnist
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.records import parse_recipe
from smoothcert.io.yaml_file import read_yaml
from smoothcert.models import MODELS
from smoothcert.training.checkpoint import load_run
from smoothcert.training.import_checkpoint import import_checkpoint
from smoothcert.training.input_layer import input_layer_warning
from smoothcert.training.loop import train
from smoothcert.training.recipe import ImportRecipe

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def channels(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).view(1, -1, 1, 1)


def network(arch: str, num_classes: int = 10) -> nn.Module:
    """A network whose batch norms are not at their initial values, in eval mode."""
    torch.manual_seed(1)
    model = MODELS[arch].build(num_classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def prefixed(model: nn.Module, prefix: str) -> "OrderedDict[str, Tensor]":
    return OrderedDict((prefix + name, tensor) for name, tensor in model.state_dict().items())


def saved(contents: object, path: Path, **options: Any) -> Path:
    torch.save(contents, path, **options)
    return path


def cohen(model: nn.Module, arch: str, prefix: str = "1.") -> dict[str, object]:
    """As the papers' training code writes it; the optimizer has state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {
        "epoch": 90,
        "arch": arch,
        "state_dict": prefixed(model, prefix),
        "optimizer": optimizer.state_dict(),
    }


def logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)


def normalized(images: Tensor) -> Tensor:
    return (images - channels(CIFAR_MEAN)) / channels(CIFAR_STD)


@pytest.fixture(scope="module")
def resnet20() -> nn.Module:
    return network("resnet20")


@pytest.fixture(scope="module")
def lenet() -> nn.Module:
    return network("lenet")


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def digits() -> Tensor:
    return torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("prefix", ["1.", "1.module.", "module.1.", "model.", "net.0.1.", ""])
def test_every_prefix_gives_the_source_logits(
    prefix: str, resnet20: nn.Module, photographs: Tensor, tmp_path: Path
) -> None:
    file = saved(cohen(resnet20, "cifar_resnet20", prefix), tmp_path / "checkpoint.pth.tar")
    run = import_checkpoint(file, tmp_path / "run", sigma=0.25, method="cohen")
    loaded = load_run(tmp_path / "run")
    expected = logits(resnet20, normalized(photographs))
    assert torch.equal(logits(run.model, photographs), expected)
    assert torch.equal(logits(loaded.model, photographs), expected)
    assert (loaded.epoch, loaded.finished, loaded.recipe.method) == (90, True, "cohen")
    assert (loaded.spec.shape, loaded.spec.class_names) == ((3, 32, 32), DATASETS["cifar10"].class_names)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model.safetensors", "recipe.yaml"]


def test_recipe_and_provenance_are_recorded(resnet20: nn.Module, tmp_path: Path) -> None:
    file = saved(cohen(resnet20, "cifar_resnet20"), tmp_path / "checkpoint.pth.tar")
    run = import_checkpoint(file, tmp_path / "run", sigma=0.25)
    recipe = parse_recipe(ImportRecipe, read_yaml(tmp_path / "run" / "recipe.yaml"), "recipe.yaml")
    assert recipe == run.recipe
    assert recipe.to_mapping() == {
        "dataset": "cifar10",
        "model": "resnet20",
        "sigma": 0.25,
        "input_layer": "normalize",
        "source": "checkpoint.pth.tar",
        "method": "imported",
    }
    assert re.fullmatch("[0-9a-f]{64}", run.provenance["source_sha256"])
    assert "torch" in run.provenance["versions"]
    assert [note.partition(":")[0] for note in run.provenance["notes"]] == ["data set", "input layer"]


def test_an_imported_model_is_not_trained(resnet20: nn.Module, tmp_path: Path, tiny_data: ImageData) -> None:
    import_checkpoint(saved(cohen(resnet20, "cifar_resnet20"), tmp_path / "a.pth.tar"), tmp_path / "run", sigma=0.25)
    with pytest.raises(RequestError, match="run: expected a run that was trained here, got an imported model"):
        train(tiny_recipe(), tiny_data, tmp_path / "run", resume=True, device="cpu")


@pytest.mark.parametrize(
    ("layer", "mean", "std"),
    [("normalize", CIFAR_MEAN, CIFAR_STD), ("center", CIFAR_MEAN, (1.0, 1.0, 1.0)), ("none", (0.0,) * 3, (1.0,) * 3)],
)
def test_input_layers_give_the_source_logits(
    layer: Any,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    resnet20: nn.Module,
    photographs: Tensor,
    tmp_path: Path,
) -> None:
    file = saved(cohen(resnet20, "cifar_resnet20"), tmp_path / "checkpoint.pth.tar")
    run = import_checkpoint(file, tmp_path / "run", sigma=0.5, dataset="cifar10", input_layer=layer)
    expected = logits(resnet20, (photographs - channels(mean)) / channels(std))
    assert torch.equal(logits(run.model, photographs), expected)
    assert run.recipe.to_mapping()["input_layer"] == layer
    assert run.provenance["notes"] == []


@pytest.mark.parametrize(("names", "shape"), [(("means", "sds"), (3,)), (("mu", "sigma"), (3, 1, 1))])
def test_mean_and_std_in_the_file_take_precedence(
    names: tuple[str, str], shape: tuple[int, ...], resnet20: nn.Module, photographs: Tensor, tmp_path: Path
) -> None:
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    state = prefixed(resnet20, "1.")
    state |= {f"0.{name}": tensor.view(shape) for name, tensor in zip(names, (mean, std), strict=True)}
    file = saved({"arch": "cifar_resnet20", "state_dict": state}, tmp_path / "a.pth")
    run = import_checkpoint(file, tmp_path / "run", sigma=0.5, input_layer="none")
    expected = logits(resnet20, (photographs - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1))
    assert torch.equal(logits(run.model, photographs), expected)
    assert run.recipe.to_mapping()["input_layer"] == "normalize"
    assert any("none, which was asked for, contradicts" in note for note in run.provenance["notes"])


def test_saved_mean_without_std_gives_a_center_layer(resnet20: nn.Module, photographs: Tensor, tmp_path: Path) -> None:
    state = prefixed(resnet20, "1.") | {"0.means": torch.tensor(CIFAR_MEAN)}
    run = import_checkpoint(saved(state, tmp_path / "a.pth"), tmp_path / "run", sigma=0.5)
    assert torch.equal(logits(run.model, photographs), logits(resnet20, photographs - channels(CIFAR_MEAN)))
    assert run.recipe.to_mapping()["input_layer"] == "center"


@pytest.mark.parametrize(("prefix", "layer"), [("", "none"), ("module.", "none"), ("module.1.", "normalize")])
def test_macer_checkpoints_have_no_input_layer(
    prefix: str, layer: str, resnet20: nn.Module, photographs: Tensor, tmp_path: Path
) -> None:
    """An index in the names means that there was a layer before the network."""
    file = saved({"net": prefixed(resnet20, prefix), "epoch": 440}, tmp_path / "440.pth")
    run = import_checkpoint(file, tmp_path / "run", sigma=0.25)
    seen = normalized(photographs) if layer == "normalize" else photographs
    assert torch.equal(logits(run.model, photographs), logits(resnet20, seen))
    assert (run.recipe.model, run.recipe.to_mapping()["input_layer"], run.epoch) == ("resnet20", layer, 440)
    assert [note.partition(":")[0] for note in run.provenance["notes"]] == ["architecture", "data set", "input layer"]


def test_bare_resnet50_state_dict_is_imported(tmp_path: Path) -> None:
    model = network("resnet50", 1000)
    file = saved(model.state_dict(), tmp_path / "resnet50.pth")
    run = import_checkpoint(file, tmp_path / "run", sigma=0.5)
    mean, std = channels((0.485, 0.456, 0.406)), channels((0.229, 0.224, 0.225))
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(logits(run.model, images), logits(model, (images - mean) / std))
    assert (run.recipe.model, run.recipe.dataset, run.spec.num_classes, run.epoch) == ("resnet50", "imagenet", 1000, 0)


@pytest.mark.parametrize("arch", ["resnet20", "densenet40"])
def test_architecture_is_guessed_from_names_and_shapes(arch: str, tmp_path: Path) -> None:
    run = import_checkpoint(saved(prefixed(network(arch), "module."), tmp_path / "a.pt"), tmp_path / "run", sigma=1.0)
    assert (run.recipe.model, run.recipe.dataset) == (arch, "cifar10")


@pytest.mark.parametrize("prefix", ["1.", "1.module.", ""])
def test_lenet_is_matched_by_name(prefix: str, lenet: nn.Module, digits: Tensor, tmp_path: Path) -> None:
    file = saved(cohen(lenet, "lenet", prefix), tmp_path / "checkpoint.pth.tar")
    run = import_checkpoint(file, tmp_path / "run", sigma=0.25)
    assert torch.equal(logits(run.model, digits), logits(lenet, digits))
    assert (run.recipe.dataset, run.recipe.to_mapping()["input_layer"]) == ("mnist", "none")


@pytest.mark.parametrize("names", [("0", "3", "7", "9"), ("net.0", "net.3", "net.7", "net.9"), ("a", "b", "c", "d")])
def test_lenet_with_other_names_is_matched_by_order(
    names: tuple[str, ...], lenet: nn.Module, digits: Tensor, tmp_path: Path
) -> None:
    ours = ("conv1", "conv2", "fc1", "fc2")
    renamed = dict(zip(ours, names, strict=True))
    state = {}
    for name, tensor in lenet.state_dict().items():
        layer, _, kind = name.partition(".")
        state[f"{renamed[layer]}.{kind}"] = tensor
    run = import_checkpoint(saved(state, tmp_path / "a.pt"), tmp_path / "run", sigma=0.25, dataset="mnist-sample")
    assert torch.equal(logits(run.model, digits), logits(lenet, digits))
    assert any("by order" in note for note in run.provenance["notes"])


def test_lenet_in_another_order_is_refused(lenet: nn.Module, tmp_path: Path) -> None:
    state = {f"layer{i}": tensor for i, tensor in enumerate(reversed(lenet.state_dict().values()))}
    with pytest.raises(RequestError, match="8 missing"):
        import_checkpoint(saved(state, tmp_path / "a.pt"), tmp_path / "run", sigma=0.25, arch="lenet")


def test_files_of_old_torch_versions_are_imported(resnet20: nn.Module, photographs: Tensor, tmp_path: Path) -> None:
    """Before torch 1.6: another container, no batch counters; and numbers of numpy, under the name of numpy 1."""
    state = {name: t for name, t in prefixed(resnet20, "1.").items() if not name.endswith("num_batches_tracked")}
    contents = {"arch": "cifar_resnet20", "epoch": np.int64(7), "best": np.float32(0.5), "state_dict": state}
    file = saved(contents, tmp_path / "old.pth.tar", _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes().replace(b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"))
    run = import_checkpoint(file, tmp_path / "run", sigma=0.25)
    assert torch.equal(logits(run.model, photographs), logits(resnet20, normalized(photographs)))
    assert run.epoch == 7
    assert all(not t.any() for name, t in run.model.state_dict().items() if name.endswith("num_batches_tracked"))
    assert any("num_batches_tracked" in note for note in run.provenance["notes"])


def test_half_precision_weights_are_widened(lenet: nn.Module, digits: Tensor, tmp_path: Path) -> None:
    state = {name: tensor.half() for name, tensor in lenet.state_dict().items()}
    run = import_checkpoint(saved(state, tmp_path / "a.pt"), tmp_path / "run", sigma=0.25)
    assert all(tensor.dtype == torch.float32 for tensor in run.model.state_dict().values())
    assert torch.allclose(logits(run.model, digits), logits(lenet, digits), atol=1e-2)


def test_import_does_not_change_the_random_state(lenet: nn.Module, tmp_path: Path) -> None:
    file = saved(lenet.state_dict(), tmp_path / "a.pt")
    before = torch.get_rng_state()
    import_checkpoint(file, tmp_path / "run", sigma=0.25)
    assert torch.equal(torch.get_rng_state(), before)


class Malicious:
    """Writes a file when it is unpickled the ordinary way."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.marker), "w"))


def refused(file: Path, out: Path, kind: type[Exception], match: str, **options: Any) -> None:
    """The import raises an error of one line and writes nothing."""
    with pytest.raises(kind, match=match) as caught:
        import_checkpoint(file, out, **{"sigma": 0.5, **options})
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_does_not_run(zipped: bool, lenet: nn.Module, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    contents = {"state_dict": lenet.state_dict(), "extra": Malicious(marker)}
    file = saved(contents, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    refused(file, tmp_path / "run", WorkError, r"refused: .* asks to run _?io\.open when it is read")
    assert not marker.exists()
    torch.load(file, weights_only=False)["extra"].close()
    assert marker.exists(), "the file would have run code in a reader that lets it"


@pytest.mark.parametrize(
    ("extra", "name"),
    [(argparse.Namespace(lr=0.1), "argparse.Namespace"), (nn.Linear(1, 1), "Linear"), (np.zeros(3), "reconstruct")],
)
def test_objects_other_than_tensors_and_numbers_are_refused(extra: object, name: str, tmp_path: Path) -> None:
    refused(saved({"args": extra}, tmp_path / "a.pth"), tmp_path / "run", WorkError, f"asks to run .*{name}")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_torchscript_model_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.jit.trace(nn.Linear(1, 1), torch.zeros(1, 1)).save(str(file))
    refused(
        file, tmp_path / "run", WorkError, "expected weights .*, got a TorchScript model; load it by torch.jit.load"
    )


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_truncated_files_are_refused(part: float, zipped: bool, lenet: nn.Module, tmp_path: Path) -> None:
    file = saved(lenet.state_dict(), tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    refused(file, tmp_path / "run", WorkError, "damaged or not a PyTorch checkpoint .* download it again")


@pytest.mark.parametrize("text", ["hello\n", "{'a': 1}\n", "epoch,loss\n"])
def test_a_text_file_is_refused_without_a_number_of_the_unpickler(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_text(text)
    with pytest.raises(WorkError) as caught:
        import_checkpoint(tmp_path / "a.pth", tmp_path / "run", sigma=0.5)
    assert "damaged or not a PyTorch checkpoint" in str(caught.value)
    assert "KeyError" not in str(caught.value)
    assert "IndexError" not in str(caught.value)


def test_files_that_are_not_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "page.pth").write_text("<html>404: no such page</html>\n")
    refused(tmp_path / "page.pth", tmp_path / "run", WorkError, "not a PyTorch checkpoint")
    refused(tmp_path / "absent.pth", tmp_path / "run", RequestError, "no such file")
    refused(tmp_path, tmp_path / "run", RequestError, "expected a file, got a folder")
    refused(saved([1, 2], tmp_path / "list.pth"), tmp_path / "run", RequestError, "got a list")
    refused(saved({}, tmp_path / "empty.pth"), tmp_path / "run", RequestError, "the keys none")
    contents = {"epoch": 3, "optimizer": {"lr": 0.1}}
    refused(saved(contents, tmp_path / "b.pth"), tmp_path / "run", RequestError, "the keys epoch, optimizer")
    for tensor in (torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), 1):
        contents = {"state_dict": {"fc.bias": tensor}}
        refused(saved(contents, tmp_path / "d.pth"), tmp_path / "run", RequestError, "the keys state_dict")
    foreign = {"features.0.weight": torch.zeros(2, 2)}
    refused(
        saved(foreign, tmp_path / "c.pth"), tmp_path / "run", RequestError, r"fit none, such as features\.0\.weight"
    )


def test_wrong_options_are_refused(resnet20: nn.Module, tmp_path: Path) -> None:
    file, out = saved(cohen(resnet20, "cifar_resnet20"), tmp_path / "a.pth"), tmp_path / "run"
    differences = r"tensors of resnet110, got \d+ missing \(layer1.3.conv1.weight, .*, \.\.\.\); give --arch resnet20"
    refused(file, out, RequestError, differences, arch="resnet110")
    refused(file, out, RequestError, "arch: expected one of lenet", arch="vgg")
    refused(file, out, RequestError, "expected 1000 classes for imagenet, got a network with 10", dataset="imagenet")
    refused(file, out, RequestError, "dataset: expected one of mnist", dataset="svhn")
    refused(file, out, RequestError, "sigma", sigma=-1)
    refused(file, out, RequestError, "input_layer", input_layer="whiten")
    refused(file, out, RequestError, "takes images of shape", dataset="mnist", input_layer="none")
    refused(file, out, RequestError, "no published mean", dataset="mnist", input_layer="center")


def test_unexpected_tensors_are_refused(resnet20: nn.Module, tmp_path: Path) -> None:
    """A denoiser before the classifier, a second copy without prefix, a wider layer: never dropped silently."""
    for extra in ({"0.conv.weight": torch.zeros(1)}, {"conv1.weight": torch.zeros(16, 3, 3, 3)}):
        state = prefixed(resnet20, "1.") | extra
        file = saved(cohen(resnet20, "cifar_resnet20") | {"state_dict": state}, tmp_path / "a.pth")
        refused(file, tmp_path / "run", RequestError, f"1 unexpected .{re.escape(next(iter(extra)))}")
    state = prefixed(resnet20, "1.") | {"1.conv1.weight": torch.zeros(32, 3, 3, 3), "1.fc.bias": torch.zeros(9)}
    file = saved(cohen(resnet20, "cifar_resnet20") | {"state_dict": state}, tmp_path / "a.pth")
    refused(file, tmp_path / "run", RequestError, r"2 of other shape \(conv1.weight, fc.weight\)")


def test_existing_run_is_not_replaced(lenet: nn.Module, tmp_path: Path) -> None:
    file, out = saved(lenet.state_dict(), tmp_path / "a.pt"), tmp_path / "run"
    import_checkpoint(file, out, sigma=0.25)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(RequestError, match="exists already"):
        import_checkpoint(file, out, sigma=0.5)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(RequestError, match="exists already"):
        import_checkpoint(file, file, sigma=0.5)


@pytest.fixture(scope="module")
def brightness() -> tuple[nn.Module, ImageData]:
    """A hand-written resnet20 that predicts 1 if the normalized red is above 0.8 on average, and images for it.

    The dark ones lie at 0.3 and the bright ones at 1.3; without the division by std, or without the layer, all of
    them lie below 0.8, so that half of the answers are wrong.
    """
    model = MODELS["resnet20"].build(10).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.zero_()
        model.conv1.weight[:2, 0, 1, 1] = torch.tensor([1.0, -1.0])  # red and its negative pass every ReLU ...
        for stage in (model.layer2, model.layer3):
            stage[0].downsample[0].weight[:2, :2, 0, 0] = torch.eye(2)  # ... along the shortcuts ...
        model.fc.weight.zero_()
        model.fc.weight[1, :2] = torch.tensor([1.0, -1.0])  # ... and are put together again
        model.fc.bias.copy_(torch.tensor([0.0, -0.8] + [-100.0] * 8))
    labels = torch.arange(40) % 2
    levels = CIFAR_MEAN[0] + CIFAR_STD[0] * (0.3 + labels)
    images = (levels * 255).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32).contiguous()
    return model, ImageData(images, labels, 2, "brightness", "test")


def test_more_accurate_input_layer_is_reported(brightness: tuple[nn.Module, ImageData], tmp_path: Path) -> None:
    model, data = brightness
    file = saved(cohen(model, "cifar_resnet20"), tmp_path / "a.pth")
    right = import_checkpoint(file, tmp_path / "right", sigma=0.1)
    assert input_layer_warning(right, data) is None
    for layer in ("center", "none"):
        wrong = import_checkpoint(file, tmp_path / layer, sigma=0.1, input_layer=layer)
        assert input_layer_warning(wrong, data) == (
            f"input layer: accuracy on 40 noisy images is 50% with {layer}, 100% with normalize; "
            "import again with --input-layer normalize"
        )


def test_input_layer_check_does_not_change_the_run(brightness: tuple[nn.Module, ImageData], tmp_path: Path) -> None:
    model, data = brightness
    run = import_checkpoint(saved(cohen(model, "resnet20"), tmp_path / "a.pth"), tmp_path / "run", sigma=0.1)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.train()
    assert input_layer_warning(run, data) is None
    assert all(module.training for module in run.model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())


def test_images_that_cannot_be_read_are_not_checked(
    lenet: nn.Module, tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = import_checkpoint(saved(lenet.state_dict(), tmp_path / "a.pth"), tmp_path / "run", sigma=0.5)
    data = mnist.load_sample("test")
    assert input_layer_warning(run, data) is None, "without a published mean there is no other layer"

    def fail(*_: object) -> None:
        raise WorkError("a.png: damaged")

    monkeypatch.setattr(ImageData, "batch", fail)
    out = tmp_path / "again"
    code, printed, _ = run_cli("import", tmp_path / "a.pth", "--sigma", 0.5, "--dataset", "mnist-sample", "--out", out)
    assert (code, "warning: input layer: not checked (a.png: damaged)" in printed) == (0, True)


def test_a_sigma_in_units_of_pixels_is_a_warning(
    lenet: nn.Module, tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    file, data = saved(lenet.state_dict(), tmp_path / "a.pth"), ("--dataset", "mnist-sample")
    for sigma, warned in ((64, True), (0.25, False)):
        code, out, err = run_cli("import", file, "--sigma", sigma, *data, "--out", tmp_path / f"run{sigma}")
        assert (code, "if it is meant for pixels in 0..255, give 64/255 = 0.251" in out + err) == (0, warned)


def test_cifar10_normalization_equals_the_papers() -> None:
    normalization = DATASETS["cifar10"].normalization
    assert normalization is not None
    assert (normalization.mean, normalization.std) == (CIFAR_MEAN, CIFAR_STD)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_weights_that_are_not_finite_are_refused(value: float, lenet: nn.Module, tmp_path: Path) -> None:
    """1e300 is finite in float64 and not in float32, which networks are evaluated in."""
    state = {name: tensor.double() for name, tensor in lenet.state_dict().items()}
    last = list(state)[-1]
    state[last][3] = value
    refused(saved(state, tmp_path / "a.pt"), tmp_path / "run", WorkError, f"NaN or infinite ones in {last}")


def test_unknown_network_is_directed_to_certify(tmp_path: Path) -> None:
    file = saved(nn.Linear(784, 10).state_dict(), tmp_path / "mynet.pt")
    refused(file, tmp_path / "run", RequestError, r"`smoothcert certify --model FILE\.py:function --init ")


def test_full_disk_is_one_line(lenet: nn.Module, tmp_path: Path) -> None:
    file, out = saved(lenet.state_dict(), tmp_path / "a.pt"), tmp_path / "run"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(WorkError, match=r"could not be written to .*File too large") as caught:
            import_checkpoint(file, out, sigma=0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    import_checkpoint(file, out, sigma=0.5)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a network as code, its checkpoint, ten digits as a Dataset, and in folders as larger files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net_for_import.py").write_text(
        "from torch import nn\n"
        "def build(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))\n"
    )
    (tmp_path / "data_for_import.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def digits():\n    return TensorDataset(torch.full((10, 1, 28, 28), 0.5), torch.arange(10))\n"
    )
    torch.manual_seed(0)
    state = {f"module.1.{name}": tensor for name, tensor in nn.Linear(784, 10).state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "own.pth")
    for digit in range(10):
        (tmp_path / "photos" / str(digit)).mkdir(parents=True)
        Image.new("L", (40, 40), 20 * digit).save(tmp_path / "photos" / str(digit) / "a.png")
    return tmp_path


OWN, DATA, PHOTOS = "net_for_import.py:build", "data_for_import.py:digits", ("folder:photos", "--image-size", 28)


@pytest.mark.parametrize("data", [("mnist-sample",), (DATA,), PHOTOS])
def test_own_network_is_imported_with_code_that_builds_it(
    data: tuple[object, ...], project: Path, digits: Tensor, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    """The next step runs as printed; without the names of code in it, none is run."""
    code, out, err = run_cli("import", "own.pth", "--sigma", 0.5, "--arch", OWN, "--dataset", *data, "--out", "run")
    assert (code, err) == (0, "")
    stored = torch.load("own.pth", weights_only=True)["state_dict"]
    expected = digits.flatten(1) @ stored["module.1.weight"].T + stored["module.1.bias"]
    torch.testing.assert_close(logits(load_run(Path("run"), OWN).model, digits), expected)
    step = shlex.split(out.partition("next: smoothcert ")[2])
    assert run_cli(*step, "--n", 20, "--max-images", 2, "--device", "cpu")[0] == 0
    code, _, err = run_cli("certify", "run", "--n", 20)
    assert (code, f"its network is the code {OWN}; allow it with --model {OWN}" in err) == (2, True)


@pytest.mark.usefixtures("project")
def test_one_function_of_python_imports_both_kinds_of_networks(lenet: nn.Module, digits: Tensor) -> None:
    own = import_checkpoint("own.pth", "own", sigma=0.5, arch=OWN, dataset="mnist-sample")
    assert (own.folder, own.recipe.model, own.spec.num_classes) == (Path("own"), OWN, 10)
    stored = torch.load("own.pth", weights_only=True)["state_dict"]
    assert torch.equal(own.model.state_dict()["1.weight"], stored["module.1.weight"])
    built_in = import_checkpoint(saved(lenet.state_dict(), Path("lenet.pt")), Path("built-in"), sigma=0.5)
    assert torch.equal(logits(built_in.model, digits), logits(lenet, digits))


@pytest.mark.parametrize("data", [(DATA,), PHOTOS])
def test_built_in_network_is_imported_for_own_data(
    data: tuple[object, ...],
    project: Path,
    lenet: nn.Module,
    digits: Tensor,
    run_cli: Callable[..., tuple[int, str, str]],
) -> None:
    saved(lenet.state_dict(), project / "lenet.pt")
    code, out, err = run_cli("import", "lenet.pt", "--sigma", 0.5, "--dataset", *data, "--out", "run")
    assert (code, err) == (0, "")
    assert torch.equal(logits(load_run(Path("run")).model, digits), logits(lenet, digits))
    assert load_run(Path("run")).recipe.image_size == (28 if data == PHOTOS else None)
    step = shlex.split(out.partition("next: smoothcert ")[2])
    assert run_cli(*step, "--n", 20, "--max-images", 2, "--device", "cpu")[0] == 0
    refused(project / "lenet.pt", project / "new", RequestError, "dataset: expected one of mnist", dataset="svhn")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arch", OWN), "expected --dataset with it, got none; add --dataset NAME"),
        (
            ("--arch", OWN, "--dataset", "mnist-sample", "--input-layer", "center"),
            "whose code contains it; leave it out",
        ),
        (("--arch", "net_for_import.py:bild", "--dataset", "mnist-sample"), "did you mean build?"),
        (("--arch", OWN, "--dataset", "cifar10"), "fails on inputs of shape [3, 32, 32]"),
        (("--arch", "lenet", "--dataset", DATA), "expected the tensors of lenet"),
        (("--dataset", "mnist-sample", "--image-size", "28"), "expected your own --dataset with them"),
        (("--dataset", "folder:none"), "folder:none: expected a folder, got nothing at"),
    ],
)
def test_wrong_imports_of_own_networks_are_one_line(
    words: tuple[str, ...], message: str, project: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = run_cli("import", "own.pth", "--sigma", 0.5, "--out", "run", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (project / "run").exists()


def test_own_networks_for_own_images_need_their_shape_in_python(project: Path) -> None:
    with pytest.raises(RequestError, match=r"inputs: expected those of .* with it, got none; give InputSpec\.of"):
        import_checkpoint(project / "own.pth", project / "run", sigma=0.5, arch=OWN, dataset=DATA)
    assert not (project / "run").exists()
