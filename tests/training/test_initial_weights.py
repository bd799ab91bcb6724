"""Training from existing weights: files of several kinds, provenance, resume, and files that do not fit."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import digest, tiny_recipe
from torch import Tensor, nn

import smoothcert as sc
from smoothcert.data import ImageData
from smoothcert.errors import RequestError, WorkError
from smoothcert.models import Normalize
from smoothcert.training.checkpoint import tensors_digest
from smoothcert.training.initial_weights import load_initial_weights, start_notes
from smoothcert.training.loop import train
from smoothcert.training.resume import load_state, refuse_other_origin
from smoothcert.training.status import TrainingStatus

STILL = {"epochs": 1, "learning_rate": 1e-30, "learning_rate_drops": ()}
"""A rate at which float32 weights do not move: the model that is saved has the initial weights."""


@pytest.mark.parametrize("kind", ["run", "safetensors", "checkpoint", "prefixed"])
def test_training_starts_from_the_weights_of_the_file(
    kind: str, trained_run: Path, tmp_path: Path, tiny_data: ImageData
) -> None:
    weights = sc.load(trained_run).model.state_dict()
    path = tmp_path / {"safetensors": "a.safetensors"}.get(kind, "a.pth")
    if kind == "run":
        path = trained_run
    elif kind == "safetensors":
        save_file(dict(weights), path)
    elif kind == "checkpoint":
        torch.save({"state_dict": weights, "epoch": 3}, path)
    else:
        torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, path)
    run = sc.train(tiny_recipe(**STILL), tiny_data, tmp_path / "run", init=str(path), device="cpu")
    assert tensors_digest(run.model.state_dict()) == tensors_digest(weights)
    file = path / "model.safetensors" if kind == "run" else path
    assert run.provenance["init"] == {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_a_bare_network_fit_after_the_input_layer(tmp_path: Path, bias: bool) -> None:
    torch.manual_seed(0)
    bare, normalized = nn.Linear(3, 2, bias), nn.Sequential(nn.Identity(), nn.Linear(3, 2, bias))
    normalized[0].register_buffer("mean", torch.zeros(3))
    save_file(bare.state_dict(), tmp_path / "bare.safetensors")
    load_initial_weights(normalized, tmp_path / "bare.safetensors", "linear")
    assert torch.equal(normalized[1].weight, bare.weight)


def test_weights_for_other_labels_are_reported(trained_run: Path, tmp_path: Path, tiny_data: ImageData) -> None:
    """Fine-tuning would begin with the wrong classes, which the loss shows to nobody."""
    moved = replace(tiny_data, labels=(tiny_data.labels + 1) % 10)
    with pytest.warns(UserWarning, match=r"start.* from are at chance \(\d+% of \d+ training images\)"):
        sc.train(tiny_recipe(**STILL), moved, tmp_path / "moved", init=trained_run, device="cpu")


def test_the_share_at_chance_is_that_of_images_spread_over_the_data(trained_run: Path, tiny_data: ImageData) -> None:
    model, shuffled = sc.load(trained_run).model, replace(tiny_data, labels=tiny_data.labels.roll(1))
    images, labels = shuffled.batch(torch.tensor([index * 256 // 100 for index in range(100)]))
    right = int((model(images).argmax(1) == labels).sum())
    assert right > 0
    (note,) = start_notes(model, shuffled, trained=True)
    assert f"are at chance ({right}% of 100 training images)" in note
    assert start_notes(model, tiny_data, trained=True) == []


def test_network_that_returns_probabilities_is_reported(tmp_path: Path, tiny_data: ImageData) -> None:
    """Under a softmax or sigmoid, the losses are those of another model; log-probabilities are logits like others."""
    for last in (nn.Softmax(1), nn.Sigmoid(), nn.LogSoftmax(1)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), last)
        notes = list[str]()
        sc.train(tiny_recipe(**STILL), tiny_data, tmp_path / type(last).__name__, model=model, on_note=notes.append)
        expected = ["the network returns probabilities, but losses expect logits; omit its last softmax or sigmoid"]
        assert notes == ([] if isinstance(last, nn.LogSoftmax) else expected)


def test_small_logits_of_random_weights_are_not_taken_for_probabilities(tiny_data: ImageData) -> None:
    """The outputs of a new network are close to its last biases, which are in [0, 1] for one in eight of 3 classes."""
    model, two = nn.Sequential(nn.Flatten(), nn.Linear(784, 3)), replace(tiny_data, labels=tiny_data.labels % 3)
    nn.init.normal_(model[1].weight, std=1e-4)
    model[1].bias.data = torch.tensor([0.4, 0.5, 0.6])
    assert start_notes(model, two, trained=False) == []
    (note,) = start_notes(nn.Sequential(model, nn.Softmax(1)), two, trained=False)
    assert "returns probabilities" in note


class Behind(nn.Module):
    """A network behind an input layer, as attributes of a class."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.norm = Normalize((mean,), (0.5,))
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

    def forward(self, images: Tensor) -> Tensor:
        return self.net(self.norm(images))  # type: ignore[no-any-return]


