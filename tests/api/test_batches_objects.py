"""Files and batches over HTTP, asked by the official client: OpenAI's objects, fields, pages and refusals."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
import redis as blocking_redis
from openai import AsyncOpenAI
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from tests.api.api_wire import PATIENCE_S
from tests.api.conftest import Api, StartApi

from jitney.apikeys import ApiKey, make_key
from jitney.connection import Redis
from jitney_api.batches.ledger import Chunk, Ledger
from jitney_api.batches.records import FileRecord, LineError, Usage, new_file_id
from jitney_api.batches.settings import BatchSettings

LINES = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n'


async def upload(client: AsyncOpenAI, content: bytes = LINES, **fields: Any) -> Any:
    return await client.files.create(file=("in.jsonl", content), purpose="batch", **fields)


async def create(client: AsyncOpenAI, **fields: Any) -> Any:
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"} | fields
    if "input_file_id" not in asked:
        asked["input_file_id"] = (await upload(client)).id
    return await client.batches.create(**asked)


def key_of(tenant: str, *scopes: str) -> tuple[str, ApiKey]:
    return make_key(f"k-{secrets.token_hex(4)}", tenant=tenant, scopes=scopes or ("generate", "read"))


@pytest.fixture
async def tenants(start_api: StartApi) -> AsyncIterator[Any]:
    """`await tenants("a", "b")`: a client for each tenant of one API that asks for keys; lists begin empty."""
    opened: list[AsyncOpenAI] = []

    async def open_each(*names: str, **settings: Any) -> list[AsyncOpenAI]:
        run = secrets.token_hex(4)
        made = [key_of(f"{name}-{run}") for name in names]
        api = await start_api(keys=[key for _, key in made], **settings)
        for secret, _ in made:
            client = AsyncOpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key=secret, max_retries=0)
            opened.append(client)
        return opened[-len(names) :]

    yield open_each
    for client in opened:
        await client.close()


@pytest.fixture
async def ledger(redis: Redis) -> Ledger:
    return Ledger(redis)


def refusal(error: pytest.ExceptionInfo[sdk.APIStatusError]) -> tuple[int, Any, Any]:
    return error.value.status_code, error.value.code, error.value.param


async def test_a_file_comes_back_as_it_was_sent_with_openais_fields(openai: AsyncOpenAI) -> None:
    content = LINES * 9_000  # more than one piece, and more than is kept in memory on its way
    made = await openai.files.create(file=("../über\n.jsonl", content), purpose="batch")
    assert made.id.startswith("file-")
    assert len(made.id) == 27
    assert (made.object, made.purpose, made.status, made.bytes) == ("file", "batch", "processed", len(content))
    assert made.filename.startswith("../über")
    assert made.expires_at is not None
    assert made.expires_at - made.created_at == 30 * 86_400
    assert await openai.files.retrieve(made.id) == made
    answer = await openai.files.content(made.id)
    assert answer.content == content
    assert answer.response.headers["x-content-type-options"] == "nosniff"
    gone = await openai.files.delete(made.id)
    assert (gone.id, gone.deleted) == (made.id, True)
    for ask in (openai.files.retrieve, openai.files.content, openai.files.delete):
        with pytest.raises(sdk.NotFoundError) as unknown:
            await ask(made.id)
        assert refusal(unknown) == (404, "file_not_found", "file_id")


async def test_a_file_expires_when_it_was_asked_to(openai: AsyncOpenAI, redis: Redis) -> None:
    made = await upload(openai, expires_after={"anchor": "created_at", "seconds": 3_600})
    assert made.expires_at == made.created_at + 3_600
    await redis.hset(f"jitney:{{batches}}:file:{made.id}", "expires_at", "1")
    with pytest.raises(sdk.NotFoundError):
        await openai.files.retrieve(made.id)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"purpose": "fine-tune"}, "purpose", "fine-tune"),
        ({"purpose": "batch_output"}, "purpose", "purpose must be batch"),
        ({"file": ("x", b"")}, "file", "empty"),
        ({"expires_after": {"anchor": "created_at", "seconds": 3_599}}, "expires_after.seconds", "3599"),
        ({"expires_after": {"anchor": "created_at", "seconds": 2_592_001}}, "expires_after.seconds", "2592001"),
        ({"expires_after": {"anchor": "now", "seconds": 3_600}}, "expires_after.anchor", "now"),
        ({"expires_after": {"anchor": "created_at"}}, "expires_after.seconds", "required"),
        ({"expires_after": {"anchor": "created_at", "seconds": "x"}}, "expires_after.seconds", "x"),
    ],
)
async def test_a_wrong_field_of_an_upload_is_named(
    openai: AsyncOpenAI, fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(sdk.BadRequestError, match=says) as wrong:
        await openai.files.create(**({"file": ("x", LINES), "purpose": "batch"} | fields))
    assert wrong.value.param == param


def form(*parts: tuple[str, bytes]) -> bytes:
    """parts: what stands behind `form-data; `, and the content."""
    lines = [b"--XX\r\ncontent-disposition: form-data; " + head.encode() + b"\r\n\r\n" + body for head, body in parts]
    return b"\r\n".join([*lines, b"--XX--\r\n"])


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="x"', LINES)


@pytest.mark.parametrize(
    ("body", "content_type", "status", "param", "code"),
    [
        (LINES, "application/json", 415, None, "unsupported_media_type"),
        (form(PURPOSE, FILE), "multipart/form-data", 400, None, "invalid_form"),
        (form(PURPOSE, FILE)[:-20], "multipart/form-data; boundary=XX", 400, None, "invalid_form"),
        (b"garbage", "multipart/form-data; boundary=XX", 400, None, "invalid_form"),
        (form(FILE), "multipart/form-data; boundary=XX", 400, "purpose", "missing_field"),
        (form(PURPOSE), "multipart/form-data; boundary=XX", 400, "file", "missing_field"),
        (form(PURPOSE, ('name="file"', LINES)), "multipart/form-data; boundary=XX", 400, "file", "invalid_value"),
        (form(PURPOSE, FILE, FILE), "multipart/form-data; boundary=XX", 400, None, "invalid_form"),
        (form(PURPOSE, *[("name=a", b"")] * 20, FILE), "multipart/form-data; boundary=XX", 400, None, "invalid_form"),
        (form(("name=a", b"x" * 5_000), FILE), "multipart/form-data; boundary=XX", 400, None, "invalid_form"),
        (
            form(("name=purpose", b"+2AA-"), FILE),
            "multipart/form-data; boundary=XX; charset=utf-7",
            400,
            "purpose",
            "invalid_value",
        ),
    ],
)
async def test_what_is_no_form_is_refused(
    api: Api, body: bytes, content_type: str, status: int, param: str | None, code: str
) -> None:
    answer = await api.post("/v1/files", body, content_type=content_type)
    error = (await answer.json())["error"]
    assert (answer.status, error["param"], error["code"]) == (status, param, code)


async def test_a_filename_that_is_half_a_character_can_be_told_again(api: Api) -> None:
    body = form(PURPOSE, ('name="file"; filename="+2AA-.jsonl"', LINES))
    answer = await api.post("/v1/files", body, content_type="multipart/form-data; boundary=XX; charset=utf-7")
    assert (answer.status, (await answer.json())["filename"]) == (200, "?.jsonl")


async def test_an_upload_has_limits_of_its_own(start_api: StartApi, tmp_path: Path) -> None:
    """Larger than any other body may be is fine; the file's own limit holds with and without a length; so does time."""
    files = tmp_path / "files"
    api = await start_api(
        max_body_bytes=1_024, batch=BatchSettings(files=str(files), max_file_bytes=100_000, upload_timeout_s=1.5)
    )
    type_ = "multipart/form-data; boundary=XX"
    fits = form(PURPOSE, ('name="file"; filename="x"', b"x" * 100_000))
    assert (await api.post("/v1/files", fits, content_type=type_)).status == 200
    for size in (100_001, 400_000):
        answer = await api.post("/v1/files", form(PURPOSE, (FILE[0], b"x" * size)), content_type=type_)
        assert (answer.status, (await answer.json())["error"]["code"]) == (413, "body_too_large")
    endless = b"FFFF\r\n" + b"x" * 0xFFFF + b"\r\n"
    head = f"POST /v1/files HTTP/1.1\nhost: x\ncontent-type: {type_}\ntransfer-encoding: chunked"
    begin = form(PURPOSE, (FILE[0], b""))[:-10]
    chunk = f"{len(begin):x}\r\n".encode() + begin + b"\r\n"
    assert (await api.send(head, chunk + 4 * endless)).status == 413
    slow = await api.send(f"POST /v1/files HTTP/1.1\nhost: x\ncontent-type: {type_}\ncontent-length: 90000", begin)
    assert (slow.status, (await slow.json())["error"]["code"]) == (408, "body_too_slow")
    assert len(list(files.iterdir())) == 1


