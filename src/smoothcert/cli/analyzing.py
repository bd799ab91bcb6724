"""`smoothcert analyze`: the papers' analyses, one sub-command each; all write a figure and the numbers behind it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from smoothcert.cli.options import Data, Device, Force, console
from smoothcert.io.console import PlainColumn
from smoothcert.training.run_folder import check_run_folder

if TYPE_CHECKING:  # commands import torch only when they need it: --help answers at once
    from smoothcert.analysis.compared_runs import Subjects, UnrestrictedAttack

analyze = typer.Typer(
    no_args_is_help=True, help="The papers' analyses: each writes a figure and the numbers behind it (csv)."
)

Runs = Annotated[list[Path], typer.Argument(help="Run folders, all of one data set.")]
Out = Annotated[Path, typer.Option(help="Folder for the figure and the csv file.")]
Formats = Annotated[str, typer.Option("--format", help="Picture formats, separated by commas: png, pdf, svg.")]
Index = Annotated[int, typer.Option(help="Which test image, from 0.")]
Sigma = Annotated[float | None, typer.Option(help="Noise level.", show_default="the runs' own")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the noise.")]
Model = Annotated[str | None, typer.Option(help="The runs' own network, package.module:function.")]
Steps = Annotated[int | None, typer.Option(help="Attack steps (T).", show_default="SmoothMix's for the data")]
StepSize = Annotated[
    float | None, typer.Option(help="L2 length of an attack step (alpha).", show_default="SmoothMix's for the data")
]
AttackNoise = Annotated[int, typer.Option(help="Noises that the attack averages over.")]


@analyze.command("margins")
def margins(
    runs: Runs,
    index: Index = 0,
    n: Annotated[int, typer.Option("--n", help="Noises.")] = 10_000,
    sigma: Sigma = None,
    out: Out = Path("analysis"),
    format_: Formats = "png",
    force: Force = False,
    seed: Seed = 0,
    model: Model = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Log-probability margins of one test image under noise: histograms of several runs."""
    for run in runs:
        check_run_folder(run)
    from smoothcert.analysis.margins import draw_margins, margins_csv, margins_under_noise
    from smoothcert.analysis.output import write_analysis

    formats = _checked_formats(format_, out, "margins", force)
    subjects = _subjects(runs, sigma, model, data, device)
    found = margins_under_noise(subjects, index, n, seed)
    rows = [[run, f"{found.share_below_zero(run):.2%}", f"{values.mean():.3f}"] for run, values in found.values.items()]
    _show(["run", "margin below 0", "mean margin"], rows)
    _tell(write_analysis(out, "margins", draw_margins(found), formats, {"csv": margins_csv(found)}, force))


