"""Settings of a worker are refused by name and value, wherever they come from."""

from __future__ import annotations

from typing import Any

import pytest

from jitney.errors import SettingsError
from jitney_worker.settings import load_settings


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("JITNEY_ENGINE__MAX_NUM_SEQS", "many", "engine.max_num_seqs='many'"),
        ("JITNEY_LEASE__DURATION_S", "0.1", "lease.duration_s='0.1'"),
        ("JITNEY_LEASE__DURATION_S", "nan", "lease.duration_s='nan'"),
        ("JITNEY_WORKER__DRAIN_TIMEOUT_S", "-1", "worker.drain_timeout_s='-1'"),
        ("JITNEY_WORKER__ID", "a b", "worker.id='a b'"),
        ("JITNEY_ENGINE__MAX_NUM_SEQ", "4", "engine.max_num_seq="),
        ("JITNEY_ENGINE", "not JSON", "engine"),
        ("JITNEY_DTYPE", "float8", "dtype='float8'"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": {"num_kv_blocks": 4, "kv_cache_bytes": 9}}, "engine.num_kv_blocks=4 and engine.kv_cache_bytes=9"),
        ({"engine": {"max_num_seqs": 9, "max_num_batched_tokens": 8}}, "engine.max_num_seqs=9 must not exceed"),
        ({"num_threads": 0}, "num_threads=0"),
    ],
)
def test_a_wrong_flag_is_named_with_its_value(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(**given)
    assert words in str(caught.value)


def test_an_address_that_is_refused_is_not_shown_because_it_may_hold_a_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JITNEY_REDIS_URL", "http://:secret@host")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert "secret" not in str(caught.value)
