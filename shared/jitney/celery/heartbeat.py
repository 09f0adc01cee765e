"""A sign of life for every message that is held: a Redis broker hands out again what it heard nothing of."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kombu.transport.redis import Channel

if TYPE_CHECKING:
    from jitney.celery.pool import HeldPool


def seconds_between(channel: Any) -> float | None:
    """Four signs within each visibility timeout; None: this kind of broker has none."""
    return channel.visibility_timeout / 4 if isinstance(channel, Channel) else None


def keep_invisible(consumer: Any, pool: HeldPool) -> int:
    """Date the deliveries of what is held to now. Returns how many; none with another kind of broker.

    The visibility timeout then measures silence, not how long a job takes. Only what is still there is dated: who was
    taken for dead meanwhile, and whose message went to somebody else, does not take it back.
    """
    channel = getattr(consumer.task_consumer, "channel", None)
    if not isinstance(channel, Channel):
        return 0
    tags = list(_tags(pool, channel))
    if tags:
        with channel.conn_or_acquire() as client:
            client.zadd(channel.unacked_index_key, dict.fromkeys(tags, time.time()), xx=True)
    return len(tags)


def bring_again(consumer: Any, pool: HeldPool) -> None:
    """Have the broker send by this connection what a lost one has brought, and could not give back.

    Who lost its connection because the broker was away had nobody to give it back to: it would come again after the
    visibility timeout, and could not be acknowledged until then. What was given back is not sent twice.
    """
    channel = getattr(consumer.task_consumer, "channel", None)
    if not isinstance(channel, Channel):
        return
    for ride in pool:
        message = ride.newest.request.message
        if message.channel is not channel:
            channel.qos.restore_by_tag(message.delivery_tag)


def _tags(pool: HeldPool, channel: Channel) -> Iterable[str]:
    """Of this connection's messages: those of a lost one have been handed out anew."""
    for ride in pool:
        message = ride.newest.request.message
        if message.channel is channel:
            yield message.delivery_tag
