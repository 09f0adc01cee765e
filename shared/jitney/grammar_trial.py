"""A program: read a grammar, say what `llguidance` complains of. In a process of its own, which can be ended.

Some short patterns multiply into automata that no memory holds, none of the library's limits stops that, and nobody
can end a thread. Imports nothing of jitney, so that it starts quickly.

    python -P grammar_trial.py < {"lark": ..., "limits": {...}, "stack_bytes": ..., "memory_bytes": ..., "cpu_s": ...}
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    _bound(asked)
    threading.stack_size(asked["stack_bytes"])
    complaints: list[str] = []
    thread = threading.Thread(target=lambda: complaints.append(_complaint(asked)))
    thread.start()
    thread.join()
    sys.stdout.write(complaints[0])


def _bound(asked: dict[str, Any]) -> None:
    try:
        import resource
    except ImportError:  # no Unix: there is the time alone, which who started this keeps
        return
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["cpu_s"], asked["cpu_s"]))


def _complaint(asked: dict[str, Any]) -> str:
    """Empty if there is nothing to complain of."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = LLMatcher.grammar_from_lark(asked["lark"])
        return LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**asked["limits"]))
    except BaseException as error:  # down to panics that are no Exception
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
