"""The report's scenarios in short, on real processes: that the blows fall, and that the checker's word counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ops.bench.nemesis.fields import MODELS, Model
from ops.bench.nemesis.run import Conditions, Measured, run
from ops.bench.nemesis.scenarios import SCENARIOS
from ops.bench.page import server_binary

SECONDS = 3.0


async def short(name: str, folder: Path, flags: Mapping[str, Any] | None = None) -> Measured:
    """A few streams with short answers, for three seconds."""
    model = Model("scripted", (5, 25), 0, {**MODELS["scripted"].flags, **(flags or {})})
    binary = server_binary("valkey")
    assert binary is not None
    given = Conditions(model, model.directory(folder), binary, SECONDS, 1.5, 4, 2, seed=1)
    (folder / "run").mkdir()
    return await run(SCENARIOS[name], given, folder / "run")


@pytest.mark.parametrize(
    ("name", "least", "most"), [("workers", 1, 2), ("rolling", 3, 6), ("redis-always", 1, 2), ("slow", 0, 0)]
)
async def test_every_kind_of_blow_falls_and_every_promise_is_kept(
    name: str, least: int, most: int, tmp_path: Path
) -> None:
    measured = await short(name, tmp_path)
    assert measured.wrong == []
    assert least <= len(measured.faults) <= most
    summary = measured.summary
    assert (summary.num_lost, summary.num_otherwise) == (0, 0)
    assert summary.num_accepted == summary.num_finished >= 12  # each seat has asked again
    assert 0 < measured.shown <= summary.num_tokens <= measured.tally.num_sampled
    assert len(measured.away_s) == (len(measured.faults) if name.startswith("redis") else 0)
    assert not (tmp_path / "run").exists()


async def test_an_answer_that_is_not_the_one_alone_makes_the_row_worthless(tmp_path: Path) -> None:
    """Workers with another model than the one that the answers were computed for."""
    measured = await short("undisturbed", tmp_path, {"salt": 77})
    assert any("alone it says" in line for line in measured.wrong)
    assert measured.wrong[-1] == f"what was seen is in {tmp_path / 'run'}"
    assert (tmp_path / "run" / "ledger.jsonl").stat().st_size > 0
