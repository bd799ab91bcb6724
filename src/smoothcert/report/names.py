"""The names that people use for methods, their settings, data sets and networks."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePath
from typing import Any

from smoothcert.data import DATASETS
from smoothcert.io.text import one_line

METHODS = {
    "gaussian": "Gaussian",
    "stability": "Stability",
    "smoothadv": "SmoothAdv",
    "macer": "MACER",
    "consistency": "Consistency",
    "smoothmix": "SmoothMix",
    "catrs": "CAT-RS",
    "distillation": "Distillation",
}
"""Name of a method without underscores -> the name that people use."""
IN_SENTENCES = {
    "mnist": "digits of MNIST",
    "mnist-sample": "digits of the MNIST sample",
    "mnist-held-out": "held-out digits of MNIST",
    "mnist-sample-held-out": "held-out digits of the MNIST sample",
    "cifar10-held-out": "held-out images of CIFAR-10",
}
"""Data set -> its images in a sentence, where that is not "images of" and its name."""
NETWORKS = {"lenet": "LeNet", "densenet": "DenseNet"}
SYMBOLS = {
    "weight": "λ",
    "eta": "η",
    "num_noise": "m",
    "steps": "T",
    "step_size": "α",
    "epsilon": "ε",
    "form": "loss",
}
"""Name of a field of a published method -> its name in the papers. Of a user's own method, only `num_noise`, which all
methods have, is the same."""
MEANINGS = {
    "σ": "standard deviation of the noise",
    "λ": "weight of the method's own term in the loss",
    "η": "weight of the mixed images in the loss",
    "m": "noisy copies per image in training",
    "T": "attack steps in training",
    "α": "L2 length of an attack step",
    "ε": "largest L2 length of the attack",
    "one-step": "the first attack step replaces the clean image",
}
"""Letters and words of labels -> what they mean."""
VALUES = {
    **{"kl_entropy": "KL + entropy", "kl": "KL", "mse": "MSE", "xent": "cross-entropy", "pgd": "PGD", "ddn": "DDN"},
    **{"True": "yes", "False": "no", "None": "none", "[]": "none"},
}
"""Value of a field of a recipe -> its name for people."""
_NO_NAMES = ("build", "build_model", "create_model", "get_model", "make_model", "model")
"""Functions of a user's own code that are not named after their network."""


def method_name(method: str) -> str:
    """The name of a method, as in "CAT-RS"; of a user's own code, without the folder of its file."""
    letters = method.lower().replace("-", "").replace("_", "")
    path, ending, function = method.partition(".py:")
    if ending and "(" not in path:  # not a list of files
        method = f"{PurePath(path).name}{ending}{function}"
    return METHODS.get(letters, one_line(method))


def setting_name(key: str, own_method: bool = False) -> str:
    """The name of a field of a recipe, such as `objective.weight`, in the papers, if it is of a published method."""
    outer, _, last = key.rpartition(".")
    if outer == "sampler":
        return outer if last == "name" else f"{outer} {last.replace('_', ' ')}"
    name = last.replace("_", " ")
    return name if own_method and last != "num_noise" else SYMBOLS.get(last, name)


def setting_titles(keys: Iterable[str], of_own_methods: Collection[str] = ()) -> dict[str, str]:
    """Field of a recipe -> its name (see `setting_name`); fields that share one differ as in "T of adversary"."""
    names = {key: setting_name(key, key in of_own_methods) for key in keys}
    counts = Counter(names.values())
    part = {key: "".join(key.split(".")[-2:-1]) for key, name in names.items() if counts[name] > 1}
    apart = {key: f" of {outer}" for key, outer in part.items() if outer not in ("", "objective")}
    return {key: name + apart.get(key, "") for key, name in names.items()}


def value_text(value: object) -> str:
    """The value of a field of a recipe for people; whole numbers have all their digits."""
    text = f"{value:g}" if isinstance(value, float) else one_line(value)
    return VALUES.get(text, text)


def setting_text(key: str, value: object, own_method: bool = False) -> str:
    """A field of a recipe with its value, as in "λ = 10"."""
    name = setting_name(key, own_method)
    if value is None or isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} = {value_text(value)}"


def meanings_in(texts: Iterable[str]) -> list[str]:
    """What the letters in some labels and titles mean, as in "η: weight of the mixed images in the loss"."""
    shown = {word for text in texts for word in re.findall(r"\w+(?= = )|\bone-step\b", text)}
    return [f"{letter}: {meaning}" for letter, meaning in MEANINGS.items() if letter in shown]


def dataset_name(dataset: str) -> str:
    """The name of a data set, as in "CIFAR-10"; of a user's own files, the last part of the path."""
    kind, colon, path = dataset.partition(":")
    if colon and kind in ("folder", "npz"):
        return one_line(PurePath(path).name or path)
    known, space, rest = dataset.partition(" ")
    title = DATASETS[known].title if known in DATASETS else known
    return one_line(f"{title}{space}{rest}")


def images_text(count: int, dataset: str | None, split: str | None) -> str:
    """Images of a data set in words, as in "100 test digits of MNIST"."""
    known = DATASETS.get(dataset or "")
    held_out = known is not None and known.trained_on_by != ()  # the noun says more than the split
    kind = f"{split} " if split in ("train", "test") and not held_out else ""
    noun = IN_SENTENCES.get(dataset or "", "images" if dataset is None else f"images of {dataset_name(dataset)}")
    return f"{count:,} {kind}{noun}"


def network_name(model: str) -> str:
    """The name of a network, as in "ResNet-110"; of a user's own code, the name of the function, or that of its module
    if the function's name says nothing."""
    if model.startswith("resnet") and model[6:].isdigit():
        return f"ResNet-{model[6:]}"
    source, _, function = model.rpartition(":")
    module = PurePath(source).name.removesuffix(".py").rpartition(".")[2]
    return one_line(NETWORKS.get(model, module if module and function in _NO_NAMES else function))


def shared_network(recipes: Iterable[Mapping[str, Any]]) -> str | None:
    """The name of the network that all `recipes` have; None if they differ or one has none."""
    models = {model if isinstance(model := recipe.get("model"), str) else None for recipe in recipes}
    model = models.pop() if len(models) == 1 else None
    return None if model is None else network_name(model)