@analyze.command("interpolate")
def interpolate(
    runs: Runs,
    index: Index = 0,
    points: Annotated[int, typer.Option(help="Points on the line.")] = 41,
    n: Annotated[int, typer.Option("--n", help="Noises at each point.")] = 500,
    votes: Annotated[bool, typer.Option("--votes", help="Draw the share of votes too.")] = False,
    steps: Steps = None,
    step_size: StepSize = None,
    num_noise: AttackNoise = 32,
    sigma: Sigma = None,
    out: Out = Path("analysis"),
    format_: Formats = "png",
    force: Force = False,
    seed: Seed = 0,
    model: Model = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """From a test image to its unrestricted adversarial example: confidence on the way, and the images."""
    for run in runs:
        check_run_folder(run)
    from smoothcert.analysis.interpolation import draw_interpolation, interpolation_csv
    from smoothcert.analysis.interpolation import interpolate as walk
    from smoothcert.analysis.output import write_analysis

    formats = _checked_formats(format_, out, "interpolation", force)
    subjects = _subjects(runs, sigma, model, data, device)
    attack = _attack(subjects, steps, step_size, num_noise)
    with _bar() as bar:
        task = bar.add_task("interpolate", total=len(runs))
        found = walk(
            subjects,
            index,
            attack,
            points=points,
            num_noise=n,
            seed=seed,
            on_progress=lambda done: bar.update(task, completed=done),
        )
    crossings = [(line, found.crossing(line)) for line in found.lines]
    rows = [[x.run, str(x.other), f"{x.distance:.3f}", "never" if at is None else f"{at:.3f}"] for x, at in crossings]
    _show(["run", f"class {found.label} becomes", "L2 distance", "equal confidence at"], rows)
    figure = draw_interpolation(found, votes=votes)
    _tell(write_analysis(out, "interpolation", figure, formats, {"csv": interpolation_csv(found)}, force))


@analyze.command("mixing")
def mixing(
    runs: Runs,
    n: Annotated[int, typer.Option("--n", help="Noises of a prediction.")] = 100,
    skip: Annotated[int, typer.Option(help="Take every SKIP-th test image.")] = 1,
    max_images: Annotated[int, typer.Option(help="Take at most this many images.")] = 200,
    steps: Steps = None,
    step_size: StepSize = None,
    num_noise: AttackNoise = 32,
    sigma: Sigma = None,
    out: Out = Path("analysis"),
    format_: Formats = "png",
    force: Force = False,
    seed: Seed = 0,
    model: Model = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Equal-confidence mixing ratios toward adversarial examples: their distribution for several runs."""
    for run in runs:
        check_run_folder(run)
    from smoothcert.analysis.mixing import draw_mixing, mixing_csv, mixing_ratios
    from smoothcert.analysis.output import write_analysis
    from smoothcert.certification.shards import chosen_images

    formats = _checked_formats(format_, out, "mixing", force)
    subjects = _subjects(runs, sigma, model, data, device)
    attack = _attack(subjects, steps, step_size, num_noise)
    indices = chosen_images(len(subjects.data), skip, max_images)
    with _bar() as bar:
        tasks = {run.name: bar.add_task(f"mixing {run.name}", total=len(indices)) for run in subjects.runs}
        found = mixing_ratios(
            subjects,
            indices,
            attack,
            num_noise=n,
            seed=seed,
            on_progress=lambda run, done: bar.update(tasks[run], completed=done),
        )
    rows = [[r.run, f"{r.median:.3f}", f"{r.wrong_from_the_start:.1%}", f"{r.never_changes:.1%}"] for r in found.runs]
    _show(["run", "median ratio", "wrong from the start", "never changes"], rows)
    _tell(write_analysis(out, "mixing", draw_mixing(found), formats, {"csv": mixing_csv(found)}, force))


@analyze.command("cost")
def cost(runs: Runs, out: Out = Path("analysis"), format_: Formats = "png", force: Force = False) -> None:
    """Training cost of runs: time, peak memory, hyper-parameters; beside the published ones where there are any."""
    from smoothcert.analysis.cost import cost_cells, cost_csv, cost_markdown, draw_cost, training_costs
    from smoothcert.analysis.output import write_analysis
    from smoothcert.report.layout import UNKNOWN

    formats = _checked_formats(format_, out, "cost", force, ("csv", "md"))
    found = training_costs(runs)
    titles, rows = cost_cells(found)
    # The files have all columns; a terminal is narrow.
    told = [any(row[i] != UNKNOWN for row in rows) for i in range(len(titles))]
    narrow = [i for i, title in enumerate(titles) if told[i] and title not in ("hyper-parameters", "device")]
    _show([titles[i] for i in narrow], [[row[i] for i in narrow] for row in rows])
    texts = {"csv": cost_csv(found), "md": cost_markdown(found)}
    _tell(write_analysis(out, "cost", draw_cost(found), formats, texts, force))


@analyze.command("input-dependent-noise")
def input_dependent_noise(
    p: Annotated[float, typer.Option("--p", help="The class's probability at the image.")] = 0.99,
    sigma: Annotated[float, typer.Option(help="Noise level at the image.")] = 0.5,
    other_sigma: Annotated[float, typer.Option(help="Noise level at the other point.")] = 0.55,
    radius: Annotated[float, typer.Option(help="L2 distance between the two.")] = 0.25,
    max_dimension: Annotated[int, typer.Option(min=1, help="Largest dimension.")] = 1_000_000,
    out: Out = Path("analysis"),
    format_: Formats = "png",
    force: Force = False,
) -> None:
    """Noise whose scale depends on the input: the exact worst case and the bound C/d, against the dimension."""
    from smoothcert.analysis.input_dependent_noise import (
        IMAGES,
        TwoScales,
        default_dimensions,
        draw_worst_cases,
        worst_case,
        worst_cases,
        worst_cases_csv,
    )
    from smoothcert.analysis.output import write_analysis

    formats = _checked_formats(format_, out, "input-dependent-noise", force)
    scales = TwoScales(p, sigma, other_sigma, radius)
    found = worst_cases(scales, default_dimensions(max_dimension))
    exact = {name: worst_case(scales, d) for name, d in IMAGES.items()}
    rows = [[name, f"{d:,}", f"{exact[name]:.3g}" if exact[name] else "< 1e-300"] for name, d in IMAGES.items()]
    rows.append(["equal σ", "any", f"{scales.same_scale:.3g}"])
    _show(["images", "dimension", "smallest probability"], rows)
    texts = {"csv": worst_cases_csv(found)}
    _tell(write_analysis(out, "input-dependent-noise", draw_worst_cases(found), formats, texts, force))


def _checked_formats(format_: str, out: Path, name: str, force: bool, texts: tuple[str, ...] = ("csv",)) -> list[str]:
    """The picture formats, after a check that the files of the analysis can be written: the work may take hours."""
    from smoothcert.analysis.output import analysis_files, parse_formats
    from smoothcert.io.written_files import refuse_foreign_files

    formats = parse_formats(format_)
    refuse_foreign_files(out, analysis_files(name, formats, texts), force)
    return formats


def _subjects(runs: list[Path], sigma: float | None, model: str | None, data: Path | None, device: str) -> "Subjects":
    from smoothcert.analysis.compared_runs import load_subjects
    from smoothcert.distributed import find_device

    return load_subjects(runs, find_device(device), sigma=sigma, data=data, code=model)


def _attack(subjects: "Subjects", steps: int | None, step_size: float | None, num_noise: int) -> "UnrestrictedAttack":
    from smoothcert.analysis.compared_runs import UnrestrictedAttack, default_attack

    usual_steps, usual_size = default_attack(subjects.data, subjects.noise.sigma)
    return UnrestrictedAttack(
        usual_steps if steps is None else steps, usual_size if step_size is None else step_size, num_noise
    )


@contextmanager
def _bar() -> Iterator[Progress]:
    """On a terminal alone, and gone when done: what it counts is in the table that follows."""
    columns = (PlainColumn("{task.description}"), *Progress.get_default_columns()[1:])
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def _show(titles: list[str], rows: list[list[str]]) -> None:
    table = Table(*titles)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _tell(written: list[Path]) -> None:
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)
