"""Peers: what they are given, what they give back, and how a run of one is bounded."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ops.bench import compare, go, page
from ops.bench.go import Go, Ground, Quiet, load_for, quiet_go
from ops.bench.peers import engines, llama_server, load, vllm_cpu
from ops.bench.peers.__main__ import setting
from ops.bench.peers.engines import CONTENDERS, Ours, Peer
from ops.bench.peers.load import Load, Outcome, PeerJob

from jitney.errors import SettingsError
from jitney_worker.bench.quiet import Reading
from jitney_worker.bench.workloads import load_workload

ENGINE, STATIC = CONTENDERS["jitney-engine"], CONTENDERS["static"]


@pytest.fixture
def ground(tiny_model: Path, tiny_workload: Path) -> Ground:
    return Ground(tiny_workload, tiny_model.name, tiny_model, num_threads=1, timeout_s=100.0)


def a_load(**changes: Any) -> Load:
    jobs = (PeerJob((1, 2, 3), 2, 0.0, 1.0, None), PeerJob((4,), 1, 0.0, 1.0, None))
    given: dict[str, Any] = {
        "name": "W5",
        "jobs": jobs,
        "warm": (),
        "prime": (),
        "seats": 4,
        "prefix_caching": False,
        "repeats": 1,
        "counts_prompt": False,
        "model": Path("model"),
        "num_threads": 2,
    }
    return Load(**(given | changes))


def test_a_peer_reads_what_it_was_sent(tiny_workload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = load_workload(tiny_workload, "W7")
    sent = load_for(workload, Path("somewhere"), 2, {"max_num_batched_tokens": 64})
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(sent)))
    read = load.read_load()
    assert [(job.prompt, job.max_tokens, job.temperature, job.top_p, job.seed) for job in read.jobs] == [
        (job.prompt, job.max_tokens, job.temperature, job.top_p, job.seed) for job in workload.jobs
    ]
    assert (read.seats, read.model, read.num_threads) == (32, Path("somewhere"), 2)
    assert read.settings == {"max_num_batched_tokens": 64}
    assert read.longest == max(len(job.prompt) + job.max_tokens for job in (*workload.jobs, *workload.warm))


def test_a_stream_of_arrivals_is_no_load_for_a_peer(tiny_workload: Path) -> None:
    with pytest.raises(ValueError, match="W6 comes over time"):
        load_for(load_workload(tiny_workload, "W6"), Path("x"), 1, {})


def test_figures_of_a_peer_are_named_and_counted_as_our_own() -> None:
    outcome = Outcome(((7, 8), (9,)), (1.0, 3.0))
    found = load.figures(a_load(), outcome, 1.5, Reading(0.0, 0.0, 0.0), Reading(2.0, 3.0, 2.0))
    assert (found["output_tokens"], found["prompt_tokens"], found["tokens_per_s"]) == (3, 4, 2.0)
    assert (found["other_cores"], found["first_token_ids"]) == (0.5, [[7, 8], [9]])
    assert found["completion_s"] == {"mean": 2.0, "p50": 2.0, "p99": 2.98}
    assert load.figures(a_load(counts_prompt=True), outcome, 0.5, None, None)["tokens_per_s"] == 8.0


def test_a_peer_that_says_too_little_is_found_out() -> None:
    with pytest.raises(AssertionError, match=r"\[2, 0\] tokens came, \[2, 1\] were asked for"):
        load.figures(a_load(), Outcome(((7, 8), ())), 1.0, None, None)


def test_the_best_of_a_peers_repeats_counts(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def generate(jobs: Any) -> Outcome:
        calls.append(len(jobs))
        until = time.perf_counter() + (0.0 if len(calls) == 2 else 0.2)
        while time.perf_counter() < until:
            pass
        return Outcome(((len(calls), 8), (9,)))

    load.measure(a_load(repeats=3), generate, engine="e", version="v", dtype="d", load_s=1.0)
    line = capsys.readouterr().out
    assert calls == [2, 2, 2]
    found = json.loads(line.removeprefix(load.RESULT))
    assert (found["mode"], found["version"], found["num_jobs"]) == ("e", "v", 2)
    assert found["first_token_ids"] == [[2, 8], [9]]
    assert found["peak_rss_mb"] > 1


def test_vllm_takes_prompts_whole_where_jobs_have_seeds() -> None:
    greedy, sampled = a_load(), a_load(jobs=(PeerJob((1,), 2, 0.8, 0.95, 7),))
    assert "enable_chunked_prefill" not in vllm_cpu.engine_options(greedy)
    assert "max_num_batched_tokens" not in vllm_cpu.engine_options(greedy)
    options = vllm_cpu.engine_options(sampled)
    assert options["enable_chunked_prefill"] is False
    assert options["max_num_batched_tokens"] >= options["max_model_len"]
    long = a_load(jobs=(PeerJob(tuple(range(3_000)), 64, 0.0, 1.0, None),))
    assert vllm_cpu.engine_options(long)["max_model_len"] == 3_072


def test_every_slot_of_llama_cpp_holds_the_longest_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SERVER", "server")
    words = llama_server.command(a_load(jobs=(PeerJob(tuple(range(500)), 64, 0.0, 1.0, None),)), slots=8, port=1_234)
    flags = dict(zip(words[1:-1:2], words[2:-1:2], strict=True))
    assert (flags["--parallel"], flags["--ctx-size"], flags["--threads"]) == ("8", str(8 * 768), "2")


def test_peers_start_without_anything_that_is_installed_for_jitney(tmp_path: Path) -> None:
    """What they import of the project is the standard library's own."""
    script = "import sys; import ops.bench.peers.load; print(sorted(m for m in sys.modules if '.' not in m))"
    peer = CONTENDERS["openvino"]
    assert isinstance(peer, Peer)
    program = [sys.executable, "-S", "-c", script]
    done = subprocess.run(program, env=peer.variables(), cwd=tmp_path, capture_output=True, text=True, check=True)
    for name in ("orjson", "pydantic", "torch", "redis"):
        assert f"'{name}'" not in done.stdout


