"""Round numbers for the steps of a table and the axis of a picture."""

from __future__ import annotations


def round_ticks(last: float, most: int) -> list[float]:
    """0 and the multiples of 1, 2 or 5 times a power of ten up to `last`: as many as fit into `most` intervals."""
    unit = 0.000_001
    while True:
        for factor in (1, 2, 5):
            num_intervals = last / (unit * factor)
            if num_intervals <= most:
                return [round(unit * factor * n, 6) for n in range(int(num_intervals + 1e-9) + 1)]
        unit *= 10
