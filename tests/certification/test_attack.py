"""Attacks on classifiers whose radius is known: they succeed beyond it only, and contradict false certificates."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from smoothcert import ABSTAIN, Cascade, Ensemble, SmoothedClassifier, certify_dataset
from smoothcert.attacks import smoothed_pgd
from smoothcert.certification.attack import (
    Attacker,
    AttackStatus,
    attack_dataset,
    noise_key,
)
from smoothcert.certification.attack_file import (
    HEADER,
    AttackedImage,
    AttacksFile,
    attacks_writer,
    contradiction_p_value,
    empirical_accuracy,
    format_row,
    parse_row,
    read_attacks,
)
from smoothcert.certification.attack_recipe import AttackRecipe, complete_attack_recipe
from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.data import ImageData, mnist
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.records import parse_recipe
from smoothcert.io.results import settings_path
from smoothcert.noise import Gaussian
from smoothcert.smoothing.certificate import Certificate
from smoothcert.smoothing.votes import VoteCounter
from smoothcert.training.checkpoint import load_run

CPU = torch.device("cpu")
SIGMA = 0.25
DISTANCES = (0.2, 0.4, 0.6)
RADII = (0.18, 0.26, 0.36, 0.52, 0.54, 0.78)
"""0.9 and 1.3 times each distance."""
INDICES = list(range(6))


def half_space(images: Tensor) -> Tensor:
    """Class 1 where the mean of 16 pixels exceeds 1/2: the unit normal is 1/4 in each pixel."""
    score = images.flatten(1).sum(1) / 4 - 2
    return torch.stack([-score, score], dim=1)


def constant(images: Tensor) -> Tensor:
    """Class 1 everywhere, though autograd sees the image."""
    zero = 0 * images.flatten(1).sum(1)
    return torch.stack([zero, zero + 1], dim=1)


@pytest.fixture
def data() -> ImageData:
    """Grey images at about the DISTANCES above and below the boundary of the half-space, labelled rightly."""
    greys = torch.tensor([255 * (0.5 + side * d / 4) for side in (1, -1) for d in DISTANCES]).round().to(torch.uint8)
    labels = torch.tensor([1, 1, 1, 0, 0, 0])
    return ImageData(greys.view(-1, 1, 1, 1).expand(-1, 1, 4, 4).clone(), labels, 2, "greys", "test")


def recipe(**changes: object) -> AttackRecipe:
    fields = {"sigma": SIGMA, "radii": RADII, "steps": 8, "num_noise": 8, "gradient_batch_size": 32, "seed": 7}
    return AttackRecipe.model_validate(fields | changes)


def attack(
    data: ImageData,
    path: Path,
    indices: list[int] = INDICES,
    *,
    model: Callable[[Tensor], Tensor] = half_space,
    certificates: CertificatesFile | None = None,
    on_progress: Callable[[AttackStatus], None] = lambda status: None,
    **changes: object,
) -> AttacksFile:
    return attack_dataset(
        model,
        data,
        indices,
        recipe(**changes),
        path,
        CPU,
        certificates=certificates,
        on_progress=on_progress,
    )


def certified(data: ImageData, scale: float = 1.0, **settings: object) -> CertificatesFile:
    """Certificates of the half-space, radii times `scale`: false for a scale well above 1."""
    images, labels = data.batch(torch.arange(len(data)))
    found = SmoothedClassifier(half_space, sigma=SIGMA, num_classes=2).certify(images, n=5000, seed=3)
    rows = [
        CertifiedImage(i, label, replace(c, radius=scale * c.radius), 0.0)
        for i, (label, c) in enumerate(zip(labels.tolist(), found, strict=True))
    ]
    about = {"sigma": SIGMA, "alpha": 0.001, "dataset": data.name, "split": data.split, "noise": "gaussian"}
    return CertificatesFile(Path("certificates/test.tsv"), tuple(rows), {**about, **settings}, {})


def comparable(file: AttacksFile) -> dict[int, AttackedImage]:
    """Everything but the time."""
    return {row.index: replace(row, seconds=0.0) for row in file.rows}


def true_distances(data: ImageData) -> list[float]:
    images, _ = data.batch(torch.arange(len(data)))
    return [abs(float(s)) for s in images.double().flatten(1).sum(1) / 4 - 2]


def test_half_spaces_are_changed_only_beyond_their_distance(data: ImageData, tmp_path: Path) -> None:
    rows = attack(data, tmp_path / "a.tsv").rows
    assert [row.radius for row in rows] == [0.26, 0.52, 0.78] * 2
    for row, truth in zip(rows, true_distances(data), strict=True):
        assert truth < row.distance <= row.radius
        assert row.distance == pytest.approx(row.radius, rel=1e-5), "the attack goes all the way"
        assert row.prediction == 1 - row.label
        assert row.certified_radius is None
        assert not row.contradiction
    assert [empirical_accuracy(rows, r) for r in (0.0, 0.2, 0.26, 0.6, 0.78)] == [1, 1, 4 / 6, 2 / 6, 0]


def test_true_certificates_are_not_contradicted(data: ImageData, tmp_path: Path) -> None:
    claims = certified(data)
    file = attack(data, tmp_path / "a.tsv", certificates=claims)
    assert [row.certified_radius for row in file.rows] == [row.certificate.radius for row in claims.rows]
    assert all(row.certified_radius is not None and 0 < row.certified_radius <= row.distance for row in file.rows)
    assert file.contradictions == ()
    assert contradiction_p_value(file) == 1


def test_false_certificates_are_contradicted(data: ImageData, tmp_path: Path) -> None:
    """Radii twice too large: the attack at 1.3 times the distance succeeds inside."""
    seen: list[AttackStatus] = []
    file = attack(data, tmp_path / "a.tsv", certificates=certified(data, scale=2), on_progress=seen.append)
    assert [row.index for row in file.contradictions] == INDICES
    assert file.contradictions == read_attacks(tmp_path / "a.tsv").contradictions
    assert seen[-1].contradictions == 6
    chance = contradiction_p_value(file)
    assert chance == pytest.approx(0.002**6)
    assert file.settings["certificates"]["file"] == "test.tsv"


def test_images_without_a_certificate_count_as_trials_of_contradictions() -> None:
    """At p slightly below 1/2, few images are certified at all, and all of these certificates are wrong.

    100,000 images with p = 0.47 and n = 100: 66 votes are needed, which 1e-4 of the images get, a tenth of alpha.
    """
    share = float(stats.binom.sf(65, 100, 0.47))
    assert 5e-5 < share < 0.001
    wrong = round(100_000 * share)
    rows = [AttackedImage(i, 1, 0, 0.05, 0.1 if i < wrong else 0.0, i < wrong, 0.1, 0.0) for i in range(100_000)]
    settings = {"alpha": 0.001, "certificates": {"alpha": 0.001}}
    file = AttacksFile(Path("a.tsv"), tuple(rows), settings, {})
    assert len(file.contradictions) == wrong
    assert contradiction_p_value(file) == pytest.approx(1)
    few = replace(file, rows=file.rows[:wrong])
    assert contradiction_p_value(few) == pytest.approx(0.002**wrong)


def test_a_certificate_for_the_wrong_class_is_contradicted_by_other_classes_only(
    data: ImageData, tmp_path: Path
) -> None:
    """Image 0, of class 1, relabelled as 0, is wrong as it is. A certificate for class 1 agrees, one for 0 cannot."""
    relabelled = replace(data, labels=torch.zeros(6, dtype=torch.int64))
    for claimed, contradicted in ((1, False), (0, True), (ABSTAIN, False)):
        radius = 0.0 if claimed == ABSTAIN else 0.1
        row = CertifiedImage(0, 0, Certificate(claimed, radius, 0, 0, 0, ()), 0.0)
        claims = CertificatesFile(Path("c.tsv"), (row,), {}, {})
        (attacked,) = attack(relabelled, tmp_path / f"{claimed}.tsv", [0], certificates=claims).rows
        assert attacked.contradiction is contradicted
        assert (attacked.prediction, attacked.certified_radius) == (1, radius)


def test_a_certificate_for_another_class_than_that_of_the_image_is_contradicted(
    data: ImageData, tmp_path: Path
) -> None:
    """Image 2, of class 1, is right as it is, withstands small attacks, and reaches the claimed class 0 at 0.78."""
    claims = CertificatesFile(
        Path("c.tsv"), (CertifiedImage(2, 1, Certificate(0, 0.1, 0, 0, 0, ()), 0.0),), {"alpha": 0.001}, {}
    )
    for radius, distance in ((0.18, math.inf), (0.78, pytest.approx(0.78, rel=1e-5))):
        file = attack(data, tmp_path / f"{radius}.tsv", [2], certificates=claims, radii=(radius,))
        assert [(row.distance, row.contradiction) for row in file.rows] == [(distance, True)]
        assert contradiction_p_value(file) == pytest.approx(0.002)


def test_misclassified_images_have_radius_0(data: ImageData, tmp_path: Path) -> None:
    rows = attack(replace(data, labels=1 - data.labels), tmp_path / "a.tsv").rows
    assert {(row.distance, row.radius) for row in rows} == {(0.0, 0.0)}
    assert all(row.prediction == 1 - row.label for row in rows)
    assert empirical_accuracy(rows, 0.0) == 0


def test_a_constant_classifier_withstands_every_attack(data: ImageData, tmp_path: Path) -> None:
    rows = attack(data, tmp_path / "a.tsv", [0, 1, 2], model=constant).rows
    assert all(row.withstood and row.radius == math.inf and row.prediction == 1 for row in rows)
    assert empirical_accuracy(rows, 100.0) == 1
    assert comparable(read_attacks(tmp_path / "a.tsv")) == {row.index: replace(row, seconds=0.0) for row in rows}


def test_an_abstention_is_not_a_success(data: ImageData, tmp_path: Path) -> None:
    """On the boundary itself every prediction abstains, whatever the label: nothing is shown, nor contradicted."""

    def coin(images: Tensor) -> Tensor:
        score = images[:, 0, 0, 0] - images[:, 0, 0, 1]
        return torch.stack([-score, score], dim=1)

    certified = CertifiedImage(0, 1, Certificate(1, 0.1, 0, 0, 0, ()), 0.0)
    claims = CertificatesFile(Path("c.tsv"), (certified,), {}, {})
    (row,) = attack(data, tmp_path / "a.tsv", [0], model=coin, radii=(1e-4,), certificates=claims).rows
    assert row.prediction == ABSTAIN
    assert row.withstood
    assert row.certified_radius == 0.1
    assert not row.contradiction


def test_all_predictions_of_an_image_share_one_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    """With six radii there are seven predictions: votes that would do at alpha must do at a seventh of it."""
    counter = VoteCounter(half_space, Gaussian(SIGMA), 2)
    attacker = Attacker(half_space, counter, recipe(n=1000, alpha=0.01))
    enough = next(k for k in range(500, 1000) if stats.binomtest(k, 1000).pvalue <= 0.01 / 7)
    plain = next(k for k in range(500, 1000) if stats.binomtest(k, 1000).pvalue <= 0.01)
    assert plain < enough
    votes = np.array([[k, 1000 - k] for k in (plain, enough - 1, enough)])
    monkeypatch.setattr(VoteCounter, "count", lambda self, images, seeds, stage, n: votes)
    assert attacker.classes(torch.zeros(3, 1, 4, 4), [0, 1, 2], 0.5) == [ABSTAIN, ABSTAIN, 0]


def test_steps_reach_the_sphere_and_then_move_along_it(data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps towards a plane at radius 0.4: three of 2.5 * 0.4 / 8 = 0.125 inside the ball, then its surface."""
    points: list[Tensor] = []

    def recorded(*arguments: Any, **options: Any) -> list[Tensor]:
        points.extend(smoothed_pgd(*arguments, **options))
        return points

    monkeypatch.setattr("smoothcert.certification.attack.smoothed_pgd", recorded)
    attacker = Attacker(half_space, VoteCounter(half_space, Gaussian(SIGMA), 2), recipe(steps=8, radii=(0.4,)))
    images, labels = data.batch(torch.tensor([2]))
    attacker.ascend(images, labels, [2], 0.4)
    lengths = [float((point[0] - images[0]).norm()) for point in points]
    assert lengths == pytest.approx([0.125, 0.25, 0.375] + [0.4] * 5, rel=1e-5)