def test_an_engine_that_is_not_set_up_is_named_with_what_to_run(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "PEERS_DIR", tmp_path)
    with pytest.raises(SettingsError, match=r"vllm is not set up .* is missing\): ops/bench/peers/setup\.sh vllm"):
        compare.contenders(["jitney", "vllm"], ground)
    left = compare.contenders(None, ground)
    assert {one.name for one in left} >= {"jitney", "jitney-engine", "naive", "static"}
    assert not {"vllm", "openvino", "llamacpp"} & {one.name for one in left}
    assert "left out: --engines llamacpp" in capsys.readouterr().err


def test_the_script_sets_up_every_peer_that_asks_for_it() -> None:
    script = (page.ROOT / engines.SET_UP).read_text()
    asking = [one.name for one in CONTENDERS.values() if isinstance(one, Peer) and (one.environment or one.program)]
    assert asking == ["openvino", "vllm", "llamacpp", "openvino-int8", "llamacpp-int8"]
    assert [name for name in asking if f"set_up_{name.replace('-', '_')}()" not in script] == []
    subprocess.run(["bash", "-n", str(page.ROOT / engines.SET_UP)], check=True)


def test_every_engine_has_the_same_budget_for_tuning() -> None:
    tried = {one.name: len(one.tuning) for one in CONTENDERS.values()}
    assert {tried[name] for name in ("jitney", "jitney-engine", "static", "openvino", "vllm", "llamacpp")} == {3}


def test_a_run_of_ours_is_a_command_of_jitney_bench(ground: Ground) -> None:
    greedy = CONTENDERS["jitney-greedy"]
    assert isinstance(greedy, Ours)
    words = greedy.command(ground.workload, "W7", "m", {"max_num_batched_tokens": 512}, Path("f.json"))
    assert words[1:5] == ["-m", "jitney", "bench", "--workload"]
    assert words[words.index("--name") + 1] == "W7G"
    assert words[-2:] == ["--max-num-batched-tokens", "512"]


@pytest.mark.usefixtures("small_cache")
def test_two_engines_say_the_same_tokens_of_the_same_weights(ground: Ground) -> None:
    ours, other = go.go(ENGINE, "W1", ground, {"dtype": "bfloat16"}), go.go(STATIC, "W1", ground)
    assert (ours.failure, other.failure) == ("", "")
    assert [len(ids) for ids in ours.figures["first_token_ids"]] == [3, 9, 3, 3]
    assert [len(ids) for ids in other.figures["first_token_ids"]] == [3, 9, 3, 3]
    assert (ours.figures["num_jobs"], other.figures["num_jobs"]) == (6, 6)
    assert other.figures["settings"] == {"batch": 16}
    # The first token of each is not a near-tie in bfloat16: both must have read the same prompts and weights.
    assert [ids[0] for ids in ours.figures["first_token_ids"]] == [ids[0] for ids in other.figures["first_token_ids"]]


def test_a_run_that_fails_is_told_and_not_raised(ground: Ground) -> None:
    failed = go.go(ENGINE, "W1", ground, {"max_num_batched_tokens": 1})
    assert "max_num_batched_tokens=1" in failed.failure
    assert not failed.is_disturbed(0.0)


def test_a_run_that_takes_too_long_is_ended(ground: Ground) -> None:
    late = Ground(ground.workload, ground.model, ground.directory, 1, timeout_s=0.05)
    assert go.go(ENGINE, "W1", late).failure == "it took longer than 0.05 s"


@pytest.mark.usefixtures("small_cache")
def test_a_disturbed_run_is_repeated_up_to_a_bound(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    runs = quiet_go(ENGINE, "W3", ground, None, Quiet(most_cores=-1.0, tries=2))
    assert len(runs) == 2
    assert all(run.is_disturbed(-1.0) for run in runs)
    assert "but others took" in capsys.readouterr().err


def test_agreement_counts_the_tokens_before_one_differs() -> None:
    ours = Go("jitney", {"first_token_ids": [[1, 2, 3], [4, 5, 6], [7], []]})
    other = Go("vllm", {"first_token_ids": [[1, 2, 3], [4, 9, 6], [8], []]})
    assert compare.agreement(ours, other) == "all 1 0 all"
    assert compare.agreement(None, other) == "–"


def test_settings_are_names_and_numbers() -> None:
    assert setting("slots=8") == ("slots", 8)
    for words in ("slots", "=8", "slots=x"):
        with pytest.raises(Exception, match="is not NAME=NUMBER"):
            setting(words)
