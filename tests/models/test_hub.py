"""Published classifiers of transformers and timm, built from a configuration: preprocessing, refusals, certificates."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import smoothcert as sc
from smoothcert.certification.certificates import read_certificates
from smoothcert.errors import RequestError
from smoothcert.models import load_hub
from smoothcert.models.hub import HubClassifier
from smoothcert.models.precision import at_precision
from smoothcert.models.preprocessing import Preprocess, Preprocessing

Cli = Callable[..., tuple[int, str, str]]
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.5]
PROCESSOR = {
    **{"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 16, "width": 16}},
    **{"resample": 2, "do_rescale": True, "rescale_factor": 1 / 255},
    **{"do_normalize": True, "image_mean": MEAN, "image_std": STD},
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the extra `hub` is not installed")


@pytest.fixture(scope="module")
def vit(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ViT in bf16 that was trained to tell dark images from bright ones, as `save_pretrained` writes it."""
    torch.manual_seed(0)
    names = {0: "light", 1: "dark", 2: "striped"}  # not in the order of the alphabet
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    network = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=16, patch_size=8, id2label=names, num_labels=3)
    )
    preprocess = Preprocess(Preprocessing(tuple(MEAN), tuple(STD)))
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(40):
        levels = torch.rand(32, 1, 1, 1)
        images = (levels + 0.25 * torch.randn(32, 3, 16, 16)).float()
        loss = torch.nn.functional.cross_entropy(network(preprocess(images)).logits, (levels.flatten() < 0.5).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("hub") / "vit"
    network.to(torch.bfloat16).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def test_logits_are_those_of_the_library(transformers: Any, vit: Path) -> None:
    """Against the processor and the network of transformers, on bytes: Pillow rounds scaled pixels to bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 24, 3), dtype=np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(vit)
    network = transformers.AutoModelForImageClassification.from_pretrained(vit, dtype=torch.float32).eval()
    expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    model = load_hub(f"hf:{vit}")
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    assert (model.preprocess(images) - expected).abs().max() < 1.01 / 255 / min(STD)
    logits = model(images)
    assert (logits.dtype, model.class_names) == (torch.float32, ("light", "dark", "striped"))
    torch.testing.assert_close(logits, network(expected).logits, atol=0.05, rtol=0.05)
    assert torch.equal(model(images[:, :1]), model(images[:, :1].expand(-1, 3, -1, -1)))  # grey images


def with_processor(vit: Path, folder: Path, **fields: object) -> Path:
    """A copy of `vit` with another preprocessing."""
    shutil.copytree(vit, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **fields}))
    return folder


@pytest.mark.parametrize("edge", [17, 18, 19, 21, 23])
def test_the_centre_is_that_of_the_library(transformers: Any, vit: Path, tmp_path: Path, edge: int) -> None:
    """Where the margins are odd, the corner is rounded down."""
    crop = {"do_center_crop": True, "crop_size": {"height": 16, "width": 16}, "size": {"shortest_edge": edge}}
    folder = with_processor(vit, tmp_path / "clip", image_processor_type="CLIPImageProcessor", **crop)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 24, 3), dtype=np.uint8)
    expected = transformers.AutoImageProcessor.from_pretrained(folder)(Image.fromarray(pixels), return_tensors="pt")
    given = load_hub(f"hf:{folder}").preprocess(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255)
    assert (given - expected["pixel_values"]).abs().mean() < 0.01


def test_preprocessing_with_further_steps_is_refused(vit: Path, tmp_path: Path) -> None:
    """LeViT's processor scales the shorter side to 256/224 of its setting, which the setting does not show."""
    crop = {"crop_size": {"height": 16, "width": 16}, "size": {"shortest_edge": 16}, "do_center_crop": True}
    folder = with_processor(vit, tmp_path / "levit", image_processor_type="LevitImageProcessor", **crop)
    with pytest.raises(RequestError, match="expected scaling, cropping and normalisation, got LevitImageProcessor"):
        load_hub(f"hf:{folder}")


@pytest.mark.parametrize(
    "fields",
    [
        {"resample": 1},
        {"resample": 4},
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}, "crop_pct": None},
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 16}, "crop_pct": 0.875},
        {"image_processor_type": "PoolFormerImageProcessor", "size": {"shortest_edge": 16}, "crop_pct": 0.9}
        | {"do_center_crop": True, "crop_size": {"height": 16, "width": 16}},
    ],
)
def test_usual_preprocessing_is_accepted(vit: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    """Filters that torch lacks (Lanczos, box), and ConvNeXt at 384 pixels, whose configuration has no crop_pct."""
    load_hub(f"hf:{with_processor(vit, tmp_path / 'other', **fields)}")


def test_a_network_of_timm_in_transformers_is_preprocessed_as_in_timm() -> None:
    settings = {"input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic", "mean": MEAN, "std": STD}
    fields = {"image_processor_type": "TimmWrapperImageProcessor", "data_config": settings}
    assert Preprocessing.of_processor(fields) == Preprocessing.of_timm(settings)


def test_noise_is_added_before_the_preprocessing(vit: Path) -> None:
    """Votes are those of images + noise at the size of the input, whatever size the network wants."""
    model, seen = load_hub(f"hf:{vit}"), []
    model.preprocess.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].clone()))
    sc.SmoothedClassifier(model, sigma=0.25)(torch.full((1, 3, 32, 32), 0.5), n=50)
    noise = max(seen, key=len)[:50] - 0.5  # the rest of a batch is not used
    assert noise.shape[1:] == (3, 32, 32)
    assert noise.std().item() == pytest.approx(0.25, rel=0.02)