async def test_a_page_of_another_origin_cannot_upload(start_api: StartApi) -> None:
    api = await start_api(cors_origins=["https://app.example"])
    type_ = "multipart/form-data; boundary=XX"
    for origin, status in (("https://evil.example", 403), ("null", 403), ("https://app.example", 200)):
        answer = await api.post("/v1/files", form(PURPOSE, FILE), content_type=type_, origin=origin)
        assert answer.status == status, origin


async def test_files_are_listed_page_by_page(tenants: Any) -> None:
    [client] = await tenants("acme")
    assert (await client.files.list()).data == []
    made = [(await upload(client)).id for _ in range(5)]
    assert [one.id async for one in client.files.list(limit=2)] == made[::-1]
    assert [one.id async for one in client.files.list(limit=2, order="asc")] == made
    page = await client.files.list(limit=2, order="asc", after=made[0])
    assert ([one.id for one in page.data], page.has_more) == (made[1:3], True)
    page = await client.files.list(limit=4, order="asc", after=made[0])
    assert ([one.id for one in page.data], page.has_more) == (made[1:], False)
    assert [one.id async for one in client.files.list(purpose="batch", limit=4)] == made[::-1]
    assert [one.id async for one in client.files.list(purpose="batch_output")] == []
    for wrong in ({"after": "file-x"}, {"limit": 0}, {"limit": 10_001}, {"order": "up"}):
        with pytest.raises(sdk.BadRequestError) as refused:
            await client.files.list(**wrong)
        assert refused.value.param == next(iter(wrong))


