"""The committed tables of results/ are what `smoothcert report` makes of the committed certificates."""

import csv
import gc
import gzip
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy.stats import beta, binom, binomtest, norm

from smoothcert import load
from smoothcert.analysis.cost import cost_csv, cost_markdown, training_costs
from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.columns import columns_of
from smoothcert.certification.settings import CertifySettings
from smoothcert.data.datasets import DATASETS
from smoothcert.io.text import duration
from smoothcert.io.written_files import MANIFEST, refuse_foreign_files
from smoothcert.papers.presets import PRESETS, preset
from smoothcert.papers.rows import paper_runs, published_for
from smoothcert.report import contents, find_certificates, style, write_report
from smoothcert.training.metrics import METRICS, epochs_in
from smoothcert.training.recipe import TrainRecipe, load_train_recipe

RESULTS = Path(__file__).parent.parent / "results"

GAUSSIAN, CONSISTENCY, SMOOTHMIX = "mnist/gaussian-1.0", "mnist/consistency-1.0", "mnist/smoothmix-eta1-1.0"
# Table -> its runs, as globs under results/, in the order of the README there.
ABLATIONS = {
    "smoothmix/table6": [GAUSSIAN, SMOOTHMIX, "mnist-ablations/smoothmix-eta*"],
    "smoothmix/table7": [SMOOTHMIX, "mnist-ablations/smoothmix-alpha-x-t*"],
    "smoothmix/table8": [SMOOTHMIX, "mnist-ablations/smoothmix-epsilon*"],
    "smoothmix/table9": [SMOOTHMIX, "mnist-ablations/smoothmix-m*"],
    "consistency/supp-table6": [GAUSSIAN, CONSISTENCY, "mnist-ablations/consistency-lambda*"],
    "consistency/supp-table4": [
        GAUSSIAN,
        CONSISTENCY,
        "mnist-ablations/consistency-lambda20-1.0",
        "mnist-ablations/consistency-loss*",
        "mnist-ablations/consistency-xent-*",
    ],
    "consistency/supp-table5": [CONSISTENCY, "mnist-ablations/consistency-m*"],
}


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """Most of these tests read the same files, of 10,000 rows each, and none looks at a figure."""
    kept = cache(read_certificates)
    gc.disable()  # it would walk through millions of numbers again and again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "read_certificates", kept)
        patch.setitem(globals(), "read_certificates", kept)
        patch.setattr(style, "_picture", lambda figure, kind: b"a picture")
        yield
    gc.enable()


def runs_of(globs: list[str]) -> list[Path]:
    """As a shell has them."""
    return [folder for glob in globs for folder in sorted(RESULTS.glob(glob))]


@pytest.mark.parametrize(
    ("name", "runs", "table", "formats", "same_images"),
    [
        ("mnist", ["mnist"], "smoothmix/table2", ("md", "csv", "png"), False),
        ("mnist-same-images", ["mnist"], "smoothmix/table2", ("md", "csv"), True),
        ("mnist-consistency-paper", ["mnist"], "consistency/supp-table2", ("md", "csv"), False),
        ("float32", ["float32"], "smoothmix/table2", ("md", "csv"), False),
        ("mnist-published-recipe", ["mnist-published-recipe"], "smoothmix/table2", ("md", "csv"), False),
        ("cifar10", ["cifar10"], "smoothmix/table1", ("md", "csv"), False),
        ("cifar10-n10000", ["cifar10-n10000"], "smoothmix/table1", ("md", "csv"), False),
        ("cifar10-architectures", ["cifar10-architectures"], "consistency/table4", ("md", "csv"), False),
        *(
            (f"mnist-ablations/report-{table.replace('/', '-')}", runs, table, ("md", "csv"), True)
            for table, runs in ABLATIONS.items()
        ),
    ],
)
def test_tables_equal_a_new_report_of_the_certificates(
    name: str, runs: list[str], table: str, formats: tuple[str, ...], same_images: bool, tmp_path: Path
) -> None:
    folders, published = runs_of(runs), published_for(table)
    report = write_report(folders, tmp_path, formats, published=published, same_images=same_images)
    assert report.written
    for path in report.written:
        committed = RESULTS / name / path.name
        if path.suffix == ".png":  # the drawing library's version shows in the pixels
            assert committed.exists()
        else:
            difference = f"another {path.name} than in results/{name}; if that is intended, write it again"
            assert rounded(path) == rounded(committed), difference


