"""`jitney batch run`: every line once, whoever is killed; what is wrong is told before anything is enqueued."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.api.batch_work import PATIENCE_S, Echo, read_output, until, working, write_input
from tests.client.scripted_worker import ScriptedWorker

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.errors import InvalidJob, SettingsError
from jitney.plugins import SUMMARIES
from jitney_api.batches.output import Outcome
from jitney_api.batches.output_files import OutputFile
from jitney_api.batches.shell import BadLines, Counts, Files, run_file

PROGRAM = """
import typer
from importlib.metadata import EntryPoint
from jitney.plugins import add_plugins
app = typer.Typer()
app.callback()(lambda: None)
add_plugins(app, [EntryPoint("batch", "jitney_api.batches.cli:batch", "jitney.commands")])
app(prog_name="jitney")
"""
"""As `jitney batch` runs it, whatever is installed."""


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url) as client:
        yield client


@pytest.fixture
async def echo(redis: Redis, queue_name: str, write_queue_card: Any) -> Echo:
    await write_queue_card()
    return Echo(ScriptedWorker(redis, queue_name))


def files_in(folder: Path) -> Files:
    return Files(folder / "in.jsonl", folder / "out.jsonl", folder / "out.errors.jsonl")


async def run(client: AsyncClient, files: Files, *, window: int = 8, model: str | None = None) -> list[Counts]:
    shown: list[Counts] = []
    async with asyncio.timeout(PATIENCE_S):
        assert await run_file(client, files, model=model, window=window, show=shown.append) == shown[-1]
    return shown


class Command:
    """`jitney batch run` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, files: Files, *options: str, redis_url: str) -> Command:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, "batch", "run", str(files.input), str(files.output), *options),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # A shell's background job ignores SIGINT, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env=os.environ | {"JITNEY_REDIS_URL": redis_url, "TERM": "dumb", "COLUMNS": "200"},
        )
        return cls(process)

    async def ended(self) -> tuple[int | None, str]:
        _, err = await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        assert b"Traceback" not in err, err.decode()
        return self.process.returncode, err.decode()


