"""What is shown in a browser, by `jitney simulate` and by the API: one script and one style, and a run to play.

`lockstep.js` defines the element <jitney-lockstep>, which plays timelines in lockstep; `lockstep.css` is its style, and
`sixteen-jobs.json` a timeline for it, as `jitney simulate --scenario sixteen-jobs --html` has it.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

Asset = Literal["lockstep.js", "lockstep.css", "sixteen-jobs.json"]


def asset(name: Asset) -> str:
    """The text of a file of this package."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
