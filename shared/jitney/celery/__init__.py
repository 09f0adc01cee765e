"""Celery: the task `jitney.generate`, a consumer that holds hundreds of them in one process, and upkeep on beat.

    from jitney.celery import install
    install(app)                                   # in an application of your own, or:
    celery -A jitney.celery.app worker -B          # the one that is ready-made

Needs the extra `celery`; `jitney` itself does not import it.
"""

from jitney.celery.installing import install

__all__ = ["install"]
