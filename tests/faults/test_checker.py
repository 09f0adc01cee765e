"""The checker sees every kind of violation: doctored ledgers, one doctored line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest
from tests.faults.answers import Answer
from tests.faults.checker import Summary, Violation, check
from tests.faults.ledger import Ledger, Line
from tests.faults.report import Figures, table

JOB = "q.0123456789abcdefghijkl"
ANSWER = Answer((11, 12, 13, 14), "abcd", "length", 5, (-0.1, -0.2, -0.3, -0.4))
USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "cached_tokens": 0}
Events = list[dict[str, Any]]


def events() -> Events:
    def said(seq: int, index: int, token_ids: list[int], text: str, **more: Any) -> dict[str, Any]:
        logprobs = [{"token_id": t, "logprob": ANSWER.logprobs[index + i]} for i, t in enumerate(token_ids)]  # type: ignore[index]
        return {"type": "tokens", "seq": seq, "index": index, "token_ids": token_ids, "text": text} | {
            "logprobs": logprobs,
            **more,
        }

    return [
        {"type": "started", "seq": 1, "attempt": 1, "prompt_tokens": 5, "cached_tokens": 0},
        said(2, 0, [11, 12], "ab"),
        {"type": "started", "seq": 3, "attempt": 2, "resumed_tokens": 2},
        said(4, 2, [13], ""),
        said(5, 3, [14], "cd", finish_reason="length"),
        {
            "type": "finished",
            "seq": 6,
            "choices": [{"choice": 0, "finish_reason": "length", "num_tokens": 4}],
            "usage": USAGE,
        },
    ]


def ledger_of(told: Events, *, lost: bool = False, second: Events | None = None) -> Ledger:
    ledger = Ledger()
    ledger.accepted("a", JOB)
    for event in told:
        ledger.saw("a", JOB, "py", orjson.dumps(event))
    for event in second or []:
        ledger.saw("a", JOB, "http", orjson.dumps(event))
    if lost:
        ledger.lost("a", JOB, "py", "gone")
    return ledger


def test_a_good_run_is_counted() -> None:
    summary = check(ledger_of(events()), {"a": ANSWER})
    assert (summary.num_accepted, summary.num_finished, summary.num_tokens, summary.num_lost) == (1, 1, 4, 0)


def shifted(told: Events, start: int, by: int) -> None:
    for event in told[start:]:
        event["seq"] += by


def drop(number: int) -> Callable[[Events], None]:
    return lambda told: told.__delitem__(number)


def change(number: int, **fields: Any) -> Callable[[Events], None]:
    return lambda told: told[number].update(fields)


def repeat_tokens(told: Events) -> None:
    """A zombie's write: the same tokens once more, under the next seq."""
    told.insert(5, {**told[4], "seq": 6})
    shifted(told, 6, 1)


def swap(told: Events) -> None:
    told[1], told[3] = told[3], told[1]