def stacked(mean: float) -> nn.Module:
    parts = Behind(mean)
    return nn.Sequential(parts.norm, parts.net)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_mean_and_std_are_loaded_with_the_network(prefix: str, tmp_path: Path) -> None:
    """The function that builds the network may leave it to the file to set them, with and without a prefix."""
    torch.manual_seed(0)
    (source, loaded), path, images = (stacked(mean) for mean in (0.3, 0.0)), tmp_path / "a.pt", torch.rand(5, 1, 2, 2)
    torch.save({prefix + name: tensor for name, tensor in source.state_dict().items()}, path)
    load_initial_weights(loaded, path, "mine")
    assert torch.equal(loaded(images), source(images))


def test_weights_fit_behind_an_input_layer_of_any_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, path, images = Behind(0.3), tmp_path / "a.pt", torch.rand(5, 1, 2, 2)
    torch.save(source.net.state_dict(), path)
    loaded = Behind(0.3)
    load_initial_weights(loaded, path, "mine")
    assert torch.equal(loaded(images), source(images))


def test_weights_fit_a_network_that_is_wrapped_behind_its_input_layer(tmp_path: Path) -> None:
    source, wrapped = (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(2))
    save_file(source.state_dict(), tmp_path / "a.safetensors")
    loaded = nn.Sequential(Normalize((0.3,), (0.5,)), nn.Sequential(wrapped))
    load_initial_weights(loaded, tmp_path / "a.safetensors", "mine")
    assert all(torch.equal(a, b) for a, b in zip(wrapped.parameters(), source.parameters(), strict=True))


def test_an_input_layer_is_not_left_out(tmp_path: Path) -> None:
    """A file with mean and std does not fit a network without them, or one with others."""
    path = tmp_path / "a.pt"
    torch.save(stacked(0.3).state_dict(), path)
    with pytest.raises(RequestError, match=r"2 unexpected \(0.mean, 0.std\)"):
        load_initial_weights(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), path, "mine")
    with pytest.raises(RequestError, match=r"1 unexpected \(0.mean\)"):
        load_initial_weights(Behind(0.0), path, "mine")
    load_initial_weights(Behind(0.3), path, "mine")


def test_killed_before_the_first_epoch_resumes_from_the_initial_weights(
    trained_run: Path, tmp_path: Path, tiny_data: ImageData
) -> None:
    recipe = tiny_recipe(epochs=1)

    def interrupt(status: TrainingStatus) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tiny_data, tmp_path / "cut", init=trained_run, device="cpu", on_progress=interrupt)
    state = load_state(tmp_path / "cut")
    assert state is not None
    assert (state.epoch, tensors_digest(state.model)) == (0, digest(trained_run))
    resumed = sc.train(recipe, tiny_data, tmp_path / "cut", device="cpu", resume=True)
    whole = sc.train(recipe, tiny_data, tmp_path / "whole", init=trained_run, device="cpu")
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    assert resumed.provenance["init"] == whole.provenance["init"]
    other = shutil.copytree(tmp_path / "whole", tmp_path / "other")
    with pytest.raises(RequestError, match=r"started from model\.safetensors, --init gives other weights"):
        train(recipe, tiny_data, tmp_path / "cut", init=other, device="cpu", resume=True)


