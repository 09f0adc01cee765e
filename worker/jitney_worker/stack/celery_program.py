"""Celery's worker with its beat, as a child of the local stack: as quiet as the others, and it says `ready`.

    python -m jitney_worker.stack.celery_program --schedule FILE

Elsewhere the same is `celery -A jitney.celery.app worker -B`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

from celery.signals import worker_ready

from jitney.celery.app import app
from jitney.tether import tether_forks


def say_ready(sender: Any, **_: Any) -> None:
    """The line that the stack waits for."""
    print(f"ready celery={sender.hostname}", file=sys.__stderr__, flush=True)  # Celery has taken over the other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", required=True, help="where beat keeps when it last sent what")
    asked = parser.parse_args()
    # Beat is forked, with our handlers until it has its own: SIGTERM in that moment would be noted, and no more.
    tether_forks(signal.SIGKILL)
    worker_ready.connect(say_ready, weak=False)
    level = os.environ.get("JITNEY_LOG_LEVEL", "warning")
    app.worker_main(["--quiet", "worker", "--beat", "--schedule", asked.schedule, "--loglevel", level])


if __name__ == "__main__":
    main()
