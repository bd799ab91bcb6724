"""The vote counter: exact counts, independence of batching, fresh and separate noise, eval mode."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normal_numbers import GENERATORS
from smoothcert import noise
from smoothcert.errors import WorkError
from smoothcert.noise import Gaussian
from smoothcert.smoothing.votes import BATCH_SIZE, NOISE_BLOCK, VoteCounter, block_keys, default_batch_size


def signs(images: Tensor) -> Tensor:
    """Four classes from the signs of two pixels minus 1/2."""
    a, b = images[:, 0, 0, 0] - 0.5, images[:, 0, 0, 1] - 0.5
    return torch.stack([a + b, a - b, -a + b, -a - b], dim=1)


def counter(classifier=signs, batch_size: int = 1000, num_classes: int = 4) -> VoteCounter:
    return VoteCounter(classifier, Gaussian(0.25), num_classes, batch_size)


def images(number: int) -> Tensor:
    return torch.rand(number, 1, 1, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("n", [1, 99, 500, 501, 2345])
@pytest.mark.parametrize("batch_size", [100, 1000])
def test_every_vote_is_counted_once(monkeypatch: pytest.MonkeyPatch, n: int, batch_size: int, generator: str) -> None:
    """Also where the last block or the last forward pass is short; with either generator of normal numbers."""
    monkeypatch.setattr(noise, "VECTOR_MATHEMATICS", generator == "sfc64, box-muller")
    batch = images(3)
    counts = counter(batch_size=batch_size).count(batch, [(7, i) for i in range(3)], "estimate", n)
    assert counts.sum(axis=1).tolist() == [n] * 3
    # An independent count: the same noise, block by block.
    block = min(NOISE_BLOCK["cpu"], n, batch_size)
    for i in range(3):
        votes: list[int] = []
        for key in block_keys((7, i), "estimate", -(-n // block)):
            drawn = GENERATORS[generator](key, block * 2).reshape(block, 1, 1, 2)
            noisy = torch.from_numpy(drawn) * 0.25 + batch[i]
            votes += signs(noisy).argmax(1).tolist()
        assert np.bincount(votes[:n], minlength=4).tolist() == counts[i].tolist()


def test_nan_logits_are_refused() -> None:
    """Counted as a vote, it would be certified as class 0; slots that only pad a pass do not matter."""

    def sometimes(noisy: Tensor) -> Tensor:
        return torch.where(noisy[:, :1, 0, 0] > 0.9, torch.nan, signs(noisy))

    with pytest.raises(WorkError, match=r"gave NaN for [\d,]+ of 2,000 noisy images, which is no vote; .*x\.clamp"):
        counter(sometimes).count(images(2), [(7, 0), (7, 1)], "estimate", 1000)
    dark = torch.full((1, 1, 1, 2), -10.0)
    assert counter(sometimes).count(dark, [(7, 0)], "estimate", 150).sum() == 150


def test_votes_do_not_depend_on_other_images() -> None:
    batch, seeds = images(6), [(1, i) for i in range(6)]
    together = counter().count(batch, seeds, "estimate", 700)
    order = [4, 0, 5, 2, 1, 3]
    shuffled = counter().count(batch[order], [seeds[i] for i in order], "estimate", 700)
    alone = [counter().count(batch[i : i + 1], seeds[i : i + 1], "estimate", 700)[0].tolist() for i in range(6)]
    assert shuffled.tolist() == together[order].tolist()
    assert alone == together.tolist()


def test_noise_depends_on_the_batch_size_only_below_a_block() -> None:
    """Two batch sizes of a block or more give equal votes, and n votes of a block or more are the first of more."""
    batch, seeds, block = images(6), [(1, i) for i in range(6)], NOISE_BLOCK["cpu"]

    def votes(batch_size: int, n: int) -> list[list[int]]:
        counts: list[list[int]] = counter(batch_size=batch_size).count(batch, seeds, "estimate", n).tolist()
        return counts

    assert votes(block, 700) == votes(block + 1, 700) == votes(3 * block, 700)
    assert votes(block - 1, 700) != votes(block, 700)
    assert votes(100, 100) == votes(block, 100)
    for fewer, more in ((block, block + 1), (block, 700), (600, 700)):
        added = np.subtract(votes(500, more), votes(500, fewer))
        assert added.min() >= 0
        assert added.sum() == len(batch) * (more - fewer)


def test_the_page_about_certification_has_the_sizes_of_blocks_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BATCH_SIZE, "cpu", 500)  # which is smaller in tests
    page = " ".join((Path(__file__).parents[2] / "docs/certification.md").read_text(encoding="utf-8").split())
    block, on_gpu = NOISE_BLOCK["cpu"], NOISE_BLOCK["cuda"]
    assert f"in blocks of {block} noisy images ({on_gpu:,} on a GPU), or fewer if" in page
    size = default_batch_size(torch.device("cpu"), (3, 224, 224))
    assert f"below a block: {size} on a CPU for 224 x 224 pixels in colour" in page
    assert size < block


def test_every_image_and_stage_has_its_own_noise() -> None:
    same = images(1).expand(4, -1, -1, -1)
    counts = counter().count(same, [(1, 0), (1, 1), (2, 0), (1, 0)], "estimate", 2000).tolist()
    assert counts[0] == counts[3]
    assert counts[0] != counts[1]
    assert counts[0] != counts[2]
    keys = [set(block_keys((1, i), stage, 200)) for i in range(20) for stage in ("select", "estimate", "predict")]
    assert len(set().union(*keys)) == sum(map(len, keys)) == 20 * 3 * 200


class ModeSensitive(nn.Module):
    """Votes 0 in eval mode, 1 in train mode; remembers the shapes that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm2d(1)
        self.frozen = nn.Dropout()
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, batch: Tensor) -> Tensor:
        self.shapes.add(tuple(batch.shape))
        logits = torch.zeros(len(batch), 2)
        logits[:, int(self.inner.training)] = 1
        return logits + self.inner(batch).mean() * 0


