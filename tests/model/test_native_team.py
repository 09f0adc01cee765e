"""The threads of the kernels: shared by several callers, by children of fork(), and gone when nobody wants them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from native_kernels import HERE, drawn, team

from jitney_worker.model.native.library import Team, kernels
from jitney_worker.model.native.packing import linear, pack

PROGRAM = """
import os, resource, sys, threading
import torch
from jitney_worker.model.native.library import Team, kernels
from jitney_worker.model.native.packing import linear, pack
torch.manual_seed(0)
rows, weight = torch.randn(9, 500), torch.randn(700, 500)
def product(team):
    return linear(team, rows, pack(team, weight))
expected = product(Team(kernels(), 1))
"""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, or limits what only Linux limits")


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=100, check=False
    )


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_callers_on_several_python_threads_each_get_their_own_result(num_threads: int) -> None:
    own, start = Team(kernels(), num_threads), threading.Barrier(4)
    weights = [drawn(400, 300, seed=seed) for seed in range(4)]
    rows = [drawn(20 + 17 * seed, 300, seed=10 + seed) for seed in range(4)]
    packed = [pack(own, weight, quantised=i == 3) for i, weight in enumerate(weights)]
    expected = [linear(own, some, matrix) for some, matrix in zip(rows, packed, strict=True)]
    wrong: list[int] = []

    def call(which: int) -> None:
        start.wait(timeout=60)
        wrong.extend(
            which for _ in range(60) if not torch.equal(linear(own, rows[which], packed[which]), expected[which])
        )

    callers = [threading.Thread(target=call, args=(which,)) for which in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=100)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


@on_linux
def test_a_team_that_nobody_holds_takes_its_threads_along() -> None:
    before = threads()
    own = Team(kernels(), 5)
    hired = threads() - before
    assert (len(hired), own.num_threads) == (4, 5)
    del own
    gc.collect()
    deadline = time.monotonic() + 30  # a thread that has been joined may stand in the list for a moment
    while hired & threads() and time.monotonic() < deadline:
        os.sched_yield()
    assert not hired & threads()


@on_linux
def test_signals_are_left_to_the_threads_of_the_interpreter() -> None:
    before = threads()
    own = Team(kernels(), 3)
    pack(own, drawn(40, 20, seed=1))  # now all of them have begun
    for thread in threads() - before:
        lines = Path(f"/proc/self/task/{thread}/status").read_text("ascii").splitlines()
        blocked = int(next(line for line in lines if line.startswith("SigBlk:")).split()[1], 16)
        assert [bool(blocked >> (number - 1) & 1) for number in (1, 2, 10, 15, 11, 7)] == [True] * 4 + [False] * 2
    assert own.num_threads == 3


@on_linux
def test_a_child_of_fork_computes_with_threads_of_its_own_and_ends() -> None:
    done = run("""
team = Team(kernels(), 3)
product(team)
child = os.fork()
found = product(team)
num_threads = len(os.listdir("/proc/self/task"))
assert torch.equal(found, expected) and num_threads >= 3, num_threads
if child == 0:
    del team
    sys.exit(7)
status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status))
""")
    assert (done.stdout, done.stderr, done.returncode) == ("7\n", "", 0)


@on_linux
def test_a_child_of_fork_that_never_computes_ends_as_well() -> None:
    done = run("""
team = Team(kernels(), 3)
child = os.fork()
if child == 0:
    del team
    sys.exit(8)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert (done.stdout, done.stderr, done.returncode) == ("8\n", "", 0)


@on_linux
def test_where_the_system_gives_fewer_threads_those_compute() -> None:
    """Each thread wants a stack: without room for all, waiting for the missing ones would last for ever."""
    done = run("""
import threading
threading.stack_size()
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * os.sysconf("SC_PAGE_SIZE") + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
team = Team(kernels(), 60)
assert torch.equal(product(team), expected)
print(1 < team.num_threads < 60)
""")
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


def test_the_process_may_end_while_a_daemon_thread_computes() -> None:
    done = run("""
team, begun, out = Team(kernels(), 2), threading.Event(), torch.empty(9, 700)
packed = pack(team, weight)
given = team.threads, 0, packed.matrix, team.rooms, rows.data_ptr(), 9, out.data_ptr()
def compute():  # without torch, which ends the process itself when its thread is stopped
    while True:
        team.library.linear(*given)
        begun.set()
threading.Thread(target=compute, daemon=True).start()
assert begun.wait(60)
print("over")
""")
    assert (done.stdout, done.stderr, done.returncode) == ("over\n", "", 0)


@pytest.mark.parametrize("wanted", [-3, 0, 1, 64, 200])
def test_a_team_has_between_one_and_sixty_four_threads(wanted: int) -> None:
    assert Team(kernels(), wanted).num_threads == min(max(wanted, 1), 64)


@pytest.mark.parametrize("level", HERE)
def test_who_flushes_small_numbers_to_zero_gets_the_same_bits(level: str) -> None:
    """Some libraries switch that on in the thread that loads them: results would differ with who computed them."""
    rows, weight = drawn(40, 64, seed=1) * 1e-20, drawn(200, 64, seed=2) * 1e-19
    packed = pack(team(level), weight)
    expected = linear(team(level), rows, packed)
    assert (expected.abs().gt(0) & expected.abs().lt(1e-38)).any()
    assert torch.set_flush_denormal(True)
    try:
        found = [linear(team(level, num_threads), rows, packed) for num_threads in (1, 2)]
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(one, expected) for one in found)
