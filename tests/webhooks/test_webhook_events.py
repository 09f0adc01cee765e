"""What is sent, held against the official package: its verifier accepts the signature, its types the events."""

from __future__ import annotations

import base64
import time

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from tests.webhooks.receiver import KEY, SECRET

from jitney.webhooks.events import EVENT_TYPES, event_body, event_id, event_type
from jitney.webhooks.signing import headers

NEW_KEY = b"n" * 24
NEW_SECRET = f"whsec_{base64.b64encode(NEW_KEY).decode()}"
OPENAIS = [
    ("response", "finished", "response.completed"),
    ("response", "incomplete", "response.incomplete"),
    ("response", "failed", "response.failed"),
    ("response", "expired", "response.failed"),
    ("response", "cancelled", "response.cancelled"),
    ("batch", "completed", "batch.completed"),
    ("batch", "failed", "batch.failed"),
    ("batch", "expired", "batch.expired"),
    ("batch", "cancelled", "batch.cancelled"),
]
OURS = [
    ("job", "finished", "job.finished"),
    ("job", "incomplete", "job.finished"),
    ("job", "failed", "job.failed"),
    ("job", "cancelled", "job.cancelled"),
    ("job", "expired", "job.expired"),
]


@pytest.fixture
def verifier() -> OpenAI:
    return OpenAI(api_key="none", webhook_secret=SECRET)


def signed(body: bytes, *, keys: tuple[bytes, ...] = (KEY,), at: int | None = None) -> dict[str, str]:
    return headers("evt_1", int(time.time()) if at is None else at, body, keys)


@pytest.mark.parametrize(("object", "ending", "name"), OPENAIS)
def test_the_official_package_takes_a_webhook_for_one_of_openais(
    verifier: OpenAI, object: str, ending: str, name: str
) -> None:
    body = event_body(object, ending, "x.1", at=1_700_000_000)
    event = verifier.webhooks.unwrap(body, signed(body))
    words = "".join(word.capitalize() for word in name.split("."))
    assert type(event).__name__ == f"{words}WebhookEvent"
    assert (event.type, event.object, event.created_at) == (name, "event", 1_700_000_000)
    assert event.data.id == ("resp_x.1" if object == "response" else "x.1")  # type: ignore[union-attr]
    assert event.id == event_id(object, ending, "x.1")


@pytest.mark.parametrize(("object", "ending", "name"), OURS)
def test_the_official_package_reads_webhooks_of_our_own_as_well(
    verifier: OpenAI, object: str, ending: str, name: str
) -> None:
    body = event_body(object, ending, "q.1", at=1)
    event = verifier.webhooks.unwrap(body, signed(body))
    assert (event.type, event.data.id) == (name, "q.1")  # type: ignore[union-attr]


def test_every_webhook_event_is_named_once() -> None:
    assert {name for *_, name in OPENAIS + OURS} == EVENT_TYPES
    assert event_type("job", "of tomorrow") == "job.of tomorrow"


def test_a_webhook_of_which_a_byte_was_changed_is_no_longer_signed(verifier: OpenAI) -> None:
    body = event_body("response", "finished", "q.1", at=1)
    with pytest.raises(InvalidWebhookSignatureError):
        verifier.webhooks.verify_signature(body.replace(b"q.1", b"q.2"), signed(body))
    with pytest.raises(InvalidWebhookSignatureError):
        verifier.webhooks.verify_signature(body, signed(body) | {"webhook-id": "evt_2"})
    with pytest.raises(InvalidWebhookSignatureError, match="too old"):
        verifier.webhooks.verify_signature(body, signed(body, at=int(time.time()) - 3_600))


@pytest.mark.parametrize("secret", [SECRET, NEW_SECRET])
def test_while_webhook_secrets_are_exchanged_either_of_them_verifies(verifier: OpenAI, secret: str) -> None:
    body = event_body("batch", "completed", "batch_1", at=1)
    both = signed(body, keys=(NEW_KEY, KEY))
    assert both["webhook-signature"].count("v1,") == 2
    verifier.webhooks.verify_signature(body, both, secret=secret)


def test_a_webhook_id_is_the_endings_own_and_holds_no_full_stop() -> None:
    ids = {
        event_id("job", "finished", "q.1"),
        event_id("job", "failed", "q.1"),
        event_id("job", "finished", "q.2"),
        event_id("response", "finished", "q.1"),
    }
    assert len(ids) == 4
    assert event_id("job", "finished", "q.1") in ids
    assert not any("." in id or len(id) != 36 for id in ids)


def test_the_webhook_signature_is_that_of_the_specification() -> None:
    """The example of the reference implementations: a known secret, id, time and body."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    made = headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, b'{"test": 2432232314}', (key,))
    assert made["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
