"""`smoothcert.losses`: the same numbers as the objectives, for every registered method, in other people's loops."""

import copy
import doctest
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run_together
from tiny import tiny_recipe
from torch import Tensor, nn
from torch.optim import SGD
from two_processes import (
    BATCH,
    CLASSES,
    MODULES,
    OTHER_SETTINGS,
    SHAPE,
    SIGMA,
    batch,
    compare_with_one_process,
    network,
    teacher,
)

import smoothcert as sc
from smoothcert.noise import NOISES
from smoothcert.objectives import OBJECTIVES, Objective, Progress
from smoothcert.training.loop import fill_progress
from smoothcert.training.meter import Meter
from smoothcert.training.step import StepLoss, training_step

every_method = pytest.mark.parametrize("name", OBJECTIVES)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(list(model.parameters()))
    return found


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_method
def test_every_method_has_a_module_and_a_function(name: str) -> None:
    absent = {name, OBJECTIVES[name].__name__}.difference(sc.losses.__all__)
    assert not absent, f"add {' and '.join(sorted(absent))} to objectives/losses.py"


def test_the_examples_of_the_docstring_run() -> None:
    result = doctest.testmod(sc.losses)
    assert (result.failed, result.attempted) == (0, 7)


@every_method
def test_modules_have_the_fields_and_defaults_of_their_objective(name: str) -> None:
    settings = MODULES[name].__init__.__annotations__["settings"].__args__[0].__annotations__
    assert set(settings) - {"sigma", "generator"} == set(OBJECTIVES[name].model_fields)
    assert MODULES[name](sigma=SIGMA).objective == OBJECTIVES[name]()


def by_function(name: str, model: nn.Module, fields: dict[str, Any]) -> Tensor:
    """Compute the loss by the function of the method, from logits where it takes them."""
    function, objective = getattr(sc.losses, name), OBJECTIVES[name].model_validate(fields)
    images, labels, noise, uniform = batch(objective.num_noise)
    if name in ("smoothadv", "smoothmix"):
        more = {"uniform": uniform} if name == "smoothmix" else {}
        return function(model, images, labels, sigma=SIGMA, epoch=3, noise=noise, **more, **fields)
    if name == "catrs":
        return function(model, images, labels, sigma=SIGMA, noise=noise, uniform=uniform, **fields)
    clean = [model(images)] if name == "stability" else []
    noisy = model((images + noise).flatten(0, 1)).view(*noise.shape[:2], -1)
    if name == "distillation":
        return function(noisy, teacher((images + noise).flatten(0, 1)).view_as(noisy))
    return function(*clean, noisy, labels, **({"sigma": SIGMA} if name == "macer" else {}), **fields)


@pytest.mark.parametrize(("name", "fields"), [*((name, {}) for name in OBJECTIVES), *OTHER_SETTINGS])
def test_modules_and_functions_compute_what_the_objectives_compute(name: str, fields: dict[str, Any]) -> None:
    """Loss, terms, gradients and batch statistics are the same bit for bit."""
    objective = OBJECTIVES[name].model_validate(fields)
    images, labels, noise, uniform = batch(objective.num_noise)
    progress = Progress(SIGMA, torch.tensor(0.4), torch.tensor(1.0), uniform, teacher=teacher)
    expected, model = network(), network()
    terms = objective.loss(expected, images, labels, noise, progress)
    terms.loss.backward()
    criterion = MODULES[name](sigma=SIGMA, **fields)
    criterion.epoch = 3
    results = [(model, criterion(model, images, labels.int(), noise=noise, uniform=uniform, teacher=teacher))]
    assert {key: value.item() for key, value in criterion.terms.items()} == {
        key: value.item() for key, value in terms.terms.items()
    }
    assert not any(value.requires_grad for value in criterion.terms.values())
    if name != "consistency" or "adversary" not in fields:  # the function of logits has no attack
        model = network()
        results.append((model, by_function(name, model, fields)))
    for model, loss in results:
        loss.backward()
        assert torch.equal(loss, terms.loss)
        assert_equal(gradients(model), gradients(expected))
        assert_equal(list(model.buffers()), list(expected.buffers()))


