"""Jobs of several processes: wrong environment variables, lost peers, restarts by torchrun, and two machines."""

import os
import re
import secrets
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.run as torchrun
from processes import PATIENCE, free_port, print_to, start_process
from tiny import metrics, tiny_recipe
from torch import nn
from torch.distributed.launcher.api import elastic_launch

from smoothcert import cli, distributed
from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.certify_dataset import Certification, certify_dataset
from smoothcert.certification.file_parts import wait_for_settings
from smoothcert.data import ImageData, load_dataset
from smoothcert.errors import RequestError, WorkError
from smoothcert.models.kernels import apply_to
from smoothcert.training import loop
from smoothcert.training.checkpoint import load_run
from smoothcert.training.loop import train
from smoothcert.training.resume import refuse_other_origin


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the variables of torchrun."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def change(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return change


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "abc"}, r"WORLD_SIZE: expected a whole number >= 1, got 'abc'"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE: expected a whole number >= 1, got '0'"),
        ({"WORLD_SIZE": "²"}, r"WORLD_SIZE: expected a whole number >= 1, got '²'"),
        ({"LOCAL_RANK": "x"}, r"LOCAL_RANK: expected a whole number >= 0, got 'x'"),
        ({"RANK": "-1"}, r"RANK: expected a whole number >= 0, got '-1'"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE is 2, but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set; start"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK: expected a number below WORLD_SIZE = 2, got 2",
        ),
    ],
)
def test_wrong_environment_is_refused_in_one_line(
    variables: dict[str, str],
    message: str,
    set_environment: Callable[..., None],
    tmp_path: Path,
    tiny_data: ImageData,
) -> None:
    """Certification and training both refuse it before anything is written."""
    set_environment(**variables)
    with pytest.raises(RequestError, match=message) as caught, distributed.team():
        pass
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match=message):
        train(tiny_recipe(), tiny_data, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_peer_ends_the_process_after_the_timeout(rank: int, set_environment: Callable[..., None]) -> None:
    set_environment(WORLD_SIZE=2, RANK=rank, LOCAL_RANK=rank, MASTER_ADDR="localhost", MASTER_PORT=free_port())
    set_environment(SMOOTHCERT_CONNECT_SECONDS=1)
    with pytest.raises(WorkError, match=f"process {rank} waited 1 s at most for the other 1 of 2 processes") as caught:
        distributed.meet()
    assert "\n" not in str(caught.value)


def test_single_process_starts_no_process_group(set_environment: Callable[..., None]) -> None:
    set_environment()
    assert distributed.meet() == 1
    assert "WORLD_SIZE" not in os.environ
    with distributed.team() as group:
        assert (group.rank, group.size, group.leads) == (0, 1, True)
        assert group.mean(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
def test_group_of_the_caller_outlives_an_error(
    fails: bool, set_environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DistributedDataParallel in the traceback must not be the last to hold its group: that can block the process."""
    set_environment(WORLD_SIZE=2, RANK=0, LOCAL_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=1)
    monkeypatch.setattr(distributed, "_stores", ["the processes have met"])
    monkeypatch.setattr(distributed, "_failed_groups", [])  # released after this test
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = weakref.ref(torch.distributed.group.WORLD)
    with pytest.raises(ValueError, match="an error") if fails else nullcontext(), distributed.team():
        if fails:
            raise ValueError("an error")
    torch.distributed.destroy_process_group()
    assert (group() is not None) == fails


def test_synchronized_batch_norm(tmp_path: Path, tiny_data: ImageData) -> None:
    """It is refused on a CPU and in a run that was trained without; our own kernels do not compute it."""
    with pytest.raises(RequestError, match="sync_batch_norm: expected GPUs, got cpu"):
        train(tiny_recipe(), tiny_data, tmp_path / "run", device="cpu", sync_batch_norm=True)
    assert not (tmp_path / "run").exists()
    for done in (False, True):
        recorded, other = ({"sync_batch_norm": True} if synchronized else {} for synchronized in (done, not done))
        refuse_other_origin(tmp_path, recorded, recorded, finished=False)
        with pytest.raises(RequestError, match=f"was trained {'with' if done else 'without'} --sync-batch-norm"):
            refuse_other_origin(tmp_path, recorded, other, finished=False)
    layers = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
    images = torch.zeros(4, 16, 8, 8)
    assert apply_to([(layers[0], layers[1])], images)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(layers)
    assert not apply_to([(converted[0], converted[1])], images)


def test_folder_that_the_machines_do_not_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match=r"a\.tsv: process 1 does not see what process 0 has written there"):
        wait_for_settings(tmp_path / "a.tsv", distributed.Team(1, 2), seconds=0)
    (tmp_path / "a.json").write_text("{}")
    wait_for_settings(tmp_path / "a.tsv", distributed.Team(1, 2), seconds=0)


def answer_once(folder: Path) -> None:
    """The processes meet, then the second one does not answer any more."""
    print_to(folder / os.environ["RANK"])

    def work(**options: object) -> None:
        with distributed.team() as group:
            group.wait()
            if group.leads:
                group.wait()
            else:
                time.sleep(PATIENCE)

    cli.app = work  # type: ignore[assignment]
    cli.main()


@pytest.mark.slow
def test_silent_peer_ends_the_process_after_the_timeout(tmp_path: Path) -> None:
    """One line and exit code 1."""
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "SMOOTHCERT_WAIT_SECONDS": 2}
    leader, silent = (start_process(answer_once, tmp_path, RANK=rank, LOCAL_RANK=rank, **shared) for rank in (0, 1))
    leader.join(PATIENCE)
    for process in (leader, silent):
        process.kill()
        process.join()
    assert leader.exitcode == 1
    errors = (tmp_path / "0.err").read_text()
    lines = [line for line in errors.splitlines() if line.startswith(("smoothcert:", "Traceback"))]
    assert len(lines) == 1
    assert "process 0 lost another of the 2 processes: it ended, or did not answer within 2 s" in lines[0]


def train_and_certify(folder: Path, recipe: Path, run: Path, options: list[str]) -> None:
    """A worker of torchrun. The second one is killed, in its first attempt while it trains, in its second one while it
    certifies."""
    second, attempt = os.environ["RANK"] == "1", os.environ["TORCHELASTIC_RESTART_COUNT"]
    print_to(folder / os.environ["RANK"])
    distributed._TOKEN = secrets.token_hex(8)  # this process is a copy of one that has drawn it
    finish_epoch, rows, calls = loop.finish_epoch, Certification.rows, list[object]()

    def die_once_the_first_has_printed(text: str) -> None:
        """The first worker is then past the exchange of messages that both have left; otherwise it fails there."""
        deadline = time.monotonic() + PATIENCE
        while text not in (folder / "0.out").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def finish_or_die(run: Any) -> None:
        finish_epoch(run)
        print("finished epoch", run.epoch - 1, "in attempt", attempt, flush=True)
        if second and attempt == "0" and run.epoch == 2:
            die_once_the_first_has_printed("finished epoch 1")

    def rows_or_die(self: Certification, indices: Any) -> Any:
        if second and attempt == "1" and calls:
            with (run / "certificates" / ".it.part1.tsv").open("a") as part:
                part.write("5\t7")  # an incomplete row
            die_once_the_first_has_printed("certified")
        calls.append(indices)
        print("certified", indices, "in attempt", attempt, flush=True)
        return rows(self, indices)

    loop.SAVE_SECONDS, loop.finish_epoch = 0.0, finish_or_die
    Certification.rows = rows_or_die  # type: ignore[method-assign]
    for command in (["train", "--recipe", str(recipe), "--out", str(run), "--resume"], ["certify", str(run), *options]):
        sys.argv = ["smoothcert", *command, "--device", "cpu"]
        try:
            cli.main()
        except SystemExit as end:
            if end.code:
                raise


def launch(node: int, port: int, *arguments: object) -> None:
    """What `torchrun` does on one of two machines, with workers that need not import everything."""
    method = "fork" if sys.platform == "linux" else "forkserver"  # elsewhere, copies of a working process may crash
    options = ["--nnodes", "2", "--max-restarts", "3", "--master-addr", "localhost", "--master-port", str(port)]
    options += ["--node-rank", str(node), "--start-method", method, "a script"]
    config, _, _ = torchrun.config_from_args(torchrun.parse_args(options))
    elastic_launch(config, train_and_certify)(*arguments)


@pytest.mark.slow
def test_two_machines_with_killed_workers_write_the_files_of_one_process(tmp_path: Path, tiny_data: ImageData) -> None:
    """Two agents of torchrun: a worker is killed while it trains, and another one while it certifies.

    The job continues from the last epoch and from the last rows; only the leading process prints results.
    """
    arrays = {"images": tiny_data.images[:128].numpy(), "labels": tiny_data.labels[:128].numpy().astype(np.int64)}
    np.savez(tmp_path / "digits.npz", **{f"{split}_{k}": v for split in ("train", "test") for k, v in arrays.items()})
    recipe = tiny_recipe(dataset=f"npz:{tmp_path / 'digits.npz'}", epochs=4)
    recipe.save(tmp_path / "recipe.yaml")
    options = ["--votes", "40", "--n0", "10", "--max-images", "12", "--seed", "3", "--batch-size", "5", "--name", "it"]
    arguments = (free_port(), tmp_path, tmp_path / "recipe.yaml", tmp_path / "two", options)
    agents = [start_process(launch, node, *arguments) for node in (0, 1)]
    for agent in agents:
        agent.join(PATIENCE)
        agent.terminate()
    outputs = [(tmp_path / f"{rank}{end}").read_text() for rank in (0, 1) for end in (".out", ".err")]
    assert [agent.exitcode for agent in agents] == [0, 0], outputs
    first, errors, second, _ = outputs
    assert "Traceback" not in errors, "a lost peer is one line"
    assert [first.count("trained "), first.count("wrote ")] == [3, 1], "each attempt ends the training"
    assert [second.count("trained "), second.count("wrote ")] == [0, 0]
    epochs = [line.split()[2::3] for line in first.splitlines() if line.startswith("finished epoch")]
    assert epochs == [["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"]]

    train(recipe, load_dataset(recipe.dataset, "train"), tmp_path / "one", device="cpu")
    for two, one in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    trained = load_run(tmp_path / "two")
    for a, b in zip(trained.model.parameters(), load_run(tmp_path / "one").model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)

    table = read_certificates(tmp_path / "two" / "certificates" / "it.tsv")
    again = certify_dataset(
        *(trained, load_dataset(recipe.dataset, "test"), tmp_path / "again.tsv"),
        **{"n": 40, "n0": 10, "max_images": 12, "seed": 3, "batch_size": 5, "precision": "fp32", "device": "cpu"},
    )
    assert [(row.index, row.certificate) for row in table.rows] == [(row.index, row.certificate) for row in again.rows]
    counted = [int(index) for text in (first, second) for index in re.findall(r"certified \[(\d+)\]", text)]
    assert 12 <= len(counted) <= 14, "at most the rows of the killed processes are computed again"
    names = {path.name for path in (tmp_path / "two").rglob("*")}
    assert names == {
        "recipe.yaml",
        "model.safetensors",
        "metrics.jsonl",
        "state.pt",
        "certificates",
        "it.tsv",
        "it.json",
    }


def test_a_numbered_gpu_is_refused_with_the_variable_that_chooses_it() -> None:
    with pytest.raises(RequestError, match=r"got cuda:1; choose a GPU by CUDA_VISIBLE_DEVICES=1$"):
        distributed.find_device("cuda:1")
    with pytest.raises(RequestError, match=r"expected auto, cpu, cuda or mps, got gpu$"):
        distributed.find_device("gpu")
