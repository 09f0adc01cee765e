"""`pip install jitney` alone is enough for a client: nothing heavy is imported, nothing of the other rooms."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",
    "safetensors",
    "numpy",
    "fastapi",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "httpx2",
    "jitney_api",
    "jitney_worker",
)


def imported(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*(name.partition('.')[0] for name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(ended.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import jitney, jitney.client, jitney.cli, jitney.channel, jitney.embedded",
        "from typer.testing import CliRunner; from jitney.cli import app; CliRunner().invoke(app, ['--help'])",
    ],
)
def test_the_client_and_the_help_page_import_nothing_heavy(code: str) -> None:
    assert imported(code) & set(HEAVY) == set()


def test_every_public_name_exists_and_is_listed() -> None:
    import jitney

    assert all(hasattr(jitney, name) for name in jitney.__all__)
    assert sorted(jitney.__all__) == sorted(set(jitney.__all__))
    assert {"Client", "AsyncClient", "Job", "AsyncJob", "JobSpec", "SamplingParams", "Event", "Result"} <= set(
        jitney.__all__
    )


def test_every_error_is_public() -> None:
    import jitney
    from jitney import errors

    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.JitneyError)
    }
    assert tree <= set(jitney.__all__)


def test_no_field_of_a_job_has_the_name_of_a_sampling_option() -> None:
    """Flat keywords would not know where to go."""
    from jitney import JobSpec, SamplingParams

    assert set(JobSpec.model_fields) & set(SamplingParams.model_fields) == set()