def test_order_and_resume_do_not_change_rows(data: ImageData, tmp_path: Path) -> None:
    claims = certified(data)
    whole = comparable(attack(data, tmp_path / "whole.tsv", certificates=claims))
    backwards = comparable(attack(data, tmp_path / "back.tsv", INDICES[::-1], certificates=claims))
    path = tmp_path / "parts.tsv"
    attack(data, path, [4], certificates=claims)
    attack(data, path, [1, 5], certificates=claims)
    with path.open("ab") as file:
        file.write(b"0\t1\t0\t0.2")  # a row in flight when the process died
    kept = path.read_bytes()
    assert len(read_attacks(path).rows) == 3
    seen: list[AttackStatus] = []
    parts = comparable(attack(data, path, certificates=claims, on_progress=seen.append))
    assert path.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert whole == backwards == parts
    assert list(whole) == INDICES
    assert [status.done for status in seen] == [3, 6]


def test_noise_keys_depend_on_every_argument() -> None:
    keys = [
        noise_key(s, i, p, r) for s in (1, 2) for i in (0, 1) for p in ("gradient", "votes") for r in (0.0, 0.5, 1.0)
    ]
    assert len(set(keys)) == len(keys) == 24


def test_votes_at_the_attacked_point_are_fresh(
    data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No key that fills noise is used twice: clean votes, gradients and votes after the attack are independent."""
    used: list[int] = []
    fill = type(SmoothedClassifier(half_space, sigma=SIGMA, num_classes=2).noise).fill

    def recorded(self: object, out: Tensor, key: int) -> None:
        used.append(key)
        fill(self, out, key)  # type: ignore[arg-type]

    monkeypatch.setattr("smoothcert.noise.Gaussian.fill", recorded)
    attack(data, tmp_path / "a.tsv", [0, 1])
    assert len(used) == len(set(used))
    # Image 0 is attacked at two radii, image 1 at four; the votes of each point take four blocks of 250.
    assert len(used) == 6 + 4 * (2 + 6)


def test_other_settings_are_refused(data: ImageData, tmp_path: Path) -> None:
    attack(data, tmp_path / "a.tsv", [0])
    before = (tmp_path / "a.tsv").read_bytes()
    for field, value in (("n", 400), ("seed", 6), ("steps", 5), ("radii", [0.5]), ("num_noise", 4)):
        with pytest.raises(RequestError, match=f"{field}: the file has"):
            attack(data, tmp_path / "a.tsv", [1], **{field: value})
    with pytest.raises(RequestError, match="certificates: the file has None"):
        attack(data, tmp_path / "a.tsv", [1], certificates=certified(data))
    assert (tmp_path / "a.tsv").read_bytes() == before


def test_certificates_of_another_classifier_are_refused(data: ImageData, tmp_path: Path) -> None:
    for field, value in (
        ("sigma", 0.5),
        ("dataset", "mnist"),
        ("noise", "laplace"),
        ("sound", True),
        ("precision", "bf16"),
        ("images_sha256", "0" * 64),
        ("weights_sha256", "0" * 64),
        ("classes_sha256", "0" * 64),
        ("consensus", 2),
        ("cascade", [0.25, 0.12]),
    ):
        with pytest.raises(RequestError, match=f"another classifier.*{field}: the file has") as caught:
            attack(data, tmp_path / "a.tsv", certificates=certified(data, **{field: value}))
        assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="image 0: expected its certified label 1, got 0"):
        attack(replace(data, labels=1 - data.labels), tmp_path / "b.tsv", certificates=certified(data))
    assert not (tmp_path / "a.tsv").exists()


def linear(bias: float) -> nn.Module:
    """The half-space, with a bias."""
    layer = nn.Linear(16, 2)
    layer.load_state_dict(
        {"weight": torch.tensor([-1.0, 1.0])[:, None].expand(2, 16), "bias": torch.tensor([8.0, bias])}
    )
    return nn.Sequential(nn.Flatten(), layer)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: lambda x: model(x)])
def test_an_attack_on_another_module_or_callable_is_refused(data: ImageData, tmp_path: Path, wrap: Any) -> None:
    same, other = wrap(linear(-8.0)), wrap(linear(8.0))
    options = {"n": 500, "sigma": SIGMA, "seed": 1, "device": "cpu"}
    certificates = certify_dataset(same, data, tmp_path / "certificates.tsv", **options)
    file = attack(data, tmp_path / "same.tsv", model=same, certificates=certificates)
    assert len(file.rows) == 6
    assert not file.contradictions
    with pytest.raises(RequestError, match=r"another classifier.*_sha256: the file has"):
        attack(data, tmp_path / "other.tsv", model=other, certificates=certificates)
    with pytest.raises(RequestError, match="_sha256: the file has"):
        attack(data, tmp_path / "same.tsv", model=other, certificates=certificates)


def test_the_consensus_of_an_ensemble_is_part_of_the_classifier(data: ImageData, tmp_path: Path) -> None:
    members = [linear(-8.0) for _ in range(3)]
    options = {"n": 500, "sigma": SIGMA, "seed": 1, "device": "cpu"}
    certificates = certify_dataset(Ensemble(members, 2), data, tmp_path / "certificates.tsv", **options)
    assert not attack(data, tmp_path / "a.tsv", model=Ensemble(members, 2), certificates=certificates).contradictions
    with pytest.raises(RequestError, match=r"another classifier.*consensus: the file has 2, the request None"):
        attack(data, tmp_path / "b.tsv", model=Ensemble(members), certificates=certificates)


def test_a_cascade_and_dependent_votes_are_refused(data: ImageData, tmp_path: Path) -> None:
    stages = [SmoothedClassifier(linear(-8.0), sigma=sigma, num_classes=2) for sigma in (0.5, SIGMA)]
    cascade: Any = Cascade(stages)
    with pytest.raises(RequestError, match="expected one classifier, got a cascade"):
        attack(data, tmp_path / "a.tsv", model=cascade)
    with pytest.raises(RequestError, match="depend on one input alone"):
        attack(data, tmp_path / "a.tsv", model=lambda x: half_space(x - x.mean(0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"radii": [0.5, 0.25]}, "radii: expected rising numbers > 0, got 0.5, 0.25; give for example"),
        ({"radii": [0.5, 0.5]}, "radii: expected rising numbers > 0"),
        ({"radii": []}, "radii: expected rising numbers > 0, got none"),
        ({"radii": [-1.0, 1.0]}, "radii: expected rising numbers > 0, got -1, 1"),
        ({"radii": [0.0, 1.0]}, "radii: expected rising numbers > 0, got 0, 1"),
        ({"radii": [math.inf]}, "radii.0: expected"),
        ({"steps": 0}, "steps: expected at least 1"),
        ({"steps": 2**63 - 1}, "steps: expected at most 1000000"),
        ({"num_noise": 300}, "num_noise: expected at most gradient_batch_size = 256, got 300"),
        ({"n": 10}, "n: 10 votes decide nothing at alpha 0.001 and 1 radii even if all agree; give at least 12"),
    ],
)
def test_wrong_requests_cost_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_recipe(AttackRecipe, {"sigma": 0.5, "radii": [1.0], "seed": 1} | changes, "attack")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_fewest_votes_that_are_accepted_can_decide(data: ImageData, tmp_path: Path) -> None:
    chosen = parse_recipe(AttackRecipe, {"sigma": 0.5, "radii": [1.0], "seed": 1, "n": 12}, "attack")
    wrong = replace(data, labels=torch.zeros_like(data.labels))
    (row,) = attack(wrong, tmp_path / "a.tsv", [0], model=constant, n=chosen.n, radii=chosen.radii).rows
    assert row.radius == 0


def test_a_classifier_without_gradient_is_refused(data: ImageData, tmp_path: Path) -> None:
    opaque = lambda images: half_space(images.detach())  # noqa: E731
    with pytest.raises(RequestError, match="no gradient with respect to the image"):
        attack(data, tmp_path / "a.tsv", model=opaque)
    assert not list(tmp_path.iterdir())


def test_the_mode_and_default_device_of_the_caller_change_nothing(data: ImageData, tmp_path: Path) -> None:
    """Inference mode has no gradients, which an attack needs; a tensor that gets no device has no values here."""
    expected = comparable(attack(data, tmp_path / "usual.tsv"))
    with torch.inference_mode(), torch.device("meta"):
        assert comparable(attack(data, tmp_path / "other.tsv")) == expected


def test_a_classifier_that_returns_a_mapping(data: ImageData, tmp_path: Path) -> None:
    plain = attack(data, tmp_path / "a.tsv", [0]).rows
    found = attack(data, tmp_path / "b.tsv", [0], model=lambda images: {"logits": half_space(images)}).rows
    assert [row.distance for row in found] == [row.distance for row in plain]


def test_default_radii_span_what_can_be_certified(trained_run: Path, tmp_path: Path) -> None:
    run = load_run(trained_run)
    assert run.recipe.sigma == 0.5
    completed = complete_attack_recipe({"seed": None}, tmp_path / "a.tsv", CPU, run.spec.shape, None, run.recipe.sigma)
    assert completed.radii == (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)


def test_rows_are_read_back_exactly(tmp_path: Path) -> None:
    rows = [
        AttackedImage(3, 1, 0, np.pi / 10, 0.25, False, 0.5, 0.125),
        AttackedImage(4, 1, 0, 0.1, 1 / 3, True, 0.5, 2.0),
        AttackedImage(5, 1, ABSTAIN, math.inf, None, False, math.inf, 0.0),
    ]
    assert [parse_row(format_row(row)) for row in rows] == rows
    with attacks_writer(tmp_path / "new" / "a.tsv", {"radii": (0.5,)}, {"versions": {}}) as writer:
        writer.append(rows)
    stored = read_attacks(tmp_path / "new" / "a.tsv")
    assert stored.rows == tuple(rows)
    assert stored.settings == {"radii": [0.5]}
    assert contradiction_p_value(stored) is None


@pytest.mark.parametrize(
    "line",
    [
        "1\t1\t0\t0.5",
        "1\t1\t0\t0.5\t\t0\t0.4\t0.0",  # farther than the ball
        "1\t1\t1\t0.5\t\t0\t0.5\t0.0",  # fell, but has its label
        "1\t1\t0\tinf\t\t0\tinf\t0.0",  # withstood, but has another class
        "1\t1\t0\t0.5\t-1.0\t0\t0.5\t0.0",
        "1\t1\t0\t0.5\t\t1\t0.5\t0.0",  # a contradiction without a certificate
        "1\t1\t0\tnan\t\t0\t0.5\t0.0",
    ],
)
def test_damaged_rows_are_refused_and_kept(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(HEADER + line + "\n")
    settings_path(path).write_text(json.dumps({"settings": {}, "provenance": {}}))
    before = path.read_bytes()
    with pytest.raises(WorkError, match="line 2: damaged"):
        read_attacks(path)
    with pytest.raises(WorkError, match="line 2: damaged"):
        attacks_writer(path, {}, {})
    assert path.read_bytes() == before


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    with pytest.raises(RequestError, match="cannot be read"):
        read_attacks(path)
    path.write_text("idx\tlabel\n")
    with pytest.raises(RequestError, match="not an attacks file"):
        read_attacks(path)
    row = "1\t1\t0\t0.5\t\t0\t0.5\t0.0\n"
    path.write_text(HEADER + row + row)
    with pytest.raises(WorkError, match="image 1 is in the file twice"):
        read_attacks(path)
    path.write_text(HEADER + row)
    with pytest.raises(RequestError, match=r"settings in a\.json"):
        read_attacks(path)
    settings_path(path).write_text("{}")
    with pytest.raises(WorkError, match=r"a\.json: damaged"):
        read_attacks(path)
    with pytest.raises(RequestError, match="at least one attacked image"):
        empirical_accuracy([], 0.5)


def test_attacks_on_a_trained_network_do_not_depend_on_order(trained_run: Path, tmp_path: Path) -> None:
    run, digits = load_run(trained_run), mnist.load_sample("test")
    chosen = recipe(sigma=0.5, radii=(0.5, 6.0), steps=4, n=250)
    files = [
        attack_dataset(run, digits, indices, chosen, tmp_path / f"{name}.tsv", CPU)
        for name, indices in (("a", [0, 1, 2, 3, 4]), ("b", [4, 3, 2, 1, 0]))
    ]
    one, other = comparable(files[0]), comparable(files[1])
    for index, row in one.items():  # the place of an image in a batch may change its last digits
        assert row.distance == pytest.approx(other[index].distance, rel=1e-5)
        assert replace(row, distance=0.0) == replace(other[index], distance=0.0)
    assert sum(row.radius == 6.0 for row in files[0].rows) >= 2, "6 is farther than the next digit"
    assert len(files[0].settings["weights_sha256"]) == 64
    with pytest.raises(RequestError, match="give the data that it was trained for"):
        attack_dataset(run, replace(digits, num_classes=11), [0], chosen, tmp_path / "c.tsv", CPU)
