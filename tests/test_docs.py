"""What the documentation shows is run: the Python of the guide and the README; command lines are parsed."""

import csv
import gzip
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import typer
import yaml
from scipy.stats import beta, norm

from smoothcert import read_certificates, report
from smoothcert.cli import app
from smoothcert.data import DATASETS, ImageData
from smoothcert.data.augmentation import flip_and_crop
from smoothcert.noise import NOISES
from smoothcert.objectives import OBJECTIVES
from smoothcert.papers.presets import preset
from smoothcert.report.names import METHODS
from smoothcert.smoothing.certificate import ABSTAIN, Certificate
from smoothcert.training.checkpoint import load_run
from smoothcert.training.choices import Augmentation, Bound
from smoothcert.training.initial_weights import load_initial_weights
from smoothcert.training.sampler_settings import SAMPLERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
LINKED = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "results").rglob("README.md"))]
OPTIONS_OF_OTHER_TOOLS = {
    *("--help", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts"),
    *("--rdzv-backend", "--rdzv-id", "--rdzv-endpoint", "--rdzv-conf"),
    *("--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--requeue"),
    "--write",
}
"""Of torchrun, SLURM and tests/objectives/test_traces.py."""


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.usefixtures("no_pictures")
def test_the_guide_to_an_objective_runs_in_a_project_of_its_own(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Every command of the page, on fewer images; certificates and reports without the objective's file."""
    page = ROOT / "docs/add-an-objective.md"
    (source,) = python_blocks(page)
    assert len(source.strip().splitlines()) < 30
    file = tmp_path / "smooth_labels.py"
    file.write_text(source)
    np.savez(tmp_path / "small.npz", images=tiny_data.images[:, 0].numpy(), labels=tiny_data.labels.numpy())
    monkeypatch.chdir(tmp_path)
    for line in command_lines(page):
        for asked, enough in (("mnist-sample", "npz:small.npz"), ("--n 1000", "--n 100")):
            line = line.replace(asked, enough)
        words = shlex.split(re.sub("--skip 20|--max-images 20", "--max-images 2", line))
        needs_code = words[0] in ("objectives", "train", "sweep")
        if not needs_code:
            file.rename(tmp_path / "away.py")
        computes = words[0] in ("train", "certify", "sweep")
        small = ["--model", "tiny"] if words[0] == "sweep" else []
        code, output, errors = run_cli(*words, *small, *(["--device", "cpu"] if computes else []))
        assert code == 0, errors
        if not needs_code:
            (tmp_path / "away.py").rename(file)
    assert "trained already, 1 of 1 epochs" in output
    run = load_run(tmp_path / "runs/mine")
    assert (run.recipe.method, run.recipe.to_mapping()["objective"]["smoothing"]) == ("SmoothLabels", 0.2)
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    shown = yaml.safe_load(recipe)["objective"]
    assert shown.items() <= run.recipe.to_mapping()["objective"].items()


def test_the_code_of_the_page_about_losses_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks in order, with a small network and images in place of the reader's."""
    monkeypatch.chdir(tmp_path)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    before = network[1].weight.detach().clone()
    batches = [(torch.rand(4, 3, 2, 2), torch.arange(4))]
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    names: dict[str, Any] = {"torch": torch, "model": network, "loader": batches, "optimizer": optimizer}
    names["test_data"] = torch.utils.data.TensorDataset(torch.rand(2, 3, 2, 2), torch.arange(2))
    for number, source in enumerate(python_blocks(ROOT / "docs/losses.md")):
        exec(compile(source, f"losses.md, block {number}", "exec"), names)
    assert names["loss"].isfinite()
    assert names["parts"].keys() == {"cross_entropy", "mix"}
    assert not torch.equal(network[1].weight, before)
    (row,) = report(["runs"])
    assert (row["name"], row["method"], row["n"]) == ("consistency-0", "Consistency", 1_000)


def test_the_table_of_losses_names_every_hyper_parameter() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/losses.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name: set(re.findall(r"`(\w+)`", fields)) - {"first_drop"} for name, fields in rows}
    expected = {kind.__name__: set(kind.model_fields) - {"num_noise"} for kind in OBJECTIVES.values()}
    assert named == expected, "correct the table of modules in docs/losses.md"


def test_the_example_of_a_loop_trains_a_robust_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import own_loop

    def load_less(split: str, load: Callable[[str], Any] = own_loop.load) -> torch.utils.data.TensorDataset:
        return torch.utils.data.TensorDataset(*load(split)[:1500])

    monkeypatch.setattr(own_loop, "load", load_less)
    assert own_loop.main() >= 0.5


def test_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its three lines, with a small network and images in place of the reader's."""
    (source,) = python_blocks(ROOT / "README.md")
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    names: dict[str, object] = {"model": network, "images": torch.rand(2, 3, 2, 2)}
    exec(compile(source.replace("100_000", "1_000"), "README.md", "exec"), names)
    assert len(names["certificates"]) == 2


def test_architecture_page_names_exactly_the_modules() -> None:
    """In the first column of its table of packages."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text[text.index("| package |") :].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w./]+)`", row.split("|")[1])]
    package = ROOT / "src/smoothcert"
    names = {p.name for p in package.glob("[a-z]*.py")} | {p.parent.name + "/" for p in package.glob("*/__init__.py")}
    assert sorted(named) == sorted(names), "correct the table of packages in docs/architecture.md"
    assert len(names) + 2 <= 18, "with __init__ and __main__"


def test_files_of_the_architecture_page_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([a-z_0-9]+/[a-z_0-9/]*\.py)`", text))
    assert len(files) > 20
    absent = [name for name in sorted(files) if not (ROOT / "src/smoothcert" / name).exists()]
    assert absent == [], "docs/architecture.md names files that do not exist"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("certification.md", [*NOISES, *get_args(Bound)]),
        ("data.md", [*DATASETS, *get_args(Augmentation)]),
        ("objectives.md", METHODS.values()),
        ("training.md", SAMPLERS),
    ],
)
def test_pages_describe_every_choice(page: str, names: Iterable[str]) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").lower()
    absent = [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name.lower())}(?![\w-])", text)]
    assert absent == [], f"describe {', '.join(absent)} in docs/{page}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", LINKED, ids=page_name)
def test_links_have_targets(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            page = path.parent / target if target else path
            assert page.exists(), target
            assert not anchor or anchor in headings(page), f"{target}#{anchor}"


def test_figures_are_small_and_all_shown() -> None:
    figures = list((ROOT / "docs/figures").iterdir())
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    shown = {name for text in texts for name in re.findall(r"\((?:docs/)?figures/([^)]+)\)", text)}
    assert {figure.name for figure in figures} == shown
    assert all(figure.stat().st_size < 200_000 for figure in figures)


def test_script_of_the_first_figure_draws_what_the_certificates_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    import draw_hero

    shares = []
    for run in ("gaussian-0.5", "smoothmix-eta5-0.5"):
        with gzip.open(ROOT / f"results/mnist/{run}/certificates/test-n100000.tsv.gz", "rt") as file:
            rows = [row for row in csv.DictReader(file, delimiter="\t") if int(row["idx"]) % 5 == 0]
        shares.append(sum(row["correct"] == "1" and float(row["radius"]) >= 1.75 for row in rows) / len(rows))
    figure = draw_hero.draw()
    assert re.findall(r"\d+%", figure.get_suptitle()) == [f"{share:.0%}" for share in reversed(shares)]
    assert len(figure.axes[0].lines) >= len(draw_hero.RUNS)


def command_lines(path: Path) -> list[str]:
    """The lines of a page's code blocks that call smoothcert, without remarks."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in found if not language]
    lines = [line.partition(" # ")[0].strip() for block in blocks for line in block.splitlines()]
    return [line.partition("smoothcert ")[2] for line in lines if re.match(r"(torchrun .* -m )?smoothcert ", line)]


@cache
def top_command() -> Any:
    return typer.main.get_command(app)


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `words` call, and the words that are left for it."""
    command = top_command()
    while hasattr(command, "commands"):
        assert words[0] in command.commands, " ".join(words)
        command, words = command.commands[words[0]], words[1:]
    return command, words


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def all_options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from all_options(inner)


def test_lists_in_command_lines_are_quoted() -> None:
    """zsh, the shell of macOS, takes brackets for a pattern of file names and refuses the whole line."""
    texts = {page_name(path): path.read_text(encoding="utf-8") for path in LINKED}
    assert [name for name, text in texts.items() if re.search(r"--set\s+[\w.]+=\[", text)] == []


def test_pages_have_command_lines() -> None:
    assert sum(len(command_lines(page)) for page in PAGES) > 30


@pytest.mark.parametrize("path", [page for page in PAGES if page.name != "commands.md"], ids=page_name)
def test_command_lines_of_the_guide_parse(path: Path) -> None:
    """Parsed as the command line does, types and required arguments included; nothing is run."""
    for line in command_lines(path):
        command, words = find_command(shlex.split(line))
        command.make_context(command.name, words)


def test_shown_jobs_of_several_processes_are_not_refused() -> None:
    """The number of processes must divide the images of a step, which a preset with several noises has fewer of."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    jobs = re.findall(r"^torchrun (.*) -m smoothcert train --preset (\S+) --sigma (\S+)", text, flags=re.MULTILINE)
    assert len(jobs) >= 2
    for options, name, sigma in jobs:
        given = dict(re.findall(r"--(nnodes|nproc-per-node) (\d+)", options))
        processes = math.prod(map(int, given.values()))
        assert preset(name, float(sigma)).images_per_step % processes == 0, name


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_shown_options_exist(path: Path) -> None:
    """In the one-line summaries of the commands too, whose brackets and bars do not parse, and in the text."""
    text = path.read_text(encoding="utf-8")
    for line in [*command_lines(path), *re.findall(r"`smoothcert ([^`]+)`", text)]:
        assert options_in(line) <= {*all_options(top_command().commands[line.split()[0]])}, line
    assert options_in(text) <= {*all_options(top_command()), *OPTIONS_OF_OTHER_TOOLS}


def test_snippets_of_the_certificate_page_print_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/reading-a-certificate.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) == 2
    for source, shown in snippets:
        exec(compile(source, "reading-a-certificate.md", "exec"), {})
        assert capsys.readouterr().out == shown


