"""From what a user calls a model to a directory: a path, a registered name, or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from jitney.errors import ModelError, first_line
from jitney_worker.model.pull import Say, pull, say_on_stderr
from jitney_worker.model.registry import KNOWN_MODELS, imported_dir, pulled_model

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")
_NOT_FROM_HUB = ("consolidated*", "original/*", "*/*")
"""The same weights again in other layouts, and what lies in subdirectories."""


def resolve(name: str | Path, *, offline: bool = False, say: Say = say_on_stderr) -> Path:
    """The model's directory, fetched if need be and allowed.

    A directory with a config.json is taken as it is; a registered name is pulled when it is absent; another name is
    what a GGUF file was converted under; ORG/NAME is a hub id. offline: nothing is fetched. Raises ModelError saying
    what to do.
    """
    text = str(name)
    path = _path(text)
    if (path / "config.json").is_file():
        return path.resolve()
    if text in KNOWN_MODELS:
        return pulled_model(text) if offline else pull(text, say=say)
    imported = imported_dir(text)
    if imported is not None:
        return imported
    if path.is_file() and path.suffix == ".gguf":
        raise ModelError(
            f"{path} must be converted once: run `jitney model pull NAME --from-gguf {path}`, and serve NAME"
        )
    if path.is_dir():
        raise ModelError(f"{path} holds no config.json: not a Hugging Face model directory")
    if _HUB_ID.fullmatch(text):
        return _from_hub(text, offline=offline)
    raise ModelError(
        f"no model {text!r}: give a directory, one of the registered names ({', '.join(KNOWN_MODELS)}), or a hub id"
    )


def _path(text: str) -> Path:
    """The path that a name would be. Raises ModelError for one that cannot even be looked at."""
    try:
        path = Path(text).expanduser()
        (path / "config.json").is_file()
    except (OSError, RuntimeError) as error:  # too long, not to be entered, the home of nobody
        raise ModelError(f"{text[:80]!r} cannot be looked up as a directory: {first_line(error)}") from error
    return path


def _why_not_fetched(repository: str, offline: bool) -> str:
    from huggingface_hub import constants

    if offline:
        return f"nothing may be fetched: run `jitney model pull {repository}`"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to fetch it: unset that, or give the directory of a copy"
    return "the hub cannot be reached: try again, or give the directory of a copy"


def _from_hub(repository: str, *, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        found = snapshot_download(
            repository,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=list(_NOT_FROM_HUB),
            local_files_only=offline,
        )
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repository} is not in the local cache, and {_why_not_fetched(repository, offline)}"
        ) from error
    except GatedRepoError as error:  # a kind of the next one
        raise ModelError(f"{repository} is gated: accept its terms on the hub, and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{repository} is not on the hub, or private and HF_TOKEN does not open it") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"{repository} cannot be fetched from the hub: {first_line(error)}") from error
    return Path(found)
