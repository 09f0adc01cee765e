"""Judges a run by its ledger: one ending each, nothing missing, nothing twice, and the words of a run alone.

The checker knows no engine and no queue. It compares what readers were given with answers computed beforehand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from tests.faults.answers import Answer
from tests.faults.ledger import Ledger, Line

from jitney.messages import Event

LOG = "log"
"""The reader that is the queue's own log."""

LAGGARDS = ("slow", "stuck")
"""What the names of readers begin with whose gaps are their own doing."""

Ending = Callable[[str, Event], bool]
"""(name of the request, terminal event): whether another ending than `finished` is what was meant."""


def always_finished(_name: str, _event: Event) -> bool:
    return False


class Violation(AssertionError):
    """What is wrong with a run, one line each."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(f"{len(found)} violations:\n" + "\n".join(found[:40]))
        self.found = found


@dataclass(slots=True)
class Summary:
    """Figures of a run that broke no promise. Times in seconds.

    longest_gap_s: between two events of one reader's stream. recovery_s: from the first fault until every stream
    that was open then, or was begun again by another claim, had its next event. num_lost: accepted jobs whose
    reader was told that they are gone.
    """

    num_accepted: int = 0
    num_finished: int = 0
    num_otherwise: int = 0
    num_lost: int = 0
    num_tokens: int = 0
    num_refused: int = 0
    num_reconnects: int = 0
    longest_gap_s: float = 0.0
    recovery_s: float = 0.0
    lost: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Reading:
    """One reader's view of one job."""

    name: str
    job: str
    reader: str
    lines: list[Line] = field(default_factory=list)
    lost: bool = False


def check(
    ledger: Ledger,
    answers: Mapping[str, Answer],
    *,
    may_lose: bool = False,
    may_end_otherwise: Ending = always_finished,
    so_far: bool = False,
) -> Summary:
    """The run's figures. Raises Violation that lists everything wrong.

    may_lose: a reader may have been told that its job is gone; what it had seen by then is checked all the same.
    so_far: the run is not over; only what can never become right again is wrong.
    """
    found: list[str] = []
    accepted = _accepted(ledger, found)
    readings = _readings(ledger)
    of_job: dict[str, list[_Reading]] = defaultdict(list)
    for reading in readings:
        of_job[reading.job].append(reading)
    summary = Summary(num_accepted=len(accepted))
    for job, name in accepted.items():
        if not of_job[job] and not so_far:
            found.append(f"{name}: accepted as {job}, and no reader heard of it again")
        for reading in of_job[job]:
            may_stop_short = may_lose if reading.lost else so_far
            found += _judge(reading, answers[name], may_stop_short, may_end_otherwise)
        found += _same_bytes(of_job[job])
    found += _bills(ledger, of_job)
    found += [f"{r.name}: {r.reader} read {r.job}, which was never accepted" for r in readings if r.job not in accepted]
    if found:
        raise Violation(found)
    _count(summary, ledger, readings, accepted)
    return summary


def _accepted(ledger: Ledger, found: list[str]) -> dict[str, str]:
    """Job id -> request. One request that became two jobs is a violation."""
    accepted: dict[str, str] = {}
    job_of: dict[str, str] = {}
    for line in ledger.of("accepted"):
        if job_of.setdefault(line.name, line.job) != line.job:
            found.append(f"{line.name}: submitted again, it became another job ({job_of[line.name]}, {line.job})")
        accepted[line.job] = line.name
    return accepted


def _readings(ledger: Ledger) -> list[_Reading]:
    readings: dict[tuple[str, str], _Reading] = {}
    for line in ledger.of("event", "lost", "logged"):
        reading = readings.setdefault((line.job, line.reader), _Reading(line.name, line.job, line.reader))
        if line.kind == "lost":
            reading.lost = True
        else:
            reading.lines.append(line)
    return list(readings.values())


