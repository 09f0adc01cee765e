"""A timeline as an animation: data for the element that `jitney.shows` brings, and the words around it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from jitney.shows import asset
from jitney_worker.simulate.run import simulate_policies
from jitney_worker.simulate.scenarios import SIXTEEN_JOBS
from jitney_worker.simulate.timeline import Lane, Timeline, of_comparison

_POLICIES = {
    "naive": "one job at a time",
    "static": "seats are filled when all are empty",
    "continuous": "a free seat is filled in the next step",
}


def wire(timeline: Timeline) -> dict[str, Any]:
    """What <jitney-lockstep> plays, as its script describes it; those that share seats first."""
    places = {job.label: place for place, job in enumerate(timeline.jobs)}
    return {
        "title": timeline.title,
        "facts": timeline.facts,
        "step_s": timeline.step_s,
        "colours": list(timeline.colours),
        "jobs": [
            {
                "name": job.label,
                "colour": job.colour,
                "arrival": job.arrival_step,
                "gone": job.gone_step,
                "tokens": job.num_output_tokens,
            }
            for job in timeline.jobs
        ],
        "lanes": [
            _lane(lane, places, "as recorded" if timeline.step_s is None else _POLICIES[lane.name])
            for lane in sorted(timeline.lanes, key=lambda lane: lane.name == "naive")
        ],
    }


def _lane(lane: Lane, places: dict[str, int], about: str) -> dict[str, Any]:
    return {
        "name": lane.name,
        "about": about,
        "seats": lane.num_seats,
        "steps": lane.num_steps,
        "stays": [
            {
                "job": places[stay.label],
                "seat": stay.seat,
                "start": stay.start_step,
                "word": stay.word_step,
                "end": stay.end_step,
                "free": stay.free_step,
                "last": stay.is_last,
                "preempted": stay.is_preempted,
            }
            for stay in lane.stays
        ],
    }


def element(timeline: Timeline) -> str:
    """The element with its data in it. A `<` in a name would otherwise end the script that holds it."""
    data = json.dumps(wire(timeline), separators=(",", ":")).replace("<", "\\u003c")
    return f'<jitney-lockstep><script type="application/json">{data}</script></jitney-lockstep>'


def two_policies() -> str:
    """`sixteen-jobs.json` of `jitney.shows`: the two policies that share seats, for pages that have no simulator."""
    timeline = of_comparison(simulate_policies(SIXTEEN_JOBS, num_seats=4, step_s=0.05))
    lanes = tuple(lane for lane in timeline.lanes if lane.name != "naive")
    return json.dumps(wire(replace(timeline, lanes=lanes)), separators=(",", ":")) + "\n"


def style() -> str:
    """What the element looks like."""
    return asset("lockstep.css")


def script() -> str:
    """What plays it. Must come after the element, whose data it reads at once."""
    return asset("lockstep.js")
