"""`jitney doctor` as a command: one line per check, an exit code that a script can use, and checks of other rooms."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import orjson
import pytest
from click.testing import Result
from tests.client.test_imports import HEAVY, imported
from typer.testing import CliRunner

from jitney import checks, clock, doctor
from jitney.checks import GROUP, Finding, checks_of_other_rooms
from jitney.cli import app
from jitney.embedded import EmbeddedServer


@pytest.fixture(autouse=True)
def _only_the_server_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not whatever else is installed on this machine."""
    monkeypatch.setattr(clock, "PAUSE_S", 0.0)
    monkeypatch.setattr(checks, "entry_points", lambda group: ())


async def jitney_doctor(*arguments: str, **environment: str) -> Result:
    """In a thread: the command runs an event loop of its own."""
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", *arguments], env=environment)
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return ended


async def test_a_healthy_server_is_exit_code_0_and_one_line_per_check(redis_url: str) -> None:
    ended = await jitney_doctor(JITNEY_REDIS_URL=redis_url)
    assert (ended.exit_code, ended.stderr) == (0, "")
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [line[0] for line in lines] == ["ok"] * 13
    assert lines[0][1] == "reachable"
    assert lines[-1][1] == "rights"


async def test_json_is_one_object_a_line(redis_url: str) -> None:
    ended = await jitney_doctor("--json", JITNEY_REDIS_URL=redis_url)
    found = [orjson.loads(line) for line in ended.stdout.splitlines()]
    assert all(set(one) == {"name", "verdict", "found", "advice"} for one in found)
    assert [one["verdict"] for one in found] == ["ok"] * 13


async def test_a_failure_is_exit_code_1_and_a_warning_is_not(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        client = doctor.connect_once(server.url)
        await client.config_set("maxmemory-policy", "allkeys-lru")
        ended = await jitney_doctor("--redis-url", server.url)
        assert "warn     eviction" in ended.stdout
        assert ended.exit_code == 0
        await client.config_set("maxmemory", "1gb")
        ended = await jitney_doctor("--redis-url", server.url)
        assert "fail     eviction" in ended.stdout
        assert ended.exit_code == 1
        await client.aclose()


async def test_a_server_that_does_not_answer_is_one_failure(tmp_path: Path) -> None:
    ended = await jitney_doctor("--redis-url", "redis://127.0.0.1:1/0")
    (line,) = ended.stdout.splitlines()
    assert line.startswith("fail     reachable    127.0.0.1:1 does not answer: ")
    assert ended.exit_code == 1


async def test_strict_clients_learn_whether_this_server_can_keep_it(redis_url: str) -> None:
    ended = await jitney_doctor(JITNEY_REDIS_URL=redis_url, JITNEY_DURABILITY="strict")
    (line,) = [line for line in ended.stdout.splitlines() if " strict " in line]
    assert line.split()[0] in ("ok", "fail")
    assert (ended.exit_code == 1) == line.startswith("fail")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--queue", "*"), "error: queue name '*' must match"),
        (("--redis-url", "nonsense"), "error: redis_url: not a Redis address"),
    ],
)
async def test_what_was_meant_wrongly_is_one_line(redis_url: str, arguments: tuple[str, ...], said: str) -> None:
    ended = await jitney_doctor(*arguments, JITNEY_REDIS_URL=redis_url)
    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert ended.stderr.startswith(said)


# --- checks of other rooms ---------------------------------------------------------------------------


def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> EntryPoint:
    module = f"checks_{tmp_path.name.replace('-', '_')}_{name}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return EntryPoint(name=name, value=f"{module}:checks", group=GROUP)


SOURCE = """
from jitney.checks import Finding
def checks():
    return [Finding("disk", "fail", "it is full", "buy one"), Finding("cpu", "ok", "two")]
"""


def test_other_rooms_add_their_findings_in_order_of_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = entry(tmp_path, monkeypatch, "a", SOURCE.replace("disk", "board"))
    second = entry(tmp_path, monkeypatch, "b", SOURCE)
    found = checks_of_other_rooms([second, first])
    assert [one.name for one in found] == ["board", "cpu", "disk", "cpu"]
    assert found[2] == Finding("disk", "fail", "it is full", "buy one")


async def test_their_failures_are_the_doctors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    mine = entry(tmp_path, monkeypatch, "a", SOURCE)
    monkeypatch.setattr(checks, "entry_points", lambda group: [mine] if group == "jitney.checks" else [])
    ended = await jitney_doctor(JITNEY_REDIS_URL=redis_url)
    assert ended.stdout.endswith("fail     disk         it is full: buy one\nok       cpu          two\n")
    assert ended.exit_code == 1


def test_a_room_whose_extra_is_missing_is_unknown_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what an import finds when it is not installed
    absent = entry(tmp_path, monkeypatch, "model", "import torch\ndef checks(): ...")
    assert checks_of_other_rooms([absent]) == [
        Finding("model", "unknown", "torch is not installed", "where it is needed, pip install 'jitney[worker]'")
    ]


def test_a_check_that_breaks_is_unknown_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = entry(tmp_path, monkeypatch, "a", "def checks(): raise RuntimeError('no driver')")
    found = checks_of_other_rooms([broken, entry(tmp_path, monkeypatch, "b", SOURCE)])
    assert found[0] == Finding("a", "unknown", "the check itself failed with RuntimeError: no driver")
    assert len(found) == 3


def test_the_doctor_itself_imports_nothing_heavy() -> None:
    assert imported("import jitney.doctor, jitney.dead_cli, jitney.retrying") & set(HEAVY) == set()
