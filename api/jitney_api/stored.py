"""A response that can be come back to: found by its id, read from its job's record, body and log."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

from jitney.errors import InvalidJob, JobNotFound, StreamLost
from jitney.follower import parse as parse_event
from jitney.keys import Keys, queue_of
from jitney.messages import JobSpec
from jitney.records import JobStatus
from jitney_api.answers import Heading
from jitney_api.callers import Caller
from jitney_api.response_frames import ResponseFrames
from jitney_api.response_job import Messages, conversation
from jitney_api.responses import PREFIX, ResponseShape
from jitney_api.service import Service, answering


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, as its job's record tells of it."""

    status: JobStatus
    spec: JobSpec
    shape: ResponseShape

    async def told(self, service: Service) -> ResponseFrames:
        """The stream up to where the log is now. Raises StreamLost where an ended job has no end, QueueUnavailable."""
        frames, seq = ResponseFrames(self.shape, after=sys.maxsize), 0  # counted, not written
        queue = service.client.queue(queue_of(self.status.id))
        while not frames.has_ended:
            async with answering():
                payloads = await queue.read_log(self.status.id, seq)
            messages = [parse_event(payload) for payload in payloads or ()]
            for message in messages:
                if message is not None:
                    seq = message.event.seq
                    frames.of(message)
            if not messages or messages[-1] is None:
                break
            await asyncio.sleep(0)  # between the pages of a long log others have their turn
        if self.status.state == "done" and not frames.has_ended:
            raise StreamLost(f"the log of {self.shape.id} ends at {frames.num_told - 1}, before its last event")
        return frames

    async def object(self, service: Service) -> dict[str, Any]:
        """The response object as it stands. Raises as `told`."""
        if self.status.state == "done":
            return (await self.told(service)).response
        has_begun = self.status.state == "running" or self.status.seq > 0
        return self.shape.standing("in_progress" if has_begun else "queued")


async def find_response(service: Service, caller: Caller, response_id: str) -> StoredResponse:
    """A response of the caller's tenant, created with `store=true`.

    Raises JobNotFound, in the same words for what is no id, for none, for another tenant's and for what was not
    stored; QueueUnavailable.
    """
    unknown = JobNotFound(
        f"no response {response_id[:96]}: it never existed, was created with store=false, or has expired"
    )
    if not response_id.startswith(PREFIX):
        raise unknown
    try:
        status = await service.status(caller, response_id.removeprefix(PREFIX))
        async with answering():
            body: Any = await service.client.redis.get(Keys(queue_of(status.id)).body(status.id))
        spec = None if body is None else JobSpec.decode(body)
        if spec is None or spec.response is None or not spec.keep_body:
            raise unknown
        heading = Heading(status.id, queue_of(status.id), int(status.created_at), fingerprint=None)
        return StoredResponse(status, spec, ResponseShape(heading, spec))
    except (InvalidJob, JobNotFound):
        raise unknown from None


async def past_of(service: Service, caller: Caller, response_id: str | None) -> Messages:
    """The conversation up to and with an earlier response; empty without one.

    Raises InvalidJob, which names `previous_response_id`, for what cannot be gone on with; ScopeMissing,
    QueueUnavailable.
    """
    if response_id is None:
        return ()
    caller.check_scope("read")  # the answer could simply be asked for
    try:
        stored = await find_response(service, caller, response_id)
    except JobNotFound as error:
        raise _cannot_go_on(str(error), "previous_response_not_found") from None
    found = await stored.object(service)
    if found["status"] not in ("completed", "incomplete"):
        raise _cannot_go_on(
            f"{response_id[:96]} is {found['status']}: there is no answer to go on with", "invalid_value"
        )
    [item] = found["output"]
    return conversation(stored.spec, item["content"][0]["text"])


def _cannot_go_on(message: str, code: str) -> InvalidJob:
    return InvalidJob(f"previous_response_id: {message}", param="previous_response_id", code=code)
