"""`jitney up`: one ready line, a stack that answers, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from pathlib import Path

import orjson
import pytest
from openai import OpenAI
from tests.e2e.programs import LIVENESS_S, children_of, is_alive, program, words

from jitney import Client

UP = ("--port", "0", "--max-num-seqs", "4", "--num-kv-blocks", "64", "--num-threads", "1")


def up(model: Path, data_dir: Path, *more: str) -> tuple[str, ...]:
    return ("up", "--model", str(model), "--data-dir", str(data_dir), *UP, *more)


def until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "children outlived their parent"


def test_up_says_ready_once_serves_and_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path)) as stack:
        ready = words(stack.until_line("ready "))
        assert set(ready) == {"redis", "api", "queue"}
        assert ready["queue"] == "tiny-llama"
        assert (tmp_path / "redis.url").read_text().strip() == ready["redis"]
        with Client(ready["redis"]) as client:
            answer = client.generate("Once", max_tokens=8, temperature=0, ignore_eos=True)
        openai = OpenAI(base_url=f"{ready['api']}/v1", api_key="none")
        said = openai.completions.create(model=ready["queue"], prompt="Once", max_tokens=8, temperature=0)
        assert answer.usage["completion_tokens"] == 8
        assert said.choices[0].text == answer.text or said.choices[0].finish_reason == "stop"
        with urllib.request.urlopen(f"{ready['api']}/readyz") as reply:
            assert reply.status == 200
        pids = children_of(stack.pid)
        assert len(pids) >= 3
        stack.terminate()
        assert stack.wait() == 0
        assert not any(is_alive(pid) for pid in pids)
        assert sum(line.startswith("ready ") for line in stack.lines) == 1
        assert not (tmp_path / "redis.url").exists()
        assert any("curl -N" in line for line in stack.stdout)


def test_a_killed_up_takes_its_children_with_it(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path)) as stack:
        stack.until_line("ready ")
        pids = children_of(stack.pid)
        assert len(pids) >= 3
        stack.kill()
        stack.wait()
    until_gone(pids)


def test_jobs_wait_when_there_is_no_worker_and_survive_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path, "--workers", "0")) as stack:
        ready = words(stack.until_line("ready "))
        with Client(ready["redis"], queue=ready["queue"]) as client:
            job_id = client.enqueue([1, 2, 3], max_tokens=5, ignore_eos=True).id
        with urllib.request.urlopen(f"{ready['api']}/readyz") as reply:
            assert reply.status == 200
        stack.terminate()
        assert stack.wait() == 0
    with program(*up(tiny_model, tmp_path)) as stack:
        ready = words(stack.until_line("ready "))
        with Client(ready["redis"], queue=ready["queue"]) as client:
            assert len(client.job(job_id).result(timeout_s=LIVENESS_S).token_ids) == 5
        stack.terminate()
        assert stack.wait() == 0


def test_a_second_up_on_the_same_folder_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path, "--workers", "0")) as first:
        first.until_line("ready ")
        with program(*up(tiny_model, tmp_path)) as second:
            assert second.wait() == 1
            assert any(str(tmp_path) in line and "--data-dir" in line for line in second.lines)


@pytest.mark.parametrize(
    ("flags", "words_"),
    [
        (("--num-kv-blocks", "8", "--kv-cache-bytes", "1000"), "both size the KV cache"),
        (("--max-num-seqs", "4096", "--max-num-batched-tokens", "64"), "max_num_seqs=4096"),
        (("--policy", "sometimes"), "engine.policy='sometimes'"),
        (("--block-size", "0"), "engine.block_size=0"),
        (("--model", "no-such-model"), "no-such-model"),
        (("--queue", "Not A Queue"), "Not A Queue"),
    ],
)
def test_a_wrong_flag_is_refused_by_name_and_value_before_anything_starts(
    tiny_model: Path, tmp_path: Path, flags: tuple[str, ...], words_: str
) -> None:
    with program("up", "--model", str(tiny_model), "--data-dir", str(tmp_path), "--port", "0", *flags) as stack:
        assert stack.wait() == 1
    assert any(words_ in line for line in stack.lines), stack.lines
    assert not any("Traceback" in line for line in stack.lines)


def is_worker(pid: int) -> bool:
    try:
        return b"\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def workers_of(pid: int) -> list[int]:
    return sorted(filter(is_worker, children_of(pid)))


def test_a_killed_worker_is_started_again_and_the_stream_it_was_in_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path, "--lease-s", "1", "--dtype", "float32")) as stack:
        ready = words(stack.until_line("ready "))
        (worker,) = workers_of(stack.pid)
        with Client(ready["redis"], queue=ready["queue"]) as client:
            undisturbed = client.generate([1, 2, 3], max_tokens=600, ignore_eos=True, temperature=0)
            events = []
            for event in client.enqueue([1, 2, 3], max_tokens=600, ignore_eos=True, temperature=0).stream():
                events.append(event)
                if event.type == "tokens" and is_alive(worker):
                    os.kill(worker, signal.SIGKILL)
        stack.until_line("worker 1 was ended by SIGKILL; starting it again")
        stack.terminate()
        assert stack.wait() == 0
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.type for event in events].count("started") == 2, "the worker died too late: the test proves nothing"
    assert tuple(token for event in events for token in event.token_ids) == undisturbed.token_ids
    assert "".join(event.text for event in events) == undisturbed.text


def test_a_killed_server_is_started_again_where_it_was_with_all_that_it_held(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path, "--workers", "1")) as stack:
        ready = words(stack.until_line("ready "))
        (server,) = [pid for pid in children_of(stack.pid) if b"-server " in Path(f"/proc/{pid}/cmdline").read_bytes()]
        with Client(ready["redis"], queue=ready["queue"]) as client:
            before = client.generate("Once", max_tokens=4)
            os.kill(server, signal.SIGKILL)
            stack.until_line("the Redis server has ended; starting it again")
            stack.until_line("the Redis server answers again")
            assert client.generate("Once upon", max_tokens=4).finish_reason == "length"
            assert client.job(before.id).result() == before
        stack.terminate()
        assert stack.wait() == 0
    assert not any("Traceback" in line for line in stack.lines), stack.lines


def test_the_death_of_the_api_ends_the_stack_says_who_and_how_and_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path
) -> None:
    with program(*up(tiny_model, tmp_path)) as stack:
        stack.until_line("ready ")
        pids, workers = children_of(stack.pid), workers_of(stack.pid)
        (api,) = [pid for pid in pids if b"\0api\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 1
        os.kill(api, signal.SIGKILL)
        assert stack.wait() == 1
    assert not any(is_alive(pid) for pid in pids)
    assert not (tmp_path / "redis.url").exists()
    assert any(line.startswith("error: api was ended by SIGKILL") for line in stack.lines), stack.lines


def test_a_sigterm_while_the_stack_starts_ends_it_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path)) as stack:
        deadline = time.monotonic() + LIVENESS_S
        while not workers_of(stack.pid):
            assert time.monotonic() < deadline, "no worker was started"
        pids = children_of(stack.pid)
        stack.terminate()
        assert stack.wait() == 0
    assert not any(is_alive(pid) for pid in pids)
    assert not any(line.startswith("ready ") for line in stack.lines)
    assert not any("Traceback" in line or "never retrieved" in line for line in stack.lines), stack.lines


def test_what_up_needs_and_cannot_have_is_named(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with program(*up(tiny_model, tmp_path / "file" / "data")) as stack:
        assert stack.wait() == 1
    assert any(f"--data-dir {tmp_path}/file/data cannot be written" in line for line in stack.lines), stack.lines
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with program(*up(tiny_model, tmp_path / "data", "--port", str(port))) as stack:
            assert stack.wait() == 1
        assert any(line.startswith("error: ") and str(port) in line for line in stack.lines), stack.lines
    assert not any("Traceback" in line for line in stack.lines)


def test_a_worker_without_a_server_says_so_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    """As after a crash of `up`, whose address is still in its folder."""
    (tmp_path / "redis.url").write_text("redis://:gone@127.0.0.1:1/0")
    flags = ("--model", str(tiny_model), "--num-kv-blocks", "64")
    with program("worker", *flags, environment={"JITNEY_DATA_DIR": str(tmp_path)}) as worker:
        assert worker.wait() == 1
    assert [line for line in worker.lines if line.startswith("error: Redis does not answer")]
    assert not any("Traceback" in line or "gone" in line for line in worker.lines), worker.lines


def test_up_with_strict_durability_has_a_server_that_keeps_it(tiny_model: Path, tmp_path: Path) -> None:
    strict = {"JITNEY_DURABILITY": "strict"}
    with program(*up(tiny_model, tmp_path), environment=strict) as stack:
        ready = words(stack.until_line("ready "))
        with Client(ready["redis"], durability="strict") as client:
            assert client.generate("Once", max_tokens=4, ignore_eos=True).usage["completion_tokens"] == 4
        body = orjson.dumps({"model": ready["queue"], "prompt": "Once", "max_tokens": 4, "ignore_eos": True})
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{ready['api']}/v1/jobs", body, headers)) as reply:
            assert reply.status == 202, "the API is a strict client too"
        with program("doctor", "--redis-url", ready["redis"], environment=strict) as doctor:
            doctor.wait()
        assert any(line.startswith("ok       strict") for line in doctor.stdout), doctor.stdout
        assert any(line.startswith("ok       fsync        always") for line in doctor.stdout), doctor.stdout
        stack.terminate()
        assert stack.wait() == 0


def test_up_names_a_damaged_file_and_keeps_it(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path, "--workers", "0")) as stack:
        ready = words(stack.until_line("ready "))
        with Client(ready["redis"], queue=ready["queue"]) as client:
            for _ in range(20):
                client.enqueue([1, 2, 3], max_tokens=5)
        stack.terminate()
        assert stack.wait() == 0
    (file,) = (tmp_path / "redis" / "appendonlydir").glob("*.incr.aof")
    whole = file.read_bytes()
    command = whole.index(b"\r\n*", len(whole) // 2) + 2  # inside a value no server would notice it
    damaged = whole[:command] + b"\xff" * 4 + whole[command + 4 :]
    file.write_bytes(damaged)
    with program(*up(tiny_model, tmp_path, "--workers", "0")) as stack:
        assert stack.wait() == 1
    (error,) = [line for line in stack.lines if line.startswith("error: ")]
    assert f"its append-only file {file} is damaged" in error
    assert f"--fix {file}" in error
    assert not any("Traceback" in line for line in stack.lines), stack.lines
    assert file.read_bytes() == damaged
    assert not (tmp_path / "redis.url").exists()


@pytest.mark.parametrize(
    ("contents", "flags", "words_"),
    [
        (b"[]", ("--name", "W5"), "does not hold W5"),
        (b'{"model": "m", "warm": []}', ("--name", "W5"), "does not hold W5"),
        (b'{"model": "m", "warm": [], "w5": []}', ("--name", "W5"), "holds no job of W5"),
        (b"{}", ("--mode", "serial", "--redis-url", "redis://127.0.0.1:1/0"), "--mode serial"),
        (b"{}", ("--rate", "0"), "--rate 0"),
        (b"not JSON", (), "is not JSON"),
    ],
)
def test_a_workload_that_bench_cannot_use_is_named(
    tmp_path: Path, contents: bytes, flags: tuple[str, ...], words_: str
) -> None:
    (tmp_path / "load.json").write_bytes(contents)
    with program("bench", "--workload", str(tmp_path / "load.json"), *flags) as run:
        assert run.wait() == 1
    assert any(line.startswith("error: ") and words_ in line for line in run.lines), run.lines


def test_bench_measures_the_whole_path_and_writes_its_figures(tiny_model: Path, tmp_path: Path) -> None:
    jobs = [{"prompt": [n % 50 + 1] * 12, "out": n % 5 + 8} for n in range(40)]
    (tmp_path / "load.json").write_bytes(orjson.dumps({"model": "tiny", "warm": [[1, 2, 3]], "w5": jobs}))
    flags = ("--workload", str(tmp_path / "load.json"), "--name", "W5", "--json", str(tmp_path / "out.json"))
    with program("bench", *flags, "--model", str(tiny_model), "--dtype", "float32") as run:
        assert run.wait() == 0
    result = orjson.loads((tmp_path / "out.json").read_bytes())
    assert (result["name"], result["mode"], result["num_jobs"]) == ("W5", "path", 40)
    assert result["output_tokens"] == sum(job["out"] for job in jobs)
    assert result["prompt_tokens"] == 480
    assert (result["dtype"], result["device"]) == ("float32", "cpu")
    assert [len(ids) for ids in result["first_token_ids"]] == [8, 9, 10, 11]
    assert set(result["completion_s"]) == {"mean", "p50", "p99"}
    assert result["tokens_per_s"] > 0
    assert result["peak_rss_mb"] > 0


def test_the_demo_seats_sixteen_prompts_prints_their_answers_and_cleans_up(tiny_model: Path) -> None:
    with program("demo", "--model", str(tiny_model)) as run:
        assert run.wait() == 0
    text = "\n".join(run.stdout)
    assert text.count("joined") == 16
    assert text.count(" left ") == 16
    assert "16 answers" in text
    assert "shut down" in text
