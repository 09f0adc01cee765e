"""Two workers with one fingerprint continue each other's jobs: it must change with anything that changes tokens."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from jitney_worker.model import fingerprint as fingerprint_module
from jitney_worker.model.fingerprint import DIGESTS, fingerprint
from jitney_worker.model.tiny import make_tiny


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "one")


def test_the_same_files_elsewhere_have_the_same_fingerprint(directory: Path, tmp_path: Path) -> None:
    first = fingerprint(directory, "float32", "t1")
    assert re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", first)
    copy = shutil.copytree(directory, tmp_path / "two")
    (copy / DIGESTS).unlink()
    assert fingerprint(copy, "float32", "t1") == first


def test_dtype_tokenizer_weights_and_configuration_each_change_it(directory: Path, tmp_path: Path) -> None:
    found = {
        fingerprint(directory, "float32", "t1"),
        fingerprint(directory, "bfloat16", "t1"),
        fingerprint(directory, "float32", "t2"),
        fingerprint(directory, "float32", "t1", quantisation="int8"),
        fingerprint(make_tiny(tmp_path / "seed", seed=1), "float32", "t1"),
        fingerprint(make_tiny(tmp_path / "eps", overrides={"rms_norm_eps": 1e-6}), "float32", "t1"),
    }
    assert len(found) == 6


def test_the_sampler_version_is_part_of_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(directory, "float32", "t1")
    monkeypatch.setattr(fingerprint_module, "SAMPLER_VERSION", 999)
    assert fingerprint(directory, "float32", "t1") != before


def test_a_kept_digest_is_used_and_a_changed_file_is_hashed_again(directory: Path) -> None:
    before = fingerprint(directory, "float32", "t1")
    weights = directory / "model.safetensors"
    content, stat = bytearray(weights.read_bytes()), weights.stat()
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint(directory, "float32", "t1") == before, "size and time are unchanged: the kept digest serves"
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert fingerprint(directory, "float32", "t1") != before


def test_a_spoilt_digest_file_is_no_obstacle(directory: Path) -> None:
    before = fingerprint(directory, "float32", "t1")
    (directory / DIGESTS).write_text('{"model.safetensors": 3}')
    assert fingerprint(directory, "float32", "t1") == before
