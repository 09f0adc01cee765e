"""`python -m jitney_worker.model.native`: compile the kernels for every CPU of this kind.

For images and packages: what runs there later may have another CPU, and no compiler.
"""

from __future__ import annotations

import sys

from jitney_worker.model.native.build import NativeUnavailable, built, levels_of_machine


def main() -> int:
    """Prints a line for each level; 1 if one could not be compiled."""
    failed = 0
    for name in levels_of_machine():
        try:
            print(f"{name:<12} {built(name)}")
        except NativeUnavailable as error:
            print(f"{name:<12} {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
