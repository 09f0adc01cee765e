"""The one file that knows all rooms: settings in, a worker's crew out."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import replace

from jitney.cards import QueueCard
from jitney.connection import Redis
from jitney.errors import SettingsError
from jitney.topology import refuse_several_nodes
from jitney.workers import unix_now
from jitney_worker.crew import crew_of
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.model.choice import served_config
from jitney_worker.model.fingerprint import fingerprint
from jitney_worker.model.resolve import resolve
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.runtime.registration import register_queue
from jitney_worker.runtime.worker import Crew
from jitney_worker.settings import WorkerSettings
from jitney_worker.text.tokenizer import Tokenizer

SEATS_ON_CPU = 64
SEATS_ON_GPU = 256


def build_crew(settings: WorkerSettings) -> Crew:
    """Load the model and set the engine up. Raises ModelError or SettingsError."""
    directory = resolve(settings.model, offline=settings.offline)
    tokenizer = Tokenizer.load(directory)
    options = settings.engine
    runner = load_runner(
        directory,
        dtype=settings.dtype,
        device=settings.device,
        num_blocks=options.num_kv_blocks,
        kv_cache_bytes=options.kv_cache_bytes,
        block_size=options.block_size,
        num_threads=settings.num_threads,
        kernels=settings.kernels,
        quantization=settings.quantization,
        batch_invariant=settings.batch_invariant,
    )
    crew = crew_of(
        runner,
        _engine_settings(settings, runner),
        tokenizer,
        model=settings.model_name,
        queue=settings.queue_name,
        fingerprint=fingerprint(
            directory,
            runner.dtype,
            tokenizer.digest,
            quantisation=settings.quantization,
            # Equal to the last bit is what the same kernels give, compiled for the same instructions; otherwise any
            # worker may continue a job.
            kernels=runner.team.library.path.stem if settings.batch_invariant and runner.team else None,
        ),
        worker_id=settings.worker.id or f"{socket.gethostname()[:32]}-{os.getpid()}-{uuid.uuid4().hex[:6]}",
        vocab_size=runner.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        hidden_size=runner.hidden_size,
        record=settings.worker.record,
        record_max_bytes=settings.worker.record_max_bytes,
        dtype=runner.dtype,
        device=runner.device,
        decoder=runner.config.source,
        kernels=runner.kernels,
        quantization=settings.quantization,
        batch_invariant=runner.is_batch_invariant,
    )
    crew.structures.warm()
    return crew


async def register_without_weights(redis: Redis, settings: WorkerSettings) -> None:
    """The same for a queue that has no worker yet: everything but the fingerprint of a loaded model."""
    directory = resolve(settings.model, offline=settings.offline)
    tokenizer, config = Tokenizer.load(directory), served_config(directory)
    card = QueueCard(
        model=settings.model_name,
        max_model_len=settings.engine.max_model_len or config.max_model_len,
        vocab_size=config.vocab_size,
        bytes_per_token=tokenizer.bytes_per_token,
        fingerprint="",
        tokenizer_digest=tokenizer.digest,
        created=int(unix_now()),
        hidden_size=config.hidden_size,
    )
    await register_queue(redis, settings.queue_name, card, tokenizer)


async def register(redis: Redis, crew: Crew) -> Crew:
    """Write the queue's card and publish its tokenizer; the crew as it must serve that queue.

    The context is a property of the queue: a longer one here is not used. Raises SettingsError for a
    shorter one, because jobs that were accepted would be refused, and for a cluster of several nodes.
    """
    await refuse_several_nodes(redis)
    card = await register_queue(redis, crew.queue, crew.card(), crew.tokenizer)
    if card.max_model_len > crew.limits.max_model_len:
        raise SettingsError(
            f"queue {crew.queue} accepts jobs of {card.max_model_len} tokens, but this worker's context is "
            f"{crew.limits.max_model_len}: raise engine.max_model_len, or serve another queue (--queue)"
        )
    limits = replace(
        crew.limits,
        max_model_len=card.max_model_len,
        max_sequence_len=min(card.max_model_len, crew.limits.max_sequence_len),
    )
    return replace(crew, limits=limits)


def _max_model_len(settings: WorkerSettings, runner: TorchRunner) -> int:
    asked = settings.engine.max_model_len
    if asked is not None and asked > runner.max_model_len:
        raise SettingsError(
            f"engine.max_model_len={asked} is more than the model's own context of {runner.max_model_len}"
        )
    return asked or runner.max_model_len


def _engine_settings(settings: WorkerSettings, runner: TorchRunner) -> EngineSettings:
    options = settings.engine
    seats = options.max_num_seqs or (SEATS_ON_CPU if runner.device == "cpu" else SEATS_ON_GPU)
    return EngineSettings(
        max_num_seqs=min(seats, options.max_num_batched_tokens),
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=_max_model_len(settings, runner),
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        enable_prefix_caching=options.enable_prefix_caching,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        bulk_prefill_share=options.bulk_prefill_share,
        policy=options.policy,
    )
