"""Every metric there is: its name, what it means, and its labels. docs/METRICS.md shows the same table to people.

Names are vLLM's with our prefix where it has one, so that what people know of its dashboards holds here. No label ever
carries a tenant or a job: their number has no bound, and who asks is nobody's business but theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. labels: its own ones, beside those of whoever it is of. buckets: upper bounds, of a histogram."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""From a step of a small model to a job that waited for minutes."""

LONG_SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 7_200.0, 43_200.0)
TOKENS: Final = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0, 8_192.0, 32_768.0)

WORKER_LABELS: Final = ("model_name", "queue", "worker")
QUEUE_LABELS: Final = ("model_name", "queue")


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"jitney_{name}_total", "counter", help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"jitney_{name}", "gauge", help, labels)


def _histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Metric:
    return Metric(f"jitney_{name}", "histogram", help, labels, buckets)


OF_WORKER: Final = (
    # The batch as it stands.
    _gauge("num_requests_running", "Sequences with a seat in the batch."),
    _gauge("num_requests_waiting", "Sequences on board that wait for a seat, preempted ones included."),
    _gauge("max_num_seqs", "Seats of the batch."),
    _gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1; cached ones that nobody uses are free."),
    # What the engine did.
    _counter("num_preemptions", "Times that a sequence lost its blocks to an earlier one, to be computed again."),
    _counter(
        "num_displacements", "Of these preemptions, those for a newcomer of a more urgent band: bulk that gave way."
    ),
    _counter("computed_tokens", "Tokens computed, those computed again after a preemption or hand-over included."),
    _histogram("iteration_tokens_total", "Tokens computed in one step.", buckets=TOKENS),
    _histogram("step_seconds", "Seconds of one step: schedule, execute, commit."),
    _counter("step_failures", "Steps that raised; everybody in the batch went back to the queue, or ended."),
    _counter("prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache."),
    _counter("prefix_cache_hits", "Prompt tokens that were found there, and not computed."),
    # What jobs were given.
    _counter("prompt_tokens", "Prompt tokens of jobs whose first event this worker wrote: as their usage has it."),
    _counter("generation_tokens", "Tokens that this worker wrote into jobs' logs: as their usage has it."),
    _counter("resumed_tokens", "Tokens that were in the logs of jobs when this worker took them over."),
    _counter("request_success", "Choices that ended by themselves.", "finished_reason"),
    _histogram("time_to_first_token_seconds", "From the enqueueing to the first token in the log, pauses included."),
    _histogram("inter_token_latency_seconds", "Between two tokens of a sequence, as the engine gave them."),
    _histogram("request_queue_time_seconds", "From the enqueueing, or its not_before, to the first seat."),
    _histogram("request_prefill_time_seconds", "From a job's first seat here to its first token."),
    _histogram(
        "request_decode_time_seconds", "From a finished job's first token here to its last.", buckets=LONG_SECONDS
    ),
    _histogram(
        "request_inference_time_seconds",
        "From a finished job's first seat here to its last token.",
        buckets=LONG_SECONDS,
    ),
    _histogram(
        "e2e_request_latency_seconds", "From the enqueueing of a finished job to its end.", buckets=LONG_SECONDS
    ),
    _histogram("request_prompt_tokens", "Prompt tokens of a finished job.", buckets=TOKENS),
    _histogram("request_generation_tokens", "Tokens of a finished job's choices together.", buckets=TOKENS),
    _histogram("deadline_margin_seconds", "What a finished job with a deadline had left of it.", buckets=LONG_SECONDS),
    # Ownership.
    _counter("jobs_claimed", "Jobs that this worker was handed, however often each."),
    _counter("jobs_left", "How they left it again. Claimed less left is on board.", "outcome"),
    _counter("redelivered", "Claimed jobs that somebody had claimed before."),
    _counter("leases_reclaimed", "Claimed jobs whose last owner had let the lease run out: a takeover."),
    _counter("fenced_writes", "Writes that were refused, because the job had ended or had another owner by then."),
    _counter("dead", "Jobs that this worker buried among the dead letters."),
    _histogram("cancel_latency_seconds", "From hearing of a cancel to the step boundary at which the seat was free."),
    # Redis.
    _histogram("redis_step_seconds", "Seconds of one call that writes: a batch's tokens, or a job's end.", "call"),
    _counter("redis_failures", "Calls that write and failed, to be sent again.", "call"),
)
"""Counted by a worker since it started; a series ends with its worker."""

OF_QUEUE: Final = (
    _gauge("queue_lag", "Jobs that wait to be claimed for the first time.", "band"),
    _gauge("queue_oldest_seconds", "How long the oldest of them has waited.", "band"),
    _gauge("queue_running", "Jobs that a worker holds.", "band"),
    _gauge(
        "queue_returned", "Begun jobs that wait for another worker: given back, or their lease has run out.", "band"
    ),
    _gauge("queue_later", "Jobs that wait for their time."),
    _gauge("queue_tokens", "Prompt tokens of the jobs that wait."),
    _gauge("queue_drain_seconds", "Until all that waits is worked off, at the rate of late."),
    _gauge("dead_letters", "Buried jobs that are kept."),
    _gauge("workers", "Workers that are alive.", "state"),
)
"""What Redis says of a queue, at the moment of the scrape."""

OF_API: Final = (
    _counter(
        "http_requests", "Requests that were answered, or whose client left first (499).", "route", "method", "status"
    ),
    _gauge("http_requests_open", "Requests that are being answered."),
    _gauge("sse_clients", "Streams that are being read."),
    _gauge("redis_up", "1 if Redis answered this scrape; at 0 only the API's own metrics are there."),
)
"""Of one API process since it started."""

ALL: Final[Mapping[str, Metric]] = {metric.name: metric for metric in (*OF_WORKER, *OF_QUEUE, *OF_API)}