def fewer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(weights.items())[1:])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            fewer,
            RequestError,
            r"weights of tiny, got 1 missing \(conv1\.weight\); give weights of the same network, or let --model name",
        ),
        (lambda w: {**w, "more": torch.zeros(1)}, RequestError, r"1 unexpected \(more\)"),
        (lambda w: {**w, "fc2.bias": torch.zeros(7)}, RequestError, r"1 of other shape \(fc2\.bias: \[7\] instead of"),
        (lambda w: {**w, "fc2.bias": torch.full((10,), torch.nan)}, WorkError, "NaN or infinite ones in fc2.bias"),
        (lambda w: b"damaged", WorkError, "damaged or not a safetensors file"),
        (lambda w: None, RequestError, "no such file; give a run folder"),
    ],
)
def test_unusable_weights_are_refused_in_one_line(
    change: Any, kind: type[Exception], message: str, trained_run: Path, tmp_path: Path, tiny_data: ImageData
) -> None:
    content, file = change(sc.load(trained_run).model.state_dict()), tmp_path / "a.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        save_file({name: tensor.clone() for name, tensor in content.items()}, file)
    with pytest.raises(kind, match=message) as caught:
        train(tiny_recipe(), tiny_data, tmp_path / "run", init=file, device="cpu")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_weights_for_a_network_without_any_are_refused(tmp_path: Path) -> None:
    save_file(nn.Linear(4, 2).state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(RequestError, match=r"expected the weights of flat, got 2 unexpected \("):
        load_initial_weights(nn.Flatten(), tmp_path / "a.safetensors", "flat")


def test_a_missing_run_folder_is_named_with_all_that_may_be_given(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"absent: no such file; give a run folder, a \.safetensors file"):
        load_initial_weights(nn.Linear(4, 2), tmp_path / "absent", "mine")


@pytest.mark.parametrize(
    ("outputs", "advice"),
    [
        (2, "; if the data lack some of 3 classes, name all of them with --classes FILE; otherwise give weights"),
        (4, "; if the data have 3 classes that count from 1, number them from 0; otherwise give weights"),
    ],
)
def test_weights_for_another_number_of_classes_are_refused_with_advice(
    outputs: int, advice: str, tmp_path: Path
) -> None:
    """A network is built for the classes of the data, which may lack some or count from 1."""
    save_file(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(RequestError, match=advice):
        load_initial_weights(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, outputs)), tmp_path / "a.safetensors", "mine")
    other = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, outputs))
    with pytest.raises(RequestError, match=r"instead of \[6\]\); give weights of the same network"):
        load_initial_weights(other, tmp_path / "a.safetensors", "mine")


def test_a_key_of_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(RequestError, match=r"expected no key for a \.safetensors file, got ema; leave :ema out"):
        load_initial_weights(nn.Linear(4, 2), Path(f"{tmp_path / 'a.safetensors'}:ema"), "mine")


def test_averaged_weights_in_a_checkpoint_are_reported_and_can_be_chosen(tmp_path: Path) -> None:
    """As timm saves them (state_dict_ema) and as torchvision does (model_ema, of an AveragedModel)."""
    plain, averaged, loaded = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)
    average = torch.optim.swa_utils.AveragedModel(averaged).state_dict()
    assert "n_averaged" in average
    for key, other, weights in (
        ("state_dict", "state_dict_ema", averaged.state_dict()),
        ("model", "model_ema", average),
    ):
        path = tmp_path / f"{other}.pth"
        torch.save({key: plain.state_dict(), other: weights, "means": {"x": torch.ones(2)}}, path)
        notes: list[str] = []
        source = load_initial_weights(loaded, path, "mine", notes.append)
        assert notes == [f"weights: read from {key}; {path.name}:{other} reads {other} instead"]
        assert torch.equal(loaded.weight, plain.weight)
        chosen = load_initial_weights(loaded, Path(f"{path}:{other}"), "mine", notes.append)
        assert len(notes) == 1, "who chose the weights knows which they are"
        assert torch.equal(loaded.weight, averaged.weight)
        assert chosen == {**source, "key": other}
    with pytest.raises(RequestError, match="expected weights under ema, got model, model_ema, means; choose one"):
        load_initial_weights(loaded, Path(f"{path}:ema"), "mine")
    torch.save({"epoch": 3, "params": plain.state_dict()}, tmp_path / "params.pth")
    with pytest.raises(
        RequestError, match=r"keys epoch, params; give the key of the weights, such as params\.pth:params"
    ):
        load_initial_weights(loaded, tmp_path / "params.pth", "mine")
    for content, message in (
        (plain.state_dict(), r"got a file that holds one network; give bare\.pth without :ema$"),
        ({"epoch": 3}, "expected weights under ema, got none; give another file$"),
    ):
        torch.save(content, tmp_path / "bare.pth")
        with pytest.raises(RequestError, match=message):
            load_initial_weights(loaded, tmp_path / "bare.pth:ema", "mine")


def test_a_run_that_started_from_other_weights_of_the_same_file_is_not_continued(tmp_path: Path) -> None:
    recorded = {"file": "a.pth", "sha256": "1", "key": "state_dict_ema"}
    for wanted in ({"init": recorded}, {}):
        refuse_other_origin(tmp_path, {"init": recorded}, wanted, finished=False)
    with pytest.raises(RequestError, match=r"started from a\.pth, --init gives other weights"):
        refuse_other_origin(tmp_path, {"init": recorded}, {"init": {"file": "a.pth", "sha256": "1"}}, finished=False)
