"""The one error tree.

    JitneyError
    ├── InvalidJob                 what was asked can never run: the caller changes something
    │   ├── PromptTooLong
    │   └── UnknownQueue
    ├── KeyRefused                 over HTTP: no API key, or one that nobody knows
    ├── ScopeMissing               over HTTP: the API key is not meant for this
    ├── IdempotencyConflict        the same key was used for another body
    ├── Overloaded                 the queue is full: come back later
    ├── QueueUnavailable           Redis, or the API before it, does not answer
    │   └── NotDurable             Redis took the job, but does not confirm that it is on disk
    ├── JobNotFound                no job with that id, or its record has expired
    ├── JobEnded                   the job's own ending, raised by `result()`
    │   ├── JobFailed
    │   ├── JobCancelled
    │   └── JobExpired
    ├── StreamLost                 the log is gone while somebody reads it
    ├── LeaseLost                  another worker owns the job now
    ├── SettingsError              a setting contradicts another one
    ├── ModelError                 weights or tokenizer cannot be used
    ├── ServerError                the embedded server cannot be started
    └── BadRecord                  a file is no record of a worker's run

Every class has a `type` (OpenAI's error type) and a `code`; both travel in a `failed` event.
"""

from __future__ import annotations

from typing import Any


class JitneyError(Exception):
    """Root of everything jitney raises on purpose."""

    type = "server_error"
    code = "internal_error"
    param: str | None = None
    told: tuple[str, ...] = ()
    """Names of the attributes that say more than the words do. Over HTTP they travel beside the error."""

    def wire(self) -> dict[str, Any]:
        """The error as it stands in a `failed` event: {type, code, message, param}."""
        return {"type": self.type, "code": self.code, "message": str(self), "param": self.param}


class InvalidJob(JitneyError):
    """What was asked can never run. `param` names the field; the message names value and limit."""

    type = "invalid_request_error"
    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class PromptTooLong(InvalidJob):
    """The prompt, or the prompt and its answer, can never fit: not now, not later."""

    told = ("num_tokens", "max_tokens")

    def __init__(self, num_tokens: int, max_tokens: int, *, what: str, param: str = "prompt") -> None:
        is_limit = param in ("max_tokens", "max_completion_tokens", "max_output_tokens")
        cure = f"shorten the prompt or lower {param}" if is_limit else "shorten it"
        super().__init__(
            f"{what} is {num_tokens} tokens, but at most {max_tokens} fit: {cure}",
            param=param,
            code="context_length_exceeded",
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class UnknownQueue(InvalidJob):
    """No queue card and no alias has this name."""

    told = ("name", "known")

    def __init__(self, name: str, known: list[str]) -> None:
        names = ", ".join(sorted(known)) or "none yet: start a worker"
        super().__init__(f"unknown model or queue {name[:80]!r}; known: {names}", param="model", code="model_not_found")
        self.name = name
        self.known = known


class KeyRefused(JitneyError):
    """Over HTTP: no API key, more than one, or one that nobody knows (any more)."""

    type = "invalid_request_error"
    code = "invalid_api_key"


class ScopeMissing(JitneyError):
    """The API key is known, and not meant for this."""

    type = "permission_error"
    code = "insufficient_scope"
    told = ("needed", "held")

    def __init__(self, needed: str, *, held: list[str]) -> None:
        super().__init__(f"this needs a key with the scope {needed}; the key given has {', '.join(held)}")
        self.needed = needed
        self.held = held


class IdempotencyConflict(JitneyError):
    """The idempotency key belongs to a job with another body."""

    type = "invalid_request_error"
    code = "idempotency_conflict"
    param = "idempotency_key"


class Overloaded(JitneyError):
    """The queue holds as much as it may. Nothing was written; try again after `retry_after_s`."""

    type = "rate_limit_error"
    code = "queue_full"
    told = ("which", "waiting_jobs", "waiting_tokens", "retry_after_s")

    def __init__(self, which: str, *, waiting_jobs: int, waiting_tokens: int, retry_after_s: float) -> None:
        super().__init__(
            f"the queue is full ({which}: {waiting_jobs} jobs, {waiting_tokens} tokens waiting); "
            f"try again in {retry_after_s:.0f} s"
        )
        self.which = which
        self.waiting_jobs = waiting_jobs
        self.waiting_tokens = waiting_tokens
        self.retry_after_s = retry_after_s


class QueueUnavailable(JitneyError):
    """Redis does not answer, or refuses writes; or the API does not answer."""

    type = "service_unavailable_error"
    code = "queue_unavailable"


class NotDurable(QueueUnavailable):
    """Redis took job `job_id`, but did not confirm in time that it is on disk. It may run all the same.

    Send it again under the same idempotency key: that answers the same job, and waits for the disk anew.
    """

    code = "not_durable"
    told = ("job_id",)

    def __init__(self, message: str, *, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobNotFound(JitneyError):
    """No job has this id, or its record has expired."""

    type = "invalid_request_error"
    code = "job_not_found"
    param = "id"


class JobEnded(JitneyError):
    """A job ended otherwise than `finished`. `text` is what it had said by then.

    job_id: '' in an error that another queue's results kept, of which the message alone is left.
    """

    def __init__(self, message: str, *, job_id: str = "", text: str = "", error: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.text = text
        self.error = error or {}
        self.type = str(self.error.get("type", self.type))
        self.code = str(self.error.get("code", self.code))
        self.param = self.error.get("param")


class JobFailed(JobEnded):
    """The job ended with `failed`; `error` is the event's own."""

    code = "job_failed"


class JobCancelled(JobEnded):
    """The job was cancelled."""

    code = "job_cancelled"


class JobExpired(JobEnded):
    """A deadline of the job passed."""

    code = "job_expired"


class StreamLost(JitneyError):
    """The job's log vanished while it was being read (data loss, or its time to live is over)."""

    code = "stream_lost"


class LeaseLost(JitneyError):
    """Another claim owns the job: its sequences are dropped without a word."""

    code = "lease_lost"


class SettingsError(JitneyError):
    """A setting is wrong or contradicts another; the message names both, with their values."""

    code = "bad_settings"


class ModelError(JitneyError):
    """A model's files are missing, damaged, or of a kind that is not served."""

    code = "model_error"


class ServerError(JitneyError):
    """The embedded server cannot be found or started."""

    code = "server_not_started"


def first_line(error: BaseException) -> str:
    """An error's message as part of one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class BadRecord(JitneyError):
    """A file is no record of a worker's run, or a line of it says what cannot be; the message names the line."""

    code = "bad_record"