def rounded(path: Path) -> str:
    """The text of a table; the tenth digit of a number depends on the processor."""
    return re.sub(r"\d+\.\d{8,}", lambda number: f"{float(number[0]):.7f}", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("table", ["smoothmix/table2", "consistency/supp-table2"])
def test_results_have_all_rows_in_the_published_order(table: str, tmp_path: Path) -> None:
    report = write_report([RESULTS / "mnist"], tmp_path, ["csv"], published=published_for(table), same_images=True)
    published = report.contents.published
    assert {row.row for row in published.values()} == {run.name for run in paper_runs(table)}
    ranked = [(s.sigma, published[s.name].acr, s.acr, s.name) for s in report.contents.summaries if s.name in published]
    wrong = [
        (worse, better)
        for sigma, less, ours, worse in ranked
        for other, more, higher, better in ranked
        if sigma == other and less is not None and more is not None and less < more and ours >= higher
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("mnist", 30),
        ("mnist-published-recipe", 4),
        ("cifar10", 25),
        ("cifar10-n10000", 34),
        ("cifar10-architectures", 3),
        ("mnist-ablations", 31),
        ("beyond", 17),
    ],
)
def test_each_result_has_its_recipe_and_provenance(name: str, runs: int) -> None:
    folders = [path for path in (RESULTS / name).iterdir() if path.is_dir()]
    others = ("report-", "ensemble", "cascade", "seeds")
    folders = [path for path in folders if not any(word in path.name for word in others)]
    assert len(folders) == runs
    for folder in folders:
        recipe, ((_, path),) = load_train_recipe(folder / "recipe.yaml"), find_certificates([folder])
        file = read_certificates(path)
        assert (file.settings["training_sigma"], file.settings["objective"]) == (recipe.sigma, recipe.objective.name)
        assert {"versions", "precision"} <= file.provenance["model"].keys()
        assert recipe.epochs == file.provenance["epoch"]
        if name != "cifar10-n10000":  # whose metrics are with the certificates of n = 100,000
            assert epochs_in(folder / METRICS) == recipe.epochs


NUMBERS = {"three": 3, "four": 4, "seven": 7, "eighteen": 18}


def test_limits_in_the_documentation_are_those_of_the_results() -> None:
    """What the FAQ and the README say is trained, and on what, counted from recipes, metrics and settings."""
    faq = (RESULTS.parent / "docs/faq.md").read_text(encoding="utf-8").replace("\n", " ")
    limits = re.sub(" +", " ", faq[faq.index("## Limits") :])
    readme = (RESULTS.parent / "README.md").read_text(encoding="utf-8").replace("\n", " ")

    def said(pattern: str, text: str = limits) -> int:
        found = re.search(pattern, text)
        assert found is not None, pattern
        return NUMBERS[found[1]]

    recipes = {path.parent: load_train_recipe(path) for path in RESULTS.glob("*/*/recipe.yaml")}

    def key(recipe: TrainRecipe) -> tuple[object, float, int]:
        return recipe.objective, recipe.sigma, recipe.epochs

    cifar10 = [key(recipe) for folder, recipe in recipes.items() if folder.parent.name == "cifar10"]
    tables = ("consistency/table1", "smoothmix/table1")
    rows = [key(run.recipe) for t in tables for run in paper_runs(t) if run.recipe is not None]
    assert said(r"\[(\w+) rows of the papers' main tables\]") == len({row for row in cifar10 if row in rows})
    assert said(r"(\w+) of them with two seeds") == len({row for row in cifar10 if cifar10.count(row) == 2})
    assert max(map(cifar10.count, cifar10)) == 2
    networks = [folder for folder in recipes if folder.parent.name == "cifar10-architectures"]
    assert said(r"\[(\w+) rows with other networks\]") == len(networks)
    models = [*(RESULTS / "models").glob("*/model.safetensors")]
    assert said(r"trained networks\?\*\* (\w+), for mnist and cifar-10", faq.lower()) == len(models)

    assert "We trained no network on ImageNet, and MACER on CIFAR-10 only at one σ, for fewer epochs" in readme
    assert "MACER at one σ with a fifth of the epochs" in limits
    assert "ImageNet has presets and measured speed, but no trained network" in limits
    certified = [r for folder, r in recipes.items() if (folder / "certificates").exists()]  # not those of training cost
    assert not any(r.dataset.startswith("imagenet") for r in certified)
    macer = {(r.sigma, 5 * r.epochs) for r in certified if (r.dataset, r.objective.name) == ("cifar10", "macer")}
    assert macer == {(0.5, preset("cifar10/macer", 0.5).epochs)}

    settings = CertifySettings()
    assert f"By default it costs {settings.n0 + settings.n:,} forward passes" in readme

    assert "on x86-64 and ARM CPUs and on one kind of GPU (NVIDIA H200)" in limits
    stored = [json.loads(path.read_text()) for path in RESULTS.rglob("certificates/*.json")]
    devices = {about["provenance"]["versions"]["device"] for about in stored if "versions" in about["provenance"]}
    assert devices <= {"cpu (x86_64)", "cpu (aarch64)", "cuda (NVIDIA H200)"}


