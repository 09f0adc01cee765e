"""What no line of a log may hold is not in it, wherever it was put."""

from __future__ import annotations

import orjson
import pytest

from jitney.apikeys import make_key
from jitney.logs import logger
from jitney.redaction import MAX_CHARS, SECRET_FIELDS, WITHHELD, redacted, without_secrets


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("redis://:hunter2@db:6379/0", "redis://:***@db:6379/0"),
        ("rediss://user:p%40ss@db", "rediss://user:***@db"),
        (
            "Error 111 connecting to redis://a:b@c and unix://d:e@f",
            "Error 111 connecting to redis://a:***@c and unix://d:***@f",
        ),
        ("redis://:p/w@db", "redis://:***@db"),
        ("redis://u:p@ss@db, redis://u:q@db", "redis://u:***@db, redis://u:***@db"),
        ("redis://db/0?db=1&password=hunter2 is away", "redis://db/0?db=1&password=*** is away"),
        ("https://hooks.example/in?access_token=abc#top", "https://hooks.example/in?access_token=***#top"),
        ("s3://x/y?X-Amz-Signature=abc&part=2", "s3://x/y?X-Amz-Signature=***&part=2"),
        ("http://host:80/a?mail=b@c.example", "http://host:80/a?mail=b@c.example"),
        ("redis://db:6379/0, nothing to hide", "redis://db:6379/0, nothing to hide"),
        ("at 10:30 mail a@b.example", "at 10:30 mail a@b.example"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("jitney_generation_tokens_total", "jitney_generation_tokens_total"),
    ],
)
def test_logs_show_no_password_of_an_address_and_no_token(said: str, shown: str) -> None:
    assert without_secrets(said) == shown


def test_logs_show_no_api_key() -> None:
    secret, _ = make_key("k", tenant="-", scopes=["read"])
    assert without_secrets(f"key {secret!r} is unknown") == "key '***' is unknown"


@pytest.mark.parametrize("odd", ["a.", "a://:", "?a=", "a"])
def test_logs_are_not_held_up_by_what_somebody_sent(odd: str) -> None:
    """A pattern that begins anew at every character would take minutes for a mebibyte."""
    event = redacted(None, "", {"event": "x", "error": odd * 500_000})
    assert str(event["error"]).startswith(odd)


@pytest.mark.parametrize("name", sorted(SECRET_FIELDS))
def test_logs_withhold_fields_of_words_at_any_depth(name: str) -> None:
    event = redacted(None, "", {"event": "x", name: ["the sea"], "asked": [{name: "the sea", "n": 1}]})
    assert event == {"event": "x", name: WITHHELD, "asked": [{name: WITHHELD, "n": 1}]}


def test_logs_cut_what_is_long_but_for_a_traceback() -> None:
    long = "x" * (MAX_CHARS + 5)
    event = redacted(None, "", {"error": long, "exception": long, "n": 3, "ok": True, "none": None, "odd": {1, 2}})
    assert event == {
        "error": f"{'x' * MAX_CHARS}… ({MAX_CHARS + 5} characters)",
        "exception": long,
        "n": 3,
        "ok": True,
        "none": None,
        "odd": [1, 2],
    }


def test_logs_pass_every_line_through_it(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ConnectionError("redis://:hunter2@db refused")
    except ConnectionError as error:
        logger(url="redis://:hunter2@db").exception("it_failed", error=repr(error), prompt="the sea")
    line = capsys.readouterr().err
    assert "hunter2" not in line
    assert "the sea" not in line
    fields = orjson.loads(line)
    assert fields["exception"].endswith("ConnectionError: redis://:***@db refused")
    assert (fields["url"], fields["prompt"]) == ("redis://:***@db", WITHHELD)
