"""A job's ride as a trace shows it, once it is over: waited, read, answered, or taken over from somebody.

Names are OpenTelemetry's for generative AI (semantic conventions 0.66). What was said is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from jitney.messages import JobSpec
from jitney.tracing import Attribute, Stretch
from jitney_worker.runtime.rides import Ride
from jitney_worker.runtime.running import RunningJob

PROVIDER: Final = "jitney"


def ride_stretch(
    ride: Ride, job: RunningJob, how: str, at: Callable[[float], float], now: float, model: str
) -> Stretch:
    """how: it left its worker. at: the server's clock at a monotonic moment, so that several workers' spans line up."""
    operation = _operation(job.spec)
    is_error = how in ("failed", "lost", "retried", "expired")
    error = how if job.error is None else str(job.error.get("code", how))
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": job.id,
        "gen_ai.usage.input_tokens": len(job.prompt_ids),
        "gen_ai.usage.output_tokens": job.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": job.cached_tokens,
        "jitney.band": ride.delivery.band,
        "jitney.attempt": ride.delivery.tries,
        "jitney.outcome": how,
        **_asked(job.spec),
        **_answered(ride, job),
    }
    return Stretch(
        f"{operation} {model}",
        _began(ride, at),
        at(now),
        attributes,
        tuple(_parts(ride, at, now)),
        error if is_error else None,
    )


def _began(ride: Ride, at: Callable[[float], float]) -> float:
    """The first owner's ride begins where the job began to wait."""
    return min(ride.asked_at, at(ride.claimed_at)) if ride.is_first_claim else at(ride.claimed_at)


def _parts(ride: Ride, at: Callable[[float], float], now: float) -> list[Stretch]:
    """Those that it came to. `hand-over` is what another owner cost: all that passed until the answer went on."""
    joined, first, last = ride.joined_at, ride.first_token_at, ride.last_token_at
    parts = []
    if ride.is_first_claim:
        parts.append(Stretch("queue", _began(ride, at), at(now if joined is None else joined)))
    else:
        said: dict[str, Attribute] = {
            "jitney.resumed_tokens": ride.delivery.num_tokens,
            "jitney.is_reclaimed": ride.delivery.is_reclaimed,
        }
        parts.append(Stretch("hand-over", at(ride.claimed_at), at(now if first is None else first), said))
    if joined is not None and first is not None:
        parts.append(Stretch("prefill", at(joined), at(first)))
        if last is not None and last > first:
            parts.append(Stretch("decode", at(first), at(last)))
    return parts


def _operation(spec: JobSpec) -> str:
    if spec.sampling.pooling is not None:
        return "embeddings"
    return "text_completion" if spec.messages is None else "chat"


def _asked(spec: JobSpec) -> dict[str, Attribute]:
    """Stop strings are words, and stay out."""
    sampling = spec.sampling
    asked: dict[str, Attribute | None] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k > 0 else None,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _answered(ride: Ride, job: RunningJob) -> dict[str, Attribute]:
    answered: dict[str, Attribute] = {}
    reasons = tuple(choice.finish_reason for choice in job.choices if choice.finish_reason is not None)
    if reasons:
        answered["gen_ai.response.finish_reasons"] = reasons
    if ride.first_token_at is not None:
        answered["gen_ai.response.time_to_first_chunk"] = round(ride.first_token_at - ride.claimed_at, 6)
    return answered
