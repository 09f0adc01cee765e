"""A recorded step in words: what happened between two forward passes, and what the second one computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jitney_worker.engine.witness import Came, Dropped, Joined, Left, Preempted, Row, Step
from jitney_worker.record.reading import Boundary, RecordedRun

_HEAD = "  step tokens prefill decode  again  seats  waits   used cached   free  who"


def tell_run(run: RecordedRun) -> Iterator[str]:
    """Who recorded, what there is, and what it came to."""
    steps = run.steps
    num_tokens = sum(step.num_prefill_tokens + step.num_decode_tokens for step in steps)
    num_gained = sum(row.gained for step in steps for row in step.rows)
    num_preempted = sum(len(step.preempted) for step in steps)
    num_again = sum(step.num_recomputed_tokens for step in steps)
    yield _worker(run)
    yield f"{run.range}{', cut off at the bound of its size' if run.is_cut else ''}: {len(run.came):,} came in"
    yield (
        f"{num_tokens:,} tokens computed, {num_gained:,} gained; "
        f"{_count(num_preempted, 'preemption')}, {_count(num_again, 'token')} computed again for them"
    )


def tell_boundary(run: RecordedRun, boundary: Boundary) -> Iterator[str]:
    """One step: who left with the one before, what came, what was decided, what was computed, who left with it."""
    step = boundary.step
    yield f"between step {step.step - 1:,} and step {step.step:,}, {boundary.at_s:,.3f} s after the record began"
    yield _worker(run)
    yield ""
    yield from _listed("left", [*map(_left, boundary.ended), *map(_dropped, boundary.dropped)])
    yield from _listed("came", map(_came, boundary.came))
    yield from _listed("preempted", map(_preempted, step.preempted))
    yield from _listed("joined", map(_joined, step.joined))
    yield _line("budget", _budget(run, step))
    yield _line("waiting", f"{step.num_waiting:,}")
    yield _line("blocks", _blocks(run, step))
    yield ""
    yield "seat  who   computes                              gains"
    rows = {row.seat: row for row in step.rows}
    for seat in range(run.began.num_seats):
        if seat in rows:
            yield _seat(run, rows[seat])
        elif run.began.num_seats <= 16:
            yield f"{seat + 1:>4}  -"
    yield ""
    yield from _listed("then left", map(_left, step.left))


def tell_steps(run: RecordedRun, first: int, last: int) -> Iterator[str]:
    """One line a step, from first to last."""
    yield _HEAD
    for step in run.steps:
        if first <= step.step <= last:
            yield (
                f"{step.step:>6} {step.num_prefill_tokens + step.num_decode_tokens:>6} {step.num_prefill_tokens:>7} "
                f"{step.num_decode_tokens:>6} {step.num_recomputed_tokens:>6} "
                f"{len(step.rows):>3}/{run.began.num_seats:<3} {step.num_waiting:>5} {step.num_used_blocks:>6} "
                f"{step.num_cached_blocks:>6} {step.num_free_blocks:>6}  {_moves(step)}"
            ).rstrip()


def _moves(step: Step) -> str:
    return ", ".join(
        [
            *(f"#{one.number} preempted" for one in step.preempted),
            *(f"#{one.number} joins" for one in step.joined),
            *(f"#{one.number} leaves ({one.reason})" for one in step.left),
        ]
    )


def _worker(run: RecordedRun) -> str:
    began = run.began
    return (
        f"worker {began.worker}, model {began.model}: {began.policy}, {_count(began.num_seats, 'seat')}, "
        f"{began.max_num_batched_tokens:,} tokens a step at most"
    )


def _listed(name: str, sentences: Iterable[str]) -> Iterator[str]:
    found = list(sentences)
    yield _line(name, found[0] if found else "nobody")
    yield from (_line("", sentence) for sentence in found[1:])


def _line(name: str, sentence: str) -> str:
    return f"{name:<10} {sentence}"


def _came(came: Came) -> str:
    before = f", {came.num_output_tokens:,} said before by another worker" if came.num_output_tokens else ""
    prompt = _count(came.num_prompt_tokens, "prompt token")
    return f"#{came.number} {came.id}: {prompt}{before}, up to {came.max_tokens:,} new"


def _dropped(dropped: Dropped) -> str:
    where = "while it waited" if dropped.seat is None else f"from seat {dropped.seat + 1}"
    return f"#{dropped.number} {where}: taken out (cancelled, out of time, handed back or taken over)"


def _left(left: Left) -> str:
    return f"#{left.number} from seat {left.seat + 1} after {_count(left.num_output_tokens, 'token')}: {left.reason}"


def _preempted(preempted: Preempted) -> str:
    return (
        f"#{preempted.number} from seat {preempted.seat + 1}: gives {_count(preempted.num_blocks, 'block')} back, and "
        f"{_count(preempted.num_computed_tokens, 'computed token')} with them"
    )


def _joined(joined: Joined) -> str:
    again = ", again" if joined.again else ""
    return (
        f"#{joined.number} to seat {joined.seat + 1}{again}: {_count(joined.num_cached_tokens, 'token')} from the cache"
    )


def _budget(run: RecordedRun, step: Step) -> str:
    num_tokens = step.num_prefill_tokens + step.num_decode_tokens
    again = f" ({step.num_recomputed_tokens:,} of them again)" if step.num_recomputed_tokens else ""
    return (
        f"{num_tokens:,} of {run.began.max_num_batched_tokens:,} tokens: "
        f"{step.num_prefill_tokens:,} prefill{again}, {step.num_decode_tokens:,} decode"
    )


def _blocks(run: RecordedRun, step: Step) -> str:
    return (
        f"{step.num_used_blocks:,} used, {step.num_cached_blocks:,} free but cached, {step.num_free_blocks:,} free, "
        f"of {run.began.num_blocks:,} with {run.began.block_size} tokens each"
    )


def _seat(run: RecordedRun, row: Row) -> str:
    num_tokens = row.stop - row.start
    where = f"token {row.start + 1:,}" if num_tokens == 1 else f"tokens {row.start + 1:,} to {row.stop:,}"
    again = f", {row.recomputed:,} again" if row.recomputed else ""
    reads = num_tokens > 1 or row.recomputed or row.start < run.came[row.number].num_prompt_tokens
    what = f"{where}{again} ({'prefill' if reads else 'decode'})"
    return f"{row.seat + 1:>4}  {f'#{row.number}':<5} {what:<37} {row.gained or '-'}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
