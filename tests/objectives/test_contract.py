"""Rules that every registered objective keeps: the loop, CUDA graphs and several processes rely on them."""

import pytest
import torch
from torch import Tensor, nn

from smoothcert.objectives import OBJECTIVES, LossTerms, Objective, Progress

BATCH, CLASSES, SHAPE, SIGMA = 6, 4, (2, 5, 5), 0.5


def small_network() -> nn.Module:
    """Convolution, batch norm, dropout, linear: modes matter to it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(36, CLASSES)
    )


def compute(objective: Objective, classifier: nn.Module, device: str = "cpu", seed: int = 3) -> LossTerms:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(BATCH, *SHAPE, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    noise = torch.randn(objective.num_noise, BATCH, *SHAPE, generator=generator) * SIGMA
    uniform = torch.rand(BATCH, generator=generator)
    progress = Progress(SIGMA, torch.tensor(0.4).to(device), torch.tensor(1.0).to(device), uniform.to(device))
    return objective.loss(classifier, images.to(device), labels.to(device), noise.to(device), progress)


@pytest.fixture(params=OBJECTIVES)
def objective(request: pytest.FixtureRequest) -> Objective:
    return OBJECTIVES[request.param]()


def test_loss_is_a_finite_scalar_with_its_terms(objective: Objective) -> None:
    result = compute(objective, small_network())
    assert result.loss.shape == ()
    assert bool(result.loss.isfinite())
    assert result.terms
    assert all(term.shape == () and bool(term.isfinite()) for term in result.terms.values())
    assert result.noisy_logits.shape == (objective.num_noise, BATCH, CLASSES)


def test_gradient_reaches_every_parameter(objective: Objective) -> None:
    network = small_network()
    compute(objective, network).loss.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        # A convolution's bias in front of batch norm has no effect, so its gradient may vanish.
        assert name == "0.bias" or float(parameter.grad.abs().sum()) > 0, name


def test_the_loss_depends_on_its_draws_alone(objective: Objective) -> None:
    first, again, other = (compute(objective, small_network(), seed=s).loss.item() for s in (3, 3, 4))
    assert first == again
    assert first != other


def test_loss_is_pure(objective: Objective) -> None:
    """The loss draws nothing from the global generator and leaves modes, gradients and requires_grad unchanged."""
    network = small_network().train()
    network[1].eval()
    before = torch.get_rng_state()
    compute(objective, network)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in network] == [True, False, True, True, True, True]
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert all(parameter.grad is None for parameter in network.parameters())


class OnMeta(nn.Module):
    """Logits without data: code that reads a value fails."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CLASSES, 50, device="meta"))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight.T


def test_loss_never_waits_for_the_device(objective: Objective) -> None:
    """Tensors on the meta device hold no values: an `.item()`, an `if tensor` or a data-dependent shape raises."""
    network = OnMeta()
    result = compute(objective, network, device="meta")
    result.loss.backward()
    assert result.noisy_logits.shape == (objective.num_noise, BATCH, CLASSES)
    assert network.weight.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_loss_does_not_synchronise_on_a_gpu(objective: Objective) -> None:
    network = small_network().cuda()
    compute(objective, network, device="cuda")
    images = torch.rand(BATCH, *SHAPE, device="cuda")
    labels = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
    noise = torch.randn(objective.num_noise, BATCH, *SHAPE, device="cuda")
    one = torch.ones((), device="cuda")
    progress = Progress(SIGMA, one, one, torch.rand(BATCH, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        objective.loss(network, images, labels, noise, progress).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
