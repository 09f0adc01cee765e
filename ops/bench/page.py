"""Figures as Markdown, and the place in a document where a command writes them.

A place is what stands between `<!-- NAME: written by COMMAND -->` and `<!-- end of NAME -->`. Nobody edits it by
hand: whoever wants other figures runs the command.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from jitney.embedded import find_server
from jitney.errors import ServerError

ROOT = Path(__file__).parent.parent.parent


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; every row must have as many cells as the head."""
    lines = [head, ["---"] * len(head), *rows]
    for line in lines:
        if len(line) != len(head):
            raise ValueError(f"a row of {len(line)} cells under a head of {len(head)}: {line}")
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def paragraph(*parts: str) -> str:
    """Parts of one paragraph, in lines as long as the project's other documents have them."""
    return textwrap.fill(" ".join(parts), 118, break_long_words=False, break_on_hyphens=False)


def find_place(document: str, name: str) -> tuple[int, int]:
    """Start and end of what stands at the place. Raises LookupError if there is none, or more than one."""
    begins = list(re.finditer(rf"<!-- {re.escape(name)}: written by .* -->\n", document))
    ends = list(re.finditer(rf"<!-- end of {re.escape(name)} -->", document))
    if len(begins) != 1 or len(ends) != 1 or ends[0].start() < begins[0].end():
        raise LookupError(f"no place called {name!r}: it needs one line '<!-- {name}: written by ... -->' and its end")
    return begins[0].end(), ends[0].start()


def put(document: str, name: str, text: str) -> str:
    """The document with `text` at the place, instead of what stood there."""
    start, end = find_place(document, name)
    return f"{document[:start]}\n{text.strip()}\n\n{document[end:]}"


def check_place(path: Path | None, name: str) -> None:
    """Before a long run: is there a place for its figures? Ends the program if not."""
    if path is None:
        return
    try:
        find_place(path.read_text(), name)
    except (OSError, LookupError) as error:
        raise SystemExit(f"--write {path}: {error}") from None


def write(path: Path | None, name: str, text: str) -> None:
    """Into the document, if one was asked for."""
    if path is not None:
        path.write_text(put(path.read_text(), name, text))


def server_binary(kind: str) -> Path | None:
    """`valkey`: the one that comes with the package. `redis`: the machine's; None where it has none."""
    try:
        return find_server("redis-server") if kind == "redis" else find_server()
    except ServerError:
        return None


def machine() -> str:
    """What the figures were measured on, and how busy it was before: one sentence."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), {platform.system()}, "
        f"Python {platform.python_version()}; load average before the run {load:.1f}"
    )


def server_version(binary: Path) -> str:
    """`Valkey 9.1.2` or `Redis 7.0.15`, as the binary says itself."""
    told = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"v=([\w.]+)", told)
    return f"{'Valkey' if 'alkey' in told else 'Redis'} {version.group(1) if version else ''}".strip()


def times(value: float, base: float, *, digits: int = 2) -> str:
    """`value` as a multiple of `base`; a dash where there is nothing to compare with."""
    return f"×{value / base:.{digits}f}" if base > 0 else "–"
