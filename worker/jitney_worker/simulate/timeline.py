"""Seats over time as plain figures: what picture and animation show, of a simulated or a recorded run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from jitney_worker.engine.witness import Dropped, Left, Preempted
from jitney_worker.record.reading import RecordedRun
from jitney_worker.simulate.palette import COLOURS, Palette
from jitney_worker.simulate.run import Comparison, PolicyRun


@dataclass(frozen=True, slots=True)
class Passenger:
    """A job, whatever lane it rides in. arrival_step: steps completed when it came. colour: index of it.

    gone_step: steps completed when it left without a seat; None: it did not.
    """

    label: str
    colour: int
    arrival_step: int
    num_output_tokens: int
    gone_step: int | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """A job in a seat, from when `start_step` steps were completed until `end_step` were.

    word_step: steps completed before the first one in which it gained a token; until then it reads its prompt, or once
    more what it lost. free_step: later than end_step where an ended job holds its seat. is_last: the job ended with it.
    tip: all of it in words.
    """

    label: str
    colour: int
    seat: int
    start_step: int
    word_step: int
    end_step: int
    free_step: int
    is_preempted: bool
    is_last: bool
    tip: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One engine's seats. first_step: steps completed where it begins; num_steps: where it ends."""

    name: str
    figures: str
    num_seats: int
    num_steps: int
    stays: tuple[Stay, ...]
    first_step: int = 0

    def seats_in(self, step: int) -> list[Stay | None]:
        """Who computes where in the step of this number."""
        seats: list[Stay | None] = [None] * self.num_seats
        for stay in self.stays:
            if stay.start_step < step <= stay.end_step:
                seats[stay.seat] = stay
        return seats


@dataclass(frozen=True, slots=True)
class Timeline:
    """Lanes on one axis. step_s: length of a step where all take the same; None: the axis counts steps.

    legend: (index of a colour, words).
    """

    title: str
    facts: str
    lanes: tuple[Lane, ...]
    step_s: float | None
    colours: tuple[str, ...]
    legend: tuple[tuple[int, str], ...]
    jobs: tuple[Passenger, ...]

    @property
    def shows_reading(self) -> bool:
        return any(stay.word_step > stay.start_step for lane in self.lanes for stay in lane.stays)

    @property
    def shows_held(self) -> bool:
        return any(stay.free_step > stay.end_step for lane in self.lanes for stay in lane.stays)

    @property
    def shows_preempted(self) -> bool:
        return any(stay.is_preempted for lane in self.lanes for stay in lane.stays)


def of_comparison(comparison: Comparison) -> Timeline:
    """One lane for each policy."""
    palette, scenario = Palette(comparison.scenario), comparison.scenario
    num_tokens = sum(job.num_output_tokens for job in scenario.jobs)
    return Timeline(
        title=scenario.title,
        facts=f"{len(scenario.jobs)} jobs, {num_tokens:,} tokens, {comparison.num_seats} seats, "
        f"{comparison.step_s * 1000:g} ms a step",
        lanes=tuple(_policy_lane(run, palette) for run in comparison.runs),
        step_s=comparison.step_s,
        colours=tuple(palette.colours),
        legend=tuple(enumerate(words for _, words in palette.legend)),
        jobs=tuple(
            Passenger(job.name, palette.number(job), job.arrival_step, job.num_output_tokens) for job in scenario.jobs
        ),
    )


def _policy_lane(run: PolicyRun, palette: Palette) -> Lane:
    figures = (
        f"all done {run.total_s:,.1f} s · {run.tokens_per_s:,.1f} tokens/s · "
        f"mean {run.mean_completion_s:,.1f} s · seats busy {run.busy_share:.0%}"
    )
    stays = tuple(
        Stay(
            label=one.job.name,
            colour=palette.number(one.job),
            seat=one.seat,
            start_step=one.start_step,
            word_step=one.start_step,
            end_step=one.end_step,
            free_step=one.free_step,
            is_preempted=False,
            is_last=True,
            tip=f"{one.job.name}: {one.job.num_output_tokens:,} tokens, steps {one.start_step:,} to {one.end_step:,}, "
            f"done {one.end_step * run.step_s:,.2f} s, {one.completion_s:,.2f} s after it came",
        )
        for one in run.jobs
    )
    return Lane(run.policy, figures, run.num_seats, run.num_steps, stays)


def of_record(run: RecordedRun) -> Timeline:
    """The run as it was: one lane, and an axis of steps, however long each of them took."""
    began, steps = run.began, run.steps
    lane = _recorded_lane(run)
    num_gained = sum(row.gained for step in steps for row in step.rows)
    num_preempted = sum(len(step.preempted) for step in steps)
    return Timeline(
        title=f"{began.worker}: a recorded run of {began.model}",
        facts=f"{len(run.came):,} jobs, {num_gained:,} tokens, {began.num_seats} seats, "
        f"{began.num_blocks:,} blocks of {began.block_size} tokens, {num_preempted:,} preemptions",
        lanes=(lane,),
        step_s=None,
        colours=COLOURS,
        legend=((0, "computing"),),
        jobs=tuple(_passengers(run)),
    )


