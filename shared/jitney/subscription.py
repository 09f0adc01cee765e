"""The followers of one job in one process."""

from __future__ import annotations

import asyncio

from jitney.errors import JitneyError
from jitney.follower import Follower, parse


class Subscription:
    """One channel. confirmed: set once the server has said so. heard_at: when it last said anything, loop time.

    epoch: identity of the data set in which the job's log was first read; None until then.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.followers: set[Follower] = set()
        self.confirmed = asyncio.Event()
        self.heard_at = asyncio.get_running_loop().time()
        self.epoch: bytes | None = None

    @property
    def newest(self) -> int:
        """The seq up to which every follower has been served."""
        return min(follower.newest for follower in self.followers)

    def look(self) -> None:
        for follower in self.followers:
            follower.look()

    def fail(self, error: JitneyError) -> None:
        for follower in self.followers:
            follower.fail(error)

    def deliver(self, published: bytes) -> None:
        """Hand on one published message: one event a line."""
        messages = [parse(line) for line in published.split(b"\n")]
        readable = [message for message in messages if message is not None]
        for follower in self.followers:
            follower.offer(readable)
        if len(readable) < len(messages):
            self.look()
