"""Masks in the engine: asked for where a structure samples, and for nobody else; only a commit moves a structure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
from scripted_model import HashModel, PhraseRules, ScriptedModel, StepBroke, request, run, settings

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelOutput, RowFailure, SchedulerOutput
from jitney_worker.engine.sequence import SequenceId, SequenceRequest


@dataclass
class MaskRules(PhraseRules):
    """A mask that names the number of tokens heard so far."""

    asked: list[tuple[str, int]] = field(default_factory=list)
    why: str | None = None

    def mask(self, sequence_id: SequenceId) -> bytes | None:
        self.asked.append((sequence_id, len(self.heard[sequence_id])))
        return bytes([len(self.heard[sequence_id])])

    def failure(self, sequence_id: SequenceId) -> str | None:
        return self.why


@dataclass
class Seeing(HashModel):
    """Remembers the masks of each step."""

    masks: list[dict[str, bytes | None]] = field(default_factory=list)

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self.masks.append({item.sequence.id: item.mask for item in scheduled.scheduled})
        return super().execute(scheduled)


def structured(name: str, prompt: int = 5, max_tokens: int = 6) -> SequenceRequest:
    one = request(name, prompt, max_tokens)
    return dataclasses.replace(one, params=dataclasses.replace(one.params, has_structure=True))


def test_a_mask_is_made_for_each_token_of_a_structure_and_for_no_one_else() -> None:
    rules, model = MaskRules({"s": (-1,)}), Seeing()
    engine = LocalEngine(settings(max_num_batched_tokens=4, max_num_seqs=4), model, rules)
    run(engine, [structured("s", prompt=10), request("free", 3, 9)])
    assert rules.asked == [("s", number) for number in range(6)]
    assert {mask for masks in model.masks for name, mask in masks.items() if name == "free"} == {None}
    own = [masks["s"] for masks in model.masks if "s" in masks]
    assert own[:2] == [None, None]
    assert [mask for mask in own if mask is not None] == [bytes([number]) for number in range(6)]


def test_without_structures_nobody_is_asked() -> None:
    rules = MaskRules({"s": (-1,)})
    run(LocalEngine(settings(), HashModel(), rules), [request("s", 3, 5, stop_strings=True), request("free", 3, 5)])
    assert rules.asked == []


def test_a_step_that_raised_moves_no_structure() -> None:
    rules = MaskRules({"s": (-1,)})
    engine = LocalEngine(settings(), HashModel(breaks=frozenset({2, 3})), rules)
    engine.add(structured("s", max_tokens=3))
    engine.step()
    for _ in range(2):
        with pytest.raises(StepBroke):
            engine.step()
    while engine.has_work():
        engine.step()
    assert [number for _, number in rules.asked] == [0, 1, 1, 1, 2]


def test_a_preempted_structure_goes_on_from_where_it_was() -> None:
    rules = MaskRules({"a": (-1,), "b": (-1,)})
    engine = LocalEngine(
        settings(num_blocks=3, max_model_len=48, admission_reserve=0.0, enable_prefix_caching=False), HashModel(), rules
    )
    run(engine, [structured("a", 12, 20), structured("b", 12, 20)])
    assert engine.snapshot().num_preemptions > 0
    for name in ("a", "b"):
        assert [number for asked, number in rules.asked if asked == name] == list(range(20))


def test_a_row_that_fails_by_its_structure_says_why_and_otherwise_keeps_its_own_reason() -> None:
    failed = RowFailure("no_token_left", "nothing")
    for why, code in (("too costly", "structure_failed"), (None, "no_token_left")):
        rules = MaskRules({"s": (-1,)}, why=why)
        outcome = run(LocalEngine(settings(), ScriptedModel({"s": [9, failed]}), rules), [structured("s")])
        error = outcome.endings[SequenceId("s")].error
        assert error is not None
        assert (error.code, error.message) == (code, why or "nothing")
        assert rules.dropped == ["s"]


def test_a_structure_without_rules_is_refused() -> None:
    with pytest.raises(ValueError, match="without any"):
        LocalEngine(settings(), HashModel()).add(structured("s"))
