"""The house itself: what the documents say is there, what must not be there is not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("shared/jitney", "api/jitney_api", "worker/jitney_worker")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
BANNED_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|managers?|misc|info)($|_)")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name.decode() for name in listed.split(b"\0") if name and (ROOT / name.decode()).is_file()]


def test_every_module_has_its_line_in_the_architecture_and_every_line_its_module() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE)
    there = ["/".join(path.relative_to(ROOT).parts[1:]) for path in SOURCES if path.name != "__init__.py"]
    assert sorted(named) == sorted(there)


def test_every_module_says_what_it_is_for() -> None:
    silent = [p.name for p in SOURCES if p.read_text().strip() and not p.read_text().lstrip().startswith('"""')]
    assert silent == []


def test_no_file_is_called_after_a_drawer() -> None:
    assert [p.name for p in SOURCES if BANNED_NAMES.search(p.stem)] == []


def test_no_top_level_root_is_a_package() -> None:
    """`import worker` must never find ours."""
    assert [name for name in ("shared", "api", "worker") if (ROOT / name / "__init__.py").exists()] == []


def test_ci_runs_the_commands_that_the_readme_names() -> None:
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "make test" in readme
    assert re.search(r"^make test$", script, re.MULTILINE)
    assert re.search(r"^make check$", script, re.MULTILINE)


@pytest.mark.parametrize("target", ["setup", "demo", "up", "bench", "check", "test"])
def test_the_makefile_has_its_targets(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_pins_lie_within_the_ranges_of_the_distribution() -> None:
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    asked = [Requirement(text) for text in requires("jitney") or []]
    named = [requirement for requirement in asked if requirement.name.lower() in pins]
    assert len(named) > 15
    assert [str(r) for r in named if not r.specifier.contains(pins[r.name.lower()])] == []


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of somebody's machine, and no placeholder that was never filled in."""
    forbidden = re.compile(rb"/work/|/root/|/home/(?!jitney)|@@[A-Z]+@@")
    texts = [p for p in tracked() if p.suffix not in (".json",) and p != Path(__file__)]
    assert [str(p.relative_to(ROOT)) for p in texts if forbidden.search(p.read_bytes())] == []