def test_modules_vote_in_eval_mode_and_their_modes_are_restored() -> None:
    module = ModeSensitive().train()
    module.frozen.eval()
    counts = counter(module, num_classes=2).count(images(2), [(0, 0), (0, 1)], "select", 100)
    assert counts.tolist() == [[100, 0], [100, 0]]
    assert module.training
    assert module.inner.training
    assert not module.frozen.training  # each submodule keeps its mode
    assert int(module.inner.num_batches_tracked) == 0


def test_all_forward_passes_have_one_shape() -> None:
    module = ModeSensitive()
    for number, n in ((1, 2000), (3, 700), (5, 1)):
        counter(module, batch_size=1000, num_classes=2).count(
            images(number), [(0, i) for i in range(number)], "estimate", n
        )
    assert module.shapes == {(1000, 1, 1, 2)}


def test_modes_are_restored_after_an_exception() -> None:
    class Broken(ModeSensitive):
        def forward(self, batch: Tensor) -> Tensor:
            raise RuntimeError("broken")

    module = Broken().train()
    with pytest.raises(RuntimeError, match="broken"):
        counter(module).count(images(1), [(0, 0)], "select", 10)
    assert module.inner.training


@pytest.mark.parametrize("error", [AssertionError("at most 64"), KeyError("x"), SystemExit(1)])
def test_classifier_that_fails_on_a_full_batch_is_reported_in_one_line(error: BaseException) -> None:
    def limited(batch: Tensor) -> Tensor:
        if len(batch) > 64:
            raise error
        return batch.flatten(1)

    pattern = rf"failed on a batch of 100 noisy images \({type(error).__name__}: .*a smaller --batch-size"
    with pytest.raises(WorkError, match=pattern) as caught:
        counter(limited, num_classes=2, batch_size=100).count(images(1), [(0, 0)], "select", 10)
    assert caught.value.__cause__ is error
    with pytest.raises(WorkError, match=pattern):
        counter(limited, num_classes=2, batch_size=100).classes(images(200))
    assert counter(limited, num_classes=2, batch_size=64).count(images(1), [(0, 0)], "select", 10).sum() == 10


def test_memory_that_runs_out_while_voting_stays_as_it_is() -> None:
    message = "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"

    def greedy(batch: Tensor) -> Tensor:
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="allocate memory") as caught:
        counter(greedy).count(images(1), [(0, 0)], "select", 10)
    assert not isinstance(caught.value, WorkError)
