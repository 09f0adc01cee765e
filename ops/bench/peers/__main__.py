"""One engine on one workload: `python -m ops.bench.peers openvino W5 [--set max_num_batched_tokens=512]`.

Prints its figures as one line of JSON, named as `jitney bench` names them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ops.bench import flags
from ops.bench.compare import ground_of
from ops.bench.go import go
from ops.bench.peers.engines import CONTENDERS, Peer

from jitney_worker.bench.workloads import NAMES


def setting(words: str) -> tuple[str, int]:
    """`name=number`"""
    name, _, value = words.partition("=")
    if not name or not value.isdigit():
        raise argparse.ArgumentTypeError(f"{words!r} is not NAME=NUMBER")
    return name, int(value)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=CONTENDERS)
    parser.add_argument("name", choices=[name for name in NAMES if name != "W6"])
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=NUMBER")
    flags.add_ground(parser)
    return parser.parse_args(words)


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    contender = CONTENDERS[asked.engine]
    ground = ground_of(asked)
    if isinstance(contender, Peer):
        contender.check_set_up(ground.directory, ground.model)
    done = go(contender, asked.name, ground, dict(asked.set) or None)
    if done.failure:
        print(done.failure, file=sys.stderr)
        raise SystemExit(1)
    print(json.dumps(dict(done.figures)))


if __name__ == "__main__":
    main()
