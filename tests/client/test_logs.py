"""A library does not print: levels, standard error, and other people's structlog."""

from __future__ import annotations

import subprocess
import sys

import orjson
import pytest
import structlog

from jitney.errors import SettingsError
from jitney.logs import configure, listening, logger


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_a_program_that_imports_jitney_hears_of_warnings_alone_and_never_on_standard_output() -> None:
    said = run("from jitney.logs import logger; log = logger(part='x'); log.info('quiet'); log.warning('loud', n=1)")
    assert said.stdout == ""
    (line,) = said.stderr.splitlines()
    fields = orjson.loads(line)
    assert {name: fields[name] for name in ("event", "level", "part", "n")} == {
        "event": "loud",
        "level": "warning",
        "part": "x",
        "n": 1,
    }


def test_a_command_may_ask_for_more_and_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from jitney.logs import configure, logger; configure('info'); logger().info('now')"
    assert "now" in run(code).stderr
    monkeypatch.setenv("JITNEY_LOG_LEVEL", "error")
    assert run(code).stderr == ""


def test_an_unknown_level_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_LOG_LEVEL", "loud")
    with pytest.raises(SettingsError, match="'loud'"):
        configure()


def test_a_traceback_stands_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logger().exception("it_failed")
    assert "ValueError: broken" in orjson.loads(capsys.readouterr().err)["exception"]


def test_another_programs_configuration_is_left_alone() -> None:
    before = structlog.get_config()
    configure("warning")
    logger().debug("nothing")
    assert structlog.get_config() == before


def test_a_listener_hears_every_level_while_it_listens() -> None:
    heard: list[str] = []
    log = logger()
    with listening(lambda event: heard.append(event["event"])):
        log.debug("first")
    log.debug("second")
    assert heard == ["first"]
