"""Random workloads over small engines: after every step the laws hold, and every answer is the undisturbed one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from scripted_model import EOS, FAILURE, HashModel, Outcome, StepBroke, choices, prompt_logprob, request, solo

from jitney.errors import PromptTooLong
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.sequence import SequenceId, SequenceRequest
from jitney_worker.engine.settings import EngineSettings


@dataclass(frozen=True)
class Visitor:
    """A sequence that comes before a step, and perhaps is aborted before another, or fails at an output token."""

    request: SequenceRequest
    comes: int
    aborted: int | None
    fails_at: int | None


@st.composite
def engine_settings(draw: st.DrawFn) -> EngineSettings:
    seats = draw(st.sampled_from([6, 4, 3, 2, 1]))
    return EngineSettings(
        max_model_len=draw(st.sampled_from([24, 40, 200])),
        num_blocks=draw(st.sampled_from([8, 10, 13, 24])),
        block_size=draw(st.sampled_from([2, 3, 4, 7])),
        max_num_seqs=seats,
        max_num_batched_tokens=draw(st.integers(seats, 40)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 1, 3, 8])),
        enable_prefix_caching=draw(st.booleans()),
        admission_reserve=draw(st.sampled_from([0.0, 0.0, 0.15, 0.9])),
        bulk_prefill_share=draw(st.sampled_from([0.25, 1.0, 0.01])),
        policy=draw(st.sampled_from(["continuous", "continuous", "static"])),
        check=True,
    )


@st.composite
def visitors(draw: st.DrawFn) -> list[Visitor]:
    """Few different prompts, so that prefixes are shared, and often the same output ids at the start.

    Some are choices of one job, which differ in how much they have said already and in when they leave.
    """
    guests = []
    for number in range(draw(st.integers(2, 9))):
        stem = draw(st.sampled_from([0, 0, 50]))
        prompt = [stem + position for position in range(draw(st.sampled_from([1, 3, 8, 9, 10, 30])))]
        alike = choices(
            f"v{number}",
            prompt + draw(st.lists(st.integers(0, 3), max_size=3)),
            draw(st.sampled_from([24, 20, 15, 10, 2, 1])),
            n=draw(st.sampled_from([1, 1, 2, 4])),
            arrival=draw(st.integers(0, 5)),
            virtual_time=draw(st.sampled_from([0.0, 1.5])),
            band=draw(st.sampled_from([2, 0, 2, 1])),
            salt=draw(st.sampled_from(["", "", "other"])),
            stop_ids=draw(st.sampled_from([(), (EOS, 5, 6, 7, 8, 9)])),
            min_tokens=draw(st.sampled_from([0, 0, 1, 9])),
        )
        comes = draw(st.sampled_from([0, 0, 1, 5, 20]))
        wants = draw(st.sampled_from([None, None, 0]))
        alike[0] = dataclasses.replace(alike[0], params=dataclasses.replace(alike[0].params, num_prompt_logprobs=wants))
        for one in alike:
            said, _ = solo(one)
            earlier = said[: draw(st.sampled_from([0, 0, 0, 1, 4, 30]))]
            guests.append(
                Visitor(
                    request=dataclasses.replace(one, output_ids=earlier),
                    comes=comes,
                    aborted=draw(st.one_of(st.none(), st.none(), st.integers(1, 40))),
                    fails_at=draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 10))),
                )
            )
    return guests


def fits(engine: LocalEngine, one: SequenceRequest) -> bool:
    try:
        engine.check_fits(one)
    except PromptTooLong:
        return False
    return True


@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
@given(engine_settings(), visitors(), st.frozensets(st.integers(1, 30), max_size=4))
@example(
    EngineSettings(max_model_len=200, num_blocks=6, block_size=2, max_num_seqs=4, admission_reserve=0.0, check=True),
    [Visitor(request(f"v{n}", [n], 10, arrival=n), comes=0, aborted=None, fails_at=None) for n in range(5)],
    frozenset(),
)
def test_any_workload_keeps_the_laws_and_every_answer_is_the_undisturbed_one(
    limits: EngineSettings, guests: list[Visitor], breaks: frozenset[int]
) -> None:
    """B01, B02, B07, B10, B16: whatever comes, leaves and fails around it, a sequence says what it says alone.

    Also where steps break as a whole, and where sequences are choices of one job that share its blocks.
    """
    fails_at = {g.request.id: g.fails_at for g in guests if g.fails_at is not None}
    model = HashModel(limits.block_size, fails_at, breaks=breaks)
    engine = LocalEngine(limits, model)
    welcome = {g.request.id: g for g in guests if fits(engine, g.request)}
    outcome, aborted, step = Outcome(), set[SequenceId](), 0
    while step <= 40 or engine.has_work():
        assert step < 5_000, "no end in sight"
        for guest in welcome.values():
            if guest.comes == step:
                engine.add(guest.request)
            if guest.aborted == step and engine.abort(guest.request.id):
                aborted.add(guest.request.id)
        try:
            deltas = engine.step()
        except StepBroke:
            deltas = []
        outcome.take(deltas)
        assert aborted.isdisjoint(delta.id for delta in deltas)
        step += 1
    engine.check()
    assert engine.capacity().num_free_blocks == limits.num_blocks
    assert engine.capacity().num_running == engine.capacity().num_waiting == 0
    for guest in welcome.values():
        check_answer(guest, outcome, limits, was_aborted=guest.request.id in aborted)
    check_progress(model, limits)


def check_answer(guest: Visitor, outcome: Outcome, limits: EngineSettings, *, was_aborted: bool) -> None:
    if outcome.tokens[guest.request.id]:
        prompt, wants = guest.request.prompt_ids, guest.request.params.num_prompt_logprobs is not None
        expected = [prompt_logprob(position, prompt[position]) for position in range(1, len(prompt))]
        assert outcome.prompt_logprobs[guest.request.id] == (expected if wants else [])
    said, reason = solo(guest.request, limits.max_model_len)
    fresh = said[len(guest.request.output_ids) :]
    gained = tuple(outcome.tokens[guest.request.id])
    if was_aborted:
        assert gained == fresh[: len(gained)]
        assert guest.request.id not in outcome.endings
        return
    end = outcome.endings.get(guest.request.id)
    if end is None:
        assert guest.aborted is not None
        assert guest.aborted <= guest.comes, "it left without a word"
    elif end.error is not None:
        assert end.error == FAILURE
        assert len(guest.request.output_ids) + len(gained) == guest.fails_at
        assert gained == fresh[: len(gained)]
    else:
        assert (gained, end.finish_reason) == (fresh, reason)


def check_progress(model: HashModel, limits: EngineSettings) -> None:
    """Steps are numbered without a gap, none is empty, none goes over the budget."""
    numbers = [step for step, _ in model.steps]
    assert all(b == a + 1 for a, b in pairwise(numbers))
    for _, computed in model.steps:
        assert 1 <= len(computed) <= limits.max_num_seqs
        assert sum(computed.values()) <= limits.max_num_batched_tokens
        longest = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        assert all(1 <= num <= longest for num in computed.values())
