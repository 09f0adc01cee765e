"""The engine of this process: scheduler, blocks and a model runner, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from jitney_worker.engine.blocks import BlockManager
from jitney_worker.engine.laws import check_laws, check_step
from jitney_worker.engine.limits import check_fits
from jitney_worker.engine.prefix_cache import HashBlock, sha256_digest
from jitney_worker.engine.protocol import (
    CacheView,
    Capacity,
    EngineSnapshot,
    ModelRunner,
    ScheduledSequence,
    SchedulerOutput,
    Seat,
    SequenceDelta,
    TextRules,
)
from jitney_worker.engine.scheduler import Scheduler
from jitney_worker.engine.sequence import Sequence, SequenceId, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.engine.witness import Came, Dropped, Step, Witness

NUM_CACHE_CELLS: Final = 512
"""Of a snapshot: as many as a page can show, and thirty microseconds."""


class LocalEngine:
    """Fulfils the `Engine` protocol. One thread calls it; `features` and `check_fits` may be called from any.

    text_rules: needed only if sequences with stop strings or structures are added.
    hash_block: hash of the prefix cache; a test may pass a weak one. record: is told of every arrival, drop and step.
    """

    def __init__(
        self,
        settings: EngineSettings,
        runner: ModelRunner,
        text_rules: TextRules | None = None,
        *,
        hash_block: HashBlock = sha256_digest,
        record: Callable[[Came | Dropped | Step], None] | None = None,
    ) -> None:
        self.settings = settings
        self._runner = runner
        blocks = BlockManager(
            settings.num_blocks,
            settings.block_size,
            enable_prefix_caching=settings.enable_prefix_caching,
            hash_block=hash_block,
        )
        self._scheduler = Scheduler(settings, blocks, text_rules)
        self._witness = None if record is None else Witness(self._scheduler, record)
        self._last: SchedulerOutput | None = None
        self._num_movements_shown = 0

    @property
    def features(self) -> dict[str, Any]:
        """Facts for the worker's heartbeat."""
        return self.settings.features()

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed since the start, those that were computed anew after a preemption included."""
        return self._scheduler.num_computed_tokens

    def check_fits(self, request: SequenceRequest) -> None:
        """Raise `PromptTooLong` or `InvalidJob` for what can never run here."""
        check_fits(request, self.settings)

    def add(self, request: SequenceRequest) -> None:
        """Take a sequence in; it joins at the next step that has room.

        Raises as `check_fits`; ValueError if its id is here already, or it needs text rules and there are none.
        """
        self._scheduler.add(request)
        if self._witness is not None and request.id in self._scheduler.sequences:
            self._witness.added(self._scheduler.sequences[request.id])

    def abort(self, sequence_id: SequenceId) -> bool:
        """Drop a sequence in any state; its blocks are free on return. False if it is not here."""
        was_here = self._scheduler.abort(sequence_id)
        if self._witness is not None:
            self._witness.dropped(sequence_id)
        return was_here

    def has_work(self) -> bool:
        """True if `step` would do something."""
        return self._scheduler.has_work()

    def step(self) -> list[SequenceDelta]:
        """Run one iteration; return what each sequence gained.

        What the runner raises passes through. Nothing is committed then and no delta is lost: the caller may
        step again, which computes the same tokens, or abort sequences first.
        """
        scheduled = self._scheduler.schedule()
        if self.settings.check:
            check_step(self._scheduler, scheduled)
        if not scheduled:
            return self._scheduler.take_ended_on_entry()
        if self._witness is not None:
            self._witness.scheduled(scheduled)
        sampled = self._runner.execute(scheduled)
        deltas = self._scheduler.commit(scheduled, sampled)
        self._last = scheduled
        if self._witness is not None:
            self._witness.committed(scheduled, deltas)
        if self.settings.check:
            check_laws(self._scheduler)
        return self._scheduler.take_ended_on_entry() + deltas

    def capacity(self) -> Capacity:
        """How much room there is now."""
        scheduler = self._scheduler
        first = scheduler.waiting.first()
        return Capacity(
            free_seats=scheduler.num_free_seats(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=scheduler.blocks.num_free,
            num_blocks=scheduler.blocks.num_blocks,
            waiting_band=None if first is None else first.band,
        )

    def snapshot(self) -> EngineSnapshot:
        """The batch as it stands, running sequences in their order."""
        scheduler, last = self._scheduler, self._last
        num_decode_tokens = 0 if last is None else sum(map(_decodes, last.scheduled))
        movements = scheduler.movements.since(self._num_movements_shown)
        self._num_movements_shown = scheduler.movements.num_noted
        blocks = scheduler.blocks
        return EngineSnapshot(
            step=scheduler.step,
            seats=tuple(map(_seat, scheduler.running)),
            capacity=self.capacity(),
            num_preemptions=scheduler.num_preemptions,
            num_displacements=scheduler.num_displacements,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_computed_tokens=scheduler.num_computed_tokens,
            num_prefill_tokens=0 if last is None else last.num_tokens - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
            movements=movements,
            cache=CacheView(blocks.num_cached, blocks.num_shared, blocks.sample(NUM_CACHE_CELLS)),
        )

    def check(self) -> None:
        """Assert the engine's laws; between any two steps, also when idle."""
        check_laws(self._scheduler)


def _seat(sequence: Sequence) -> Seat:
    return Seat(
        id=sequence.id,
        joined_step=sequence.joined_step or 0,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_output_tokens=sequence.num_output_tokens,
        max_output_tokens=sequence.max_num_tokens - sequence.num_prompt_tokens,
    )


def _decodes(item: ScheduledSequence) -> bool:
    """One new token after the last one; everything else reads a prompt, or what was lost or inherited."""
    return item.stop - item.start == 1 and item.start >= item.sequence.num_prompt_tokens
