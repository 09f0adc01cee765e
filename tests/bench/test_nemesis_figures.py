"""The arithmetic of the report, on ledgers whose figures can be seen with the naked eye."""

from __future__ import annotations

from pathlib import Path

import pytest
from ops.bench.nemesis import figures
from ops.bench.nemesis.run import Measured
from ops.bench.nemesis.scenarios import SCENARIOS
from ops.bench.nemesis_report import HEAD, Yardstick, cells, in_order, row_of
from tests.faults.checker import Summary
from tests.faults.ledger import Ledger, Line

from jitney.messages import Event


def ledger_of(*lines: Line) -> Ledger:
    return Ledger(lines=list(lines))


def told(at: float, job: str, event: Event) -> Line:
    return Line(at, "event", name=job, job=job, reader="py", payload=event.encode().decode())


def tokens(at: float, job: str, seq: int, count: int = 1) -> Line:
    return told(at, job, Event("tokens", seq, index=seq - 2, token_ids=tuple(range(count)), text="a"))


LEDGER = ledger_of(
    Line(0.0, "accepted", name="a", job="a"),
    Line(0.5, "accepted", name="b", job="b"),
    told(1.0, "a", Event("started", 1, attempt=1, prompt_tokens=3, cached_tokens=0)),
    tokens(1.1, "a", 2),
    told(3.0, "b", Event("started", 1, attempt=1, prompt_tokens=3, cached_tokens=0)),
    tokens(3.1, "b", 2, 4),
    Line(3.2, "fault", text="SIGKILL w1"),
    tokens(3.3, "b", 3, 2),
    told(5.1, "a", Event("started", 3, attempt=2, resumed_tokens=1)),
    tokens(5.2, "a", 4),
)


def test_silences_are_within_streams_and_never_between_them() -> None:
    times = figures.event_times(LEDGER)
    assert times == {("a", "py"): [1.0, 1.1, 5.1, 5.2], ("b", "py"): [3.0, 3.1, 3.3]}
    lengths = sorted(round(stall.length_s, 3) for stall in figures.stalls(times))
    assert lengths == [0.1, 0.1, 0.1, 0.2, 4.0]
    assert figures.longest_s(figures.stalls(times)) == pytest.approx(4.0)
    assert figures.longest_s([]) == 0.0


def test_the_wait_for_a_first_event_counts_from_the_acceptance() -> None:
    assert figures.slowest_first_s(LEDGER, figures.event_times(LEDGER)) == pytest.approx(2.5)


def test_tokens_are_counted_while_the_load_is_on() -> None:
    assert figures.tokens_shown(LEDGER, 1.0, 5.2) == 7  # the one at 5.2 came after the end
    assert figures.tokens_shown(LEDGER, 0.0, 9.0) == 8


def test_a_second_claim_that_goes_on_with_tokens_is_counted() -> None:
    assert figures.num_resumed(LEDGER) == 1


def test_a_fault_is_over_when_the_last_stream_that_it_silenced_goes_on() -> None:
    found = [figures.Stall(9.9, 12.0), figures.Stall(9.8, 14.5), figures.Stall(19.0, 21.0), figures.Stall(1.0, 5.0)]
    assert figures.recoveries_s([10.0, 20.0, 30.0], found, normal_s=0.5) == [4.5, 1.0, 0.0]


def test_a_silence_as_long_as_in_the_undisturbed_run_is_no_recovery() -> None:
    assert figures.recoveries_s([10.0], [figures.Stall(9.5, 11.0)], normal_s=1.5) == [0.0]
    assert figures.recoveries_s([10.0], [figures.Stall(9.5, 11.0)], normal_s=1.4) == [1.0]
    assert figures.recoveries_s([], [figures.Stall(9.5, 11.0)], normal_s=0.0) == []


def test_what_all_workers_computed_is_added_up(tmp_path: Path) -> None:
    (tmp_path / "w1.0.tally").write_text("2 40 0\n2 2 1\n")
    (tmp_path / "w2.0.tally").write_text("1 1 0\n")
    assert figures.tally_of(tmp_path) == figures.Tally(num_sampled=5, num_computed=43)
    assert figures.percent_more(5, 4) == 25.0
    assert figures.percent_more(4, 5) == 0.0
    assert figures.percent_more(4, 0) == 0.0


def measured(
    name: str, *stalls: figures.Stall, shown: int = 1_000, sampled: int = 1_000, computed: int = 2_000
) -> Measured:
    return Measured(
        SCENARIOS[name],
        seconds=10.0,
        summary=Summary(num_accepted=70, num_finished=70, num_tokens=1_000),
        faults=[3.0] if name == "workers" else [],
        stalls=list(stalls),
        resumed=5,
        shown=shown,
        tally=figures.Tally(sampled, computed),
    )


CALM = [
    measured("undisturbed", figures.Stall(1.0, 1.2), shown=900),
    measured("undisturbed", figures.Stall(1.0, 1.4), shown=1_100),
]


def test_the_undisturbed_runs_are_the_yardstick() -> None:
    stick = Yardstick.of([*CALM, measured("workers", figures.Stall(2.0, 9.0), shown=1)], lease_s=5.0)
    assert (stick.lease_s, round(stick.gap_s, 3), stick.tokens_per_s, stick.positions_per_token) == (
        5.0,
        0.4,
        100.0,
        2.0,
    )


def test_a_row_has_its_figures_beside_those_of_the_undisturbed_runs() -> None:
    stick = Yardstick.of(CALM, lease_s=5.0)
    hit = measured("workers", figures.Stall(2.9, 8.9), shown=500, sampled=1_020, computed=2_200)
    row = row_of(hit, stick)
    assert (row["longest_gap_s"], row["recoveries_s"], row["tokens_per_s"]) == (6.0, [5.9], 50.0)
    assert (row["done_twice_percent"], row["recomputed_percent"]) == (2.0, 10.0)
    assert cells(hit, stick) == [
        "one of three workers killed (`kill -9`) every 5 s",
        *("1", "70", "0", "0", "5"),
        "6.00 s (×1.20 lease, ×15.0 undisturbed)",
        "5.90 s, 5.90 s",
        "2.0 %, 10.0 %",
        "×0.50",
    ]


def test_a_run_that_broke_a_promise_has_no_figures() -> None:
    broken = Measured(SCENARIOS["rolling"], seconds=120.0, wrong=["s1-4: said (1,), alone it says (2,)"])
    line = cells(broken, Yardstick.of(CALM, 5.0))
    assert len(line) == len(HEAD)
    assert line[1] == "**promise broken**"
    assert set(line[2:]) == {""}


def test_without_an_undisturbed_run_nothing_is_compared() -> None:
    stick = Yardstick.of([], lease_s=5.0)
    assert cells(CALM[0], stick)[6:] == ["0.20 s (×0.04 lease, – undisturbed)", "–", "0.0 %, 0.0 %", "–"]


def test_the_undisturbed_run_comes_first_and_last() -> None:
    names = [scenario.name for scenario in in_order(list(SCENARIOS))]
    assert names == ["undisturbed", "workers", "rolling", "redis-everysec", "redis-always", "slow", "undisturbed"]


@pytest.mark.parametrize(("seconds", "pause_s"), [(120.0, 10.0), (12.0, 6.0)])
def test_at_least_two_blows_fall_in_a_short_run(seconds: float, pause_s: float) -> None:
    assert SCENARIOS["workers"].pause_s(seconds) == pause_s
