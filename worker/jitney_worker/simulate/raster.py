"""A picture as PNG: resvg draws the very SVG, so that there is one picture and not two."""

from __future__ import annotations

from jitney.errors import JitneyError

ZOOM = 2.0
"""Pixels of the PNG for each of the SVG's: sharp on screens that have two, and in a slide."""


def png(svg: str) -> bytes:
    """The PNG of an SVG. Raises ModuleNotFoundError without the extra `pictures`; JitneyError if it cannot be drawn."""
    import resvg_py

    try:
        return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=ZOOM))
    except ValueError as error:
        raise JitneyError(f"the picture cannot be drawn as PNG: {error}") from None
