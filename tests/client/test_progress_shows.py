"""Progress where people wait: a bar on a terminal, plain lines elsewhere, nothing for what is over at once."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from jitney import progress as module
from jitney.progress import progress


def test_on_a_terminal_progress_shows_as_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    written = StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=80)
    with progress("simulating", 400, "tokens", console) as tell:
        tell(100)
        tell(400)
    assert "simulating" in written.getvalue()
    assert "400/400 tokens" in written.getvalue()
    assert written.getvalue().endswith("\x1b[2K"), "nothing is left of it"


def test_elsewhere_progress_shows_as_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.0)
    written = StringIO()
    with progress("simulating", 4_000, "tokens", Console(file=written, width=80)) as tell:
        tell(1_000)
        tell(4_000)
    assert written.getvalue() == ("simulating: 1,000 of 4,000 tokens (25%)\nsimulating: 4,000 of 4,000 tokens (100%)\n")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_over_at_once_shows_no_progress(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 3_600.0)
    monkeypatch.setattr(module, "LINE_EVERY_S", 3_600.0)
    written = StringIO()
    with progress("simulating", 400, "tokens", Console(file=written, force_terminal=is_terminal)) as tell:
        tell(200)
    assert written.getvalue() == ""


def test_an_error_within_shows_after_the_progress_is_put_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    written = StringIO()

    def fail() -> None:
        with progress("simulating", 400, "tokens", Console(file=written, force_terminal=True, width=80)) as tell:
            tell(100)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert written.getvalue().endswith("\x1b[2K")
