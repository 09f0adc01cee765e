"""Upkeep on beat, and the ready-made application as `celery -A jitney.celery.app worker -B` starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery
from tests.celery_bridge.celery_programs import running
from tests.celery_bridge.conftest import Batch, got, until

from jitney.celery import install
from jitney.celery.app import make_app as make_ready_made
from jitney.celery.app import spelled
from jitney.celery.settings import CelerySettings, celery_settings
from jitney.connection import Redis
from jitney.errors import SettingsError
from jitney.keys import Keys


async def test_the_ready_made_celery_application_serves_and_keeps_up(
    batch: Batch, redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    options = ("-B", "-s", str(tmp_path / "schedule"))
    with running(redis_url, *options, module="jitney.celery.app", JITNEY_CELERY__UPKEEP_EVERY_S="1"):
        sender = Celery("a program that knows nothing of jitney", broker=redis_url, backend=redis_url)
        result = sender.send_task("jitney.generate", args=["hello"], queue="jitney")
        [turn] = await batch.turns()
        await turn.finish("x")
        assert (await got(result))["text"] == "x"
        await until(lambda: redis.exists(Keys("only").history))


def test_settings_of_the_ready_made_celery_application() -> None:
    settings = CelerySettings(broker_url="redis://broker:6379/1", queue="llm")  # type: ignore[arg-type]
    app = make_ready_made(settings, "redis://jobs:6379/0")
    assert app.conf.broker_url == "redis://broker:6379/1"
    assert app.conf.result_backend == "redis://jobs:6379/0"
    assert app.conf.task_default_queue == "llm"
    assert app.conf.beat_schedule["jitney.upkeep"]["schedule"] == settings.upkeep_every_s


def test_celery_has_its_own_spelling_of_a_socket() -> None:
    assert spelled("unix:///run/redis.sock?db=3") == "redis+socket:///run/redis.sock?virtual_host=3"
    assert spelled("unix://user:secret@/run/redis.sock") == "redis+socket://user:secret@/run/redis.sock?virtual_host=0"
    assert spelled("rediss://h:1/0") == "rediss://h:1/0"


def test_a_wrong_setting_of_the_celery_side_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_CELERY__MAX_HELD", "0")
    with pytest.raises(SettingsError, match="JITNEY_CELERY__MAX_HELD"):
        celery_settings()


def test_installing_keeps_what_a_celery_application_has_on_its_beat() -> None:
    app = Celery("mine", broker="memory://")
    app.conf.accept_content = ["json"]
    app.conf.beat_schedule = {"mine": {"task": "mine", "schedule": 1.0}}
    install(app)
    assert set(app.conf.beat_schedule) == {"mine", "jitney.upkeep"}


def test_jitney_does_not_import_celery() -> None:
    code = "import jitney, jitney.cli, jitney.upkeeping, jitney.bridging, sys; print('celery' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "False"
