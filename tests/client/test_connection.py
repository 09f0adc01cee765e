"""How long everybody waits before Redis is asked again."""

from __future__ import annotations

from jitney.connection import MAX_PAUSE_S, pause_s


def test_the_pause_grows_and_stays_bounded_however_long_the_outage() -> None:
    assert 0.025 <= pause_s(0) <= 0.05
    assert all(MAX_PAUSE_S / 2 <= pause_s(failures) <= MAX_PAUSE_S for failures in (10, 2_000, 10**9))
