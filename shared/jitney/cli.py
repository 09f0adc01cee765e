"""The command `jitney`: what the Python client does, from a shell, and the commands of the other rooms."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from jitney.client import Client, Job
from jitney.dead_cli import dead
from jitney.doctor import doctor
from jitney.errors import InvalidJob, JitneyError, SettingsError
from jitney.keys_cli import keys
from jitney.plugins import add_plugins, outcomes
from jitney.result import Collector
from jitney.sampling import SamplingParams
from jitney.settings import usable_api_url, usable_url
from jitney.top import top
from jitney.webhooks.cli import webhooks

app = typer.Typer(
    name="jitney",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RedisUrl = Annotated[
    str | None, typer.Option(help="Redis to talk to (default: JITNEY_REDIS_URL, the local stack, localhost).")
]
ApiUrl = Annotated[
    str | None, typer.Option(help="The API to talk to instead (default: JITNEY_API_URL); its key: JITNEY_API_KEY.")
]
JobIdArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.", show_default=False)]
Cursor = Annotated[int, typer.Option(min=0, help="Start after the event of this seq.")]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"jitney {version('jitney')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Durable, Redis-native LLM generation by continuous batching."""


DEFAULT_MAX_TOKENS = 256
"""A small model that misses its end would otherwise talk until its context is full."""

_OPTIONS = (*SamplingParams.model_fields, "band", "priority", "timeout_s")
"""Of `enqueue`'s parameters those that the client takes by the same name."""


