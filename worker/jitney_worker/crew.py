"""A crew over any runner: engine, text and limits put together. Knows no model, so that a double may be served."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jitney.workers import unix_now
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelRunner
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.record.lines import Began
from jitney_worker.record.recorder import Recorder
from jitney_worker.runtime.choice import named
from jitney_worker.runtime.intake import ModelLimits
from jitney_worker.runtime.worker import Crew
from jitney_worker.settings import RECORD_MAX_BYTES
from jitney_worker.text.logprobs import LogprobSpeller
from jitney_worker.text.rules import StopRules
from jitney_worker.text.structures import Structures
from jitney_worker.text.tokenizer import Tokenizer


def crew_of(
    runner: ModelRunner,
    settings: EngineSettings,
    tokenizer: Tokenizer,
    *,
    model: str,
    queue: str,
    fingerprint: str,
    worker_id: str,
    vocab_size: int | None = None,
    eos_token_ids: Iterable[int] = (),
    hidden_size: int = 0,
    record: Path | None = None,
    record_max_bytes: int = RECORD_MAX_BYTES,
    **features: Any,
) -> Crew:
    """vocab_size: the model's, if it is not the tokenizer's. eos_token_ids: of the model, besides the tokenizer's.

    hidden_size: numbers of an embedding; 0: the runner gives none.
    record: a file that is told of every step, up to so many bytes.
    features: what the worker tells of itself besides its engine's.
    """
    stop_rules = StopRules(tokenizer)
    recorder = None
    if record is not None:
        began = Began.of(settings, worker=worker_id, queue=queue, model=model, at=unix_now())
        recorder = Recorder(record, began, _label, max_bytes=record_max_bytes)
    engine = LocalEngine(settings, runner, stop_rules, record=None if recorder is None else recorder.keep)
    limits = ModelLimits(
        vocab_size=tokenizer.vocab_size if vocab_size is None else vocab_size,
        max_model_len=settings.max_model_len,
        max_sequence_len=settings.max_sequence_tokens,
        eos_token_ids=frozenset(eos_token_ids) | tokenizer.eos_token_ids,
        hidden_size=hidden_size,
    )
    return Crew(
        engine=engine,
        tokenizer=tokenizer,
        stop_rules=stop_rules,
        structures=Structures(tokenizer, vocab_size=limits.vocab_size, eos_token_ids=limits.eos_token_ids),
        spell_logprobs=LogprobSpeller(tokenizer),
        limits=limits,
        model=model,
        queue=queue,
        fingerprint=fingerprint,
        features={**engine.features, **features},
        worker_id=worker_id,
        recorder=recorder,
    )


def _label(sequence: SequenceId) -> str:
    """A choice of a job, without the nonce of its claim: whoever is shown a record need not know that."""
    name = named(sequence)
    return f"{name.job_id}/{name.choice}"