DOCTORED: dict[str, tuple[Callable[[Events], None], str]] = {
    "a hole in seq": (drop(3), "seq 5 where 4"),
    "a repeated event": (lambda told: told.insert(2, dict(told[1])), "seq 2 where 3"),
    "two events in the other order": (swap, "seq 4 where 2"),
    "tokens twice under new seqs": (repeat_tokens, "goes on at token 3, not 4"),
    "a token too few": (change(3, token_ids=[], logprobs=[]), "goes on at token 3, not 2"),
    "another token": (change(3, token_ids=[99]), "alone it says"),
    "another text": (change(4, text="cx"), "alone 'abcd'"),
    "text that was held back and lost": (change(4, text=""), "alone 'abcd'"),
    "another log probability": (change(4, logprobs=[{"token_id": 14, "logprob": -9.0}]), "log probabilities are not"),
    "another finish reason": (change(4, finish_reason="stop"), "finish reasons ['stop']"),
    "no finish reason": (lambda told: told[4].pop("finish_reason"), "finish reasons []"),
    "two finish reasons": (change(3, finish_reason="length"), "finish reasons ['length', 'length']"),
    "no end": (drop(5), "no terminal event"),
    "two ends": (lambda told: told.append({**told[5], "seq": 7}), "2 terminal events"),
    "tokens after the end": (
        lambda told: told.append({"type": "tokens", "seq": 7, "index": 4, "token_ids": [], "text": ""}),
        "tokens after finished",
    ),
    "a failure": (change(5, type="failed", choices=None, error={"code": "x"}), "ended as failed"),
    "usage that counts a token twice": (change(5, usage={**USAGE, "completion_tokens": 5}), "usage says 5 tokens"),
    "usage with another prompt": (change(5, usage={**USAGE, "prompt_tokens": 6}), "usage says 6 prompt tokens"),
    "a wrong sum at the end": (
        change(5, choices=[{"choice": 0, "finish_reason": "length", "num_tokens": 3}]),
        "ends with",
    ),
}


@pytest.mark.parametrize("kind", DOCTORED)
def test_a_doctored_ledger_is_caught(kind: str) -> None:
    doctor, said = DOCTORED[kind]
    told = events()
    doctor(told)
    with pytest.raises(Violation) as caught:
        check(ledger_of(told), {"a": ANSWER})
    assert said in str(caught.value)


TWO = replace(ANSWER, logprobs=None, others=(Answer((21, 22), "xy", "stop", 5),))


def of_two() -> Events:
    """Choice 1 has ended when another worker goes on with choice 0."""

    def said(seq: int, choice: int, index: int, token_ids: list[int], text: str, **more: Any) -> dict[str, Any]:
        return {
            "type": "tokens",
            "seq": seq,
            "choice": choice,
            "index": index,
            "token_ids": token_ids,
            "text": text,
        } | more

    ends = [
        {"choice": 0, "finish_reason": "length", "num_tokens": 4},
        {"choice": 1, "finish_reason": "stop", "num_tokens": 2},
    ]
    return [
        {"type": "started", "seq": 1, "attempt": 1, "prompt_tokens": 5, "cached_tokens": 0},
        said(2, 0, 0, [11, 12], "ab"),
        said(3, 1, 0, [21, 22], "xy", finish_reason="stop"),
        {"type": "started", "seq": 4, "attempt": 2, "resumed_tokens": 4},
        said(5, 0, 2, [13, 14], "cd", finish_reason="length"),
        {"type": "finished", "seq": 6, "choices": ends, "usage": USAGE | {"completion_tokens": 6}},
    ]


def another_choice(told: Events) -> None:
    told[2]["choice"] = 2


def end_of_the_other(told: Events) -> None:
    """Choice 1 stops like choice 0, and the other way round: their sum is right."""
    told[2]["finish_reason"], told[4]["finish_reason"] = "length", "stop"


def go_on(told: Events) -> None:
    """The second worker begins choice 1, which had ended, anew and says nothing."""
    told.insert(5, {**told[2], "seq": 6, "index": 2, "token_ids": [], "text": "", "finish_reason": None})
    shifted(told, 6, 1)


DOCTORED_CHOICES: dict[str, tuple[Callable[[Events], None], str]] = {
    "a choice that nobody asked for": (another_choice, "choices [0, 2], alone it has 2"),
    "a choice that is not there": (drop(2), "finished after 4 tokens, alone it says 6"),
    "another token in the second choice": (change(2, token_ids=[21, 99]), "choice 1: said (21, 99)"),
    "another text in the second choice": (change(2, text="xz"), "choice 1: text 'xz'"),
    "tokens of one choice in the other": (change(4, choice=1), "choice 1: said (21, 22, 13, 14)"),
    "the choices' reasons the other way round": (end_of_the_other, "choice 1: finish reasons ['length'], alone stop"),
    "a choice that goes on after its end": (go_on, "choice 1: goes on after its end"),
    "a second choice that is begun again": (change(2, index=1), "choice 1 goes on at token 1, not 0"),
    "the end of one choice only": (
        change(5, choices=[{"choice": 0, "finish_reason": "length", "num_tokens": 4}]),
        "ends with",
    ),
}