def _judge(reading: _Reading, answer: Answer, may_stop_short: bool, may_end_otherwise: Ending) -> list[str]:
    who = f"{reading.name} ({reading.reader}, {reading.job})"
    events = [line.event for line in reading.lines]
    found = [*_order(who, events), *_words(who, events, answer)]
    terminal = [event for event in events if event.is_terminal]
    if len(terminal) > 1:
        found.append(f"{who}: {len(terminal)} terminal events: {[event.type for event in terminal]}")
    elif not terminal and not may_stop_short:
        found.append(f"{who}: {'told that it is gone' if reading.lost else 'no terminal event'} after {len(events)}")
    elif terminal and events[-1] is not terminal[0]:
        found.append(f"{who}: {events[-1].type} after {terminal[0].type}")
    if len(terminal) == 1:
        found += _ending(who, reading.name, events, answer, may_end_otherwise)
    return found


def _order(who: str, events: list[Event]) -> Iterable[str]:
    """seq dense from 1; the tokens of each choice once each, in order."""
    for expected, event in enumerate(events, 1):
        if event.seq != expected:
            yield f"{who}: seq {event.seq} where {expected} should be"
            break
    next_index: dict[int, int] = defaultdict(int)
    for event in events:
        if event.type != "tokens":
            continue
        if event.index != next_index[event.choice]:
            yield f"{who}: choice {event.choice} goes on at token {event.index}, not {next_index[event.choice]}"
            return
        next_index[event.choice] += len(event.token_ids)


def _words(who: str, events: list[Event], answer: Answer) -> Iterable[str]:
    """What was said is the beginning of what a run alone says."""
    told = [event for event in events if event.type == "tokens"]
    numbers = {event.choice for event in told}
    if numbers - set(range(len(answer.choices))):
        yield f"{who}: choices {sorted(numbers)}, alone it has {len(answer.choices)}"
    for number, choice in enumerate(answer.choices):
        yield from _words_of_choice(f"{who} choice {number}", [e for e in told if e.choice == number], choice)


def _words_of_choice(who: str, told: list[Event], answer: Answer) -> Iterable[str]:
    token_ids = tuple(token_id for event in told for token_id in event.token_ids)
    if token_ids != answer.token_ids[: len(token_ids)]:
        yield f"{who}: said {token_ids}, alone it says {answer.token_ids}"
    text = "".join(event.text for event in told)
    if not answer.text.startswith(text):
        yield f"{who}: text {text!r}, alone {answer.text!r}"
    logprobs = [entry for event in told for entry in event.logprobs or ()]
    if answer.logprobs is None:
        if logprobs:
            yield f"{who}: log probabilities that nobody asked for"
        return
    if tuple(entry["logprob"] for entry in logprobs) != answer.logprobs[: len(token_ids)]:
        yield f"{who}: log probabilities are not those of its {len(token_ids)} tokens"


def _ending(who: str, name: str, events: list[Event], answer: Answer, may_end_otherwise: Ending) -> Iterable[str]:
    end = events[-1]
    told = [event for event in events if event.type == "tokens"]
    num_tokens = sum(len(event.token_ids) for event in told)
    usage = end.usage or {}
    if usage.get("completion_tokens") != num_tokens:
        yield f"{who}: usage says {usage.get('completion_tokens')} tokens, {num_tokens} were told"
    if end.type != "finished":
        if not may_end_otherwise(name, end):
            yield f"{who}: ended as {end.type}: {end.error}"
        return
    if num_tokens != answer.num_tokens:
        yield f"{who}: finished after {num_tokens} tokens, alone it says {answer.num_tokens}"
    for number, choice in enumerate(answer.choices):
        yield from _ending_of_choice(f"{who} choice {number}", [e for e in told if e.choice == number], choice)
    if usage.get("prompt_tokens") != answer.num_prompt_tokens:
        yield f"{who}: usage says {usage.get('prompt_tokens')} prompt tokens, there are {answer.num_prompt_tokens}"
    summed = [
        {"choice": number, "finish_reason": choice.finish_reason, "num_tokens": len(choice.token_ids)}
        for number, choice in enumerate(answer.choices)
    ]
    if [dict(choice) for choice in end.choices or ()] != summed:
        yield f"{who}: ends with {end.choices}, alone {summed}"


