"""The contract's first test: random histories on a real server break no promise (see `histories` and `oracle`)."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from histories import History, forget

from jitney.connection import Redis
from jitney.queue import Queue

SEEDS = int(os.environ.get("JITNEY_FUZZ_SEEDS", "100"))
PER_TEST = 50


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
async def test_random_histories_break_no_promise(redis: Redis, queue_name: str, first: int) -> None:
    tally: Counter[str] = Counter()
    for seed in range(first, min(first + PER_TEST, SEEDS)):
        queue = Queue(redis, f"{queue_name}-{seed}")
        history = History(queue, seed)
        try:
            await history.run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        await forget(queue)
        tally.update(history.tally)
    # A history in which nothing goes wrong proves nothing.
    for what in (
        "appended",
        "appended twice",
        "refused by fence",
        "refused by seq",
        "adopted",
        "later attempts",
        "suspects alone",
        "moved",
        "orphans",
        "expired",
        "dead",
        "ghosts refused",
        "repaired",
        "cancelled running",
        "cancelled waiting",
        "cancelled returned",
        "cancelled later",
    ):
        assert tally[what] > 0, f"no history of {first}.. had: {what} ({dict(tally)})"
