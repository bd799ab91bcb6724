"""Networks: shapes, parameter counts, normalisation inside the model."""

import pytest
import torch

from smoothcert.errors import RequestError
from smoothcert.models import MODELS, build_model

EXPECTED_PARAMETERS = {"lenet": 20 * 25 + 20 + 50 * 500 + 50 + 800 * 500 + 500 + 500 * 10 + 10}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count(name: str) -> None:
    assert sum(p.numel() for p in MODELS[name].build(10).parameters()) == EXPECTED_PARAMETERS[name]


def test_lenet_gives_logits() -> None:
    assert build_model("lenet", (1, 28, 28), 10)(torch.rand(3, 1, 28, 28)).shape == (3, 10)


def test_normalisation_is_the_first_layer_and_is_saved() -> None:
    torch.manual_seed(0)
    model = build_model("lenet", (1, 28, 28), 10, mean=(0.25,), std=(0.5,))
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(model(images), model[1]((images - 0.25) / 0.5))
    assert float(model.state_dict()["0.mean"]) == 0.25
    assert float(model.state_dict()["0.std"]) == 0.5


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(RequestError, match="did you mean lenet"):
        build_model("lenett", (1, 28, 28), 10)
    with pytest.raises(RequestError, match=r"lenet takes images of shape \(1, 28, 28\), the data has \(3, 32, 32\)"):
        build_model("lenet", (3, 32, 32), 10)