def _passengers(run: RecordedRun) -> Iterator[Passenger]:
    """Everybody that came in, with as many tokens as the run gave it."""
    gained: Counter[int] = Counter()
    for step in run.steps:
        for row in step.rows:
            gained[row.number] += row.gained
    arrivals = {came.number: boundary.step.step - 1 for boundary in run.boundaries for came in boundary.came}
    last = run.steps[-1].step if run.boundaries else 0
    waited = {one.number: boundary.step.step - 1 for boundary in run.boundaries for one in _waited(boundary.dropped)}
    gone = waited | {one.number: last for one in _waited(run.last_dropped)}
    for number in run.came:
        yield Passenger(f"#{number}", _colour(number), arrivals.get(number, last), gained[number], gone.get(number))


def _waited(dropped: Iterable[Dropped]) -> list[Dropped]:
    return [one for one in dropped if one.seat is None]


def _colour(number: int) -> int:
    return (number - 1) % len(COLOURS)


@dataclass(slots=True)
class _Sitting:
    """A stay that has begun and not ended."""

    number: int
    seat: int
    start_step: int
    again: bool
    word_step: int = 0
    gained: int = 0
    recomputed: int = 0


@dataclass(slots=True)
class _Stays:
    """Rows of steps, put together to stays."""

    run: RecordedRun
    open: dict[int, _Sitting] = field(default_factory=dict)
    closed: list[Stay] = field(default_factory=list)

    def close(self, number: int, completed: int, words: str, *, ends: bool = True, is_preempted: bool = False) -> None:
        sitting = self.open.pop(number)
        came = self.run.came[number]
        lost = f", {sitting.recomputed:,} tokens of it computed again" if sitting.recomputed else ""
        self.closed.append(
            Stay(
                label=f"#{number}",
                colour=_colour(number),
                seat=sitting.seat,
                start_step=sitting.start_step,
                word_step=completed if not sitting.gained else sitting.word_step,
                end_step=completed,
                free_step=completed,
                is_preempted=is_preempted,
                is_last=ends,
                tip=f"#{number} {came.id}: steps {sitting.start_step + 1:,} to {completed:,}, "
                f"{sitting.gained:,} tokens{lost}; {words}",
            )
        )

    def close_all(self, ended: Iterable[Preempted | Dropped | Left], completed: int) -> None:
        for one in ended:
            match one:
                case Preempted():
                    self.close(one.number, completed, "preempted", ends=False, is_preempted=True)
                case Dropped():
                    if one.number in self.open:
                        self.close(one.number, completed, "taken out")
                case Left():
                    self.close(one.number, completed, one.reason)


def _recorded_lane(run: RecordedRun) -> Lane:
    stays = _Stays(run)
    for boundary in run.boundaries:
        step = boundary.step
        completed = step.step - 1
        stays.close_all(boundary.dropped, completed)
        stays.close_all(step.preempted, completed)
        for joined in step.joined:
            stays.open[joined.number] = _Sitting(joined.number, joined.seat, completed, joined.again)
        for row in step.rows:
            sitting = stays.open[row.number]
            if row.gained and not sitting.gained:
                sitting.word_step = completed
            sitting.gained += row.gained
            sitting.recomputed += row.recomputed
        stays.close_all(step.left, step.step)
    last = run.steps[-1].step if run.boundaries else 0
    stays.close_all(run.last_dropped, last)
    for number in list(stays.open):
        stays.close(number, last, "still there when the record ends", ends=False)
    num_busy = sum(len(step.rows) for step in run.steps)
    share = num_busy / (run.began.num_seats * last) if last else 0.0
    figures = f"{last:,} steps in {_seconds(run):,.1f} s · seats busy {share:.0%}"
    return Lane(run.began.policy, figures, run.began.num_seats, last, tuple(stays.closed))


def _seconds(run: RecordedRun) -> float:
    """From when the first job came to the end of the last step."""
    return run.boundaries[-1].at_s - run.first_came_s if run.boundaries else 0.0


def window(timeline: Timeline, first: int, last: int) -> Timeline:
    """The steps from first to last alone; whoever sits through them is cut off at the edges."""
    return replace(
        timeline,
        facts=f"{timeline.facts}; steps {first:,} to {last:,}",
        lanes=tuple(_cut(lane, first - 1, last) for lane in timeline.lanes),
    )


def _cut(lane: Lane, start: int, stop: int) -> Lane:
    inside = [stay for stay in lane.stays if stay.start_step < stop and stay.free_step > start]
    stays = tuple(
        replace(
            stay,
            start_step=max(stay.start_step, start),
            word_step=min(max(stay.word_step, start), stop),
            end_step=min(max(stay.end_step, start), stop),
            free_step=min(stay.free_step, stop),
            is_preempted=stay.is_preempted and stay.end_step <= stop,
            is_last=stay.is_last and stay.end_step <= stop,
        )
        for stay in inside
    )
    return replace(lane, num_steps=min(lane.num_steps, stop), stays=stays, first_step=start)