def test_python_of_the_results_page_computes_the_numbers_of_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the page shows is what the blocks print; the first numbers are those of the CIFAR-10 page."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    for source in python_blocks(ROOT / "results/README.md"):
        exec(compile(source, "results/README.md", "exec"), {})
    assert capsys.readouterr().out == "".join(re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL))
    table = (ROOT / "results/cifar10/README.md").read_text(encoding="utf-8")
    assert "| Consistency | 0.5 | 0.695 |" in table


def test_row_of_the_certificate_page_is_in_the_results() -> None:
    text = (ROOT / "docs/reading-a-certificate.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(idx.*?)```", text, flags=re.DOTALL)
    content = (ROOT / "results/float32/consistency-0.5/certificates/test-n100000.tsv.gz").read_bytes()
    rows = gzip.decompress(content).decode().splitlines()
    for line in block.splitlines():
        assert "\t".join(line.split()) in rows


def test_user_model_of_the_guide_gets_true_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network is linear, so its distance d from the boundary between any two classes is known exactly.

    Under noise a rival beats the class with probability Phi(-d / sigma). The largest of these bounds the class's
    probability from above, their sum from below, and no radius beyond the nearest boundary may be certified. The seed
    is given, since fresh votes may fail with probability alpha each.
    """
    module, script, loop, save = python_blocks(ROOT / "docs/your-own-model.md")
    (tmp_path / "nearest_mean.py").write_text(module, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nearest_mean", raising=False)
    names: dict[str, Any] = {}
    exec(compile(script.replace("n=10_000", "n=1_000, seed=0"), "your-own-model.md", "exec"), names)
    monkeypatch.delitem(sys.modules, "nearest_mean")
    few = loop.replace('"test")', '"test").subset(torch.arange(50))').replace("n=1_000", "n=200, seed=0")
    exec(compile(few, "your-own-model.md", "exec"), names)
    assert (names["total"], len(read_certificates(tmp_path / "mine.tsv").rows)) == (50, 50)
    assert 20 < names["right"] < 45
    certificates: list[Certificate] = names["certificates"]
    normalize, linear = names["build"]()
    weight = linear.weight.detach() / normalize.std.item()  # as a function of the image in [0, 1]
    logits = linear(normalize(names["images"])).detach()
    certified = [(c, logit) for c, logit in zip(certificates, logits, strict=True) if c.prediction != ABSTAIN]
    assert len(certificates) == 10
    assert len(certified) >= 5
    for certificate, logit in certified:
        rivals = [c for c in range(10) if c != certificate.prediction]
        gaps = logit[certificate.prediction] - logit[rivals]
        distances = (gaps / (weight[certificate.prediction] - weight[rivals]).norm(dim=1)).numpy()
        beaten, four_deviations = norm.sf(distances / 0.5), 4 * 0.5 / math.sqrt(1000)
        astray = 1 - certificate.count / 1000
        assert beaten.max() - four_deviations < astray < beaten.sum() + four_deviations
        bound = beta.ppf(0.999, 1000 - certificate.count + 1, certificate.count)
        assert certificate.radius == pytest.approx(0.5 * norm.isf(bound))
        assert certificate.radius < distances.min()

    exec(compile(save, "your-own-model.md", "exec"), {})
    with np.load("digits.npz") as saved:
        assert saved["images"].shape == (2000, 1, 28, 28)
        assert saved["labels"].shape == (2000,)


def test_python_of_the_page_about_certification_runs(
    tmp_path: Path, trained_run: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its three blocks, with small runs, few images and few votes; a file has the ACR that is printed."""
    monkeypatch.chdir(tmp_path)
    np.savez("small.npz", images=tiny_data.images[:, 0].numpy(), labels=tiny_data.labels.numpy())
    for name in ("a", "clean"):
        shutil.copytree(trained_run, f"runs/{name}")
    for sigma in ("1.0", "0.5", "0.25"):
        shutil.copytree(ROOT / f"results/models/mnist-best-{sigma}", f"runs/sigma{sigma}")
    names: dict[str, Any] = {}
    for source in python_blocks(ROOT / "docs/certification.md"):
        for asked, enough in (
            ("n=10_000, skip=20", "n=100, max_images=2"),
            ('"denoised.tsv", ', '"denoised.tsv", n=100, max_images=2, '),
            ("epochs=4", "epochs=1"),
            ("mnist-sample", "npz:small.npz"),
        ):
            source = source.replace(asked, enough)
        exec(compile(source, "certification.md", "exec"), names)
    assert names["file"].acr == read_certificates(tmp_path / "runs/a/certificates/python.tsv").acr
    denoised = read_certificates(tmp_path / "denoised.tsv")
    assert (len(denoised.rows), denoised.settings["sigma"]) == (2, names["smoothed"].noise.sigma)
    assert [stage.noise.sigma for stage in names["cascade"].stages] == [1.0, 0.5, 0.25]


