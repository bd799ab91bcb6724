"""All losses with a DistributedDataParallel model in two processes."""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import smoothcert as sc
from smoothcert.distributed import team
from smoothcert.objectives import OBJECTIVES

BATCH, CLASSES, SHAPE, SIGMA = 6, 4, (2, 5, 5), 0.5


def teacher(inputs: Tensor) -> Tensor:
    """A classifier of any inputs: their first pixels are its logits."""
    return inputs.flatten(1)[:, :CLASSES]


class WithTeacher(sc.losses.Distillation):
    def forward(self, model: Any, inputs: Tensor, labels: Tensor, **more: Any) -> Tensor:
        return super().forward(model, inputs, labels, **{"teacher": teacher, **more})


MODULES: dict[str, Any] = {name: getattr(sc.losses, kind.__name__, None) for name, kind in OBJECTIVES.items()}
MODULES["distillation"] = WithTeacher
OTHER_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("smoothadv", {"num_noise": 2, "adversary": {"attack": "ddn", "steps": 3, "epsilon": 0.5}}),
    ("consistency", {"form": "xent", "weight": 1.0}),
    ("consistency", {"num_noise": 3, "adversary": {"steps": 2}}),
    ("smoothmix", {"num_noise": 2, "steps": 2, "one_step": True, "one_step_radius": 0.4, "max_norm": 0.9}),
]


def network() -> nn.Module:
    """Convolution, batch norm, linear: modes matter to it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES))


def batch(num_noise: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images, uniform = torch.rand(BATCH, *SHAPE, generator=generator), torch.rand(BATCH, generator=generator)
    noise = torch.randn(num_noise, BATCH, *SHAPE, generator=generator) * SIGMA
    return images, torch.randint(CLASSES, (BATCH,), generator=generator), noise, uniform


def compare_with_one_process() -> None:
    """Compare the gradients of two processes, each with half of a batch, with those of the whole batch."""
    with team() as group:  # keeps the group after a failed assertion, whose traceback holds DistributedDataParallel
        _compare_losses(group.rank)


def _compare_losses(rank: int) -> None:
    """In a function of its own: a DistributedDataParallel that is the last to hold its process group can deadlock."""
    share = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    for name, fields in [*((name, {}) for name in MODULES), OTHER_SETTINGS[-1]]:
        criterion = MODULES[name](sigma=SIGMA, **fields)
        x, y, noise, uniform = batch(criterion.objective.num_noise)
        # MACER enlarges rounding errors: in float32 its gradients differ by 1e-4 and more on some processors.
        x, noise = x.double(), noise.double()
        for unused in (False, True):
            torch.manual_seed(0)
            alone = nn.Sequential(nn.Flatten(), nn.Linear(50, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
            model = DistributedDataParallel(alone, find_unused_parameters=unused)
            criterion(model, x[share], y[share], noise=noise[:, share], uniform=uniform[share]).backward()
            found = [parameter.grad for parameter in alone.parameters()]
            alone.zero_grad()
            criterion(alone, x, y, noise=noise, uniform=uniform).backward()
            for gradient, parameter in zip(found, alone.parameters(), strict=True):
                assert torch.allclose(gradient, parameter.grad, rtol=1e-9, atol=1e-12), (name, unused)
        model = DistributedDataParallel(network().double())  # has batch norm, so that the shares matter
        passes: list[str] = []
        model.register_forward_pre_hook(lambda *_, name=name, passes=passes: passes.append(name))
        for step in range(2):
            criterion(model, x[share], y[share]).backward()
            assert len(passes) == step + 1, f"{name}: one synchronized pass per step"
            own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            first = own.clone()
            distributed.broadcast(first, 0)
            assert torch.equal(own, first), name
            assert float(own.abs().sum()) > 0, name
            model.zero_grad()