def test_a_good_run_of_two_choices_is_counted() -> None:
    assert check(ledger_of(of_two()), {"a": TWO}).num_tokens == 6


@pytest.mark.parametrize("kind", DOCTORED_CHOICES)
def test_a_doctored_ledger_of_two_choices_is_caught(kind: str) -> None:
    doctor, said = DOCTORED_CHOICES[kind]
    told = of_two()
    doctor(told)
    with pytest.raises(Violation) as caught:
        check(ledger_of(told), {"a": TWO})
    assert said in str(caught.value)


def test_an_answer_that_stops_too_soon_is_caught() -> None:
    longer = replace(ANSWER, token_ids=(*ANSWER.token_ids, 15), logprobs=None)
    told = [{name: value for name, value in event.items() if name != "logprobs"} for event in events()]
    with pytest.raises(Violation, match="finished after 4 tokens, alone it says 5"):
        check(ledger_of(told), {"a": longer})


def test_log_probabilities_that_nobody_asked_for_are_caught() -> None:
    with pytest.raises(Violation, match="nobody asked for"):
        check(ledger_of(events()), {"a": replace(ANSWER, logprobs=None)})


def test_an_accepted_job_that_nobody_hears_of_is_caught() -> None:
    with pytest.raises(Violation, match="no reader heard of it again"):
        check(ledger_of([]), {"a": ANSWER})


def test_a_request_that_became_two_jobs_is_caught() -> None:
    ledger = ledger_of(events())
    ledger.accepted("a", f"{JOB[:-1]}m")
    with pytest.raises(Violation, match="became another job"):
        check(ledger, {"a": ANSWER})


def test_a_job_that_was_never_accepted_and_runs_all_the_same_is_caught() -> None:
    ledger = ledger_of(events())
    ledger.lines = [line for line in ledger.lines if line.kind != "accepted"]
    with pytest.raises(Violation, match="never accepted"):
        check(ledger, {"a": ANSWER})


def test_two_readers_that_were_told_different_things_are_caught() -> None:
    other = events()
    other[0]["cached_tokens"] = 3
    with pytest.raises(Violation, match="were told different things"):
        check(ledger_of(events(), second=other), {"a": ANSWER})


def test_a_reader_that_was_told_of_a_loss_counts_only_where_losses_are_allowed() -> None:
    told = events()[:2]
    assert check(ledger_of(told, lost=True), {"a": ANSWER}, may_lose=True).num_lost == 1
    with pytest.raises(Violation, match="told that it is gone"):
        check(ledger_of(told, lost=True), {"a": ANSWER})


def test_a_silence_is_no_loss() -> None:
    with pytest.raises(Violation, match="no terminal event"):
        check(ledger_of(events()[:2]), {"a": ANSWER}, may_lose=True)


def test_what_a_lost_reader_had_seen_must_be_right_all_the_same() -> None:
    told = events()[:2]
    told[1]["token_ids"] = [11, 99]
    with pytest.raises(Violation, match="alone it says"):
        check(ledger_of(told, lost=True), {"a": ANSWER}, may_lose=True)


def test_another_ending_is_fine_where_it_was_meant() -> None:
    told = events()
    told[5] = {"type": "cancelled", "seq": 6, "usage": USAGE}
    summary = check(ledger_of(told), {"a": ANSWER}, may_end_otherwise=lambda name, end: end.type == "cancelled")
    assert (summary.num_finished, summary.num_otherwise) == (0, 1)


