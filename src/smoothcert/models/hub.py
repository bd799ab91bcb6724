"""Published classifiers: `hf:NAME` (transformers) and `timm:NAME`, with their preprocessing behind the noise.

Weights are read from a folder or from the cache of the library, and only from safetensors files: nothing is downloaded,
and neither pickled data nor code of a repository is run.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from smoothcert.classifier import logits_of
from smoothcert.errors import RequestError
from smoothcert.io.text import error_line, one_line
from smoothcert.models.preprocessing import OWN_FUNCTION, Preprocess, Preprocessing

WEIGHTS = "model.safetensors"
LIBRARIES = {"hf": "transformers", "timm": "timm"}
LARGEST_DIFFERENCE = 0.1
"""Mean difference of pixels, as a share of their standard deviation: other filters give up to 0.06, and another scale
0.3 or more."""


def is_hub(name: str) -> bool:
    """Tell `hf:NAME` and `timm:NAME` from other names of networks."""
    kind, colon, rest = name.partition(":")
    return kind in LIBRARIES and bool(colon and rest)


class HubClassifier(nn.Module):
    """A published network from images [n, c, h, w] in [0, 1], of any size, to logits [n, classes] in float32.

    Noise is added to its input; scaling, cropping and normalisation follow inside, as published.
    """

    def __init__(self, network: nn.Module, steps: Preprocessing, class_names: Sequence[str] | None, grey: bool) -> None:
        super().__init__()
        self.preprocess = Preprocess(steps)
        self.network = network
        self.grey = grey
        self.class_names = None if class_names is None else tuple(class_names)
        """Names of the outputs in order, if the files contain them."""

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1 and not self.grey:
            images = images.expand(-1, 3, -1, -1)
        inputs = self.preprocess(images)
        parameter = next(self.network.parameters(), inputs)
        return logits_of(self.network(inputs.to(parameter.dtype)))


def output_names(model: object) -> tuple[str, ...] | None:
    """Names of the outputs of a published classifier, in order, if its files contain them; None for other models."""
    return model.class_names if isinstance(model, HubClassifier) else None


def load_hub(reference: str) -> HubClassifier:
    """Load the classifier `hf:NAME`, `hf:FOLDER`, `timm:NAME` or `timm:FOLDER` on the CPU in eval mode, in float32.

    A name is looked up in the cache of Hugging Face. What cannot be loaded is a RequestError of one line.
    """
    if not isinstance(reference, str) or not is_hub(reference):
        raise RequestError(f"hub: expected hf:NAME, hf:FOLDER, timm:NAME or timm:FOLDER, got {reference}")
    kind, _, name = reference.partition(":")
    folder = Path(name).expanduser()
    try:
        model = (_from_transformers if kind == "hf" else _from_timm)(name, folder if folder.is_dir() else None)
    except RequestError as error:
        raise RequestError(f"{reference}: {error}") from error
    except Exception as error:  # the libraries raise many kinds
        raise RequestError(
            f"{reference}: expected an image classifier that the installed {LIBRARIES[kind]} can load, "
            f"got a failure ({error_line(error)}); update the package, {OWN_FUNCTION}"
        ) from error
    return model.eval()


def _from_transformers(name: str, folder: Path | None) -> HubClassifier:
    _refuse_absent(name, folder, name)
    transformers = _imported("transformers")
    source = str(folder or name)
    options = {"local_files_only": True, "trust_remote_code": False}
    with _quiet(transformers):
        config = transformers.AutoConfig.from_pretrained(source, **options)
        if type(config) not in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
            raise RequestError(f"expected an image classifier, got {config.model_type}; give another network")
        network, info = transformers.AutoModelForImageClassification.from_pretrained(
            source, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **options
        )
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(source, **options)
        except OSError as error:
            raise RequestError(
                f"expected preprocessor_config.json, the preprocessing of images, next to the weights, got none that "
                f"can be read ({error_line(error, 80)}); save it there with processor.save_pretrained(FOLDER)"
            ) from error
    if missing := sorted(info["missing_keys"]):
        raise RequestError(
            f"expected the weights of a trained classifier, got a file without {', '.join(missing[:3])}; give one that "
            "was trained to classify"
        )
    labels = network.config.id2label
    names = [str(labels[index]) for index in sorted(labels)]
    default = [f"LABEL_{index}" for index in range(len(names))]
    grey = getattr(network.config, "num_channels", 3) == 1
    steps = Preprocessing.of_processor(processor.to_dict())
    if not grey:
        _compare(steps, processor)
    return HubClassifier(network, steps, None if names == default else names, grey)


def _compare(steps: Preprocessing, processor: Any) -> None:
    """Refuse a processor of transformers that makes something else of a colour image than `steps`.

    The image is smooth, as photographs are: filters that torch lacks, such as Lanczos, change it little.
    """
    height, width = (61, 48) if steps.crop is None else (steps.crop[0] + 23, steps.crop[1] + 10)
    corners = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    pixels = np.array(Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC))
    inputs = processor(Image.fromarray(pixels), return_tensors="pt")
    if "pixel_values" not in inputs:
        given = ", ".join(inputs)
        raise RequestError(f"preprocessing: expected pixels, got {given} of {type(processor).__name__}; {OWN_FUNCTION}")
    expected = inputs["pixel_values"]
    given = Preprocess(steps)(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255)
    if given.shape != expected.shape or (given - expected).abs().mean() > LARGEST_DIFFERENCE * expected.std():
        raise RequestError(
            f"preprocessing: expected scaling, cropping and normalisation, got {type(processor).__name__}, which gives "
            f"other pixels; {OWN_FUNCTION}"
        )


def _from_timm(name: str, folder: Path | None) -> HubClassifier:
    timm = _imported("timm")
    known = None if folder is not None else timm.get_pretrained_cfg(name, allow_unregistered=False)
    file = _refuse_absent(name, folder, str(known.hf_hub_id or "") if known is not None else "")
    # The file, which is in safetensors format, replaces every other source of weights that the configuration names.
    overlay = {"file": str(file), "source": "", "custom_load": False}
    source = name if folder is None else f"local-dir:{folder}"
    network = timm.create_model(source, pretrained=True, pretrained_cfg_overlay=overlay)
    settings = network.pretrained_cfg
    names = settings.get("label_names")
    names = [names[index] for index in sorted(names)] if isinstance(names, Mapping) else names
    return HubClassifier(network, Preprocessing.of_timm(settings), names, settings["input_size"][0] == 1)


def _refuse_absent(name: str, folder: Path | None, repository: str) -> Path:
    """Return the weights in `folder` or in the cache of Hugging Face; refuse what is not there."""
    if folder is not None:
        for needed in ("config.json", WEIGHTS):
            if not (folder / needed).is_file() and not (folder / f"{needed}.index.json").is_file():
                raise RequestError(
                    f"expected a folder with config.json and {WEIGHTS}, got one without {needed}; save the "
                    "network with model.save_pretrained(FOLDER)"
                )
        return folder / WEIGHTS
    hub = _imported("huggingface_hub")
    paths: list[object] = []
    if repository:
        try:
            paths = [hub.try_to_load_from_cache(repository, file) for file in (WEIGHTS, f"{WEIGHTS}.index.json")]
        except ValueError as error:  # not the name of a repository
            raise RequestError(
                f"expected a folder or the name of a repository, got neither ({one_line(error)[:80]}); correct it"
            ) from None
    cached = [path for path in paths if isinstance(path, str)]
    if not cached:
        advice = (
            f"download it once with `hf download {repository}`, or give a folder" if repository else "give a folder"
        )
        raise RequestError(
            f"expected {WEIGHTS} of {name} in a folder or in the cache of Hugging Face, got none; {advice}"
        )
    return Path(cached[0])


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except Exception as error:  # timm fails in several ways if its torchvision does not fit torch
        raise RequestError(
            f"expected the package {package}, got none that works ({error_line(error, 100)}); "
            "install it with: pip install 'smoothcert[hub]'"
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and no warnings of transformers: what matters is checked here."""
    logging = transformers.utils.logging
    bars = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
