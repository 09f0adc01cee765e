"""Who computes what in each step, and what becomes of it.

No prefill phase and no decode phase: each sequence has computed tokens chasing known tokens, and a step hands
out a budget of tokens to compute. Chunked prefill, cache hits, preemption and resumption are that one difference.
Iteration-level scheduling: Orca, Yu et al. 2022; preemption by recomputation: PagedAttention, Kwon et al. 2023.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from math import ceil
from operator import attrgetter

from jitney_worker.engine.blocks import BlockManager
from jitney_worker.engine.limits import already_ended, check_fits, max_num_tokens
from jitney_worker.engine.movements import Movements
from jitney_worker.engine.protocol import (
    ModelOutput,
    RowFailure,
    Sampled,
    ScheduledSequence,
    SchedulerOutput,
    SequenceDelta,
    TextRules,
    TokenLogprobs,
)
from jitney_worker.engine.seats import seats_for
from jitney_worker.engine.sequence import BULK, FinishReason, Sequence, SequenceId, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.engine.siblings import Fork, Siblings
from jitney_worker.engine.waiting import WaitingQueue

_rank = attrgetter("rank")
_band = attrgetter("band")


class Scheduler:
    """Owns all sequences: running ones in the order of their rank, and waiting ones.

    `schedule` and `commit` take turns. Computed counters move in `commit` alone, so a forward pass that raised
    leaves them true and its step can be scheduled again.
    """

    def __init__(self, settings: EngineSettings, blocks: BlockManager, text_rules: TextRules | None = None) -> None:
        self.settings = settings
        self.blocks = blocks
        self.step = 0
        self.num_preemptions = 0
        self.num_displacements = 0
        self.num_generated_tokens = 0
        self.num_computed_tokens = 0
        self.sequences: dict[SequenceId, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.movements = Movements()
        self._text_rules = text_rules
        self._seats = seats_for(settings)
        self._siblings = Siblings()
        self._ended_on_entry: dict[SequenceId, SequenceDelta] = {}
        self._prompt_logprobs: dict[SequenceId, list[TokenLogprobs]] = {}
        self._pooled: dict[SequenceId, bytes] = {}
        self._structured: set[SequenceId] = set()
        self._num_arrivals = 0
        self._max_chunk = settings.long_prefill_token_threshold or settings.max_num_batched_tokens
        self._max_reserve = ceil(settings.admission_reserve * settings.num_blocks)
        self._bulk_prefill_left = settings.max_bulk_prefill

    # Coming and going

    def add(self, request: SequenceRequest) -> None:
        """Let a sequence wait for its turn. Raises as `check_fits`, and ValueError for a known id or an odd group."""
        if request.id in self.sequences or request.id in self._ended_on_entry:
            raise ValueError(f"sequence {request.id} is in the engine already: abort it first")
        check_fits(request, self.settings)
        if request.params.needs_text_rules and self._text_rules is None:
            raise ValueError(f"sequence {request.id} needs text rules, but the engine was built without any")
        num_allowed = max_num_tokens(request, self.settings)
        reason = already_ended(request, num_allowed)
        if reason is not None:
            self._ended_on_entry[request.id] = SequenceDelta(request.id, self.step, finish_reason=reason)
            return
        self._num_arrivals += 1
        sequence = Sequence.of(request)
        self._siblings.add(sequence)
        sequence.max_num_tokens, sequence.arrival = num_allowed, self._num_arrivals
        if self._text_rules is not None and request.params.needs_text_rules:
            self._text_rules.start(request.id, request.output_ids)
        if request.params.has_structure:
            self._structured.add(request.id)
        if request.params.num_prompt_logprobs is not None:
            self._prompt_logprobs[request.id] = []
        if request.params.pooling is not None:
            self._pooled[request.id] = b""
        self.sequences[request.id] = sequence
        self.waiting.push(sequence)

    def abort(self, sequence_id: SequenceId) -> bool:
        """Drop a sequence wherever it stands; its blocks are free at once. False if it is not here."""
        if self._ended_on_entry.pop(sequence_id, None) is not None:
            return True
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return False
        self._leave(sequence)
        return True

    def take_ended_on_entry(self) -> list[SequenceDelta]:
        """Endings of sequences that came in with all of their output; each is returned once."""
        deltas = list(self._ended_on_entry.values())
        self._ended_on_entry.clear()
        return deltas

    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self.sequences or self._ended_on_entry)

    def num_free_seats(self) -> int:
        """Seats left over by running and waiting sequences."""
        return self._seats.num_free(len(self.running), len(self.waiting))

    def keeps_seat(self, sequence_id: SequenceId) -> bool:
        """True if the policy holds the seat of one that is not being computed."""
        return self._seats.keeps(sequence_id)

    def _leave(self, sequence: Sequence) -> None:
        del self.sequences[sequence.id]
        self._siblings.remove(sequence)
        self._prompt_logprobs.pop(sequence.id, None)
        self._pooled.pop(sequence.id, None)
        if self.waiting.remove(sequence.id) is None:
            self.blocks.release(sequence)
            del self.running[bisect_left(self.running, sequence.rank, key=_rank)]
            self.movements.note(self.step, "left", sequence.id)
        if self._text_rules is not None and sequence.params.needs_text_rules:
            self._text_rules.drop(sequence.id)
            self._structured.discard(sequence.id)

    # Before the forward pass

    def schedule(self) -> SchedulerOutput:
        """Hand out the step's token budget: running sequences first, then waiting ones if none was preempted.

        But before all, whoever waits for words is let on in the place of those for whom nobody does.
        """
        output = SchedulerOutput(step=self.step + 1, scheduled=[], num_tokens=0)
        self._bulk_prefill_left = self.settings.max_bulk_prefill
        self._seats.open_step(len(self.running), self.waiting.first())
        if self._seats.can_be_taken:
            self._make_way(output)
        self._continue_running(output)
        if not output.preempted:
            self._admit_waiting(output)
        if self._prompt_logprobs:
            self._ask_for_prompt_logprobs(output.scheduled)
        if self._structured:
            self._mask(output.scheduled)
        if self._pooled:
            self._ask_to_pool(output.scheduled)
        output.copies = self.blocks.copies
        return output

    def _make_way(self, output: SchedulerOutput) -> None:
        """Let on those whose band goes before that of somebody who runs. The last in order give them seats and blocks.

        They join before tokens are handed out, so that by their rank their prompts come before those of bulk. Who
        gives way waits at the front of its band, and joins when a seat is free: it takes none back.
        """
        expectant: list[Sequence] = []
        while self.running and (sequence := self.waiting.first()) and sequence.band < self.running[-1].band:
            fork = self._fork(sequence)
            if fork is not None and fork.sibling.num_computed_tokens < fork.num_tokens:
                expectant.append(self.waiting.pop())
            elif self._displaces(sequence, fork, output):
                self._join(self.waiting.pop(), output.step, fork)
            else:
                break
        for sequence in expectant:
            self.waiting.push(sequence)

    def _displaces(self, sequence: Sequence, fork: Fork | None, output: SchedulerOutput) -> bool:
        """Get it a seat and blocks, from later bands if need be; nobody goes for one that would not fit."""
        later = self.running[bisect_right(self.running, sequence.band, key=_band) :]
        growth = sum(map(self._growth, self.running)) - sum(map(self._growth, later))
        is_whole, reserve = self._is_whole(sequence), min(growth, self._max_reserve)
        missing = self.blocks.num_missing(sequence, reserve=reserve, fork=fork, reuses_cached=not is_whole)
        if missing > sum(len(one.block_table) for one in later):
            return False
        while not self._seats.admits(sequence, len(self.running)) or not self.blocks.admit(
            sequence, reserve=reserve, fork=fork, reuses_cached=not is_whole
        ):
            if not later:
                return False  # blocks that they share were counted once for each
            self._preempt(later.pop(), output)
            self.num_displacements += 1
        return True

    def _preempt(self, victim: Sequence, output: SchedulerOutput) -> None:
        """The last one in order goes back to waiting: tokens kept, blocks free."""
        assert self.running.pop() is victim
        self.blocks.release(victim)
        self.waiting.push(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        output.preempted.append(victim.id)
        self.movements.note(output.step, "preempted", victim.id)

    def _continue_running(self, output: SchedulerOutput) -> None:
        """In order of rank. A prompt leaves one token of the budget to each sequence behind it, so none stalls."""
        running, block_size = self.running, self.blocks.block_size
        budget = self.settings.max_num_batched_tokens
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            start = sequence.num_computed_tokens
            num_wanted = len(sequence.token_ids) - start
            num = 1 if num_wanted == 1 else self._chunk(sequence, num_wanted, budget - (len(running) - index))
            stop = start + num
            if stop > len(sequence.block_table) * block_size and not self._make_room(sequence, stop, output):
                break
            output.scheduled.append(ScheduledSequence(sequence, start, stop, num == num_wanted))
            budget -= num
        output.num_tokens = self.settings.max_num_batched_tokens - budget

    def _chunk(self, sequence: Sequence, num_wanted: int, most: int) -> int:
        """How much of a prompt is computed in this step. One of bulk may be left with a token, but not with none."""
        num = min(num_wanted, self._max_chunk, most)
        if sequence.band >= BULK:
            num = min(num, max(1, self._bulk_prefill_left))
        self._bulk_prefill_left -= num
        return num

    def _make_room(self, sequence: Sequence, num_tokens: int, output: SchedulerOutput) -> bool:
        """Preempt from the back of the order until the sequence can grow; False if it was its own turn to go.

        The first in the order is never the last while others run, and alone it always fits: so it never goes.
        """
        while not self.blocks.grow(sequence, num_tokens):
            victim = self.running[-1]
            self._preempt(victim, output)
            if victim is sequence:
                return False
        return True

    def _admit_waiting(self, output: SchedulerOutput) -> None:
        """In order of rank, until one must wait: nobody behind it may overtake, or a long prompt would starve.

        Except those that wait for a sibling to compute their prompt: it will be done in a few steps, and their
        seats are kept. The prompt of a job with n choices is computed once.
        """
        budget = self.settings.max_num_batched_tokens - output.num_tokens
        growth = sum(map(self._growth, self.running)) if self.waiting else 0
        expectant: list[Sequence] = []
        while budget > 0:
            sequence = self.waiting.first()
            if sequence is None or not self._seats.admits(sequence, len(self.running) + len(expectant)):
                break
            if sequence.band >= BULK and self._bulk_prefill_left <= 0:
                break
            fork = self._fork(sequence)
            if fork is not None and fork.sibling.num_computed_tokens < fork.num_tokens:
                self._seats.seat(sequence)
                expectant.append(self.waiting.pop())
                continue
            reserve, is_whole = min(growth, self._max_reserve), self._is_whole(sequence)
            if not self.blocks.admit(sequence, reserve=reserve, fork=fork, reuses_cached=not is_whole):
                break
            self._join(self.waiting.pop(), output.step, fork)
            growth += self._growth(sequence)
            start = sequence.num_computed_tokens
            num_wanted = len(sequence.token_ids) - start
            num = self._chunk(sequence, num_wanted, budget)
            output.scheduled.append(ScheduledSequence(sequence, start, start + num, num == num_wanted))
            budget -= num
        for sequence in expectant:
            self.waiting.push(sequence)
        self._seats.close_step(budget_left=budget)
        output.num_tokens = self.settings.max_num_batched_tokens - budget

    def _ask_for_prompt_logprobs(self, scheduled: list[ScheduledSequence]) -> None:
        """Of the sequences that want them and have not been given them yet."""
        for item in scheduled:
            if item.sequence.id in self._prompt_logprobs:
                item.num_prompt_logprobs = item.sequence.params.num_prompt_logprobs

    def _ask_to_pool(self, scheduled: list[ScheduledSequence]) -> None:
        """Of the last token only where the prompt ends, of a mean everywhere. One that was preempted begins anew."""
        for item in scheduled:
            pooling = item.sequence.params.pooling
            if pooling is not None:
                item.pooling = pooling if item.samples or pooling == "mean" else None
                item.samples = False
                item.pooled = self._pooled[item.sequence.id] if item.start else b""

    def _mask(self, scheduled: list[ScheduledSequence]) -> None:
        """Say which tokens may come next, where a structure decides. Its state moves in `commit` alone."""
        assert self._text_rules is not None
        for item in scheduled:
            if item.samples and item.sequence.id in self._structured:
                item.mask = self._text_rules.mask(item.sequence.id)

    def _is_whole(self, sequence: Sequence) -> bool:
        """True if every token of its prompt must be computed, whoever has computed it before."""
        return sequence.id in self._prompt_logprobs or sequence.params.pooling == "mean"

    def _fork(self, sequence: Sequence) -> Fork | None:
        return None if self._is_whole(sequence) else self._siblings.fork(sequence)

    def _growth(self, sequence: Sequence) -> int:
        """Blocks a sequence may still ask for. The last token is sampled and never computed, hence the one less."""
        return self.blocks.num_blocks_for(sequence.max_num_tokens - 1) - len(sequence.block_table)

    def _join(self, sequence: Sequence, step: int, fork: Fork | None) -> None:
        """What a sibling has just computed does not count as cached, unless it was cached for the sibling."""
        if sequence.joined_step is None:
            sequence.joined_step = step
            cached = sequence.num_computed_tokens if fork is None else fork.sibling.num_cached_tokens
            sequence.num_cached_tokens = min(cached, sequence.num_prompt_tokens)
        self._seats.seat(sequence)
        insort(self.running, sequence, key=_rank)
        self.movements.note(step, "joined", sequence.id)

    # After the forward pass

    def commit(self, scheduled: SchedulerOutput, output: ModelOutput) -> list[SequenceDelta]:
        """Append what was sampled, and let those go that have ended; what each sequence gained, in the step's order."""
        num_rows = sum(item.samples for item in scheduled.scheduled)
        assert len(output.rows) == num_rows, f"{num_rows} rows were to be sampled, the runner gave {len(output.rows)}"
        self.step = scheduled.step
        self.num_computed_tokens += scheduled.num_tokens
        self.blocks.copied()
        if self._prompt_logprobs:
            self._keep_prompt_logprobs(scheduled.scheduled, output)
        rows = iter(output.rows)
        deltas: list[SequenceDelta] = []
        for item in scheduled.scheduled:
            sequence = item.sequence
            sequence.num_computed_tokens = item.stop
            given = next(rows) if item.samples else None if item.pooling is None else output.pooled[sequence.id]
            if isinstance(given, RowFailure):
                deltas.append(self._fail(sequence, given))
                continue
            self.blocks.enter(sequence)
            if isinstance(given, bytes):
                deltas += self._pool(item, given)
            elif given is not None:
                deltas.append(self._gain(sequence, given))
        return deltas

    def _keep_prompt_logprobs(self, scheduled: list[ScheduledSequence], output: ModelOutput) -> None:
        """A sequence that was preempted half-way has begun anew, so `start` says how many are still good."""
        for item in scheduled:
            if item.num_prompt_logprobs is not None:
                kept = self._prompt_logprobs[item.sequence.id]
                del kept[item.start :]
                kept += output.prompt_logprobs[item.sequence.id]

    def _gain(self, sequence: Sequence, row: Sampled) -> SequenceDelta:
        sequence.token_ids.append(row.token_id)
        self.num_generated_tokens += 1
        prompt_logprobs = tuple(self._prompt_logprobs.pop(sequence.id, ())) if self._prompt_logprobs else ()
        reason = self._ending(sequence, row.token_id)
        if reason is not None:
            self._leave(sequence)
        return SequenceDelta(
            sequence.request.id,
            self.step,
            token_ids=(row.token_id,),
            logprobs=() if row.logprobs is None else (row.logprobs,),
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens,
            joined_step=sequence.joined_step or 0,
            prompt_logprobs=prompt_logprobs,
        )

    def _pool(self, item: ScheduledSequence, pooled: bytes) -> list[SequenceDelta]:
        """Keep what the prompt has come to so far. At its end that is the embedding, and the sequence goes."""
        sequence = item.sequence
        if not item.is_pooled:
            self._pooled[sequence.id] = pooled
            return []
        self._leave(sequence)
        return [
            SequenceDelta(
                sequence.id,
                self.step,
                finish_reason="stop",
                num_cached_tokens=sequence.num_cached_tokens,
                joined_step=sequence.joined_step or 0,
                embedding=pooled,
            )
        ]

    def _ending(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """A stop at the very limit is a stop: the model, not the limit, ended the text."""
        params = sequence.request.params
        if token_id in params.stop_token_ids and sequence.num_output_tokens > params.min_tokens:
            return "stop"
        if params.needs_text_rules and self._text_rules is not None:
            reason = self._text_rules.advance(sequence.id, token_id)
            if reason is not None:
                return reason
        return "length" if len(sequence.token_ids) >= sequence.max_num_tokens else None

    def _fail(self, sequence: Sequence, failure: RowFailure) -> SequenceDelta:
        """Only this one ends, and nobody inherits its blocks' content."""
        if sequence.id in self._structured and self._text_rules is not None:
            message = self._text_rules.failure(sequence.id)
            failure = failure if message is None else RowFailure("structure_failed", message)
        self.blocks.forget(sequence)
        self._leave(sequence)
        return SequenceDelta(
            sequence.id,
            self.step,
            error=failure,
            num_cached_tokens=sequence.num_cached_tokens,
            joined_step=sequence.joined_step or 0,
        )
