"""`jitney batch run`: a file of requests worked off straight over Redis, with neither the API nor RQ."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from jitney import AsyncClient
from jitney.errors import InvalidJob, SettingsError
from jitney.submission import BULK_RESULT_TTL_S
from jitney_api.batches.checking import find_errors
from jitney_api.batches.lines import Line, LineReader, in_blocks
from jitney_api.batches.output import Outcome
from jitney_api.batches.output_files import OutputFile, begin, complete
from jitney_api.batches.records import LineError
from jitney_api.batches.terms import Terms
from jitney_api.batches.window import Window
from jitney_api.service import answering
from jitney_api.tokenizers import Tokenizers

MAX_HOLD_S = 2.0
MAX_TOKENIZERS = 4


@dataclass(frozen=True, slots=True)
class Files:
    """What goes in, and where the outcomes go."""

    input: Path
    output: Path
    errors: Path


@dataclass(frozen=True, slots=True)
class Counts:
    """How far a run is. All lines = those with their outcome, and the others."""

    total: int
    answered: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        return self.answered + self.failed


class BadLines(InvalidJob):
    """The input has lines that nobody could answer. Nothing was enqueued."""

    def __init__(self, path: Path, errors: Sequence[LineError]) -> None:
        lines = f"{len(errors)} line{'s' if len(errors) != 1 else ''}"
        super().__init__(f"{path}: {lines} cannot be asked, so none was: correct them, and run it again")
        self.errors = errors


@dataclass(slots=True)
class Checked:
    """What a first reading of the input tells."""

    digest: str
    numbers: dict[str, int]
    """Line numbers by custom id."""


async def check_input(client: AsyncClient, path: Path, *, model: str | None) -> Checked:
    """Read every line. Raises BadLines, which holds all that is wrong."""
    numbers: dict[str, int] = {}

    def good(line: Line) -> None:
        numbers[line.custom_id] = line.number

    with _reading(path) as file:
        reading = _Digested(file)
        errors = await find_errors(client, LineReader(reading, endpoint=None, model=model), good=good)
    if errors:
        raise BadLines(path, errors)
    return Checked(reading.digest.hexdigest(), numbers)


async def run_file(
    client: AsyncClient, files: Files, *, model: str | None, window: int, show: Callable[[Counts], None]
) -> Counts:
    """Answer every line that the output does not hold yet. Raises InvalidJob, SettingsError, QueueUnavailable.

    A run that was killed goes on: its lines come in under the same keys. After a complete one those that had failed are
    asked again.
    """
    async with answering():  # a wrong address is told now; later on, Redis is waited for
        await client.redis.ping()
    checked = await check_input(client, files.input, model=model)
    with _output_files(files) as (output, errors):
        run, has_begun = begin(files.output, checked.digest)
        answered = _numbers(output, checked)
        if not has_begun:
            errors.clear()
        failed = _numbers(errors, checked)
        counts = Counts(len(checked.numbers), len(answered), len(failed))
        show(counts)

        async def keep(outcomes: Sequence[Outcome]) -> None:
            nonlocal counts
            good = [outcome for outcome in outcomes if outcome.ending == "answered"]
            bad = [outcome for outcome in outcomes if outcome.ending != "answered"]
            output.add(good)
            errors.add(bad)
            counts = Counts(counts.total, counts.answered + len(good), counts.failed + len(bad))
            show(counts)

        done = answered | failed
        if counts.done < counts.total:
            terms = Terms(run.id, "-", deadline=None, result_ttl_s=BULK_RESULT_TTL_S)
            async with _tokenizers(client) as tokenizers:
                riding = Window(client, tokenizers, terms, size=window, max_hold_s=MAX_HOLD_S)
                await riding.run(_lines_left(files.input, model, done), keep)
            if counts.done < counts.total:
                raise InvalidJob(f"{files.input} has changed since it was checked: it has fewer lines now")
        complete(files.output)
    return counts


def _numbers(file: OutputFile, checked: Checked) -> set[int]:
    """The lines whose outcome a file holds. Raises SettingsError for one that is not of this input."""
    held = file.held()
    for custom_id in held:
        if custom_id not in checked.numbers:
            raise SettingsError(f"{file.path} holds {custom_id[:64]!r}, which the input does not: name another file")
    return {checked.numbers[custom_id] for custom_id in held}


async def _lines_left(path: Path, model: str | None, done: set[int]) -> AsyncGenerator[Line, None]:
    with _reading(path) as file:
        reader = LineReader(file, endpoint=None, model=model, is_done=done.__contains__)
        async with contextlib.aclosing(in_blocks(reader)) as ones:
            async for one in ones:
                if isinstance(one, LineError):
                    raise InvalidJob(f"{path} has changed since it was checked: line {one.line}: {one.message}")
                yield one


@contextlib.asynccontextmanager
async def _tokenizers(client: AsyncClient) -> AsyncIterator[Tokenizers]:
    made = Tokenizers(client.redis, max_loaded=MAX_TOKENIZERS, num_threads=1)
    try:
        yield made
    finally:
        await made.aclose()


@contextlib.contextmanager
def _output_files(files: Files) -> Iterator[tuple[OutputFile, OutputFile]]:
    output = OutputFile(files.output)
    try:
        errors = OutputFile(files.errors)
        try:
            yield output, errors
        finally:
            errors.close(keep_empty=False)
    finally:
        output.close(keep_empty=True)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InvalidJob(f"{path} is a pipe or a device, and the input is read more than once: name a file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidJob(f"cannot read {path}: {error.strerror}") from None
    with file:
        yield file


class _Digested:
    """A file whose bytes are digested as they are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = sha256()

    def readline(self, limit: int) -> bytes:
        raw = self._file.readline(limit)
        self.digest.update(raw)
        return raw