async def test_every_line_has_its_answer_in_the_shape_of_openai(
    client: AsyncClient, echo: Echo, queue_name: str, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    write_input(files.input, [f"line {n}" for n in range(40)], queue_name)
    async with working(echo):
        shown = await run(client, files)
    assert shown[0] == Counts(40)
    assert shown[-1] == Counts(40, answered=40)
    output = {line["custom_id"]: line for line in read_output(files.output)}
    assert sorted(output) == sorted(f"line {n}" for n in range(40))
    one = output["line 7"]
    assert one["error"] is None
    assert one["id"].startswith("batch_req_")
    assert one["response"]["status_code"] == 200
    body = one["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "line 7!"
    assert body["usage"]["prompt_tokens"] == 3
    assert one["response"]["request_id"] == body["id"].removeprefix("cmpl-")
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


async def test_no_more_than_the_window_is_on_its_way(
    client: AsyncClient, echo: Echo, queue_name: str, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    write_input(files.input, [str(n) for n in range(100)], queue_name)
    async with working(echo, at_once=2):
        await run(client, files, window=5)
    assert len(echo.prompts) == 100
    assert 1 <= echo.most_waiting <= 5


async def test_lines_that_fail_go_to_the_error_file_and_are_asked_again_by_another_run(
    client: AsyncClient, redis: Redis, queue_name: str, write_queue_card: Any, tmp_path: Path
) -> None:
    await write_queue_card()
    files = files_in(tmp_path)
    write_input(files.input, ["good", "bad"], queue_name)
    worker = ScriptedWorker(redis, queue_name)
    async with working(Echo(worker, fails="bad".__eq__)):
        shown = await run(client, files)
    assert shown[-1] == Counts(2, answered=1, failed=1)
    (failed,) = read_output(files.errors)
    assert failed["custom_id"] == "bad"
    assert failed["error"] is None
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_value",
    }
    again = Echo(worker)
    async with working(again):
        shown = await run(client, files)
    assert again.prompts == ["bad"]
    assert shown == [Counts(2, answered=1), Counts(2, answered=2)]
    assert not files.errors.exists()


async def test_bad_lines_are_all_named_before_anything_is_enqueued(
    client: AsyncClient, echo: Echo, redis: Redis, queue_name: str, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    write_input(files.input, ["a"], queue_name)
    with files.input.open("ab") as file:
        file.write(b"nonsense\n")
        body = {"model": "nobody", "prompt": "x"}
        for custom_id in ("b", "c"):
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
            file.write(orjson.dumps(line) + b"\n")
    with pytest.raises(BadLines) as caught:
        await run(client, files)
    assert [(error.line, error.code) for error in caught.value.errors] == [
        (2, "invalid_json_line"),
        (3, "model_not_found"),
        (4, "model_not_found"),
    ]
    assert not files.output.exists()
    assert (await ScriptedWorker(redis, queue_name).queue.backlog()).num_jobs == 0


async def test_the_program_killed_in_the_middle_goes_on_and_each_line_is_there_once(
    echo: Echo, redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    custom_ids = [f"line {n}" for n in range(300)]
    write_input(files.input, custom_ids, queue_name)
    for num_held in (60, 140):
        echo.most = num_held  # so that a window of jobs waits when it is killed
        command = await Command.start(files, "--window", "32", redis_url=redis_url)
        async with working(echo):
            await until(partial(holds_lines, files.output, num_held))
            command.process.send_signal(signal.SIGKILL)
            await command.process.wait()
        with files.output.open("ab") as file:
            file.write(b'{"id": "batch_req_torn')
    echo.most = 300
    async with working(echo):
        code, said = await (await Command.start(files, redis_url=redis_url)).ended()
    assert code == 0, said
    assert "300/300 lines done, 0 failed" in said
    assert Counter(line["custom_id"] for line in read_output(files.output)) == Counter(custom_ids)
    assert Counter(echo.prompts) == Counter(custom_ids)  # nor was any of them run twice


def holds_lines(path: Path, num_lines: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= num_lines


async def test_the_program_says_what_is_wrong_and_has_its_exit_codes(
    redis: Redis, redis_url: str, queue_name: str, write_queue_card: Any, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    files.input.write_bytes(b"{}\nnonsense\n")
    code, said = await (await Command.start(files, redis_url=redis_url)).ended()
    assert code == 1
    assert said.startswith("line 1: custom_id is required\nline 2: the line is not JSON: ")
    await write_queue_card()
    write_input(files.input, ["bad"], queue_name)
    async with working(Echo(ScriptedWorker(redis, queue_name), fails="bad".__eq__)):
        code, said = await (await Command.start(files, redis_url=redis_url)).ended()
    assert code == 3
    assert str(files.errors) in said


async def test_ctrl_c_stops_the_program_and_it_goes_on(
    echo: Echo, redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    write_input(files.input, ["a", "b"], queue_name)
    command = await Command.start(files, redis_url=redis_url)
    echo.most = 1
    async with working(echo):
        await until(partial(holds_lines, files.output, 1))
    command.process.send_signal(signal.SIGINT)
    code, said = await command.ended()
    assert code == 130
    assert said.endswith("stopped; the same command goes on from here\n")
    echo.most = 2
    async with working(echo):
        code, said = await (await Command.start(files, redis_url=redis_url)).ended()
    assert code == 0, said
    assert sorted(echo.prompts) == ["a", "b"]


async def test_a_server_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    write_input(files.input, ["a"], "q")
    code, said = await (await Command.start(files, redis_url="redis://127.0.0.1:1/0")).ended()
    assert code == 1
    assert "error: Redis does not answer" in said


async def test_two_runs_never_write_one_file(client: AsyncClient, echo: Echo, queue_name: str, tmp_path: Path) -> None:
    files = files_in(tmp_path)
    write_input(files.input, ["a"], queue_name)
    first = asyncio.create_task(run(client, files))
    await until(files.output.exists)
    with pytest.raises(SettingsError, match="being written by another run"):
        await run(client, files)
    async with working(echo):
        await first


async def test_the_file_of_something_else_is_left_alone(
    client: AsyncClient, echo: Echo, queue_name: str, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    write_input(files.input, ["a"], queue_name)
    files.output.write_bytes(b"my diary\n")
    with pytest.raises(SettingsError, match="line 1"):
        await run(client, files)
    assert files.output.read_bytes() == b"my diary\n"
    files.output.write_bytes(b'{"custom_id": "z"}\n')
    with pytest.raises(SettingsError, match="'z'"):
        await run(client, files)


async def test_a_run_that_is_not_complete_goes_on_with_its_own_input_alone(
    client: AsyncClient, echo: Echo, queue_name: str, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    write_input(files.input, ["a"], queue_name)
    task = asyncio.create_task(run(client, files))
    await until((tmp_path / "out.jsonl.run").exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    write_input(files.input, ["a", "b"], queue_name)
    with pytest.raises(SettingsError, match="another input"):
        await run(client, files)


async def test_what_cannot_be_read_again_or_added_to_is_refused(
    client: AsyncClient, echo: Echo, queue_name: str, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidJob, match="pipe is a pipe"):
        await run(client, replace(files, input=tmp_path / "pipe"))
    write_input(files.input, ["a"], queue_name)
    with pytest.raises(SettingsError, match="cannot write /dev/null"):
        await run(client, replace(files, output=Path("/dev/null")))


@pytest.mark.parametrize(("left", "word"), [(["a", "b"], "fewer lines"), (["a", "b", "a"], "line 3: custom_id 'a'")])
async def test_an_input_that_changes_meanwhile_is_an_error_of_its_own_and_no_end(
    client: AsyncClient, echo: Echo, queue_name: str, tmp_path: Path, left: list[str], word: str
) -> None:
    files = files_in(tmp_path)
    write_input(files.input, "abc", queue_name)

    def show(counts: Counts) -> None:  # checked by now, and not read again yet
        write_input(files.input, left, queue_name)

    async with working(echo):
        with pytest.raises(InvalidJob, match=word):
            await asyncio.wait_for(run_file(client, files, model=None, window=8, show=show), PATIENCE_S)
    assert (tmp_path / "out.jsonl.run").exists()


def test_a_full_disk_is_an_error_and_what_was_torn_off_is_cut_away(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "out.jsonl")
    file.add([Outcome(1, "answered", b'{"custom_id": "a"}\n')])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24, hard))
    try:
        with pytest.raises(SettingsError, match=r"cannot write .*out\.jsonl: .*goes on from here"):
            file.add([Outcome(2, "answered", b'{"custom_id": "b"}\n')])
        file.close(keep_empty=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "out.jsonl").stat().st_size == 24
    again = OutputFile(tmp_path / "out.jsonl")
    assert again.held() == ["a"]
    again.close(keep_empty=True)


def test_the_command_is_listed() -> None:
    assert "batch" in SUMMARIES