def test_python_of_the_page_about_existing_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corrected network does to images in [0, 1] what the first one does to normalised images."""
    network, training, corrected = python_blocks(ROOT / "docs/existing-models.md")
    (tmp_path / "digits.py").write_text(network, encoding="utf-8")
    (tmp_path / "fixed.py").write_text(corrected, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(training.replace("torch.randperm(2 * len(data))", "torch.arange(256)"), "training", "exec"), names)
    import fixed

    model = fixed.build()
    load_initial_weights(model, Path("weights.pt"), "fixed")
    images = names["images"]
    torch.testing.assert_close(model.eval()(images), names["model"].eval()((images - 0.1307) / 0.3081))
    for name in ("digits", "fixed"):
        monkeypatch.delitem(sys.modules, name)


def test_python_of_the_page_about_training_runs(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the small network of the tests and one epoch; the loss that is printed is that of `metrics`."""
    (source,) = python_blocks(ROOT / "docs/training.md")
    monkeypatch.chdir(tmp_path)
    changes = 'model_copy(update={"model": "tiny", "epochs": 1, "learning_rate_drops": ()})'
    short = source.replace("sigma=0.5)\n", f"sigma=0.5).{changes}\n")
    names: dict[str, Any] = {
        "my_dataset": torch.utils.data.TensorDataset(*tiny_data.batch(torch.arange(len(tiny_data))))
    }
    exec(compile(short, "training.md", "exec"), names)
    assert [line["loss"] for line in names["run"].metrics] == [float(capsys.readouterr().out)]


def test_python_of_the_page_about_data_divides_and_normalises_the_images(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each training image is in one of the two parts, and the parts keep the augmentation of the data set."""
    held_out, normalised = python_blocks(ROOT / "docs/data.md")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(held_out.replace("500", "50"), "held_out.py", "exec"), names)
    whole = replace(tiny_data, augment=flip_and_crop)
    monkeypatch.setattr("smoothcert.load_dataset", lambda name, split, image_size, on_note=None: whole)
    parts = [names["photographs"](split) for split in ("train", "test")]
    assert [len(part) for part in parts] == [206, 50]
    images = torch.cat([part.images for part in parts]).flatten(1).tolist()
    assert sorted(images) == sorted(whole.images.flatten(1).tolist())
    assert all(part.augment is flip_and_crop for part in parts)
    assert len(parts[1].labels.unique()) == 10
    exec(compile(normalised, "photographs.py", "exec"), names)
    assert names["normalised"]("test").normalization.mean == (0.49, 0.48, 0.45)
