"""Jobs of several processes: wrong environment variables, and peers that never start."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_recipe

from smoothcert import distributed
from smoothcert.data import ImageData
from smoothcert.errors import RequestError, WorkError
from smoothcert.training.loop import train


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the variables of torchrun."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
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
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    set_environment(WORLD_SIZE=2, RANK=rank, LOCAL_RANK=rank, MASTER_ADDR="localhost", MASTER_PORT=port)
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
