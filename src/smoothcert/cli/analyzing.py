"""`smoothcert analyze`: the papers' analyses, one sub-command each; all write a figure and the numbers behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.options import (
    DATASET,
    NOISE_LEVEL,
    Device,
    Force,
    ImageOptions,
    OwnNetwork,
    console,
    count_option,
    show_table,
)
from smoothcert.cli.registration import add_command
from smoothcert.data.datasets import refuse_absent_data
from smoothcert.training.run_folder import check_run_folder

if TYPE_CHECKING:  # commands import torch only when they need it: --help answers at once
    from matplotlib.figure import Figure

    from smoothcert.analysis.compared_runs import ComparedRuns, UnrestrictedAttack
    from smoothcert.analysis.output import Output

analyze = typer.Typer(
    no_args_is_help=True, help="Draw the papers' analyses: each command writes a figure and its numbers (CSV)."
)

OPTIONS = "Options"
"""The group of options that belong to no other group: it keeps the numbers of `input-dependent-noise` together."""

Runs = Annotated[list[Path], typer.Argument(help="Run folders.")]
Index = Annotated[int, typer.Option(help="Which test image, from 0.")]


@dataclass(frozen=True)
class FigureOptions:
    """Where an analysis writes its figure and its numbers."""

    out: Annotated[Path, typer.Option(help="Folder for the figure and the csv file.")] = Path("analysis")
    format_: Annotated[str, typer.Option("--format", help="Comma-separated picture formats: png, pdf, svg.")] = "png"
    force: Force = False

    def output(self, name: str, texts: tuple[str, ...] = ("csv",)) -> "Output":
        """Return the files of the analysis `name`, after a check that they can be written."""
        from smoothcert.analysis.output import Output, parse_formats

        return Output(self.out, name, parse_formats(self.format_), self.force).check(texts)


@dataclass(frozen=True)
class ComparisonOptions(ImageOptions, FigureOptions):
    """The options of analyses that load networks and images."""

    sigma: Annotated[float | None, typer.Option(help=NOISE_LEVEL, show_default="the runs' own")] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0
    model: OwnNetwork = None
    dataset: Annotated[str | None, typer.Option(help=DATASET, show_default="the runs' own")] = None
    device: Device = "auto"

    def start(self, runs: list[Path], name: str) -> "tuple[ComparedRuns, Output]":
        """Return the runs, and the files of the analysis `name`, which are checked first."""
        for run in runs:
            check_run_folder(run)
        refuse_absent_data(self.dataset)
        from smoothcert.analysis.compared_runs import load_compared_runs
        from smoothcert.certification.subject import Subject
        from smoothcert.cli.classifiers import print_about_runs
        from smoothcert.distributed import find_device
        from smoothcert.report.progress import print_data_notes

        output = self.output(name)
        device = find_device(self.device)
        compared = load_compared_runs(
            runs,
            device,
            sigma=self.sigma,
            dataset=self.dataset,
            image_size=self.image_size,
            load=self.load,
            code=self.model,
            on_run=lambda run: print_about_runs(Subject.of(run), console.note, console.warn),
        )
        print_data_notes(console, compared.data)
        return compared, output


@dataclass(frozen=True)
class AttackOptions:
    """The options of analyses that attack images."""

    steps: Annotated[int | None, typer.Option(help="Attack steps (T).", show_default="SmoothMix's for the data")] = None
    step_size: Annotated[
        float | None, typer.Option(help="L2 length of an attack step (alpha).", show_default="SmoothMix's for the data")
    ] = None
    num_noise: Annotated[int, typer.Option(help="Noise samples that the attack averages over.")] = 32

    def on(self, compared: "ComparedRuns") -> "UnrestrictedAttack":
        from smoothcert.analysis.compared_runs import UnrestrictedAttack, default_attack

        usual_steps, usual_size = default_attack(compared.data, compared.noise.sigma)
        steps = usual_steps if self.steps is None else self.steps
        return UnrestrictedAttack(steps, usual_size if self.step_size is None else self.step_size, self.num_noise)


def margins(
    *,
    runs: Runs,
    index: Index = 0,
    n: Annotated[int, count_option("--n", help="Number of noise samples.")] = 10_000,
    comparison: ComparisonOptions,
) -> None:
    """Draw histograms of the log-probability margins of one test image under noise, one per run."""
    compared, output = comparison.start(runs, "margins")
    from smoothcert.analysis.margins import draw_margins, margins_csv, margins_under_noise

    result = margins_under_noise(compared, index, n, comparison.seed)
    shares = {run: f"{result.share_below_zero(run):.2%}" for run in result.values}
    rows = [[run, shares[run], f"{values.mean():.3f}"] for run, values in result.values.items()]
    show_table(["run", "margin below 0", "mean margin"], rows)
    _write(output, {"csv": margins_csv(result)}, lambda: draw_margins(result))


def interpolate(
    *,
    runs: Runs,
    index: Index = 0,
    points: Annotated[int, typer.Option(help="Points on the line.")] = 41,
    n: Annotated[int, count_option("--n", help="Noise samples at each point.")] = 500,
    votes: Annotated[bool, typer.Option("--votes", help="Draw the share of votes too.")] = False,
    attack: AttackOptions,
    comparison: ComparisonOptions,
) -> None:
    """Draw the confidence on the line from a test image to its adversarial example, and images on it."""
    compared, output = comparison.start(runs, "interpolation")
    from smoothcert.analysis.interpolation import draw_interpolation, interpolation_csv
    from smoothcert.analysis.interpolation import interpolate as walk
    from smoothcert.report.progress import counting_bar

    with counting_bar({"interpolate": len(runs)}) as show:
        result = walk(
            compared,
            index,
            attack.on(compared),
            points=points,
            num_noise=n,
            seed=comparison.seed,
            on_progress=lambda done: show("interpolate", done),
        )
    crossings = {line.run: result.crossing(line) for line in result.lines}
    equal = {run: "never" if ratio is None else f"{ratio:.3f}" for run, ratio in crossings.items()}
    rows = [[line.run, str(line.other), f"{line.distance:.3f}", equal[line.run]] for line in result.lines]
    show_table(["run", f"class {result.label} becomes", "L2 distance", "equal confidence at"], rows)
    _write(output, {"csv": interpolation_csv(result)}, lambda: draw_interpolation(result, votes=votes))


def mixing(
    *,
    runs: Runs,
    n: Annotated[int, count_option("--n", help="Noise samples per prediction.")] = 100,
    skip: Annotated[int, count_option(help="Take every SKIP-th test image.")] = 1,
    max_images: Annotated[int, count_option(help="Take at most this many images.")] = 200,
    attack: AttackOptions,
    comparison: ComparisonOptions,
) -> None:
    """Mix test images with their adversarial examples and draw the ratios at which the class changes."""
    compared, output = comparison.start(runs, "mixing")
    from smoothcert.analysis.mixing import draw_mixing, mixing_csv, mixing_ratios
    from smoothcert.certification.shards import Selection
    from smoothcert.report.progress import counting_bar

    unrestricted = attack.on(compared)
    indices = Selection(len(compared.data), skip, max_images).indices
    with counting_bar({f"mixing {run.name}": len(indices) for run in compared.runs}) as show:
        result = mixing_ratios(
            compared,
            indices,
            unrestricted,
            num_noise=n,
            seed=comparison.seed,
            on_progress=lambda run, done: show(f"mixing {run}", done),
        )
    rows = [[r.run, f"{r.median:.3f}", f"{r.wrong_from_the_start:.1%}", f"{r.never_changes:.1%}"] for r in result.runs]
    show_table(["run", "median ratio", "wrong from the start", "never changes"], rows)
    _write(output, {"csv": mixing_csv(result)}, lambda: draw_mixing(result))


def cost(*, runs: Runs, figure: FigureOptions) -> None:
    """Draw the cost of training: time, peak memory and hyper-parameters, with published values if there are any."""
    from smoothcert.analysis.cost import cost_csv, cost_markdown, cost_table, draw_cost, training_costs
    from smoothcert.report.layout import terminal

    output = figure.output("cost", ("csv", "md"))
    costs = training_costs(runs)
    console.print(terminal(cost_table(costs), console.width))
    _write(output, {"csv": cost_csv(costs), "md": cost_markdown(costs)}, lambda: draw_cost(costs))


def input_dependent_noise(
    p: Annotated[float, typer.Option("--p", help="The class's probability at the image.")] = 0.99,
    sigma: Annotated[float, typer.Option(help="Noise level at the image.", rich_help_panel=OPTIONS)] = 0.5,
    other_sigma: Annotated[float, typer.Option(help="Noise level at the other point.")] = 0.55,
    radius: Annotated[float, typer.Option(help="L2 distance between the two.", rich_help_panel=OPTIONS)] = 0.25,
    max_dimension: Annotated[int, typer.Option(min=1, help="Largest dimension.")] = 1_000_000,
    *,
    figure: FigureOptions,
) -> None:
    """Draw the exact worst case for noise whose scale depends on the input, and the bound C/d, by dimension."""
    from smoothcert.analysis import input_dependent_noise as theorem

    output = figure.output("input-dependent-noise")
    scales = theorem.TwoScales(p, sigma, other_sigma, radius)
    cases = theorem.worst_cases(scales, theorem.default_dimensions(max_dimension))
    exact = {name: theorem.worst_case(scales, d) for name, d in theorem.IMAGES.items()}
    rows = [[name, f"{d:,}", f"{exact[name]:.3g}" if exact[name] else "< 1e-300"] for name, d in theorem.IMAGES.items()]
    rows.append(["equal σ", "any", f"{scales.same_scale:.3g}"])
    show_table(["images", "dimension", "smallest probability"], rows)
    _write(output, {"csv": theorem.worst_cases_csv(cases)}, lambda: theorem.draw_worst_cases(cases))


def _write(output: "Output", texts: dict[str, str], draw: "Callable[[], Figure]") -> None:
    for path in output.write(texts, draw):
        console.print(f"wrote {path}")


ANALYSES: tuple[tuple[str, Callable[..., None], str], ...] = (
    # name, function, example
    ("margins", margins, "runs/a runs/b --index 7"),
    ("interpolate", interpolate, "runs/a --index 7"),
    ("mixing", mixing, "runs/a runs/b --max-images 100"),
    ("cost", cost, "runs/a runs/b"),
    ("input-dependent-noise", input_dependent_noise, "--p 0.99 --sigma 0.5 --other-sigma 0.55"),
)
for name, function, example in ANALYSES:
    add_command(analyze, name, function, None, f"analyze {name} {example}")
