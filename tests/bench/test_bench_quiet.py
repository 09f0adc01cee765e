"""Who else was at work: CPU time of the machine less that of one's own processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jitney_worker.bench import quiet
from jitney_worker.bench.quiet import Reading, is_disturbed, other_cores, reading

TICKS = os.sysconf("SC_CLK_TCK")


def test_what_others_used_is_the_machines_time_less_ones_own() -> None:
    assert other_cores(Reading(100.0, 40.0, 7.0), Reading(102.0, 44.0, 8.0)) == 1.5


def test_ticks_that_are_counted_late_never_make_others_give_time_back() -> None:
    assert other_cores(Reading(0.0, 1.0, 1.0), Reading(1.0, 1.5, 2.0)) == 0.0


def test_what_nobody_could_measure_is_unknown_and_not_disturbed() -> None:
    one = Reading(0.0, 1.0, 1.0)
    assert (other_cores(None, one), other_cores(one, None), other_cores(one, one)) == (None, None, None)
    assert not is_disturbed(None)


@pytest.mark.parametrize(("cores", "most", "disturbed"), [(0.2, 0.2, False), (0.201, 0.2, True), (0.3, 1.0, False)])
def test_a_run_is_disturbed_above_the_bound(cores: float, most: float, disturbed: bool) -> None:
    assert is_disturbed(cores, most) is disturbed


def test_busy_time_leaves_out_idling_and_the_disk_and_counts_what_the_hypervisor_took(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 4 8000 9000 16 32 64 128 256\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert quiet._busy_s(stat) == (1 + 2 + 4 + 16 + 32 + 64) / TICKS


def test_a_tree_is_a_process_with_all_that_descend_from_it_and_those_it_waited_for(tmp_path: Path) -> None:
    def program(pid: int, parent: int, *ticks: int) -> None:
        (tmp_path / str(pid)).mkdir()
        before = f"S {parent} 0 0 0 0 0 0 0 0 0"
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (odd) name) {before} {' '.join(map(str, ticks))} 20 0 1")

    program(10, 1, 1, 2, 4, 8)
    program(11, 10, 16, 0, 0, 0)
    program(12, 11, 32, 0, 0, 0)
    program(13, 1, 64_000, 0, 0, 0)
    (tmp_path / "uptime").write_text("not a process")
    assert quiet._tree_s(10, tmp_path) == (1 + 2 + 4 + 8 + 16 + 32) / TICKS


def used_by_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_work_of_a_child_that_has_ended_is_ones_own() -> None:
    used_before, before = used_by_children(), reading()
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    after, used = reading(), used_by_children() - used_before
    assert before is not None
    assert after is not None
    assert used >= 0.25
    assert after.own_s - before.own_s >= used - 2 / TICKS
