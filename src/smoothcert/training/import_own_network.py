"""Imports a checkpoint of a user's own network, which their code builds, as a run folder."""

from pathlib import Path

from smoothcert.models import as_module, check_outputs
from smoothcert.training.checkpoint import InputSpec, Run
from smoothcert.training.import_checkpoint import write_import
from smoothcert.training.initial_weights import own_model_with_weights
from smoothcert.training.recipe import ImportRecipe, parse_recipe
from smoothcert.training.run_folder import split_key


def import_own_network(
    file: Path,
    out: Path,
    *,
    sigma: float,
    arch: str,
    dataset: str,
    inputs: InputSpec,
    image_size: int | None = None,
    method: str = "imported",
) -> Run:
    """Make the run folder `out` from the weights in `file` and the code `arch` (see `own_model_with_weights`).

    The code contains the input layer of the network, if it has one. Call this only if the user has named the code.
    """
    fields = {"dataset": dataset, "model": arch, "sigma": sigma, "input_layer": "none", "image_size": image_size}
    recipe = parse_recipe(ImportRecipe, {**fields, "source": file.name, "method": method}, "import")
    notes: list[str] = []
    network = as_module(own_model_with_weights(arch, inputs.num_classes, file, notes.append), arch, "arch")
    check_outputs(network, arch, inputs.shape, inputs.num_classes)
    spec = InputSpec(inputs.shape, inputs.num_classes, class_names=inputs.class_names)
    return write_import(Run(out, recipe, spec, network.eval(), 0, {"notes": notes}), split_key(file)[0])
