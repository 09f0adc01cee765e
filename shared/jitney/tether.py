"""Children that end with their parent, also when it is killed without a chance to say goodbye."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def tether(number: signal.Signals) -> Callable[[], None] | None:
    """A `preexec_fn` that asks the kernel to send `number` to the child when its parent dies.

    Linux only (prctl(2), PR_SET_PDEATHSIG); None elsewhere, where an orphan must be ended by hand. The kernel
    watches the *thread* that started the child, so start it from one that lives as long as the process.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask


def tether_forks(number: signal.Signals) -> None:
    """The same for whatever this process forks from now on, and for what those fork.

    For libraries that fork where no `preexec_fn` reaches: their children would outlive a SIGKILL of ours.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    parent = 0

    def note() -> None:
        nonlocal parent
        parent = os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:
            os._exit(1)

    os.register_at_fork(before=note, after_in_child=ask)