def _ending_of_choice(who: str, told: list[Event], answer: Answer) -> Iterable[str]:
    if (text := "".join(event.text for event in told)) != answer.text:
        yield f"{who}: text {text!r}, alone {answer.text!r}"
    reasons = [event.finish_reason for event in told if event.finish_reason is not None]
    if reasons != [answer.finish_reason]:
        yield f"{who}: finish reasons {reasons}, alone {answer.finish_reason}"
    elif told[-1].finish_reason is None:
        yield f"{who}: goes on after its end"


def _same_bytes(readings: list[_Reading]) -> Iterable[str]:
    """All readers of a job were given the same bytes, as far as they got."""
    longest = max(readings, key=lambda reading: len(reading.lines), default=None)
    for reading in readings:
        assert longest is not None
        theirs = [line.payload for line in reading.lines]
        if theirs != [line.payload for line in longest.lines][: len(theirs)]:
            yield f"{reading.name}: {reading.reader} and {longest.reader} were told different things"


def _bills(ledger: Ledger, of_job: Mapping[str, list[_Reading]]) -> Iterable[str]:
    """A job that ended stands in the usage ledger once, with the tokens that were told. Only after an audit."""
    bills: dict[str, list[int]] = defaultdict(list)
    for line in ledger.of("billed"):
        bills[line.job].append(int(line.text))
    for job, readings in of_job.items():
        logs = [reading for reading in readings if reading.reader == LOG]
        for reading in logs:
            told = sum(len(line.event.token_ids) for line in reading.lines)
            if bills[job] != [told]:
                yield f"{reading.name}: billed {bills[job]} tokens, {told} were told"


def _count(summary: Summary, ledger: Ledger, readings: list[_Reading], accepted: Mapping[str, str]) -> None:
    summary.num_refused = sum(1 for _ in ledger.of("refused"))
    summary.num_reconnects = sum(1 for _ in ledger.of("broken"))
    ended: dict[str, str] = {}
    told: dict[str, int] = defaultdict(int)
    readings = [reading for reading in readings if reading.reader != LOG]
    for reading in readings:
        events = [line.event for line in reading.lines]
        told[reading.job] = max(told[reading.job], sum(len(event.token_ids) for event in events))
        if reading.lost:
            summary.lost.add(reading.job)
        elif events:
            ended[reading.job] = events[-1].type
        if not reading.reader.startswith(LAGGARDS):
            summary.longest_gap_s = max(summary.longest_gap_s, _longest_gap_s(reading))
    summary.num_finished = sum(1 for type_ in ended.values() if type_ == "finished")
    summary.num_otherwise = len(ended) - summary.num_finished
    summary.num_lost = len(summary.lost)
    summary.num_tokens = sum(told.values())
    summary.recovery_s = _recovery_s(ledger, readings)


def _longest_gap_s(reading: _Reading) -> float:
    times = [line.at for line in reading.lines]
    return max((later - sooner for sooner, later in pairwise(times)), default=0.0)


def _recovery_s(ledger: Ledger, readings: list[_Reading]) -> float:
    """Over the streams that were open at the first fault, and those that another claim had to begin again."""
    fault_at = ledger.first_fault_at
    if fault_at is None:
        return 0.0
    waits = []
    for reading in readings:
        after = [line for line in reading.lines if line.at > fault_at]
        if len(after) < len(reading.lines):
            waits += [line.at - fault_at for line in after[:1]]
        taken_over = (line.at - fault_at for line in after if (line.event.attempt or 0) > 1)
        waits += list(taken_over)[:1]
    return max(waits, default=0.0)
