"""Webhooks are off until somebody switches them on, and settings that contradict each other are refused by name."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tests.webhooks.receiver import SECRET

from jitney.errors import InvalidJob, SettingsError
from jitney.webhooks.settings import WebhookSettings
from jitney.webhooks.wish import Webhook

ON: dict[str, Any] = {"allowed_hosts": ("hooks.example.com",), "secret": SECRET}


def test_webhooks_are_off_by_default_and_a_job_that_asks_for_one_is_refused() -> None:
    settings = WebhookSettings.load()
    assert not settings.is_on
    with pytest.raises(InvalidJob, match=r"JITNEY_WEBHOOKS__ALLOWED_HOSTS.*JITNEY_WEBHOOKS__SECRET") as refused:
        settings.permitted(Webhook(url="https://hooks.example.com/"))
    assert (refused.value.param, refused.value.code) == ("webhook", "webhooks_off")


def test_webhook_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_WEBHOOKS__ALLOWED_HOSTS", "hooks.example.com, *.Partner.example  b.example:8443")
    monkeypatch.setenv("JITNEY_WEBHOOKS__SECRET", SECRET)
    settings = WebhookSettings.load()
    assert settings.is_on
    assert settings.allowed_hosts == ("hooks.example.com", "*.partner.example", "b.example:8443")
    assert settings.keys == (base64.b64decode(SECRET.removeprefix("whsec_")),)
    assert SECRET not in repr(settings)


def test_the_deployments_own_webhook_endpoint_stands_in_for_one_that_is_not_named() -> None:
    settings = WebhookSettings.load(**ON, url="https://hooks.example.com/own")
    assert settings.permitted(Webhook()).url == "https://hooks.example.com/own"
    assert settings.permitted(Webhook(url="https://hooks.example.com/x")).url == "https://hooks.example.com/x"
    with pytest.raises(InvalidJob, match=r"webhook\.url is absent"):
        WebhookSettings.load(**ON).permitted(Webhook())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allowed_hosts": ("a.example",)}, "allowed_hosts needs secret"),
        ({"secret": SECRET}, "secret needs allowed_hosts"),
        ({**ON, "secret": "hunter2hunter2hunter2hunter2hunter2"}, r"webhooks\.secret: must be whsec_"),
        ({**ON, "secret": "whsec_c2hvcnQ="}, "24 to 64 bytes"),
        ({**ON, "secret": SECRET.removeprefix("whsec_")}, r"webhooks\.secret: must be whsec_"),
        ({**ON, "secret": "whsec_!!!"}, r"webhooks\.secret: must be whsec_"),
        ({**ON, "secret": "  "}, r"webhooks\.secret: is empty"),
        ({**ON, "private_hosts": ("b.example",)}, "private_hosts names b.example"),
        ({**ON, "allowed_hosts": ("https://a.example",)}, r"webhooks\.allowed_hosts: .*is no host"),
        ({**ON, "url": "https://elsewhere.example/"}, "url names elsewhere.example"),
        ({**ON, "backoff_s": 100.0, "max_backoff_s": 10.0}, "max_backoff_s=10.0 is less than backoff_s=100.0"),
        ({**ON, "timeout_s": 0}, r"webhooks\.timeout_s"),
        ({**ON, "max_attempts": 0}, r"webhooks\.max_attempts"),
    ],
)
def test_webhook_settings_that_make_no_sense_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        WebhookSettings.load(**fields)
    assert "hunter2" not in str(refused.value)
    assert SECRET not in str(refused.value)