def test_gaps_and_recovery_are_measured() -> None:
    times = [0.0, 1.0, 5.0, 5.5, 6.0, 6.5]
    ledger = Ledger()
    ledger.lines = [
        Line(0.0, "accepted", name="a", job=JOB),
        *(Line(at, "event", "a", JOB, "py", orjson.dumps(e).decode()) for at, e in zip(times, events(), strict=True)),
        Line(2.0, "fault", text="kill"),
    ]
    summary = check(ledger, {"a": ANSWER})
    assert (summary.longest_gap_s, summary.recovery_s) == (4.0, 3.0)


def audited(told: Events, *, logged: Events, bills: tuple[int, ...]) -> Ledger:
    ledger = ledger_of(told)
    for event in logged:
        ledger.logged("a", JOB, orjson.dumps(event))
    for bill in bills:
        ledger.billed("a", JOB, bill)
    return ledger


def test_a_log_and_a_bill_that_say_the_same_are_fine() -> None:
    assert check(audited(events(), logged=events(), bills=(4,)), {"a": ANSWER}).num_finished == 1


def test_a_log_that_goes_on_after_its_end_is_caught_though_no_reader_saw_it() -> None:
    longer = [*events(), {**events()[5], "seq": 7}]
    with pytest.raises(Violation, match="2 terminal events"):
        check(audited(events(), logged=longer, bills=(4,)), {"a": ANSWER})


def test_a_log_that_holds_something_else_than_was_told_is_caught() -> None:
    other = events()
    other[0]["cached_tokens"] = 3
    with pytest.raises(Violation, match="were told different things"):
        check(audited(events(), logged=other, bills=(4,)), {"a": ANSWER})


@pytest.mark.parametrize("bills", [(), (4, 4), (5,)], ids=["none", "two", "another"])
def test_a_wrong_bill_is_caught(bills: tuple[int, ...]) -> None:
    with pytest.raises(Violation, match=r"billed \[.*\] tokens, 4 were told"):
        check(audited(events(), logged=events(), bills=bills), {"a": ANSWER})


def test_in_the_middle_of_a_run_only_what_is_wrong_for_good_is_wrong() -> None:
    assert check(ledger_of(events()[:3]), {"a": ANSWER}, so_far=True).num_accepted == 1
    assert check(ledger_of([]), {"a": ANSWER}, so_far=True).num_accepted == 1
    with pytest.raises(Violation, match="seq 3 where 2"):
        check(ledger_of([events()[0], events()[2]]), {"a": ANSWER}, so_far=True)
    with pytest.raises(Violation, match="told that it is gone"):
        check(ledger_of(events()[:3], lost=True), {"a": ANSWER}, so_far=True)


def test_the_report_says_the_gap_in_leases_and_sums_up() -> None:
    quiet = Figures("F0 quiet", Summary(num_accepted=70, num_finished=70, num_tokens=200), 2.0, num_sampled=200)
    deadly = Figures(
        "F1 deadly",
        Summary(num_accepted=60, num_finished=59, num_otherwise=1, num_tokens=100, longest_gap_s=3.0, recovery_s=3.5),
        2.0,
        num_sampled=110,
        num_takeovers=12,
        num_late_writes=4,
        num_preemptions=3,
        notes={"blows_struck": 2},
    )
    lines = table([quiet, deadly]).splitlines()
    head, row = next(line for line in lines if line.startswith("fault")), next(li for li in lines if "deadly" in li)
    assert head.split()[:2] == ["fault", "jobs"]
    cells = (
        "F1 deadly",
        "60",
        "1",
        "–",
        "12",
        "4",
        "3",
        "–",
        "3.0 s",
        "2.0 s",
        "1.5",
        "3.5 s",
        "10.0 %",
        "blows struck 2",
    )
    assert row.split() == " ".join(cells).split()
    sums = next(line for line in lines if line.startswith("2 rows"))
    assert "130 jobs accepted, 300 tokens compared" in sums
    assert "longest gap in leases 1.5 (F1 deadly)" in sums