async def test_a_batch_has_openais_fields_and_an_rq_job(openai: AsyncOpenAI, redis_url: str) -> None:
    file = await upload(openai)
    made = await openai.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"night": "1"},
        output_expires_after={"anchor": "created_at", "seconds": 7_200},
    )
    assert made.id.startswith("batch_")
    assert (made.object, made.status, made.endpoint, made.input_file_id) == (
        "batch",
        "validating",
        "/v1/completions",
        file.id,
    )
    assert made.completion_window == "24h"
    assert made.expires_at == made.created_at + 86_400
    assert made.metadata == {"night": "1"}
    assert made.request_counts is not None
    assert made.request_counts.model_dump() == {"total": 0, "completed": 0, "failed": 0}
    assert await openai.batches.retrieve(made.id) == made
    with blocking_redis.Redis.from_url(redis_url) as connection:
        job = Job.fetch(made.id, connection=connection, serializer=JSONSerializer)
        assert (job.origin, job.func_name, job.args) == ("jitney", "jitney.rq.run_batch", [made.id])
        assert (job.timeout, job.get_status(), job.meta) == (
            -1,
            JobStatus.QUEUED,
            {"total": 0, "completed": 0, "failed": 0},
        )
        assert job.retries_left


async def test_a_batch_is_told_as_it_goes(openai: AsyncOpenAI, ledger: Ledger) -> None:
    """Every state and field that an assembler sets, as the official client reads them."""
    made = await create(openai)
    held = await ledger.begin(made.id)
    await ledger.accept(held, total=3, model="m")
    told = await openai.batches.retrieve(made.id)
    assert (told.status, told.model, told.request_counts.total) == ("in_progress", "m", 3)
    assert told.in_progress_at is not None
    usage = Usage(input_tokens=7, cached_tokens=2, output_tokens=5)
    await ledger.commit(
        held,
        [Chunk("c/1", "output", [1, 3], completed=2, usage=usage), Chunk("c/2", "error", [2], failed=1)],
    )
    await ledger.finalize(held)
    told = await openai.batches.retrieve(made.id)
    assert told.status == "finalizing"
    assert told.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert told.usage.model_dump() == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
    output, error = (FileRecord(new_file_id(), held.tenant, f"{n}.jsonl", "batch_output", 1) for n in "ab")
    await ledger.end(held, "completed", output=output, error=error, keep_s=5_000)
    told = await openai.batches.retrieve(made.id)
    assert (told.status, told.output_file_id, told.error_file_id) == ("completed", output.id, error.id)
    assert told.completed_at >= told.finalizing_at >= told.in_progress_at
    file = await openai.files.retrieve(output.id)
    assert (file.purpose, file.filename, file.expires_at - file.created_at) == ("batch_output", "a.jsonl", 5_000)