@every_method
def test_noise_is_drawn_as_in_the_training_loop(name: str) -> None:
    """A generator with the same seed gives the same update as one step of `smoothcert train`."""
    objective = OBJECTIVES[name]()
    images, labels, *_ = batch(1)
    expected, model = network(), network()
    run: Any = SimpleNamespace(
        recipe=SimpleNamespace(objective=objective, images_per_step=BATCH),
        module=StepLoss(expected, objective),
        optimizer=SGD(expected.parameters(), 0.1),
        progress=Progress(SIGMA, torch.tensor(1.0), torch.tensor(1.0), torch.empty(0), teacher=teacher),
        meter=Meter(torch.device("cpu"), 1),
        noise=NOISES["gaussian"](SIGMA),
        autocast=nullcontext,
        share=slice(None),
        generator=torch.Generator().manual_seed(5),
    )
    training_step(run, images, labels)
    criterion = MODULES[name](sigma=SIGMA, generator=torch.Generator().manual_seed(5))
    before = torch.get_rng_state()
    criterion(model, images, labels).backward()
    assert torch.equal(torch.get_rng_state(), before)
    SGD(model.parameters(), 0.1).step()
    assert_equal(list(model.parameters()), list(expected.parameters()))


def test_a_module_prints_as_the_call_that_makes_it() -> None:
    criterion = sc.losses.Stability(sigma=0.5, num_noise=1, weight=3.0)
    assert repr(criterion) == "Stability(sigma=0.5, num_noise=1, weight=3.0)"


def test_without_a_generator_each_call_draws_other_noise() -> None:
    images, labels, *_ = batch(1)
    model, criterion = network(), sc.losses.Gaussian(sigma=SIGMA)
    torch.manual_seed(1)
    first, second = criterion(model, images, labels).item(), criterion(model, images, labels).item()
    torch.manual_seed(1)
    assert first == criterion(model, images, labels).item()
    assert first != second


@pytest.mark.parametrize("epoch", [0, 4, 5, 9, 30])
def test_the_epoch_sets_what_the_training_loop_sets(epoch: int) -> None:
    recorded: list[Progress] = []

    class Recorder(Objective):
        def loss(self, classifier: Any, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress) -> Any:
            recorded.append(progress)
            return OBJECTIVES["gaussian"]().loss(classifier, images, labels, noise, progress)

    criterion = sc.losses.Loss(Recorder(), sigma=SIGMA)
    criterion.epoch, criterion.first_drop = epoch, 5
    criterion(network(), *batch(1)[:2])
    expected = Progress(SIGMA, torch.zeros(()), torch.zeros(()), torch.empty(0))
    fill_progress(expected, tiny_recipe(learning_rate_drops=(5,), epochs=40), epoch)
    assert recorded[0][:3] == expected[:3]


def test_deferred_macer_waits_for_the_first_drop() -> None:
    images, _, noise, _ = batch(16)
    plain, deferred = sc.losses.Macer(sigma=SIGMA), sc.losses.Macer(sigma=SIGMA, deferred=True, first_drop=2)
    model = network()
    labels = (16 * model((images + noise).flatten(0, 1))).softmax(-1).view(16, BATCH, -1).mean(0).argmax(1)
    for epoch, same in ((0, False), (1, False), (2, True), (None, True)):
        deferred.epoch = epoch
        losses = [criterion(model, images, labels, noise=noise).item() for criterion in (plain, deferred)]
        assert (losses[0] == losses[1]) == same
    assert deferred.terms["robust"] > 0


@every_method
def test_modes_gradients_and_requires_grad_stay_as_they_are(name: str) -> None:
    model = network()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    images, labels, *_ = batch(1)
    images.requires_grad_(True)
    loss = MODULES[name](sigma=SIGMA)(model, images, labels)
    assert [module.training for module in model] == [True, False, True, True, True]
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, *[True] * 5]
    assert all(bool((parameter.grad == 7).all()) for parameter in model.parameters())
    assert images.grad is None
    loss.backward()
    assert bool((model[0].weight.grad == 7).all())
    assert images.grad is not None


class Wrapped(nn.Module):
    """A model whose output is an object with `.logits`, or a mapping with "logits"."""

    def __init__(self, model: nn.Module, kind: type) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, inputs: Tensor) -> Any:
        return self.kind(logits=self.model(inputs), hidden=None)