def table_from(path: Path, title: str) -> list[str]:
    """The lines of the table whose first begins with `title`, which no other does."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(title))
    return list(takewhile(lambda line: line.startswith("|"), lines[start:]))


def test_first_table_of_the_readme_equals_the_results() -> None:
    table = table_from(RESULTS.parent / "README.md", "| MNIST")
    expected: dict[str, list[str]] = {}
    for run in paper_runs("smoothmix/table2"):
        ((_, path),) = find_certificates([RESULTS / "mnist" / run.name])
        rows = read_certificates(path).rows
        some = "" if len(rows) == 10_000 else "*"
        expected.setdefault(run.label, []).extend([f"{columns_of(rows).acr:.3f}{some}", f"{run.acr:.3f}"])
    assert table[2:] == [f"| {' | '.join([label, *cells])} |" for label, cells in expected.items()]


CIFAR10_OF_THE_README = {
    "Gaussian": "cifar10/gaussian",
    "Consistency": "cifar10/consistency",
    "SmoothMix + one-step adversary": "cifar10/smoothmix-one-step",
    "Sun et al. (`cifar10/best`)": "beyond/cifar10-sun2024",
    "[the same, distilled](docs/best-recipe.md#distilled)": "beyond/cifar10-distilled",
    "[three networks as one](docs/best-recipe.md#cifar10best)": "beyond/cifar10-ensemble",
}


def test_second_table_of_the_readme_equals_the_results() -> None:
    table = table_from(RESULTS.parent / "README.md", "| CIFAR-10")[2:]
    printed = {(run.label, run.sigma): f"{run.acr:.3f}" for run in paper_runs("smoothmix/table1")}
    sun = PRESETS["cifar10/sun2024"].published_acr
    printed |= {("Sun et al. (`cifar10/best`)", sigma): f"{sun(sigma):.3f}" for sigma in (0.5, 1.0)}
    compared = list(CIFAR10_OF_THE_README)[:4]
    for line, (label, name) in zip(table, CIFAR10_OF_THE_README.items(), strict=True):
        cells = [label]
        for sigma in (0.5, 1.0):
            ((_, path),) = find_certificates([RESULTS / f"{name}-{sigma}"])
            file = read_certificates(path)
            assert [row.index for row in file.rows] == list(range(0, 10_000, 20))
            assert file.settings["n"] == 100_000
            published = RESULTS / f"published/cifar10-{Path(name).name.removeprefix('cifar10-')}-{sigma}.tsv.gz"
            same_images = ""
            if label in compared and published.exists():
                radii = published_radii(published.name.removesuffix(".tsv.gz"))
                same_images = f"{fmean(radius for index, radius in radii.items() if index % 20 == 0):.3f}"
            cells += [f"{file.acr:.3f}", same_images, printed.get((label, sigma), "")]
        assert " ".join(line.split()) == " ".join(f"| {' | '.join(cells)} |".split())


def estimate_for_more_images(many_votes: str, many_images: str) -> str:
    """The ACR of few images with many votes, corrected by more images with few votes; its standard error in brackets.

    The mean over the many images plus the mean gain of the votes over the few. The standard error adds the squared
    influence of each image.
    """
    few, many = (
        {index: max(radius, 0.0) for index, radius in counted_radii(run, 1).items()}
        for run in (many_votes, many_images)
    )
    mean, gain = fmean(many.values()), fmean(few[index] - many[index] for index in few)
    influence = {index: (radius - mean) / len(many) for index, radius in many.items()}
    for index, radius in few.items():
        influence[index] += (radius - many[index] - gain) / len(few)
    return f"{mean + gain:.3f} ({sum(value**2 for value in influence.values()) ** 0.5:.3f})"


def test_tables_of_corrected_recipes_equal_the_results() -> None:
    """ACR, number of images and, for MNIST, certified accuracies, computed here from the rows."""

    def acr(name: str) -> str:
        ((_, path),) = find_certificates([RESULTS / name])
        return f"{read_certificates(path).acr:.3f}"

    mnist = ["gaussian-1.0", "consistency-1.0", "macer-1.0", "macer-fp32-1.0"]
    for line, name in zip(table_from(RESULTS / "mnist-published-recipe/README.md", "| run")[2:], mnist, strict=True):
        ((_, path),) = find_certificates([RESULTS / "mnist-published-recipe" / name])
        radii = [row.certificate.radius if row.correct else -1.0 for row in read_certificates(path).rows]
        shares = [100 * fmean(value >= radius for value in radii) for radius in (0, 0.5, 1, 1.5, 2, 2.5)]
        cells = [cell.strip() for cell in line.split("|")[2:6]]
        assert cells[:2] == [f"{len(radii):,}", f"{fmean(max(value, 0.0) for value in radii):.3f}"]
        assert cells[3] == ", ".join(f"{share:.1f}" for share in shares)
    for line in table_from(RESULTS / "cifar10/README.md", "| run")[2:]:
        cells = [cell.strip() for cell in line.split("|")]
        method, _, seed = cells[1].lower().partition(", seed ")
        method = (
            method.replace(", one-step adversary", "-one-step")
            .replace(", m = 4", "-m4")
            .replace(", lambda ", "-lambda")
        )
        method = method.replace(", best settings", "-best").replace(" + ", "-").replace(", 88 epochs", "-88-epochs")
        name = f"{method}-{cells[2]}-seed{seed}" if seed else f"{method}-{cells[2]}"
        assert cells[3] == acr(f"cifar10/{name}")
        network = f"cifar10-{method.removesuffix('-88-epochs')}-{cells[2]}"
        if (RESULTS / f"published/{network}.tsv.gz").exists():
            published = published_radii(network)
            assert cells[4] == f"{fmean(published.values()):.3f}"
            assert cells[5] == paired_difference(counted_radii(f"cifar10/{name}", 20), published)
        else:
            assert not cells[4]
            assert not cells[5]
        if (RESULTS / "cifar10-n10000" / name).exists():
            assert cells[7] == estimate_for_more_images(f"cifar10/{name}", f"cifar10-n10000/{name}")
        else:
            assert not cells[7]


def test_table_of_more_images_equals_the_certificates() -> None:
    """Row minus column: differences in ACR between runs of CIFAR-10 at sigma 0.5 on every 5th image, n = 10,000."""

    def radii(label: str) -> dict[int, float]:
        method, _, seed = label.lower().partition(", seed ")
        method = method.replace(", one-step adversary", "-one-step").replace(", best settings", "-best")
        method = method.replace(", m = ", "-m").replace(", lambda ", "-lambda").replace(" + ", "-")
        method = method.replace(", 88 epochs", "-88-epochs")
        return counted_radii(f"cifar10-n10000/{method}-0.5{f'-seed{seed}' if seed else ''}", 1)

    header, _, *lines = table_from(RESULTS / "cifar10/README.md", "| sigma 0.5")
    columns = [cell.strip() for cell in header.split("|")[2:-1]]
    for line in lines:
        row, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        assert cells == ["" if row == column else paired_difference(radii(row), radii(column)) for column in columns]


def test_table_of_other_networks_equals_the_results() -> None:
    rows = table_from(RESULTS / "cifar10-architectures/README.md", "| network")[2:]
    assert len(rows) == len(list(RESULTS.glob("cifar10-architectures/*/recipe.yaml")))
    printed = {run.label: f"{run.acr:.3f}" for run in paper_runs("consistency/table4")}
    for line in rows:
        network, method, acr, same_images, difference, all_images = (cell.strip() for cell in line.split("|")[1:-1])
        name = f"{network.lower().replace('-', '')}-{method.lower().partition(',')[0]}-0.5"
        radii, published = counted_radii(f"cifar10-architectures/{name}", 20), published_radii(f"cifar10-{name}")
        assert acr == f"{fmean(max(radius, 0.0) for radius in radii.values()):.3f}"
        assert same_images == f"{fmean(published.values()):.3f}"
        assert difference == paired_difference(radii, published)
        label = f"{network}, {method}".replace("Consistency, lambda 20", "Gaussian + Consistency (lambda=20)")
        assert all_images == printed[label]


def test_comparison_of_published_networks_equals_their_radii() -> None:
    lines = table_from(RESULTS / "published/README.md", "| network")[2:]
    assert len(lines) == len(list((RESULTS / "published").glob("cifar10-*.tsv.gz"))) - 4  # of other architectures
    for line in lines:
        network, sigma, acr, at_zero, difference, smallest = (cell.strip() for cell in line.split("|")[1:-1])
        (file,) = re.findall(r"\((.*)\.tsv\.gz\)", network)
        assert file.endswith(f"-{sigma}")
        radii, consistency = (
            {index: radius for index, radius in published_radii(name).items() if index % 20 == 0}
            for name in (file, f"cifar10-consistency-{sigma}")
        )
        labels = {int(row["idx"]): int(row["label"]) for row in published_rows(file)}
        assert (len(radii), acr) == (500, f"{fmean(radii.values()):.3f}")
        assert at_zero == f"{100 * fmean(radius > 0 for radius in radii.values()):.1f}"
        assert difference == (paired_difference(radii, consistency) if consistency != radii else "")
        means = {
            name: fmean(radius for index, radius in radii.items() if labels[index] == number)
            for number, name in enumerate(DATASETS["cifar10"].class_names)
        }
        name = min(means, key=lambda key: means[key])
        assert smallest == f"{name}: {means[name]:.3f}"


SETTINGS = {
    "nesterov=true": "nesterov",
    "num_noise=8 batch_size=512": "m8",
    "optimizer=adamw learning_rate=0.0005": "adamw-0.0005",
    "optimizer=adamw learning_rate=0.001": "adamw-0.001",
    "optimizer=adamw learning_rate=0.002": "adamw-0.002",
    "learning_rate=0.1": "lr-0.1",
    "momentum=0.95 learning_rate=0.03": "momentum-0.95",
    "eta=3": "eta3",
    "eta=10": "eta10",
    "one_step=true": "one-step",
    "noise_attack.steps=2 noise_attack.step_size=0.5": "attack2",
    "SmoothAdv + Consistency, the same schedule": "sac",
}
EPOCHS = {"epochs=60": "long", "weight_decay=0": "wd0"}
SHIFTS = {
    "weight_decay=0.0005": "none-wd0.0005",
    "augment=crop": "crop-wd0.0001",
    "augment=crop weight_decay=0.0005": "crop-wd0.0005",
}
CATRS = {weight: f"weight{weight}" for weight in ("0.5", "2", "4")}


@pytest.mark.parametrize(
    ("report", "title", "names"),
    [
        ("settings", "| `--set` | σ = 1.0", SETTINGS),
        ("epochs", "| with Nesterov", EPOCHS),
        ("catrs", "| λ instead of 1", CATRS),
        ("shifts", "| `--set` | σ = 0.5 |", SHIFTS),
    ],
)
def test_tables_of_settings_equal_the_reports(report: str, title: str, names: dict[str, str]) -> None:
    differences = {}
    sigmas = ("0.5",) if report == "shifts" else ("1.0", "0.5")
    for sigma in sigmas:
        with (RESULTS / f"beyond/report-{report}-{sigma}/report.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["reference"]:
                    values = row["acr_minus_reference"], row["acr_minus_reference_standard_error"]
                    difference = "{:+.3f} ({:.3f})".format(*map(float, values)).replace("-", "−")
                    differences[row["name"]] = difference
    rows = table_from(RESULTS / "beyond/choices.md", title)[2:]
    shown = {}
    for line in rows:
        setting, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        for sigma, cell in zip(sigmas, cells, strict=True):
            if cell and cell != "(in `mnist/best`)":
                shown[f"{names[setting]}-{sigma}"] = cell
    assert shown == differences


def test_table_of_600_epochs_equals_the_reports() -> None:
    expected = []
    for sigma in ("1.0", "0.5"):
        with (RESULTS / f"beyond/report-600-epochs-{sigma}/report.csv").open(encoding="utf-8") as file:
            fewer, more = csv.DictReader(file)
        assert [(row["epochs"], row["images"], row["n"]) for row in (fewer, more)] == [
            ("300", "10000", "100000"),
            ("600", "10000", "100000"),
        ]
        values = [float(more[f"acr_minus_reference{name}"]) for name in ("", "_standard_error")]
        difference = "{:+.4f} ({:.4f})".format(*values).replace("-", "−")
        acrs = " | ".join(f"{float(row['acr']):.4f}" for row in (fewer, more))
        expected.append(f"| σ = {sigma} | {acrs} | {difference} |")
    assert table_from(RESULTS / "beyond/choices.md", "| ACR | 300 epochs")[2:] == expected


def test_table_of_ablations_equals_the_results(tmp_path: Path) -> None:
    expected = []
    for table, runs in ABLATIONS.items():
        report = write_report(runs_of(runs), tmp_path, ["csv"], published=published_for(table), same_images=True)
        published = report.contents.published
        printed = {run.name: run for run in paper_runs(table) if run.sigma == 1.0}
        found = {row.row for row in published.values()}
        assert found == printed.keys(), "all rows of the table at this sigma"
        for summary in report.contents.summaries:
            if summary.name in published:
                run = printed[published[summary.name].row]
                difference = f"{summary.acr - (run.acr or 0):+.3f}".replace("-", "−")
                expected.append(f"| {table} | {run.label} | {summary.acr:.3f} | {run.acr:.3f} | {difference} |")
    assert table_from(RESULTS / "mnist-ablations" / "README.md", "| table")[2:] == expected


def test_cost_table_equals_the_runs() -> None:
    costs = training_costs([RESULTS / "cost"])
    assert (RESULTS / "cost" / "cost.md").read_text(encoding="utf-8") == cost_markdown(costs)
    assert (RESULTS / "cost" / "cost.csv").read_text(encoding="utf-8") == cost_csv(costs)
    assert all(cost.published_hours and cost.runs_at_once == 1 for cost in costs)
    cells = [
        f"| {cost.run} | {cost.seconds_per_epoch:.2f} s | {duration(cost.seconds_planned or 0)} "
        f"| {cost.published_hours:g} h | {(cost.peak_memory_bytes or 0) / 1e9:.1f} GB "
        f"| {cost.published_memory_gb:g} GB |"
        for cost in costs
    ]
    assert table_from(RESULTS / "cost" / "README.md", "| run")[2:] == cells


CIFAR10_ROWS = {
    "ensemble of `cifar10/best`, `cifar10/consistency-cosine`, `cifar10/smoothmix`": "beyond/cifar10-ensemble-0.5",
    "`cifar10/best`, distilled": "beyond/cifar10-distilled-0.5",
    "student of the same teachers, from random weights": "beyond/cifar10-distilled-scratch-0.5",
    "`cifar10/best`": "beyond/cifar10-sun2024-0.5",
    "`cifar10/consistency-cosine`": "beyond/cifar10-consistency-cosine-0.5",
    "`cifar10/smoothmix`": "cifar10/smoothmix-0.5",
    "`cifar10/consistency-cosine` with attacked noise": "beyond/cifar10-consistency-attack-0.5",
    "`cifar10/smoothmix-one-step`": "cifar10/smoothmix-one-step-0.5",
    "`cifar10/consistency`, seed 1": "cifar10/consistency-0.5-seed1",
    "`cifar10/consistency`": "cifar10/consistency-0.5",
    "`cifar10/best` with a cosine schedule": "beyond/cifar10-attack-cosine-0.5",
    "`cifar10/gaussian`": "cifar10/gaussian-0.5",
}
CIFAR10_ROWS_1 = {
    "`cifar10/best`, distilled": "beyond/cifar10-distilled-1.0",
    "ensemble": "beyond/cifar10-ensemble-1.0",
    "`cifar10/best`": "beyond/cifar10-sun2024-1.0",
    "student of two teachers, from random weights": "beyond/cifar10-distilled-scratch-1.0",
    "`cifar10/smoothmix-one-step`": "cifar10/smoothmix-one-step-1.0",
    "`cifar10/smoothmix`": "cifar10/smoothmix-1.0",
    "`cifar10/consistency`": "cifar10/consistency-1.0",
    "`cifar10/consistency`, seed 1": "cifar10/consistency-1.0-seed1",
    "`cifar10/consistency-cosine`": "beyond/cifar10-consistency-cosine-1.0",
    "`cifar10/gaussian`": "cifar10/gaussian-1.0",
}
DISTILLED = {
    "distilled": "distilled",
    "with a higher learning rate": "distilled-high-rate",
    "from random weights": "distilled-scratch",
    "`cifar10/best`": "sun2024",
}
TEACHERS = {"the two teachers as an ensemble, σ = 0.5": "cifar10-n10000/ensemble-teachers-0.5"}
DISTILLED_1, DISTILLED_HALF = (
    {f"{title}, σ = {sigma}": f"cifar10-n10000/{run}-{sigma}" for title, run in DISTILLED.items()}
    for sigma in (1.0, 0.5)
)
SMOOTHMIX_1, SMOOTHMIX_HALF = "mnist/smoothmix-eta5-one-step-adversary-1.0", "mnist/smoothmix-eta5-0.5"
ROWS_1 = {
    "`mnist/best`": "beyond/mnist-best-1.0",
    "`mnist/best`, 600 epochs": "beyond/mnist-best-600-epochs-1.0",
    "SmoothMix (η = 5) + one-step adversary": SMOOTHMIX_1,
    "SmoothMix (η = 5)": "mnist/smoothmix-eta5-1.0",
    "SmoothAdv + Consistency": "mnist/smoothadv-consistency-lambda1-1.0",
    "CAT-RS": "beyond/mnist-catrs-1.0",
}
ROWS_HALF = {
    "`mnist/best`": "beyond/mnist-best-0.5",
    "SmoothMix (η = 5)": SMOOTHMIX_HALF,
    "SmoothMix (η = 5) + one-step adversary": "mnist/smoothmix-eta5-one-step-adversary-0.5",
    "SmoothAdv + Consistency": "mnist/smoothadv-consistency-lambda1-0.5",
    "CAT-RS": "beyond/mnist-catrs-0.5",
}
CASCADE = {
    "cascade of σ = 1.0, 0.5, 0.25": "beyond/mnist-cascade",
    "`mnist/best`, σ = 1.0": "beyond/mnist-best-seeds/1.0-seed0",
}
SEEDS = {f"`mnist/best`, seed {seed}": f"beyond/mnist-best-seeds/1.0-seed{seed}" for seed in range(3)}


@pytest.mark.parametrize(
    ("rows", "reference", "skip", "radii"),
    [
        (CIFAR10_ROWS, "cifar10/consistency-0.5", 20, (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5)),
        (CIFAR10_ROWS_1, "cifar10/consistency-1.0", 20, (0, 0.5, 1, 1.5, 2, 2.5, 3)),
        (TEACHERS | DISTILLED_HALF, "cifar10-n10000/sun2024-0.5", 5, (0, 0.5, 1, 1.5)),
        (DISTILLED_1, "cifar10-n10000/sun2024-1.0", 5, (0, 0.5, 1, 1.5)),
        (ROWS_1, SMOOTHMIX_1, 5, (0, 0.5, 1, 1.5, 2, 2.5)),
        ({"ensemble, σ = 1.0": "beyond/ensemble-1.0"}, SMOOTHMIX_1, 10, (0, 0.5, 1)),
        (ROWS_HALF, SMOOTHMIX_HALF, 5, (0, 0.5, 1, 1.5)),
        ({"ensemble, σ = 0.5": "beyond/ensemble-0.5"}, SMOOTHMIX_HALF, 10, (0, 0.5, 1)),
        (CASCADE, "beyond/mnist-best-seeds/1.0-seed0", 20, (0, 0.25, 0.5, 1, 2, 3)),
        (SEEDS, "beyond/mnist-best-seeds/1.0-seed0", 20, (0, 0.5, 1, 2, 3)),
    ],
)
def test_tables_of_the_best_recipes_equal_the_certificates(
    rows: dict[str, str], reference: str, skip: int, radii: tuple[float, ...]
) -> None:
    """The tables of two pages: ACR, paired difference with its standard error, certified accuracies."""
    pages = RESULTS / "beyond/README.md", RESULTS.parent / "docs/best-recipe.md"
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    compared = counted_radii(reference, skip)
    for title, run in rows.items():
        mine = counted_radii(run, skip)
        assert mine.keys() == compared.keys()
        against = "" if mine == compared else paired_difference(mine, compared)
        shares = " | ".join(f"{100 * fmean(value >= radius for value in mine.values()):.1f}" for radius in radii)
        acr = f"{fmean(max(value, 0.0) for value in mine.values()):.3f}"
        assert " ".join(f"| {title} | {acr} | {against} | {shares} |".split()) in text


def test_rows_of_attacked_noise_equal_the_reports() -> None:
    """ACR and certified accuracies of three seeds, whose certificates were not kept."""
    text = (RESULTS / "beyond/README.md").read_text(encoding="utf-8")
    for sigma, radii in (
        ("1.0", ("0.00", "0.50", "1.00", "1.50", "2.00", "2.50")),
        ("0.5", ("0.00", "0.50", "1.00", "1.50")),
    ):
        with (RESULTS / f"beyond/report-mnist-{sigma}/report.csv").open(encoding="utf-8") as file:
            rows = {row["name"]: row for row in csv.DictReader(file)}
        for seed in range(3):
            row = rows[f"attacked-noise-{sigma}-seed{seed}"]
            pattern = rf"\| `mnist/attacked-noise`, seed {seed} \| {float(row['acr']):.3f} \| [^|]* \| ([^\n]*) \|\n"
            (shares,) = re.findall(pattern, text)
            shown = [float(cell) for cell in shares.split(" | ")]
            assert shown == pytest.approx([float(row[radius]) for radius in radii], abs=0.0501), "two decimals, rounded"
            assert (row["images"], row["n"]) == ("2000", "100000")


def counted_radii(run: str, skip: int) -> dict[int, float]:
    """The radius of every `skip`-th image by its index, -1 where wrong or abstained."""
    ((_, path),) = find_certificates([RESULTS / run])
    rows = [row for row in read_certificates(path).rows if row.index % skip == 0]
    return {row.index: row.certificate.radius if row.correct else -1.0 for row in rows}


PUBLISHED_NETWORKS = {
    ("`mnist/catrs`", "mnist-catrs"): (("CAT-RS", "mnist-catrs"),),
    ("`mnist/best`", "mnist-best"): (("CAT-RS", "mnist-catrs"),),
    ("`mnist/best`, 600 epochs", "mnist-best-600-epochs"): (("CAT-RS", "mnist-catrs"),),
    ("three seeds of `mnist/best`", "ensemble"): (("CAT-RS", "mnist-catrs"),),
    ("distilled", "cifar10-distilled"): (("Sun et al.", "cifar10-sun2024"), ("CAT-RS", "cifar10-catrs")),
    ("`cifar10/best`", "cifar10-sun2024"): (("Sun et al.", "cifar10-sun2024"), ("CAT-RS", "cifar10-catrs")),
    ("ensemble of three", "cifar10-ensemble"): (("Sun et al.", "cifar10-sun2024"), ("CAT-RS", "cifar10-catrs")),
}


def published_radii(name: str) -> dict[int, float]:
    """The published radius of each image by its index, 0 where wrong or abstained."""
    rows = published_rows(name)
    return {int(row["idx"]): float(row["radius"]) * (row["label"] == row["predict"]) for row in rows}


@cache
def published_rows(name: str) -> list[dict[str, str]]:
    with gzip.open(RESULTS / f"published/{name}.tsv.gz", "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def paired_difference(ours: dict[int, float], others: dict[int, float]) -> str:
    """The difference in ACR over our images, with its standard error in brackets."""
    differences = [max(radius, 0.0) - max(others[index], 0.0) for index, radius in ours.items()]
    error = stdev(differences) / len(differences) ** 0.5
    return f"{fmean(differences):+.3f} ({error:.3f})".replace("-", "−")


@cache
def lower_bounds(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of votes above one half, and the lower bounds (Clopper-Pearson, alpha = 0.001) of their share."""
    votes = np.arange(n // 2, n + 1)
    return votes, np.asarray(beta.ppf(0.001, votes, n + 1 - votes))


@cache
def mean_radius_of_10_000_votes(radius: float, sigma: float) -> float:
    """The mean radius with n = 10,000 of an image that has `radius` with n = 100,000, for its share of votes there."""
    if radius == 0:
        return 0.0
    votes, bounds = lower_bounds(100_000)
    share = float(np.interp(norm.cdf(radius / sigma), bounds, votes / 100_000))
    votes, bounds = lower_bounds(10_000)
    likely = abs(votes - 10_000 * share) < 500  # ten standard deviations
    return float(binom.pmf(votes[likely], 10_000, share) @ (sigma * norm.ppf(bounds[likely])).clip(0.0))


def test_differences_from_published_networks_equal_the_certificates() -> None:
    """Paired over the images: n = 100,000 on the images that both have, and n = 10,000 on every 5th image."""
    expected = []
    for (title, run), others in PUBLISHED_NETWORKS.items():
        for sigma in (0.5, 1.0):
            if not (RESULTS / f"beyond/{run}-{sigma}").exists():
                continue
            for other, name in others:
                published = published_radii(f"{name}-{sigma}")
                assert list(published) == list(range(0, 10_000, 5))
                cells = [paired_difference(counted_radii(f"beyond/{run}-{sigma}", 5), published), ""]
                if run.startswith("cifar10"):
                    fewer = {i: mean_radius_of_10_000_votes(radius, sigma) for i, radius in published.items()}
                    more_images = counted_radii(f"cifar10-n10000/{run.removeprefix('cifar10-')}-{sigma}", 5)
                    cells[1] = paired_difference(more_images, fewer)
                expected.append(" ".join(f"| {title} | {sigma} | {other} | {' | '.join(cells)} |".split()))
    lines = table_from(RESULTS / "beyond/README.md", "| ours")[2:]
    assert [" ".join(line.split()) for line in lines] == expected


def test_differences_at_10_000_votes_equal_those_that_the_certificates_predict() -> None:
    """Against networks of which only certificates with n = 100,000 exist."""
    text = " ".join((RESULTS / "beyond/README.md").read_text(encoding="utf-8").split())
    smoothmix = {i: mean_radius_of_10_000_votes(max(r, 0.0), 1.0) for i, r in counted_radii(SMOOTHMIX_1, 20).items()}
    seeds = [paired_difference(counted_radii(run, 20), smoothmix) for run in SEEDS.values()]
    assert {difference[-7:] for difference in seeds} == {"(0.003)"}
    first, second, third = (difference[1:-8] for difference in seeds)
    assert f"one-step adversary by {first}, {second} and {third} (0.003 each)" in text
    best, catrs = counted_radii("beyond/mnist-best-1.0", 5), published_radii("mnist-catrs-1.0")
    fewer = [{i: mean_radius_of_10_000_votes(max(r, 0.0), 1.0) for i, r in radii.items()} for radii in (best, catrs)]
    assert f"for n = 10,000 the votes of both predict {paired_difference(*fewer)}." in text


MODELS = {
    "cifar10-best-0.5": "beyond/cifar10-distilled-0.5",
    "cifar10-best-1.0": "beyond/cifar10-distilled-1.0",
    "mnist-best-0.25": "beyond/mnist-best-0.25",
    "mnist-best-0.5": "beyond/mnist-best-0.5",
    "mnist-best-1.0": "beyond/mnist-best-1.0",
    "mnist-best-1.0-seed1": "beyond/mnist-best-seeds/1.0-seed1",
    "mnist-best-1.0-seed2": "beyond/mnist-best-seeds/1.0-seed2",
}


@pytest.mark.parametrize(("name", "run"), MODELS.items())
def test_models_are_copies_of_certified_ones(name: str, run: str) -> None:
    """The card has the ACR of the certificates, and says if they are those of the weights before they were rounded."""
    ((_, path),) = find_certificates([RESULTS / run])
    file, model = read_certificates(path), load(RESULTS / "models" / name)
    assert model.epoch == file.provenance["epoch"]
    stored = model.provenance["weights"]
    assert (model.recipe.sigma, model.recipe.dataset) == (file.settings["sigma"], file.settings["dataset"])
    card = (RESULTS / "models" / name / "README.md").read_text(encoding="utf-8")
    if "exactly these weights" in card:
        assert file.settings["weights_sha256"] == model.about()["weights_sha256"]
    else:
        assert file.settings["weights_sha256"] == stored["original_weights_sha256"]
        assert "Before rounding: ACR" in card
    assert f"ACR {file.acr:.3f} on {len(file.rows):,} test images" in card
    if limit := re.search(r"none changed by more than ([0-9.]+)\)", card):
        assert 0 <= float(limit[1]) - stored["largest_change"] <= 1e-5
    for title in ("Training", "Numbers", "Use", "Limits", "Licence"):
        assert f"## {title}" in card


CERTIFIED = {
    "bare": "clean/certificates/bare",
    "denoiser": "clean/certificates/denoised",
    "fine-tuning": "finetuned/certificates/finetuned",
}


def test_rows_of_existing_models_are_those_of_their_certificates() -> None:
    """Each percentage with its Clopper-Pearson interval, and the average radius, in both tables."""
    lines = (RESULTS / "existing-models/README.md").read_text().splitlines()
    tables = {"## MNIST": "", "## CIFAR-10": "cifar10/"}
    folder, head, checked = "", [], 0
    for line in lines:
        folder = next((value for key, value in tables.items() if line.startswith(key)), folder)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| classifier"):
            head = cells
        if not line.startswith(("| clean", "| LeNet", "| ResNet")):
            continue
        kind = next(key for key in reversed(CERTIFIED) if key in cells[0])
        (file,) = (RESULTS / "existing-models").glob(f"{folder}{CERTIFIED[kind]}.tsv*")
        rows = read_certificates(file).rows
        for title, cell in zip(head, cells, strict=True):
            if title == "ACR":
                assert cell == f"{fmean(row.certificate.radius if row.correct else 0.0 for row in rows):.3f}"
            elif title.startswith("r = "):
                right = sum(row.correct and row.certificate.radius >= float(title[4:]) for row in rows)
                low, high = (100 * float(end) for end in binomtest(right, len(rows)).proportion_ci(0.95, "exact"))
                assert cell == f"{100 * (right / len(rows)):.1f}% ({low:.1f} to {high:.1f})"
                checked += 1
    assert checked == 2 * 4 * 3


@pytest.mark.parametrize("manifest", sorted(RESULTS.rglob(MANIFEST)), ids=lambda path: path.parent.name)
def test_reports_can_be_written_again(manifest: Path) -> None:
    """The manifest knows the files as they are; otherwise the commands of the README refuse to replace them."""
    files = list(json.loads(manifest.read_text())["files"])
    assert {"report.md", "cost.md"}.intersection(files)
    assert all((manifest.parent / name).is_file() for name in files)
    refuse_foreign_files(manifest.parent, files, force=False)


def test_results_are_small() -> None:
    sizes = {path: path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()}
    weights = [path for path in sizes if path.suffix == ".safetensors"]
    assert {path.parent.name for path in weights} == MODELS.keys()
    assert sum(sizes[path] for path in weights) < 12e6
    assert sum(size for path, size in sizes.items() if path not in weights) < 12e6
