"""npm's AI SDK, the client of most web front ends, against the whole stack with a real model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.e2e.conftest import Stack

from jitney import Client
from jitney.errors import JobCancelled

CLIENTS = Path(__file__).parents[1] / "clients_js"
LEAST_NODE = 18
LIVENESS_S = 90.0


@pytest.fixture(scope="module")
def node() -> str:
    """The program, with the packages of `tests/clients_js` beside it."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("no node here: apt-get install nodejs npm, then npm ci --prefix tests/clients_js")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if int(re.findall(r"\d+", told)[0]) < LEAST_NODE:
        pytest.skip(f"node {told.strip()} is older than {LEAST_NODE}")
    if not (CLIENTS / "node_modules" / "ai").is_dir():
        pytest.skip("no packages in tests/clients_js: npm ci --prefix tests/clients_js")
    return found


@pytest.fixture(scope="module")
def answers(real_stack: Stack, node: str) -> dict[str, Any]:
    """All that `answers.mjs` asked and heard, in one go."""
    script = [node, str(CLIENTS / "answers.mjs"), real_stack.base_url, real_stack.model]
    ran = subprocess.run(script, capture_output=True, text=True, timeout=LIVENESS_S)
    assert ran.returncode == 0, ran.stderr
    heard: dict[str, Any] = json.loads(ran.stdout)
    return heard


def test_generate_text_and_stream_text_say_what_the_official_client_hears(
    real_stack: Stack, answers: dict[str, Any]
) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    with OpenAI(base_url=real_stack.base_url, api_key="none", max_retries=0) as openai:
        said = openai.chat.completions.create(model=real_stack.model, messages=messages, temperature=0, max_tokens=24)
    whole, streamed = answers["whole"], answers["streamed"]
    assert "Paris" in whole["text"]
    assert whole["text"] == streamed["text"] == "".join(streamed["parts"]) == said.choices[0].message.content
    assert len(streamed["parts"]) > 1
    assert whole["finishReason"] == streamed["finishReason"] == said.choices[0].finish_reason
    assert said.usage is not None
    for told in (whole["usage"], streamed["usage"]):
        assert (told["inputTokens"], told["outputTokens"], told["totalTokens"]) == (
            said.usage.prompt_tokens,
            said.usage.completion_tokens,
            said.usage.total_tokens,
        )


def test_generate_object_and_stream_object_hold_the_schema(answers: dict[str, Any]) -> None:
    boat = answers["object"]["object"]
    assert boat.keys() == {"name", "kind", "oars"}
    assert boat["kind"] in ("ship", "raft")
    assert answers["object"]["finishReason"] == "stop"
    assert answers["objectStreamed"]["object"] == boat
    partials = answers["objectStreamed"]["partials"]
    assert len(partials) > 1
    assert partials[-1] == boat


def test_refusals_are_the_errors_of_its_kind_and_are_not_repeated(answers: dict[str, Any]) -> None:
    unknown, too_long = answers["unknownModel"], answers["tooLong"]
    assert (unknown["name"], unknown["status"], unknown["isRetryable"]) == ("AI_APICallError", 404, False)
    assert "smollm2-135m-instruct" in unknown["message"]
    assert (too_long["name"], too_long["status"], too_long["isRetryable"]) == ("AI_APICallError", 400, False)
    assert "at most 8191 fit" in too_long["message"]


def test_an_abort_cancels_the_job(real_stack: Stack, answers: dict[str, Any]) -> None:
    assert "abort" in answers["aborted"]["types"]
    with Client(real_stack.redis) as client, pytest.raises(JobCancelled):
        client.job(answers["aborted"]["jobId"]).result(timeout_s=LIVENESS_S)
