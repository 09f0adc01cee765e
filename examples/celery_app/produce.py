"""Sends the tasks of `shop.py` and prints what comes back, partial text included: `python produce.py`."""

from __future__ import annotations

import time

from shop import label, labels, summary

REVIEWS = ["Works as it should.", "Broke on the second day.", "My cat loves the box."]
WAIT_S = 120


def main() -> None:
    asked = label(REVIEWS[0])
    while not asked.ready():
        if asked.state == "STREAMING":
            print("so far:", asked.info["text"])
        time.sleep(0.5)
    print("one:", asked.get()["text"])
    print("chain:", summary(REVIEWS).get(timeout=WAIT_S))
    together = labels(REVIEWS).get(timeout=WAIT_S)
    print(f"chord: {len(together['texts'])} answers, {together['tokens']} tokens")


if __name__ == "__main__":
    main()
