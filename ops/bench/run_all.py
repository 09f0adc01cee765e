"""All measurements, one after the other: figures and pictures into one folder, tables into RESULTS.md.

    python -m ops.bench.run_all [--into ops/bench/pictures] [--quick] [--only limits,compare]

With every peer set up two to three hours, in which nothing else should run; --quick takes one round of each,
and half an hour. One that fails does not keep the others from running.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ops.bench import flags, page

Step = tuple[str, list[str]]
"""(module, its words)"""

NAMES = (
    "limits",
    "step_curve",
    "worker_cost",
    "preemption",
    "variance",
    "under_load",
    "queue_tax",
    "streams",
    "compare",
)
UNDRAWN = ("worker_cost", "streams")
QUICK = {
    "step_curve": ["--rounds", "1"],
    "preemption": ["--rounds", "1"],
    "variance": ["--rounds", "1", "--jobs", "64", "--single-jobs", "8"],
    "queue_tax": ["--rounds", "1"],
    "streams": ["--readers", "200", "--events", "60"],
    "compare": ["--rounds", "1", "--names", "W1,W5"],
}
FULL = {"compare": ["--rounds", "3", "--names", "W1,W2,W3,W4,W5,W7,W8,W8P,W9"]}


def plan(asked: argparse.Namespace) -> list[Step]:
    """What will be run."""
    return [(f"ops.bench.{name}", _words(name, asked)) for name in asked.only]


def _words(name: str, asked: argparse.Namespace) -> list[str]:
    stem = name.replace("_", "-")
    outputs = ["--json", f"{asked.into}/{stem}.json"]
    if name not in UNDRAWN:
        outputs += ["--svg", f"{asked.into}/{stem}.svg"]
    if asked.write is not None:
        outputs += ["--write", str(asked.write)]
    return [*(QUICK if asked.quick else FULL).get(name, []), *outputs]


def run(steps: Sequence[Step], timeout_s: float) -> list[str]:
    """Run them; the modules of those that failed."""
    failed = []
    for module, words in steps:
        flags.say(f"{time.strftime('%H:%M:%S')} {module} {' '.join(words)}")
        try:
            ended: object = subprocess.run([sys.executable, "-m", module, *words], timeout=timeout_s).returncode
        except subprocess.TimeoutExpired:
            ended = f"nothing after {timeout_s:g} s"
        if ended:
            flags.say(f"{module} ended with {ended}")
            failed.append(module)
    return failed


def existing_folder(words: str) -> Path:
    if not Path(words).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {words}")
    return Path(words)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=existing_folder, default=page.ROOT / "ops" / "bench" / "pictures")
    parser.add_argument("--only", type=flags.listed(str, NAMES), default=NAMES, metavar="limits,compare")
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--write", type=flags.existing_file, help="a document with places for all tables")
    parser.add_argument("--timeout-s", type=flags.above_zero, default=4 * 3_600.0, help="of one of them; %(default)g")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    failed = run(plan(asked), asked.timeout_s)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