def test_last_layer_is_in_float32_in_low_precision(transformers: Any, vit: Path) -> None:
    """In 16 bits the two largest logits of some votes would be equal; also for the bare network, which has .logits."""
    images = torch.rand(2, 3, 16, 16, dtype=torch.bfloat16)
    hub = load_hub(f"hf:{vit}")
    for model in (hub, hub.network):
        low = at_precision(model, "bf16", torch.device("cpu"), (3, 16, 16))
        output = low(images)
        logits = output if isinstance(output, Tensor) else output.logits
        assert logits.dtype == torch.float32


def test_a_trained_classifier_is_certified_and_fine_tuned_from_the_command_line(
    vit: Path, tmp_path: Path, run_cli: Cli
) -> None:
    """Folders are matched with the outputs by the names in the files, and fine-tuning needs no code of the user."""
    for name, level in (("dark", 20), ("light", 235)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (20, 20), (level, level, level + number)).save(tmp_path / "data" / name / f"{number}.png")
    data = ("--set", f"dataset=folder:{tmp_path / 'data'}")
    arguments = ("--hub", f"hf:{vit}", "--dataset", f"folder:{tmp_path / 'data'}", "--sigma", 0.25, "--device", "cpu")
    code, _, err = run_cli("certify", *arguments, "--n", 200, "--out", tmp_path / "out")
    assert code == 0, err
    stored = read_certificates(tmp_path / "out/certificates/test-n200.tsv")
    assert [row.label for row in stored.rows] == [1] * 4 + [0] * 4
    assert sum(row.correct for row in stored.rows) == 8
    assert stored.settings["model"] == f"hf:{vit}"
    few = ("--steps", 1, "--num-noise", 1, "--votes", 50, "--radii", 0.1, "--max-images", 2)
    code, out, err = run_cli("attack", *arguments, *few, "--out", tmp_path / "out")
    assert (code, "│ 0      │ 100.0% " in out) == (0, True), err
    image = tmp_path / "data/light/0.png"
    code, out, err = run_cli("predict", *arguments[:2], *arguments[4:], image, "--n", 100)
    assert (code, "0 light" in out) == (0, True), err
    code, out, err = run_cli("doctor", *arguments, "--out", tmp_path / "doctor")
    assert code == 0, err
    assert "nothing was found" in out
    assert f"next: smoothcert certify --hub hf:{vit} --dataset" in out

    recipe = ("--preset", "cifar10/gaussian", *data, "--set", "epochs=1", "--set", "batch_size=4")
    rate = ("--set", "learning_rate=1e-30", "--set", "learning_rate_drops=[]")
    tuned = ("--model", f"hf:{vit}", "--out", tmp_path / "run", "--device", "cpu")
    code, _, err = run_cli("train", *recipe, *rate, *tuned)
    assert code == 0, err
    run = sc.load(tmp_path / "run")  # no code of the user: nothing to allow
    assert run.metrics[0]["noisy_accuracy"] == 1, "labels are in the order of its outputs"
    model = run.model
    images = torch.rand(2, 3, 20, 20)
    torch.testing.assert_close(model(images), load_hub(f"hf:{vit}")(images))

    moved = f"hf:{shutil.copytree(vit, tmp_path / 'moved')}"
    code, _, err = run_cli("predict", run.folder, "--hub", moved, image, "--n", 100)
    weights = ("--model", moved, "--init", str(run.folder))
    assert (code, f"if it has moved, give {' '.join(weights)} in place of the run" in err) == (2, True), err
    code, out, err = run_cli("predict", *weights, *arguments[4:], image, "--n", 100)
    assert (code, "0 light" in out) == (0, True), err


