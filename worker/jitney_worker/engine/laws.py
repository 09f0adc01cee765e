"""The engine's laws as assertions: after every step in tests, and when a worker is idle."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from jitney_worker.engine.protocol import SchedulerOutput
from jitney_worker.engine.scheduler import Scheduler
from jitney_worker.engine.sequence import BULK


def check_laws(scheduler: Scheduler) -> None:
    """Assert what holds between any two steps. Costs time in proportion to sequences and blocks.

    Every sequence is in exactly one queue, running ones are in order and within the seats, waiting ones hold
    nothing, and the blocks add up.
    """
    waiting = {sequence.id: sequence for sequence in scheduler.waiting.sequences()}
    running = {sequence.id: sequence for sequence in scheduler.running}
    assert not waiting.keys() & running.keys(), "a sequence runs and waits"
    assert waiting | running == scheduler.sequences, "a sequence is lost"
    ranks = [sequence.rank for sequence in scheduler.running]
    assert all(first < second for first, second in pairwise(ranks)), "running sequences are out of order"
    assert len(ranks) <= scheduler.settings.max_num_seqs, "more sequences than seats"
    for sequence in scheduler.running:
        assert sequence.num_computed_tokens < sequence.num_tokens < sequence.max_num_tokens, sequence.id
        assert sequence.num_computed_tokens <= len(sequence.block_table) * scheduler.blocks.block_size, sequence.id
    for sequence in waiting.values():
        assert not sequence.block_table, f"{sequence.id} waits and holds blocks"
        assert not sequence.block_serials, f"{sequence.id} waits and remembers blocks"
        assert sequence.num_computed_tokens == 0, f"{sequence.id} waits and has computed tokens"
    scheduler.blocks.check(scheduler.running)


def check_step(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Assert, before a step is executed, that it keeps to its budget and preempted nobody for a later one."""
    check_laws(scheduler)
    assert output.scheduled or not scheduler.sequences, "somebody waits and nobody runs"
    assert output.num_tokens == sum(item.stop - item.start for item in output.scheduled), "tokens of the step"
    assert output.num_tokens <= scheduler.settings.max_num_batched_tokens, "token budget"
    assert len({item.sequence.id for item in output.scheduled}) == len(output.scheduled), "scheduled twice"
    check_bands(scheduler, output)
    preempted = [scheduler.sequences[sequence_id].rank for sequence_id in output.preempted]
    assert not preempted or scheduler.running[-1].rank < min(preempted), "preempted for a later one"
    assert output.copies == scheduler.blocks.copies, "a copy is missing"
    started = {item.sequence.block_table[item.start // scheduler.blocks.block_size] for item in output.scheduled}
    targets = {copy.target for copy in output.copies}
    assert len(targets) == len(output.copies), "two copies into one block"
    assert targets <= started, "a copy into a block in which nobody goes on"
    assert targets.isdisjoint(copy.source for copy in output.copies), "a copy of a copy"
    for item in output.scheduled:
        sequence = item.sequence
        assert item.start == sequence.num_computed_tokens < item.stop <= sequence.num_tokens, sequence.id
        samples = item.stop == sequence.num_tokens and sequence.params.pooling is None
        assert item.samples == samples, sequence.id
        assert item.pooling is None or item.pooling == sequence.params.pooling, sequence.id
        assert item.mask is None or item.samples, f"{sequence.id} has a mask and samples nothing"
        assert item.stop <= len(sequence.block_table) * scheduler.blocks.block_size, sequence.id


def check_bands(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Assert that bulk stands in nobody's way: it keeps no seat from another band, and leaves its prompts' share.

    A choice whose sibling computes their prompt waits for that, and one that does not fit waits for blocks.
    """
    settings, first = scheduler.settings, scheduler.waiting.first()
    if first is not None and settings.policy == "continuous" and len(scheduler.running) == settings.max_num_seqs:
        is_expectant = any(one.request.group == first.request.group != "" for one in scheduler.running)
        reserve = ceil(settings.admission_reserve * settings.num_blocks)
        fits = scheduler.blocks.num_missing(first, reserve=reserve, reuses_cached=False) <= 0
        assert first.band >= scheduler.running[-1].band or is_expectant or not fits, f"{first.id} is kept from a seat"
    prompts = [item for item in output.scheduled if item.stop - item.start > 1 or item.stop < item.sequence.num_tokens]
    bulk = [item for item in prompts if item.sequence.band >= BULK]
    if bulk:
        others = sum(item.stop - item.start for item in prompts) - sum(item.stop - item.start for item in bulk)
        share = max(0, settings.max_bulk_prefill - others)
        assert sum(item.stop - item.start for item in bulk) <= share + len(bulk), "prompts of bulk beyond their share"
