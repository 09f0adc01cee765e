"""The programs of `jitney up --bulk`: RQ jobs and Celery tasks, awaited many at once, and Celery's beat for upkeep."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from jitney.errors import SettingsError
from jitney_worker.stack.children import Child

NEEDED = ("rq", "celery")
"""Modules, and the extras of the same names that bring them."""


def check_bridges() -> None:
    """Raise SettingsError for a bridge that is not installed, before anything is started."""
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise SettingsError(f"--bulk needs {' and '.join(missing)}: pip install 'jitney[{','.join(missing)}]'")


def bridges(data_dir: Path, environment: Mapping[str, str]) -> list[Child]:
    """One of each. Beat remembers in `data_dir` when it last sent what."""
    schedule = str(data_dir / "celerybeat-schedule")
    return [
        Child("rq-worker", ["rq-worker"], environment),
        Child("celery", ["--schedule", schedule], environment, module="jitney_worker.stack.celery_program"),
    ]
