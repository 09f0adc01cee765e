"""Held jobs: jobs of RQ that are awaited, many beside each other, instead of performed one after the other.

A distribution offers them as entry points: name = the function's name in RQ, value = `module:coroutine function`. It
is called with the job's `Held` and the job's own arguments, and returns the job's result, a JSON value.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Protocol

from rq.job import Job
from rq.serializers import JSONSerializer

from jitney.async_client import AsyncClient
from jitney.errors import InvalidJob, JitneyError

GROUP: Final = "jitney.held_jobs"
OUR_PREFIX: Final = "jitney."

Perform = Callable[..., Coroutine[Any, Any, Any]]


class Held(Protocol):
    """One execution of a held job, as its coroutine sees it.

    The coroutine is cancelled when the job is stopped, cancelled, deleted or out of time. It is not told when its
    worker leaves or dies: the job is given to another worker, which must find what this one began.
    """

    client: AsyncClient
    job: Job

    async def save_meta(self, **fields: Any) -> None:
        """Put `fields` into `job.meta`. They are stored within a second or so, and before the job ends."""
        ...


class JobUnreadable(InvalidJob):
    """The job was not written in JSON. Nothing of it was read: pickled bytes may run anything when they are loaded."""

    code = "not_json"

    def __init__(self, job: Job) -> None:
        super().__init__(
            f"RQ job {job.id} was not written in JSON, and nothing else is ever loaded here: enqueue it with "
            'Queue(…, serializer="json")'
        )


class HeldJobs:
    """The held jobs that are installed, by name. entries: other ones, for whoever has their own."""

    def __init__(self, entries: Iterable[EntryPoint] | None = None) -> None:
        found = entry_points(group=GROUP) if entries is None else entries
        self._entries = {entry.name: entry for entry in found}

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def find(self, name: str) -> Perform:
        """The coroutine function. Raises InvalidJob for a name that nothing installed here has."""
        if name not in self._entries:
            known = ", ".join(self.names) or "none: is jitney installed?"
            raise InvalidJob(f"no held job is called {name[:80]!r}; known: {known}", param="func_name")
        perform: Perform = self._entries[name].load()
        return perform


def function_name(job: Job) -> str:
    """What RQ calls the job's function. Raises JobUnreadable."""
    check_readable(job)
    return str(job.func_name)


def check_readable(job: Job) -> None:
    """Raises JobUnreadable for a job whose bytes are not the JSON that RQ writes."""
    assert job.serializer is JSONSerializer  # or reading it could run what somebody wrote
    try:
        is_call = isinstance(job.func_name, str) and job.instance is None
        is_call = is_call and isinstance(job.args, list) and isinstance(job.kwargs, dict)
    except Exception as error:  # whatever bytes do to a JSON reader
        raise JobUnreadable(job) from error
    if not is_call:
        raise JobUnreadable(job)


def begin(perform: Perform, held: Held) -> Coroutine[Any, Any, Any]:
    """The job's coroutine. Raises InvalidJob for arguments that its function does not take."""
    try:
        return perform(held, *held.job.args, **held.job.kwargs)
    except TypeError as error:
        raise InvalidJob(f"{held.job.func_name}: {error}", param="args") from error


def is_hopeless(error: BaseException) -> bool:
    """Whether another attempt would end the same way: what was asked for is wrong, or somebody does not want it."""
    from jitney.errors import JobCancelled, UnknownQueue

    if isinstance(error, UnknownQueue):
        return False  # its first worker may be about to start
    is_wrong = isinstance(error, JitneyError) and error.type == InvalidJob.type
    return is_wrong or isinstance(error, JobCancelled)