def broken(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_what_cannot_be_loaded_is_one_line(vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pickled = broken(vit, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    headless = broken(vit, tmp_path / "headless")
    from safetensors.torch import load_file, save_file

    weights = load_file(headless / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "classifier" not in k}, headless / "model.safetensors", {"format": "pt"}
    )
    padded = broken(vit, tmp_path / "padded")
    (padded / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "do_pad": True}))
    remote = {"auto_map": {"AutoModelForImageClassification": "evil.Model", "AutoConfig": "evil.Config"}}
    code = broken(vit, tmp_path / "code", **remote, model_type="evil")
    (code / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    unprocessed = broken(vit, tmp_path / "unprocessed")
    (unprocessed / "preprocessor_config.json").unlink()
    tokens = {"image_processor_type": "ImageGPTImageProcessor", "clusters": [[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]}
    edge = with_processor(vit, tmp_path / "edge", size={"longest_edge": 16})
    for reference, message in (
        ("hf:nobody/nothing", r"hf:nobody/nothing: .*got none; download it once with `hf download nobody/nothing`"),
        ("timm", "expected hf:NAME, hf:FOLDER, timm:NAME or timm:FOLDER, got timm"),
        (f"hf:{tmp_path / 'absent'}", "got neither"),
        (f"hf:{tmp_path}", r"got one without config\.json; save the network with model\.save_pretrained"),
        (f"hf:{unprocessed}", r"expected preprocessor_config\.json, .*; save it there with processor\.save_pretrained"),
        (
            f"hf:{with_processor(vit, tmp_path / 'gpt', **tokens)}",
            r"expected pixels, got input_ids of ImageGPT.*--model",
        ),
        (f"hf:{edge}", r"got \{'longest_edge': 16\}; load it in a function of your own \(--model FILE\.py:function\)"),
        (f"hf:{pickled}", r"got one without model\.safetensors"),
        (f"hf:{headless}", r"got a file without classifier\.bias, classifier\.weight"),
        (f"hf:{padded}", "got do_pad as well"),
        (f"hf:{code}", "expected an image classifier that the installed transformers can load"),
        (f"hf:{broken(vit, tmp_path / 'bert', model_type='bert')}", "expected an image classifier, got bert"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            load_hub(reference)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_name_is_found_in_the_cache(
    transformers: Any, vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "models--someone--vit"
    shutil.copytree(vit, cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    from huggingface_hub import constants, file_download

    for module in (constants, file_download.constants, transformers.utils.hub.constants):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path))
    images = torch.rand(1, 3, 16, 16)
    assert torch.equal(load_hub("hf:someone/vit")(images), load_hub(f"hf:{vit}")(images))


def test_absent_packages_are_one_line(vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RequestError, match=r"expected the package transformers, .*pip install 'smoothcert\[hub\]'"):
        load_hub(f"hf:{vit}")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": {"height": 16, "width": 12}}, (16, 12)),
        ({"size": {"shortest_edge": 14}, "crop_pct": 0.875}, (14, 14)),
        ({"size": {"shortest_edge": 400}, "crop_pct": 0.875}, (400, 400)),
        ({"do_resize": False}, (40, 24)),
    ],
)
def test_sizes_of_processors(fields: dict[str, Any], expected: tuple[int, int]) -> None:
    steps = Preprocessing.of_processor({**PROCESSOR, **fields})
    assert Preprocess(steps)(torch.rand(1, 3, 40, 24)).shape == (1, 3, *expected)


def test_values_of_processors() -> None:
    """Bytes p become (factor p - offset - mean) / std, once more divided by std if the processor says so."""
    image = torch.rand(1, 3, 16, 16)
    changes = {"rescale_factor": 1 / 127.5, "rescale_offset": True, "include_top": True, "do_flip_channel_order": True}
    given = Preprocess(Preprocessing.of_processor({**PROCESSOR, **changes}))(image)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(given, (2 * image.flip(1) - 1 - mean) / std / std)
    bytes_ = Preprocess(Preprocessing.of_processor({**PROCESSOR, "do_rescale": False, "do_normalize": False}))(image)
    torch.testing.assert_close(bytes_, 255 * image)


@pytest.mark.parametrize("resample", [0, 2, 3, None])
def test_scaling_is_that_of_pillow(resample: int | None) -> None:
    """0 is the nearest pixel, and not an absent setting, which is bilinear."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 24, 3), dtype=np.uint8)
    expected = Image.fromarray(pixels).resize((16, 16), 2 if resample is None else resample)
    preprocess = Preprocess(Preprocessing.of_processor({**PROCESSOR, "do_normalize": False, "resample": resample}))
    scaled = preprocess(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255)[0].permute(1, 2, 0) * 255
    assert (scaled - torch.from_numpy(np.array(expected))).abs().max() < (0.01 if resample == 0 else 3)


def test_timm_settings() -> None:
    """The shorter side becomes size / crop_pct, and the centre is cut out; "squash" scales both sides."""
    fields = {"input_size": (3, 224, 224), "crop_pct": 0.875, "interpolation": "bicubic", "mean": MEAN, "std": STD}
    steps = Preprocessing.of_timm(fields)
    assert (steps.size, steps.crop, steps.mode) == (256, (224, 224), "bicubic")
    assert Preprocessing.of_timm({**fields, "crop_mode": "squash"}).size == (256, 256)
    image = torch.rand(1, 3, 256, 300)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(Preprocess(steps)(image), (image[..., 16:240, 38:262] - mean) / std)


def test_timm_classifier_from_a_folder(tmp_path: Path) -> None:
    try:
        import timm
        from timm.models._hub import save_for_hf
    except Exception as error:  # its torchvision may not fit torch
        pytest.skip(f"timm cannot be imported: {error}")
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=3).eval()
    save_for_hf(network, tmp_path / "m", model_config={"label_names": ["a", "b", "c"]}, safe_serialization=True)
    model = load_hub(f"timm:{tmp_path / 'm'}")
    assert isinstance(model, HubClassifier)
    assert model.class_names == ("a", "b", "c")
    images = torch.rand(2, 3, 160, 160)
    inputs = (torch.nn.functional.interpolate(images, (168, 168), mode="bicubic", antialias=True) - 0.5) / 0.5
    torch.testing.assert_close(model(images), network(inputs[..., 4:164, 4:164]))
