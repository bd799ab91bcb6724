"""Metrics for TensorBoard and Weights & Biases; the packages are imported only if they are asked for."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, get_args

from smoothcert.errors import RequestError
from smoothcert.training.checkpoint import Run
from smoothcert.training.choices import Tracker

FOLDER = "tensorboard"


def tracker(tool: Tracker) -> Callable[[Run, dict[str, Any]], None]:
    """A function to call after each epoch with the run and its metrics; TensorBoard files are in the run folder."""
    if tool not in get_args(Tracker):
        raise RequestError(f"track: expected one of {', '.join(get_args(Tracker))}, got {tool}; choose one of these")
    if find_spec(tool) is None:
        raise RequestError(f"track: expected the package {tool}, got none; install it: pip install 'smoothcert[track]'")
    return _write_for_tensorboard if tool == "tensorboard" else _WeightsAndBiases()


def _write_for_tensorboard(run: Run, metrics: dict[str, Any]) -> None:
    """Write one scalar per metric and epoch; a resumed run replaces the epochs that it trains again."""
    from torch.utils.tensorboard import SummaryWriter

    epoch = int(metrics["epoch"])
    # Opened for each epoch: an interrupted run leaves complete files.
    with SummaryWriter(str(run.folder / FOLDER), purge_step=epoch) as writer:
        if epoch == 0:
            writer.add_text("recipe", f"```\n{run.recipe.to_yaml()}```", 0)
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "epoch":
                writer.add_scalar(name, value, epoch)


class _WeightsAndBiases:
    """Logs one step per epoch to a run that is named after the run folder."""

    def __init__(self) -> None:
        self.run: Any = None

    def __call__(self, run: Run, metrics: dict[str, Any]) -> None:
        import wandb

        if self.run is None:
            config = run.recipe.to_mapping()
            self.run = wandb.init(project="smoothcert", name=run.folder.name, dir=str(run.folder), config=config)
        self.run.log({name: value for name, value in metrics.items() if name != "epoch"}, step=int(metrics["epoch"]))
        if run.finished:
            self.run.finish()
