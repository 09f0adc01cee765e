"""Every command of the benchmarks, run from end to end on a tiny model: tables, figures, pictures, and refusals."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from ops.bench import (
    compare,
    limits,
    preemption,
    queue_tax,
    run_all,
    step_curve,
    streams,
    under_load,
    variance,
    worker_cost,
)
from typer.testing import CliRunner

from jitney import progress
from jitney.errors import SettingsError
from jitney_worker.bench.cli import bench
from jitney_worker.bench.options import BenchOptions
from jitney_worker.bench.run import run
from jitney_worker.bench.workloads import load_workload
from jitney_worker.model.tiny import make_tiny

COMMANDS: tuple[Any, ...] = (
    limits,
    step_curve,
    worker_cost,
    preemption,
    variance,
    under_load,
    queue_tax,
    streams,
    compare,
)

Finish = Callable[..., dict[str, Any]]


@pytest.fixture
def finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Finish:
    """`finish(module, *words)`: run a command with all its outputs; its figures. The table must be where it belongs."""

    def run(module: Any, *words: object) -> dict[str, Any]:
        document, figures, picture = (tmp_path / name for name in ("page.md", "figures.json", "picture.svg"))
        document.write_text(f"<!-- {module.PLACE}: written by x -->\n<!-- end of {module.PLACE} -->\n")
        outputs = ["--write", document, "--json", figures]
        if module is not worker_cost:
            outputs += ["--svg", picture]
        module.main([str(word) for word in (*words, *outputs)])
        printed = capsys.readouterr().out.strip()
        assert printed
        assert printed in document.read_text()
        assert printed.count("\n| --- |") >= 1
        if module is not worker_cost:
            ElementTree.fromstring(picture.read_text())
        found: dict[str, Any] = json.loads(figures.read_text())
        return found

    return run


def test_limits_of_the_machine(finish: Finish) -> None:
    found = finish(limits, "--threads", "1", "--sizes-mib", "1,2", "--rows", "1,8")
    assert [(one["num_threads"], one["mebibytes"]) for one in found["read"]] == [(1, 1), (1, 2)]
    expected = [(kind, rows, layers) for kind in limits.kinds() for rows in (1, 8) for layers in (1, 30)]
    assert [(one["kind"], one["rows"], one["num_layers"]) for one in found["products"]] == expected
    assert all(one["gb_per_s"] > 0 for one in found["read"])
    assert all(one["gflops"] > 0 for one in found["products"])


def test_the_step_curve(finish: Finish, tiny_model: Path) -> None:
    words = ("--model", tiny_model, "--seats", "1,3", "--rounds", "2", "--prompt-tokens", "8", "--output-tokens", "5")
    found = finish(step_curve, *words, "--num-threads", "1")
    assert [point["seats"] for point in found["points"]] == [1, 3]
    for point in found["points"]:
        assert point["least_ms"] <= point["step_ms"] <= point["most_ms"]
        assert point["read_ms"] > 0
    assert set(found["fit"]) == {"fixed_ms", "each_ms"}


def test_a_decode_step_has_all_seats_and_there_is_one_for_every_token_but_the_first(tiny_model: Path) -> None:
    asked = step_curve.arguments(["--model", str(tiny_model), "--num-threads", "1", "--dtype", "float32"])
    lab = step_curve.open_lab(asked, num_blocks=20)
    assert len(step_curve.decode_steps(lab, seats=3, prompt_tokens=8, output_tokens=6)) == 5


def test_weights_that_a_step_reads_are_all_but_a_table_that_only_embeds(tmp_path: Path) -> None:
    tied = make_tiny(tmp_path / "tied", family="llama")
    untied = make_tiny(tmp_path / "untied", family="mistral")
    assert (
        step_curve.num_weights(tied)
        == step_curve.num_weights(untied)
        == 512 * 128 + 128 + 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256 + 2 * 128)
    )


def test_a_fit_goes_through_points_on_a_line() -> None:
    assert step_curve.fitted([(1, 3.0), (2, 5.0), (4, 9.0)]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert step_curve.fitted([(7, 3.0)]) == (3.0, 0.0)


def test_preemption_costs_tokens_that_are_computed_again(finish: Finish, tiny_model: Path, tiny_workload: Path) -> None:
    words = ("--model", tiny_model, "--workload", tiny_workload, "--rounds", "2", "--num-threads", "1")
    found = finish(preemption, *words, "--percent", "100,50,25", "--dtype", "float32")
    counts = {
        (pool["reserve_percent"], pool["percent"]): [
            (r["num_preemptions"], r["num_recomputed"]) for r in pool["rounds"]
        ]
        for pool in found["pools"]
    }
    assert set(counts) == {(reserve, percent) for reserve in (15, 0) for percent in (100, 50, 25)}
    assert counts[0, 100] == [(0, 0), (0, 0)]
    for percent in (50, 25):
        (preemptions, recomputed), again = counts[0, percent]
        assert (preemptions, recomputed) == again
        assert preemptions > 0
        assert recomputed > 0
        assert counts[15, percent][0][0] <= preemptions
    blocks = {pool["percent"]: pool["rounds"][0]["num_blocks"] for pool in found["pools"]}
    need = found["need_blocks"]
    assert blocks == {100: need, 50: need // 2, 25: need // 4}


def test_the_need_is_the_most_that_is_in_use_at_once(tiny_model: Path, tiny_workload: Path) -> None:
    """All jobs sit at once, so it is more than their prompts take, and less than if all were longest at once."""
    asked = preemption.arguments(["--model", str(tiny_model), "--workload", str(tiny_workload), "--num-threads", "1"])
    jobs = preemption.load_workload(asked.workload, "W5").jobs
    lab = preemption.open_lab(asked, num_blocks=preemption.plenty(jobs, 32))
    need = preemption.measured_need(lab, jobs, 32)
    at_start = sum(-(-len(job.prompt) // 16) for job in jobs)
    assert at_start < need < sum(map(preemption.blocks_of, jobs))


def test_what_jitney_refuses_ends_a_command_with_one_line(tiny_model: Path, tiny_workload: Path) -> None:
    words = ["--model", str(tiny_model), "--workload", str(tiny_workload), "--num-threads", "1", "--percent", "1"]
    with pytest.raises(SystemExit, match=r"^error: --percent 1 of the \d+ blocks needed are"):
        preemption.main(words)


def test_a_pool_in_which_the_longest_job_never_runs_is_refused_by_name(tiny_workload: Path) -> None:
    jobs = preemption.load_workload(tiny_workload, "W5").jobs
    with pytest.raises(SettingsError, match=r"--percent 3 of the 60 blocks needed are 1, but the longest job"):
        preemption.pools(60, [100, 3], jobs)


def test_what_a_worker_costs(finish: Finish, tiny_model: Path, tiny_workload: Path) -> None:
    words = ("--model", tiny_model, "--workload", tiny_workload, "--num-threads", "1", "--rounds", "1", "--limit", "3")
    found = finish(worker_cost, *words, "--kv-cache-bytes", "8000000")
    assert len(found["ready_s"]) == 1
    assert found["run"]["num_jobs"] == 3
    assert found["peak_rss_gib"] == pytest.approx(found["run"]["peak_rss_mb"] * 1_000 / 2**20, abs=0.001)
    assert found["run"]["engine"]["num_blocks"] < 8_000_000 // 2**11


def test_a_cost_meets_a_bound_that_it_does_not_exceed() -> None:
    assert worker_cost.row("x", [1.0, 2.0, 9.0], 2.0, 1.5) == [
        "x",
        "2.00",
        "1.00–9.00",
        "≤ 2",
        "met",
        "≤ 1.5",
        "not met",
    ]


def test_a_worker_that_does_not_start_is_told_in_one_line(tiny_workload: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: the worker ended before it was ready: .*config\.json"):
        worker_cost.main(["--model", str(tmp_path), "--workload", str(tiny_workload), "--rounds", "1"])


def test_variance_of_lengths(finish: Finish, tiny_model: Path) -> None:
    words = ("--model", tiny_model, "--scale", "32", "--jobs", "10", "--single-jobs", "2", "--rounds", "1")
    found = finish(variance, *words, "--num-threads", "1", "--most-other-cores", "1e9")
    assert [row["law"] for row in found["rows"]] == [
        "no variance",
        "at most 2",
        "at most 4",
        "at most 16",
        "at most 48",
    ]
    for row in found["rows"]:
        assert set(row["tokens_per_s"]) == set(variance.WAYS)
        assert all(rate > 0 for (rate,) in row["tokens_per_s"].values())
        product = 1.0
        for part in row["parts"].values():
            product *= part
        (naive,), (paged,) = row["tokens_per_s"]["naive"], row["tokens_per_s"]["paged"]
        assert product == pytest.approx(paged / naive, rel=0.05)
    assert found["rows"][0]["static_busy_share"] == 1.0
    assert all(row["static_busy_share"] < 1 for row in found["rows"][1:])


@pytest.mark.usefixtures("small_cache")
def test_jobs_under_load(finish: Finish, tiny_model: Path, tiny_workload: Path) -> None:
    words = ("--model", tiny_model, "--workload", tiny_workload, "--num-threads", "1", "--limit", "6")
    found = finish(under_load, *words, "--percent", "400", "--seats", "3")
    assert found["capacity_jobs_per_s"] > 0
    assert [(run["percent"], run["policy"], run["mode"]) for run in found["runs"]] == [
        (400, "continuous", "path"),
        (400, "static", "static"),
    ]
    for one in found["runs"]:
        assert (one["name"], one["num_jobs"], one["engine"]["max_num_seqs"]) == ("W6", 6, 3)
        assert one["engine"]["policy"] == one["policy"]
        assert one["ttft_s"]["p50"] <= one["ttft_s"]["p99"]


@pytest.mark.usefixtures("small_cache")
def test_the_tax_of_the_queue(finish: Finish, tiny_model: Path, tiny_workload: Path) -> None:
    words = ("--model", tiny_model, "--workload", tiny_workload, "--num-threads", "1", "--limit", "3")
    found = finish(queue_tax, *words, "--names", "W2", "--rounds", "1", "--most-other-cores", "1e9")
    assert [(run["contender"], run["num_jobs"]) for run in found["runs"]] == [("jitney", 3), ("jitney-engine", 3)]
    assert [goal["bar"] for goal in found["goals"]] == ["≥ 0.93 × jitney-engine", "≥ 0.97 × jitney-engine"]
    assert {goal["verdict"] for goal in found["goals"]} <= {"met", "not met"}
    rates = found["rounds"]["W2"]
    assert all(len(rounds) == 1 and rounds[0] > 0 for rounds in rates.values())


@pytest.mark.usefixtures("small_cache")
def test_engines_side_by_side_take_turns_in_opposite_orders(
    finish: Finish, tiny_model: Path, tiny_workload: Path
) -> None:
    words = ("--model", tiny_model, "--workload", tiny_workload, "--num-threads", "1", "--limit", "2")
    words = (*words, "--names", "W1", "--engines", "jitney,static", "--rounds", "2", "--most-other-cores", "1e9")
    found = finish(compare, *words)
    assert [(run["round"], run["contender"]) for run in found["runs"]] == [
        (1, "jitney"),
        (1, "static"),
        (2, "static"),
        (2, "jitney"),
    ]
    assert [goal["verdict"] for goal in found["goals"]] == ["not measured"] * 4
    assert found["settings"] == {"W1": {"jitney": {}, "static": {"batch": 16}}}
    assert [(run["failure"], run["counts"]) for run in found["runs"]] == [("", True)] * 4


@pytest.mark.usefixtures("small_cache")
def test_a_comparison_may_be_made_in_parts(tiny_model: Path, tiny_workload: Path, tmp_path: Path) -> None:
    """What was there of another workload stays as it was; the same workload is measured anew."""
    figures = tmp_path / "figures.json"
    words = ["--model", str(tiny_model), "--workload", str(tiny_workload), "--num-threads", "1", "--limit", "2"]
    words += ["--engines", "jitney-engine", "--rounds", "2", "--json", str(figures), "--add"]
    words += ["--most-other-cores", "1e9"]
    compare.main([*words, "--names", "W2"])
    first = json.loads(figures.read_text())
    compare.main([*words, "--names", "W1"])
    both = json.loads(figures.read_text())
    assert list(both["rounds"]) == ["W1", "W2"]
    assert len(both["rounds"]["W1"]["jitney-engine"]) == 2
    assert both["rounds"]["W2"] == first["rounds"]["W2"]
    assert [run for run in both["runs"] if run["name"] == "W2"] == first["runs"]
    (again,) = compare.kept(figures, ["W1"])
    assert again.rounds == {"jitney-engine": first["rounds"]["W2"]["jitney-engine"]}
    assert compare.kept(figures, ["W1", "W2"]) == []
    both["runs"][-1]["counts"] = False
    figures.write_text(json.dumps(both))
    (again,) = compare.kept(figures, ["W1"])
    assert again.rounds == {"jitney-engine": [first["rounds"]["W2"]["jitney-engine"][0], None]}


def test_a_file_that_is_no_comparison_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(SettingsError, match=r"--add: .*x\.json is not of this command"):
        compare.kept(tmp_path / "x.json", [])


def test_tuning_tries_every_setting_once_and_keeps_the_fastest(
    tiny_model: Path, tiny_workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = compare.arguments(["--model", str(tiny_model), "--workload", str(tiny_workload), "--num-threads", "1"])
    settings, num_tried = compare.tuned(compare.CONTENDERS["static"], "W2", compare.ground_of(asked))
    told = [line.rsplit(" ", 2)[1].replace(",", "") for line in capsys.readouterr().err.splitlines()]
    rates = list(map(float, told))
    assert num_tried == len(rates) == 3
    assert settings == compare.CONTENDERS["static"].tuning[rates.index(max(rates))]


@pytest.mark.parametrize(
    ("module", "words", "complaint"),
    [
        (limits, "--sizes-mib 0", "argument --sizes-mib: '0' is not a whole number of at least 1"),
        (limits, "--threads 1,1", "argument --threads: 1 stands there twice"),
        (step_curve, "--seats 1,x", "argument --seats: 'x' is not a whole number of at least 1"),
        (step_curve, "--output-tokens 1", "argument --output-tokens: '1' is not a whole number of at least 2"),
        (step_curve, "--dtype float64", "argument --dtype: invalid choice: 'float64'"),
        (preemption, "--percent 100,0", "argument --percent: '0' is not a whole percentage of 1 to 1000"),
        (preemption, "--name W6", "argument --name: invalid choice: 'W6'"),
        (preemption, "--workload nowhere.json", "argument --workload: there is no file nowhere.json"),
        (variance, "--scale 0", "argument --scale: '0' is not a number above 0"),
        (variance, "--scale nan", "argument --scale: 'nan' is not a number above 0"),
        (variance, "--quantization int4", "argument --quantization: invalid choice: 'int4'"),
        (under_load, "--rounds 0", "argument --rounds: '0' is not a whole number of at least 1"),
        (under_load, "--json nowhere/x.json", "argument --json: there is no folder nowhere"),
        (queue_tax, "--names W6", "argument --names: 'W6' is not one of W1, W2"),
        (queue_tax, "--timeout-s -1", "argument --timeout-s: '-1' is not a number above 0"),
        (compare, "--engines jitney,sglang", "argument --engines: 'sglang' is not one of jitney"),
        (compare, "--most-other-cores none", "argument --most-other-cores: 'none' is not a number above 0"),
        (compare, "--svg nowhere/x.svg", "argument --svg: there is no folder nowhere"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(
    module: Any, words: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main(shlex.split(words))
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.PLACE)
def test_a_document_without_a_place_is_refused_before_anything_is_measured(module: Any, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("no place\n")
    with pytest.raises(SystemExit, match=f"no place called '{module.PLACE}'"):
        module.main(["--write", str(tmp_path / "page.md")])


def test_all_of_it_is_one_list_of_commands_that_parse(tmp_path: Path) -> None:
    for quick in ([], ["--quick"]):
        planned = run_all.plan(run_all.arguments(["--into", str(tmp_path), *quick]))
        assert [name for name, _ in planned] == [module.__name__ for module in COMMANDS]
        for name, words in planned:
            asked = importlib.import_module(name).arguments(words)
            assert asked.json.parent == tmp_path
            assert getattr(asked, "svg", asked.json).parent == tmp_path


def test_one_command_that_fails_does_not_keep_the_others_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = ("ops.bench.limits", ["--threads", "0"])
    works = ("ops.bench.limits", ["--threads", "1", "--sizes-mib", "1", "--rows", "1", "--json", f"{tmp_path}/a.json"])
    assert run_all.run([fails, works], timeout_s=100) == ["ops.bench.limits"]
    assert (tmp_path / "a.json").exists()
    assert "ops.bench.limits ended with 2" in capsys.readouterr().err


@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("mode", ["engine", "naive", "path", "static", "serial"])
def test_every_mode_of_jitney_bench_writes_the_same_figures(
    mode: str, tiny_model: Path, tiny_workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 they also say the same tokens. Whoever waits is told of every job that has ended."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    figures = tmp_path / "figures.json"
    words = ["--workload", tiny_workload, "--model", tiny_model, "--name", "W1", "--mode", mode, "--dtype", "float32"]
    words += ["--num-threads", "1", "--limit", "4", "--json", figures]
    app = typer.Typer()
    app.command()(bench)
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert [line for line in done.stderr.splitlines() if line.startswith("W1")] == [
        f"W1, mode {mode}: {n} of 4 jobs ({n / 4:.0%})" for n in range(1, 5)
    ]
    found = json.loads(figures.read_text())
    assert (found["mode"], found["num_jobs"], found["output_tokens"], found["prompt_tokens"]) == (mode, 4, 18, 32)
    assert (found["dtype"], found["device"]) == ("float32", "cpu")
    assert found["first_token_ids"] == told_alone(tiny_model, tiny_workload)
    for name in ("ttft_s", "itl_s", "completion_s"):
        assert {"p50", "p99"} <= set(found[name])
    seats = {"naive": 1, "serial": 1}.get(mode, 64)
    assert found["engine"]["max_num_seqs"] == seats
    assert found["engine"].get("policy", "none") == {"static": "static", "naive": "none"}.get(mode, "continuous")


def test_a_short_run_through_the_path_knows_its_preemptions(tiny_model: Path, tiny_workload: Path) -> None:
    """The worker speaks twice a second, and the run is over before that."""
    workload = load_workload(tiny_workload, "W5")
    options = BenchOptions(model=str(tiny_model), num_kv_blocks=8, num_threads=1)
    measured = run(workload, options)
    assert measured.num_preemptions > 0
    assert [len(ride.token_ids) for ride in measured.rides] == [job.max_tokens for job in workload.jobs]


def told_alone(model: Path, workload: Path) -> list[list[int]]:
    """What transformers says of W1, one job at a time."""
    from jitney_worker.bench.naive import generate, load_naive

    loaded = load_naive(model, "float32", 1)
    return [generate(loaded, job) for job in load_workload(workload, "W1", limit=4).jobs]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--rate 2", "--rate 2 is of W6 alone: in W5 all jobs arrive at once"),
        ("--name W6 --rate 0", "--rate 0 must be more than 0"),
        ("--name W10", "--name 'W10' is not one of W1"),
        ("--json nowhere/x.json", "--json nowhere/x.json: there is no folder nowhere"),
        ("--mode engine --kernels fast", "kernels"),
        ("--mode engine --quantization int3", "quantization"),
        ("--mode engine --dtype float99", "dtype='float99'"),
        ("--mode engine --seats 64 --max-num-batched-tokens 8", "engine.max_num_seqs=64"),
    ],
)
def test_jitney_bench_refuses_by_name(words: str, complaint: str, tiny_model: Path, tiny_workload: Path) -> None:
    app = typer.Typer()
    app.command()(bench)
    given = ["--workload", str(tiny_workload), "--model", str(tiny_model), *shlex.split(words)]
    with pytest.raises(SettingsError) as refused:
        CliRunner().invoke(app, given, catch_exceptions=False)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    "words", ["--seats 0", "--num-kv-blocks 1", "--num-threads 0", "--limit 0", "--kv-cache-bytes x"]
)
def test_numbers_that_cannot_be_are_refused_by_their_flag(words: str) -> None:
    app = typer.Typer()
    app.command()(bench)
    done = CliRunner().invoke(app, shlex.split(words))
    assert done.exit_code == 2
    assert words.split()[0] in done.output


def test_every_command_says_how_long_it_takes() -> None:
    """Whoever starts one wants to know; and its own words name it as it is run."""
    for module in COMMANDS:
        assert isinstance(module, ModuleType)
        about = module.__doc__ or ""
        assert f"python -m {module.__name__}" in about
        assert "minute" in about, module.__name__
