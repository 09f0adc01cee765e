"""`python -m jitney.celery.health`: exit 0 if this host's Celery worker answers a ping. For exec probes."""

from __future__ import annotations

import sys
from typing import Final

from celery.utils.nodenames import default_nodename
from kombu.exceptions import OperationalError

from jitney.celery.app import app
from jitney.errors import JitneyError

TIMEOUT_S: Final = 8.0


def main() -> int:
    name = default_nodename(None)
    try:
        answers = app.control.inspect(destination=[name], timeout=TIMEOUT_S, limit=1).ping()
    except (JitneyError, OperationalError, OSError) as error:
        print(f"cannot ask the broker: {type(error).__name__}", file=sys.stderr)
        return 1
    print(f"{name} {'answers' if answers else 'does not answer'}", file=sys.stderr)
    return 0 if answers else 1


if __name__ == "__main__":
    sys.exit(main())