@pytest.mark.parametrize("kind", [SimpleNamespace, dict])
@every_method
def test_models_may_return_their_logits_inside_an_object(name: str, kind: type) -> None:
    images, labels, noise, uniform = batch(OBJECTIVES[name]().num_noise)
    plain, wrapped = network(), Wrapped(network(), kind)
    losses = [MODULES[name](sigma=SIGMA)(m, images, labels, noise=noise, uniform=uniform) for m in (plain, wrapped)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert_equal(gradients(plain), gradients(wrapped))


@every_method
def test_autocast_and_gradient_scaling(name: str) -> None:
    """Scaled and unscaled gradients equal those without a scale; the loss is float32, near that of full precision.

    So is the loss of a model in half precision.
    """
    images, labels, noise, uniform = batch(OBJECTIVES[name]().num_noise)
    results = []
    for scale in (2.0**10, 1.0):
        model, criterion = network(), MODULES[name](sigma=SIGMA)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = SGD(model.parameters(), 0.1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model, images, labels, noise=noise, uniform=uniform)
        assert loss.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        results.append(gradients(model))
        scaler.step(optimizer)
    assert_equal(*results)
    criterion = MODULES[name](sigma=SIGMA)
    full = criterion(network(), images, labels, noise=noise, uniform=uniform)
    half = criterion(network().half(), images.half(), labels, noise=noise.half(), uniform=uniform)
    assert loss.item() == pytest.approx(full.item(), rel=0.1)
    assert half.item() == pytest.approx(full.item(), rel=0.02)


def test_a_noise_attack_waits_for_its_first_epoch() -> None:
    torch.manual_seed(0)
    model, inputs, labels, noise = nn.Linear(4, 3), torch.rand(8, 4), torch.arange(8) % 3, 0.1 * torch.randn(1, 8, 4)
    plain = sc.losses.Gaussian(sigma=0.5)(model, inputs, labels, noise=noise)
    late = sc.losses.Gaussian(sigma=0.5, noise_attack={"first_epoch": 3})
    losses = []
    for epoch in (2, 3, None):
        late.epoch = epoch
        losses.append(float(late(model, inputs, labels, noise=noise)))
    assert losses[0] == float(plain)
    assert losses[1] == losses[2] > losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_noise_has_the_type_of_the_inputs(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 3).to(dtype)  # which refuses inputs of another type
    loss = sc.losses.Gaussian(sigma=0.5)(model, torch.rand(8, 4, dtype=dtype), torch.arange(8) % 3)
    assert loss.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_draw_of_catrs_stays_below_one_in_half_precision(dtype: torch.dtype) -> None:
    """A model that is always wrong keeps one noise of each image, never all: there is no term of confident images."""
    images, labels, noise, _ = batch(4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), CLASSES)).to(dtype)
    wrong = nn.functional.one_hot((labels + 1) % CLASSES, CLASSES).repeat(4, 1).to(dtype) * 100
    criterion = sc.losses.CatRs(sigma=SIGMA)
    almost_one = torch.full((BATCH,), 1 - 2.0**-14)
    criterion(lambda x: model(x) + wrong, images.to(dtype), labels, noise=noise.to(dtype), uniform=almost_one)
    assert criterion.terms["high"] == 0 < criterion.terms["low"]


@every_method
def test_inputs_of_any_shape_and_models_in_eval_mode(name: str) -> None:
    """Rows of numbers through a plain callable, and a module in eval mode, whose batch statistics stay."""
    weight = torch.randn(5, CLASSES, generator=torch.Generator().manual_seed(0), requires_grad=True)
    MODULES[name](sigma=SIGMA)(lambda rows: rows @ weight, torch.rand(BATCH, 5), torch.arange(BATCH) % 4).backward()
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all())
    model = network().eval()
    before = copy.deepcopy(list(model.buffers()))
    MODULES[name](sigma=SIGMA)(model, *batch(1)[:2]).backward()
    assert_equal(list(model.buffers()), before)
    assert len(gradients(model)) == 6