@app.command()
def enqueue(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads it from standard input.")] = None,
    messages: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A chat: a JSON file with a list of messages.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id alone, and leave.")] = False,
    redis_url: RedisUrl = None,
    api_url: ApiUrl = None,
    queue: Annotated[str | None, typer.Option(help="The queue to use (default: the only one).")] = None,
    model: Annotated[str | None, typer.Option(help="The model to use, instead of a queue.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most probable tokens up to this sum.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most probable tokens; 0 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the answer repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    stop_token_ids: Annotated[list[int] | None, typer.Option(help="Token id that ends it; may be repeated.")] = None,
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos", help="Go on after an end token.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log probabilities of so many tokens, in the events.")] = None,
    n: Annotated[int | None, typer.Option(help="Answers to the prompt; the first one is shown.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens so probable in relation to the best.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Against tokens that were said.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, each time they were.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Against those of the prompt as well.")] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(metavar="ID=BIAS", help="May be repeated.")] = None,
    allowed_token_ids: Annotated[list[int] | None, typer.Option(help="Nothing else is said; repeat.")] = None,
    bad_words: Annotated[list[str] | None, typer.Option(help="Text that must not come; may be repeated.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Tokens before the answer may end.")] = None,
    include_stop_str_in_output: Annotated[
        bool | None, typer.Option("--include-stop-str-in-output", help="Show what ended the answer.")
    ] = None,
    skip_special_tokens: Annotated[
        bool | None, typer.Option("--skip-special-tokens/--show-special-tokens", help="Are they text?")
    ] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="As --logprobs, of the prompt.")] = None,
    echo: Annotated[bool | None, typer.Option("--echo", help="Begin with the prompt.")] = None,
    truncate_prompt_tokens: Annotated[int | None, typer.Option(help="Keep the prompt's end; -1: what fits.")] = None,
    structured_outputs: Annotated[
        str | None, typer.Option(metavar="JSON", help="""What it must be: '{"choice": ["yes", "no"]}'.""")
    ] = None,
    pooling: Annotated[str | None, typer.Option(help="last or mean: the prompt's embedding, no answer.")] = None,
    band: Annotated[str | None, typer.Option(help="interactive, standard or bulk.")] = None,
    priority: Annotated[int | None, typer.Option(help="Lower is sooner.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds the job may take in all.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="A job with this key is enqueued once.")] = None,
) -> None:
    """Enqueue a job and stream its text."""
    options: dict[str, Any] = {name: value for name, value in locals().items() if name in _OPTIONS}
    with outcomes():
        options["logit_bias"] = _biases(logit_bias)
        options["structured_outputs"] = _structure(structured_outputs)
        if pooling is not None and max_tokens == DEFAULT_MAX_TOKENS:
            del options["max_tokens"]  # nobody asked for it
        chat = None if messages is None else _read_messages(messages)
        text = sys.stdin.read() if prompt == "-" else prompt
        with _client(redis_url, api_url, queue=queue, model=model) as client:
            job = client.enqueue(text, chat, idempotency_key=idempotency_key, **options)
            if detach:
                typer.echo(job.id)
            elif pooling is not None:
                typer.echo(orjson.dumps(job.result().embedding).decode())
            else:
                _stream_text(job)


def _client(
    redis_url: str | None, api_url: str | None, *, queue: str | None = None, model: str | None = None
) -> Client:
    """By Redis or by the API, as asked or as the environment says. A key is never an option: everybody sees those."""
    if redis_url is not None and api_url is not None:
        raise SettingsError("give --redis-url or --api-url, not both")
    url = None if redis_url is None else usable_url(redis_url)
    url = url if api_url is None else usable_api_url(api_url)
    return Client(url, queue=queue, model=model, name="jitney-cli")


def _biases(given: list[str] | None) -> dict[str, float] | None:
    """`ID=BIAS` as the object that a job has; what is no id, or beyond the limits, is refused there."""
    biases: dict[str, float] = {}
    for text in given or ():
        token_id, _, bias = text.partition("=")
        try:
            number = float(bias)
        except ValueError:
            raise InvalidJob("logit_bias: write ID=BIAS, a token id and a number", param="logit_bias") from None
        if token_id in biases:
            raise InvalidJob(f"logit_bias names token id {token_id} twice", param="logit_bias")
        biases[token_id] = number
    return biases or None


def _structure(given: str | None) -> Any:
    try:
        return None if given is None else orjson.loads(given)
    except orjson.JSONDecodeError as error:
        raise InvalidJob(f"structured_outputs is not JSON: {error.msg}", param="structured_outputs") from None


@app.command()
def stream(
    job_id: JobIdArgument,
    cursor: Cursor = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the events themselves, one a line.")] = False,
    redis_url: RedisUrl = None,
    api_url: ApiUrl = None,
) -> None:
    """Stream a job's text, from the beginning or from a cursor."""
    with outcomes(), _client(redis_url, api_url) as client:
        job = client.job(job_id)
        if as_json:
            _stream_events(job, cursor)
        else:
            _stream_text(job, cursor)


@app.command()
def cancel(job_id: JobIdArgument, redis_url: RedisUrl = None, api_url: ApiUrl = None) -> None:
    """End a job now."""
    with outcomes(), _client(redis_url, api_url) as client:
        typer.echo("cancelled" if client.job(job_id).cancel() else "had already ended")


@app.command()
def status(
    job_id: JobIdArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    redis_url: RedisUrl = None,
    api_url: ApiUrl = None,
) -> None:
    """Show where a job stands."""
    with outcomes(), _client(redis_url, api_url) as client:
        fields = asdict(client.job(job_id).status())
    if as_json:
        typer.echo(orjson.dumps(fields).decode())
        return
    for name, value in fields.items():
        if value not in (None, ""):
            typer.echo(f"{name:<18} {value}")


def _stream_text(job: Job, cursor: int = 0) -> None:
    collector = Collector(job.id)
    try:
        for batch in job.batches(cursor):
            for message in batch:
                if message.event.choice == 0:
                    sys.stdout.write(message.event.text)
                collector.add(message.event)
            sys.stdout.flush()
        sys.stdout.write("\n")
    except KeyboardInterrupt:
        typer.echo(f"\nthe job goes on: jitney stream {job.id}", err=True)
        raise
    except JitneyError:
        sys.stdout.write("\n")
        raise


def _stream_events(job: Job, cursor: int) -> None:
    collector = Collector(job.id)
    for batch in job.batches(cursor):
        sys.stdout.writelines(message.payload.decode() + "\n" for message in batch)
        sys.stdout.flush()
        for message in batch:
            collector.add(message.event)


def _read_messages(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of bytes that are not UTF-8
        raise InvalidJob(f"{path} is not JSON: {error}", param="messages") from None


app.add_typer(dead)
app.add_typer(keys)
app.add_typer(webhooks)
app.command()(doctor)
app.command()(top)
add_plugins(app)


def main() -> None:
    """The console script."""
    app(prog_name="jitney")
