"""What `jitney doctor` finds: one verdict per check. Other rooms add theirs by entry points, `jitney.checks`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Literal

from jitney.plugins import missing_extra

GROUP: Final = "jitney.checks"
"""Each entry point names a function without arguments that returns Findings."""

Verdict = Literal["ok", "warn", "fail", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. found: what is so. advice: what to change, '' where nothing has to be.

    unknown: it could not be seen, which is not the same as ok. fail: jobs are lost or nothing works.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""

    def line(self) -> str:
        return f"{self.verdict:<8} {self.name:<12} {self.found}" + (f": {self.advice}" if self.advice else "")


def checks_of_other_rooms(entries: Iterable[EntryPoint] | None = None) -> list[Finding]:
    """What the installed rooms find (default: all entry points), in order of name."""
    found = entry_points(group=GROUP) if entries is None else entries
    return [finding for entry in sorted(found, key=lambda entry: entry.name) for finding in _checks_of(entry)]


def _checks_of(entry: EntryPoint) -> list[Finding]:
    """A check that cannot run is a finding too: the others go on."""
    try:
        return list(entry.load()())
    except ModuleNotFoundError as error:
        extra = missing_extra(error)
        advice = f"where it is needed, pip install 'jitney[{extra}]'" if extra else ""
        return [Finding(entry.name, "unknown", f"{error.name} is not installed", advice)]
    except Exception as error:
        return [Finding(entry.name, "unknown", f"the check itself failed with {type(error).__name__}: {error}")]