@every_method
def test_modules_never_wait_for_the_device(name: str) -> None:
    """Tensors on the meta device hold no values: code that reads one raises. The first inputs are checked elsewhere."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, CLASSES, device="meta"))
    images, labels, *_ = (tensor.to("meta") for tensor in batch(1))
    MODULES[name](sigma=SIGMA)(model, images, labels).backward()
    assert len(gradients(model)) == 2


@pytest.mark.parametrize("name", ["smoothadv", "smoothmix", "catrs"])
def test_attacks_in_inference_mode_are_refused_in_one_line(name: str) -> None:
    criterion = MODULES[name](sigma=SIGMA)
    with torch.no_grad():
        assert criterion(network(), *batch(1)[:2]).isfinite()
    with torch.inference_mode(), pytest.raises(sc.RequestError, match=r"inference_mode\(\).*; use torch\.no_grad\(\)"):
        criterion(network(), *batch(1)[:2])


IMAGES, LABELS = torch.rand(BATCH, *SHAPE), torch.zeros(BATCH, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": (IMAGES * 255).byte()}, "inputs: expected floating-point numbers .* got uint8 .* x.float"),
        ({"inputs": IMAGES.numpy()}, "inputs: expected a tensor, got ndarray; use torch.as_tensor"),
        ({"inputs": IMAGES[:0], "labels": LABELS[:0]}, r"inputs: .* got float32 \[0, 2, 5, 5\]"),
        ({"labels": None}, "labels: expected a tensor, got NoneType"),
        ({"labels": LABELS.float()}, r"labels: .* got float32 \[6\]"),
        ({"labels": nn.functional.one_hot(LABELS, CLASSES)}, r"labels: .* got int64 \[6, 4\] on cpu"),
        ({"labels": LABELS[:3]}, r"labels: .* got int64 \[3\]"),
        ({"labels": LABELS.to("meta")}, r"labels: .* on cpu, got int64 \[6\] on meta"),
        ({"labels": LABELS - 100}, "labels: expected classes from 0 on, got -100 to -100; leave such images out"),
        (
            {"noise": torch.zeros(1, BATCH, *SHAPE)},
            r"noise: expected the shape \[2, 6, 2, 5, 5\], got \[1, 6, 2, 5, 5\]",
        ),
        ({"uniform": torch.zeros(2)}, r"uniform: expected the shape \[6\], got \[2\]"),
        ({"uniform": [0.5] * BATCH}, r"uniform: expected the shape \[6\], got list"),
        ({"targets": [[1, 0, 0, 0]] * BATCH}, r"targets: expected votes \[6, classes\], got list"),
        ({"targets": torch.zeros(6)}, r"targets: expected votes \[6, classes\], got float32 \[6\] on cpu"),
        ({"model": torch.zeros(6, 4)}, r"model: .* got float32 \[6, 4\] on cpu; pass the model, not its output"),
        (
            {"model": lambda x: x.flatten(1).argmax(1)},
            r"expected logits of shape \[12, classes\], got \[12\]; that is one class",
        ),
        ({"model": lambda x: (x.flatten(1), None)}, "model: expected a tensor of logits, .* got tuple"),
        ({"model": lambda x: {"scores": x.flatten(1)}}, "model: expected a tensor of logits, .* got dict"),
        ({"model": lambda x: x.flatten(1).detach().numpy()}, "model: .* got ndarray"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    given = {"model": network(), "inputs": IMAGES, "labels": LABELS} | arguments
    for criterion in (sc.losses.Consistency(sigma=SIGMA), sc.losses.SmoothMix(sigma=SIGMA, num_noise=2)):
        with pytest.raises(sc.RequestError, match=message) as caught:
            criterion(**given)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sc.losses.Gaussian(), "sigma: expected a number > 0, got None"),
        (lambda: sc.losses.Gaussian(sigma=-1), "sigma: expected a number > 0, got -1"),
        (lambda: sc.losses.macer(torch.zeros(2, 6, 4), LABELS, sigma=-1), "sigma: expected a number > 0, got -1"),
        (lambda: sc.losses.Consistency(sigma=1, weigth=3), "weigth: unknown key; did you mean weight"),
        (lambda: sc.losses.Consistency(sigma=1, lambda_=3), "lambda_: unknown key; did you mean weight"),
        (lambda: sc.losses.Consistency(sigma=1, lam=5), "lam: unknown key; did you mean weight"),
        (lambda: sc.losses.Consistency(sigma=1, weight=-3), "weight: expected at least 0, got -3"),
        (lambda: sc.losses.Consistency(sigma=1, form="mse", num_noise=3), "expected 2 for form mse, got 3"),
        (lambda: sc.losses.SmoothAdv(sigma=1, adversary={"steps": 0}), r"adversary\.steps: expected .* got 0"),
        (lambda: sc.losses.Macer(sigma=1, deferred=True), "first_drop: expected the epoch .* got None"),
        (lambda: sc.losses.Macer(sigma=1, first_drop=3), "first_drop: expected .* None without, got 3"),
        (lambda: sc.losses.consistency(torch.zeros(1, 6, 4), LABELS), "num_noise: expected at least 2, got 1"),
        (lambda: sc.losses.consistency(torch.zeros(12, 4), LABELS), r"noisy_logits: .* got float32 \[12, 4\]"),
        (
            lambda: sc.losses.distillation(torch.zeros(6, 4), torch.zeros(6, 4)),
            r"^noisy_logits: expected floating-point numbers \[num_noise, batch, classes\], got float32 \[6, 4\]",
        ),
        (
            lambda: sc.losses.distillation(torch.zeros(2, 6, 4), None),
            "^teacher_logits: .* a tensor, got NoneType",
        ),
        (lambda: sc.losses.gaussian(torch.zeros(2, 5, 4), LABELS), r"labels: expected integer classes \[5\]"),
        (lambda: sc.losses.gaussian(torch.zeros(2, 6, 4), LABELS - 1), "labels: expected classes from 0 on, got -1 to"),
        (lambda: sc.losses.gaussian(torch.zeros(2, 6, 4), LABELS + 4), "expected classes from 0 to 3, got 4 to 4"),
        (
            lambda: sc.losses.stability(torch.zeros(6, 3), torch.zeros(1, 6, 4), LABELS),
            r"clean_logits: expected the shape \[6, 4\], got \[6, 3\]",
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(sc.RequestError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_generator_on_another_device_is_refused() -> None:
    criterion = sc.losses.Gaussian(sigma=SIGMA, generator=torch.Generator())
    with pytest.raises(sc.RequestError, match="generator: expected one on meta, where the inputs are, got one on cpu"):
        criterion(network(), IMAGES.to("meta"), LABELS.to("meta"))


def test_errors_of_the_model_stay_as_they_are() -> None:
    """Only an error about the labels is explained: another one is not about them."""

    def model(inputs: Tensor) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        sc.losses.Gaussian(sigma=SIGMA)(model, IMAGES, LABELS)
    with pytest.raises(sc.RequestError, match=r"labels: expected classes from 0 on, one per output .* got 4 to 4"):
        sc.losses.Gaussian(sigma=SIGMA)(network(), IMAGES, LABELS + CLASSES)


def test_two_processes_get_the_gradients_of_one() -> None:
    """DistributedDataParallel over gloo: each process has half a batch, the gradients are those of the whole batch."""
    run_together(compare_with_one_process)


@pytest.mark.parametrize("kind", [sc.losses.Consistency, sc.losses.SmoothMix])
def test_a_compiled_model_is_compiled_once_per_mode_and_gives_the_same_loss(kind: type[sc.losses.Loss]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(50, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    copied, graphs = copy.deepcopy(plain), list[Any]()
    compiled = torch.compile(copied, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    losses = [kind(sigma=0.5, generator=torch.Generator().manual_seed(0)) for _ in range(2)]  # type: ignore[call-arg]
    for epoch in range(3):
        values = []
        for criterion, model in zip(losses, (plain, compiled), strict=True):
            criterion.epoch = epoch
            values.append(criterion(model, IMAGES, LABELS))
        torch.testing.assert_close(values[1], values[0])
        assert copied.training
    assert len(graphs) == (1 if kind is sc.losses.Consistency else 2), "one for the attack in eval mode"


@pytest.mark.parametrize(
    ("given", "shown"), [(OBJECTIVES["gaussian"], "the class Gaussian"), ("gaussian", "'gaussian'")]
)
def test_a_loss_of_no_objective_is_refused_in_one_line(given: Any, shown: str) -> None:
    with pytest.raises(sc.RequestError, match=f"^objective: expected an objective, .*, got {shown}; make an object$"):
        sc.losses.Loss(given, sigma=0.5)


class Bare(Objective):
    def loss(self, *arguments: Any) -> Any:
        return torch.zeros((), requires_grad=True)


def test_an_objective_that_returns_a_tensor_is_explained() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(sc.RequestError, match=r"Bare\.loss\(\) to return LossTerms\(loss, .*\), got Tensor$"):
        sc.losses.Loss(Bare(), sigma=0.5)(model, torch.rand(2, 1, 2, 2), torch.tensor([0, 1]))


def test_a_sigma_in_units_of_bytes_is_warned_of_once_for_images_in_0_1() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    images, labels = torch.rand(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64)
    loss = sc.losses.Gaussian(sigma=64)
    with pytest.warns(UserWarning, match=r"sigma 64 hides images in \[0, 1\] completely; .* give 64/255 = 0.251"):
        loss(model, images, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(model, images, labels)
        sc.losses.Gaussian(sigma=64)(model, 255 * images, labels)
        sc.losses.Gaussian(sigma=0.25)(model, images, labels)
