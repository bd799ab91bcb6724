"""`smoothcert serve`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.options import ClassifierOptions, Device, Sigma, console, folder_name
from smoothcert.cli.quickstart import OUT, small_recipe
from smoothcert.errors import RequestError
from smoothcert.training.run_folder import MODEL, RECIPE

if TYPE_CHECKING:  # commands import torch only when they need it
    import torch

    from smoothcert.certification.serve.service import ServedModel

DEMO = "consistency"
"""The method of the quickstart that --demo serves."""


def serve(
    *,
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders; the page has a slider if sigmas differ.")
    ] = None,
    request: ClassifierOptions,
    sigma: Sigma = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Serve the quickstart's model; train it if there is none.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all machines.")] = "127.0.0.1",
    device: Device = "auto",
    token: Annotated[Path | None, typer.Option(help="File with a token that clients must send.")] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Noisy images per forward pass.", show_default="fits the device")
    ] = None,
    max_votes: Annotated[
        int, typer.Option(min=100, help="The most votes per image that a client may ask for.")
    ] = 20_000,
    max_seconds: Annotated[int, typer.Option(min=1, help="The longest deadline of a request.")] = 30,
    max_body: Annotated[int, typer.Option(min=1, help="The longest body, in MiB.")] = 8,
    queue: Annotated[int, typer.Option(min=1, help="Images that may wait; more are refused with 429.")] = 256,
    log: Annotated[Path | None, typer.Option(help="Folder for the log of certificates.", show_default="no log")] = None,
) -> None:
    """Answer prediction requests with certificates over HTTP, with a page that shows the votes."""
    folders = runs or []
    named = request.network
    if demo == bool(folders or named):
        raise RequestError(
            f"expected run folders, --model, --hub or --demo, got {'several' if demo else 'none'} of them; give one"
        )
    request.check(folders, several=True)
    if not demo:
        request.check_noise_level(folders, sigma)
    require_server()
    from smoothcert.certification.serve.requests import Limits
    from smoothcert.certification.serve.server import address, is_local, listen, read_token, serve
    from smoothcert.certification.serve.service import Service
    from smoothcert.distributed import find_device

    secret = None if token is None else read_token(token)
    listener = listen(host, port)  # a port in use is reported before models are loaded
    folders = [demo_run()] if demo else folders
    limits = Limits(votes=max_votes, milliseconds=1000 * max_seconds, body=max_body << 20, queue=queue)
    torch_device = find_device(device)
    service = Service(load_models(request, folders, sigma, max_batch, torch_device), limits, log)
    service.warm_up()
    if secret is None and not is_local(host):
        console.warn(f"anyone who reaches {host} can use this server; give a --token FILE")
    for served in service.models:
        noise = served.counter.noise
        console.print(f"serving {served.name} ({noise.name} noise, sigma {noise.sigma:g}, {torch_device.type})")
    url = address(listener)
    console.print(f"open {url} in a browser, or POST images to {url}/v1/predict; Ctrl+C stops")
    serve(service, listener, secret)
    console.print("stopped")


def require_server() -> None:
    """Refuse an installation without the extra `serve`."""
    try:
        import fastapi
        import uvicorn

        del fastapi, uvicorn
    except ImportError as error:
        raise RequestError(
            f"serve: expected fastapi and uvicorn, got none ({error}); install them: pip install 'smoothcert[serve]'"
        ) from error


def load_models(
    request: ClassifierOptions,
    folders: Sequence[Path],
    sigma: float | None,
    max_batch: int | None,
    device: "torch.device",
) -> "list[ServedModel]":
    """Return each run as a model, or all of them as one, or the network that is no run, under its name."""
    from smoothcert.certification.serve.service import ServedModel
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.cli.certify_targets import results_folder
    from smoothcert.cli.classifiers import named_classifier, noise_for, print_about_runs

    groups = [(folder.resolve().name, [folder]) for folder in folders]
    if request.kind or not folders:
        name = results_folder(request.kind, folders).name if folders else folder_name(str(request.network))
        groups = [(name, [*folders])]
    models = []
    for name, members in groups:
        named = named_classifier(request, members, sigma, console.note)
        level, kind = noise_for(named.subject, sigma, None)
        settings = CertifySettings(batch_size=max_batch, sigma=level)  # refuses a wrong sigma before warnings about it
        print_about_runs(named.subject, console.note, console.warn)
        for text in named.subject.noise_warnings(level, kind):
            console.warn(text)
        models.append(ServedModel.of(name, named.subject, named.spec, named.dataset, device, settings))
    return models


def demo_run() -> Path:
    """The run of the quickstart that --demo serves, trained first if it has no model."""
    folder = OUT / "runs" / DEMO
    if not (folder / MODEL).exists():
        from smoothcert.data import load_dataset
        from smoothcert.report.progress import train_with_bar

        recipe = small_recipe(f"mnist/{DEMO}")
        train_with_bar(recipe, load_dataset(recipe.dataset, "train"), folder, resume=(folder / RECIPE).exists())
    return folder