async def test_a_batch_that_is_not_valid_tells_the_lines(openai: AsyncOpenAI, ledger: Ledger) -> None:
    made = await create(openai)
    await ledger.refuse(await ledger.begin(made.id), [LineError("invalid_json", "no JSON", 2, None)] * 101)
    told = await openai.batches.retrieve(made.id)
    assert (told.status, len(told.errors.data)) == ("failed", 100)
    assert told.failed_at is not None
    assert told.errors.data[0].model_dump() == {
        "code": "invalid_json",
        "line": 2,
        "message": "no JSON",
        "param": None,
    }


async def test_a_cancel_may_be_repeated_and_ends_nothing_that_has_ended(openai: AsyncOpenAI, ledger: Ledger) -> None:
    made = await create(openai)
    for _ in range(2):
        told = await openai.batches.cancel(made.id)
        assert told.status == "cancelling"
        assert told.cancelling_at is not None
    held = await ledger.begin(made.id)
    assert (await ledger.accept(held, total=1, model=None)).state == "cancelling"
    assert (await ledger.finalize(held)).state == "cancelling"
    await ledger.end(held, "cancelled", output=None, error=None)
    told = await openai.batches.cancel(made.id)
    assert told.status == "cancelled"
    assert told.cancelled_at is not None
    assert told.output_file_id is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint", "/v1/chat/completions"),
        ({"completion_window": "7d"}, "completion_window", "7d"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 pairs; it holds 17"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "65"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "513"),
        ({"metadata": {"k": 1}}, "metadata", "strings"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3_599}}, "output_expires_after.seconds", "3599"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3_600}}, "output_expires_after.anchor", "x"),
        ({"input_file_id": 7}, "input_file_id", "7"),
        ({"extra_headers": {"Idempotency-Key": "k" * 600}}, "idempotency_key", "600"),
    ],
)
async def test_a_wrong_field_of_a_batch_is_named(
    openai: AsyncOpenAI, fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(sdk.BadRequestError, match=says) as wrong:
        await create(openai, **fields)
    assert wrong.value.param == param


@pytest.mark.parametrize("missing", ["input_file_id", "endpoint", "completion_window"])
async def test_a_field_that_is_missing_is_named(api: Api, missing: str) -> None:
    body = {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = await api.post("/v1/batches", {name: value for name, value in body.items() if name != missing})
    error = (await answer.json())["error"]
    assert (answer.status, error["param"], error["code"]) == (400, missing, "missing_field")


async def test_a_batch_needs_an_input_file_that_is_there(openai: AsyncOpenAI, ledger: Ledger) -> None:
    for file_id in ("file-x", new_file_id(), "../../etc/passwd"):
        with pytest.raises(sdk.NotFoundError) as unknown:
            await create(openai, input_file_id=file_id)
        assert refusal(unknown) == (404, "file_not_found", "file_id")
    made = await create(openai)
    held = await ledger.begin(made.id)
    output = FileRecord(new_file_id(), held.tenant, "out.jsonl", "batch_output", 1)
    await ledger.end(held, "completed", output=output, error=None)
    with pytest.raises(sdk.BadRequestError) as wrong:
        await create(openai, input_file_id=output.id)
    assert wrong.value.param == "input_file_id"


async def test_the_input_of_a_batch_that_goes_on_cannot_be_deleted(openai: AsyncOpenAI, ledger: Ledger) -> None:
    file = await upload(openai)
    made = [await create(openai, input_file_id=file.id) for _ in range(2)]
    for batch in made:
        with pytest.raises(sdk.ConflictError) as used:
            await openai.files.delete(file.id)
        assert refusal(used) == (409, "file_in_use", "file_id")
        await ledger.end(await ledger.begin(batch.id), "cancelled", output=None, error=None)
    assert (await openai.files.delete(file.id)).deleted


async def test_a_batch_under_a_known_idempotency_key_is_the_same_one(openai: AsyncOpenAI) -> None:
    file, header = await upload(openai), {"Idempotency-Key": secrets.token_hex(8)}
    first, again = [await create(openai, input_file_id=file.id, extra_headers=header) for _ in range(2)]
    assert again == first
    with pytest.raises(sdk.ConflictError) as other:
        await create(openai, input_file_id=file.id, extra_headers=header, metadata={"x": "y"})
    assert refusal(other) == (409, "idempotency_conflict", "idempotency_key")


async def test_batches_are_listed_page_by_page(tenants: Any) -> None:
    [client] = await tenants("acme")
    file = await upload(client)
    made = [(await create(client, input_file_id=file.id)).id for _ in range(5)]
    assert [one.id async for one in client.batches.list(limit=2)] == made[::-1]
    page = await client.batches.list(limit=2, after=made[3])
    assert ([one.id for one in page.data], page.has_more) == ([made[2], made[1]], True)
    for wrong in ({"after": "batch_x"}, {"limit": 0}, {"limit": 101}):
        with pytest.raises(sdk.BadRequestError) as refused:
            await client.batches.list(**wrong)
        assert refused.value.param == next(iter(wrong))


async def test_a_tenant_sees_nothing_of_another_one(tenants: Any) -> None:
    ours, theirs = await tenants("acme", "other")
    file = await upload(ours)
    batch = await create(ours, input_file_id=file.id)
    asks = [
        *(theirs.files.retrieve(file.id), theirs.files.content(file.id), theirs.files.delete(file.id)),
        *(theirs.batches.retrieve(batch.id), theirs.batches.cancel(batch.id), create(theirs, input_file_id=file.id)),
    ]
    for ask in asks:
        with pytest.raises(sdk.NotFoundError, match="it never existed"):
            await ask
    assert (await theirs.files.list()).data == []
    assert (await theirs.batches.list()).data == []
    for cursor in (theirs.files.list(after=file.id), theirs.batches.list(after=batch.id)):
        with pytest.raises(sdk.BadRequestError):
            await cursor
    assert (await ours.batches.retrieve(batch.id)).status == "validating"


async def test_a_file_whose_content_is_gone_is_a_404_and_no_accident(start_api: StartApi, tmp_path: Path) -> None:
    api = await start_api(batch=BatchSettings(files=str(tmp_path)))
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="x", max_retries=0) as client:
        made = await upload(client)
        (tmp_path / made.id).unlink()
        with pytest.raises(sdk.NotFoundError, match="its content is gone"):
            await client.files.content(made.id)


async def test_a_file_is_closed_when_its_reader_goes_away(start_api: StartApi, tmp_path: Path) -> None:
    """Left open, it would be complained of when this test ends: warnings are errors."""
    api = await start_api(batch=BatchSettings(files=str(tmp_path)))
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="x", max_retries=0) as client:
        made = await upload(client, b"x" * 4_000_000)
    answer = await api.get(f"/v1/files/{made.id}/content")
    assert await answer.reader.read(1_000)
    assert open_files(tmp_path / made.id) == 1
    await answer.close()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if not open_files(tmp_path / made.id):
                return
            await asyncio.sleep(0.01)


def open_files(path: Path) -> int:
    """How often this process has it open."""
    return sum(os.path.realpath(f"/proc/self/fd/{one}") == str(path) for one in os.listdir("/proc/self/fd"))


async def test_a_store_that_does_not_work_is_a_503(start_api: StartApi, tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no directory")
    api = await start_api(batch=BatchSettings(files=str(tmp_path / "files")))
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(sdk.InternalServerError) as broken:
            await upload(client)
    assert refusal(broken)[:2] == (503, "file_store_unavailable")
    assert str(tmp_path) not in str(broken.value)


async def test_an_upload_that_finds_no_room_is_a_503(openai: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(sdk.InternalServerError, match="no room for the upload") as full:
        await upload(openai, LINES * 20_000)
    assert refusal(full)[:2] == (503, "file_store_unavailable")


async def test_many_uploads_at_once_are_each_their_own(openai: AsyncOpenAI) -> None:
    contents = [json.dumps({"n": n}).encode() * 50_000 for n in range(6)]
    made = await asyncio.gather(*(upload(openai, content) for content in contents))
    read = await asyncio.gather(*(openai.files.content(one.id) for one in made))
    assert [one.content for one in read] == contents
