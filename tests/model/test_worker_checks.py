"""The worker's part of `jitney doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitney.checks import Finding
from jitney_worker.checks import checks
from jitney_worker.model.tiny import make_tiny


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of our own, which the environment names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JITNEY_DEVICE", "cpu")
    monkeypatch.setenv("JITNEY_DTYPE", "float32")
    directory = make_tiny(tmp_path / "little")
    monkeypatch.setenv("JITNEY_MODEL", str(directory))
    return directory


def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in checks()}


def test_a_whole_model_and_a_device_that_is_there_are_fine(tiny: Path) -> None:
    found = findings()
    assert {name: one.verdict for name, one in found.items()} == {"model": "ok", "device": "ok", "kernels": "ok"}
    assert found["model"].found.startswith(f"little in {tiny}: ")
    assert found["device"].found == "cpu, computing in float32"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(tiny: Path, name: str) -> None:
    (tiny / name).unlink()
    model = findings()["model"]
    assert model.verdict == "fail"
    assert str(tiny) in model.found
    assert model.advice


def test_a_model_that_was_never_fetched_is_a_warning(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JITNEY_MODEL", str(tmp_path / "nowhere"))
    assert findings()["model"].verdict == "warn"


def test_a_device_that_is_not_there_fails(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_DEVICE", "abacus")
    device = findings()["device"]
    assert device.verdict == "fail"
    assert "abacus" in device.found


def test_wrong_settings_are_one_finding(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_LEASE__DURATION_S", "0")
    (finding,) = checks()
    assert (finding.name, finding.verdict) == ("worker", "fail")
    assert "lease.duration_s" in finding.found
