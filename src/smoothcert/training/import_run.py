"""Imports a checkpoint as a run folder: of one of our networks, or of a user's own, which their code builds."""

from pathlib import Path

from smoothcert.data import DATASETS
from smoothcert.errors import RequestError
from smoothcert.models import as_module, check_outputs, is_code
from smoothcert.training.checkpoint import InputSpec, Run
from smoothcert.training.choices import InputLayer
from smoothcert.training.import_checkpoint import import_checkpoint, write_import
from smoothcert.training.initial_weights import own_model_with_weights
from smoothcert.training.recipe import ImportRecipe, parse_recipe
from smoothcert.training.run_folder import split_key


def import_run(
    file: Path,
    out: Path,
    *,
    sigma: float,
    arch: str | None = None,
    dataset: str | None = None,
    inputs: InputSpec | None = None,
    image_size: int | None = None,
    input_layer: InputLayer | None = None,
    method: str = "imported",
) -> Run:
    """Make the run folder `out` from the weights in `file`: see `import_checkpoint` for the arguments.

    `arch` may also name a user's code that builds the network, and runs: only the user may name it. The code contains
    the input layer of the network, if it has one, and `dataset` must be given with it.
    """
    if arch is None or not is_code(arch):
        return import_checkpoint(
            *(file, out),
            sigma=sigma,
            arch=arch,
            dataset=dataset,
            inputs=inputs,
            image_size=image_size,
            input_layer=input_layer,
            method=method,
        )
    inputs = InputSpec.of(DATASETS[dataset]) if inputs is None and dataset in DATASETS else inputs
    if inputs is None or input_layer not in (None, "none"):
        raise RequestError(
            f"--arch {arch}: expected --dataset with it, and no --input-layer, which the code contains; "
            + ("add --dataset NAME" if inputs is None else "leave --input-layer out")
        )
    fields = {"dataset": dataset, "model": arch, "sigma": sigma, "input_layer": "none", "image_size": image_size}
    recipe = parse_recipe(ImportRecipe, {**fields, "source": file.name, "method": method}, "import")
    notes: list[str] = []
    network = as_module(own_model_with_weights(arch, inputs.num_classes, file, notes.append), arch, "arch")
    check_outputs(network, arch, inputs.shape, inputs.num_classes)
    spec = InputSpec(inputs.shape, inputs.num_classes, class_names=inputs.class_names)
    return write_import(Run(out, recipe, spec, network.eval(), 0, {"notes": notes}), split_key(file)[0])
