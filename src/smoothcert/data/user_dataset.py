"""A user's own data set, named as `package.module:Name` or `FILE.py:Name`."""

import inspect
from dataclasses import replace

from smoothcert.data.datasets import UNSPLIT, Split
from smoothcert.data.streamed_images import Images
from smoothcert.data.torch_dataset import images_from_dataset
from smoothcert.errors import RequestError, WorkError
from smoothcert.models.user_code import import_code, reporting_failures


def load_user_dataset(reference: str, split: Split) -> Images:
    """Import and call what `reference` names; return the images of the torch Dataset that it gives.

    A class or a function with a parameter `split` is called with "train" or "test", one with a parameter `train` with
    True or False. One with neither has no split: both requests give all images. See `images_from_dataset` for the
    items; what `load_dataset` returns is taken as it is. Call this only if the user has named the code.
    """
    build = import_code(reference, "dataset", "Class")
    if not callable(build) or inspect.isbuiltin(build):
        raise RequestError(
            f"dataset: expected {reference} to be a class or a function that returns a torch Dataset, got "
            f"{type(build).__name__}"
        )
    given: dict[str, object] = {"split": split, "train": split == "train"}
    arguments = "split or train, if it has such a parameter,"
    with reporting_failures(reference, "dataset", arguments, (RequestError, WorkError)):
        parameters = inspect.signature(build).parameters
        choice = next(({name: value} for name, value in given.items() if name in parameters), {})
        dataset = build(**choice)
    part = split if choice else UNSPLIT
    if isinstance(dataset, Images):
        return replace(dataset, name=reference, split=part)
    return images_from_dataset(dataset, name=reference, split=part)
