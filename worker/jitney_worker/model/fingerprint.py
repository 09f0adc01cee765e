"""What makes two workers the same model: only they may continue each other's jobs exactly."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from jitney_worker.model.choice import served_config
from jitney_worker.model.sampler import SAMPLER_VERSION
from jitney_worker.model.weights import weight_files

DIGESTS = ".jitney-digests.json"
"""Beside the weights: SHA-256 by file name, valid for one size and modification time."""


def fingerprint(
    directory: Path, dtype: str, tokenizer_digest: str, *, quantisation: str = "none", kernels: str | None = None
) -> str:
    """Short identity of weights, precision, tokenizer with template, and sampler: `[A-Za-z0-9.-]+`.

    The same files give the same fingerprint on every machine, wherever they lie. kernels: what they are compiled for,
    given only where answers must be equal to the last bit.
    """
    parts = {
        # Of transformers' decoders also its version: their code, and with it their rounding, changes with it.
        "config": repr(served_config(directory)),
        "weights": weights_digests(directory),
        "dtype": dtype,
        "quantisation": quantisation,
        "tokenizer": tokenizer_digest,
        "sampler": SAMPLER_VERSION,
    }
    if kernels is not None:
        parts["kernels"] = kernels
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9]', '', dtype)}-s{SAMPLER_VERSION}-{digest[:20]}"


def weights_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every weight file. Computed once (a gigabyte takes about a second) and kept beside the files."""
    kept = _read_kept(directory / DIGESTS)
    digests: dict[str, str] = {}
    now: dict[str, list[str | int]] = {}
    for file in weight_files(directory):
        stat = file.stat()
        entry = kept.get(file.name)
        if entry is None or entry[1:] != [stat.st_size, stat.st_mtime_ns]:
            with file.open("rb") as opened:
                entry = [hashlib.file_digest(opened, "sha256").hexdigest(), stat.st_size, stat.st_mtime_ns]
        now[file.name] = entry
        digests[file.name] = str(entry[0])
    if now != kept:
        _keep(directory / DIGESTS, now)
    return digests


def _read_kept(path: Path) -> dict[str, list[str | int]]:
    try:
        kept = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {name: entry for name, entry in kept.items() if isinstance(entry, list) and len(entry) == 3}


def _keep(path: Path, digests: dict[str, list[str | int]]) -> None:
    """Best effort: a read-only model directory is hashed again at the next start."""
    partial = path.with_name(f"{path.name}.{hashlib.sha256(str(digests).encode()).hexdigest()[:8]}")
    try:
        partial.write_text(json.dumps(digests), "utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
