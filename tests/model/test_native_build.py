"""From sources to a loaded library, and what happens where that cannot be."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from native_kernels import HERE, drawn

from jitney.errors import SettingsError
from jitney.logs import listening
from jitney_worker.build import build_crew
from jitney_worker.checks import checks
from jitney_worker.model.fingerprint import fingerprint
from jitney_worker.model.native import build, choice, library
from jitney_worker.model.native.build import NativeUnavailable, built, kept_in, level
from jitney_worker.model.native.choice import KernelsName, team_for
from jitney_worker.model.native.library import Team, kernels
from jitney_worker.model.native.packing import linear, pack
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.settings import WorkerSettings

Events = list[MutableMapping[str, Any]]
SMALL = "plain"
QUICK = ("-O0", *(flag for flag in build.FLAGS if flag != "-O3"))
"""What is compiled here is compiled soon, and for any CPU."""


@pytest.fixture
def events() -> Iterator[Events]:
    heard: Events = []
    with listening(heard.append):
        yield heard


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for libraries with nothing in it, and nothing loaded."""
    place = tmp_path / "native"
    monkeypatch.setattr(build, "FLAGS", QUICK)
    monkeypatch.setenv("JITNEY_NATIVE_DIR", str(place))
    kernels.cache_clear()
    yield place
    kernels.cache_clear()


@pytest.fixture
def no_compiler(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty / "nowhere"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good library of the smallest level."""
    place = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", QUICK)
        patch.setenv("JITNEY_NATIVE_DIR", str(place))
        return built(SMALL)


def product_of(found: library.Kernels) -> torch.Tensor:
    team = Team(found, 2)
    return linear(team, drawn(3, 20, seed=1), pack(team, drawn(40, 20, seed=2)))


def load(directory: Path, **options: Any) -> TorchRunner:
    return load_runner(directory, **{"dtype": "float32", "device": "cpu", "num_blocks": 4, **options})


def test_a_library_is_compiled_once_and_found_again(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built(SMALL)
    written = first.stat().st_mtime_ns
    assert [file.name for file in empty.iterdir()] == [first.name]
    monkeypatch.setenv("PATH", "")
    assert built(SMALL) == first
    assert first.stat().st_mtime_ns == written
    assert product_of(kernels(SMALL)).isfinite().all()


def test_another_source_flag_or_machine_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {build._digest(SMALL), build._digest("avx2")}
    sources = shutil.copytree(build.SOURCES, tmp_path / "kernels")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build._digest(SMALL) in names
    with (sources / "rows.hpp").open("a") as file:
        file.write("\n")
    names.add(build._digest(SMALL))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    names.add(build._digest(SMALL))
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    names.add(build._digest(SMALL))
    assert len(names) == 5


def test_without_a_compiler_the_error_says_what_to_install(no_compiler: None) -> None:
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found .* apt-get install g\+\+"):
        built(SMALL)


def test_without_a_compiler_torch_computes_loudly_or_native_is_refused(
    no_compiler: None, tiny_llama: Path, events: Events
) -> None:
    runner = load(tiny_llama)
    assert (runner.kernels, runner.is_batch_invariant) == ("torch", False)
    assert [event["reason"].split(" (")[0] for event in events if event["event"] == "kernels_torch"] == [
        "no C++ compiler found"
    ]
    with pytest.raises(SettingsError, match=r"kernels='native' cannot be had: no C\+\+ compiler"):
        load(tiny_llama, kernels="native")
    for wanted in ({"batch_invariant": True}, {"quantization": "int8"}):
        with pytest.raises(SettingsError, match="needs the kernels"):
            load(tiny_llama, **wanted)


def test_a_compiler_that_refuses_is_quoted(empty: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho too old for this >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NativeUnavailable, match="refused the kernels: too old for this"):
        built(SMALL)
    assert list(empty.iterdir()) == [], "nothing half-made is left"


def test_a_place_that_cannot_be_written_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file where a directory should be: unlike a read-only directory, root cannot write there either."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITNEY_NATIVE_DIR", str(tmp_path / "file" / "native"))
    with pytest.raises(NativeUnavailable, match=r"file/native cannot hold compiled kernels: .*JITNEY_NATIVE_DIR"):
        built(SMALL)


def test_the_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JITNEY_NATIVE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_in() == tmp_path / "jitney" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept_in() == tmp_path / ".cache" / "jitney" / "native"


@pytest.mark.parametrize("what", ["empty", "half", "text", "one bit"])
def test_a_library_that_is_not_whole_is_compiled_anew_and_not_loaded(compiled: Path, empty: Path, what: str) -> None:
    """Loading half a library ends the process by a signal."""
    whole = compiled.read_bytes()
    spoilt = {"empty": b"", "half": whole[: len(whole) // 2], "text": b"no library\n", "one bit": b"\0" + whole[1:]}
    empty.mkdir()
    (empty / compiled.name).write_bytes(spoilt[what])
    assert torch.equal(product_of(kernels(SMALL)), product_of(library.Kernels(compiled, SMALL)))


@pytest.mark.parametrize("defines", ["nothing of ours", "other sizes"])
def test_a_library_of_other_sources_is_refused(tmp_path: Path, defines: str) -> None:
    source, made = tmp_path / "other.cpp", tmp_path / "other.so"
    names = [name for name in library.SIGNATURES if name != "jitney_sizes"] if defines == "other sizes" else []
    functions = "".join(f"void {name}() {{}}\n" for name in names)
    source.write_text(f'extern "C" {{\nvoid jitney_sizes(long long* sizes) {{ sizes[0] = 8; }}\n{functions}}}\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    says = r"lays its structures out as \[8, 0" if defines == "other sizes" else "it has no jitney_team"
    with pytest.raises(NativeUnavailable, match=says):
        library.Kernels(made, SMALL)


def test_a_file_that_the_loader_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(NativeUnavailable, match=r"text\.so cannot be loaded"):
        library.Kernels(tmp_path / "text.so", SMALL)


def test_two_processes_that_build_at_once_both_get_a_whole_library(empty: Path) -> None:
    program = (
        f"import ctypes; from jitney_worker.model.native import build; build.FLAGS = {QUICK!r};"
        f"ctypes.CDLL(str(build.built({SMALL!r}))).jitney_team_size"
    )
    builders = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(2)]
    assert [(builder.communicate(timeout=100)[1], builder.returncode) for builder in builders] == [(b"", 0)] * 2
    assert len(list(empty.iterdir())) == 1


def test_structures_are_as_large_here_as_there() -> None:
    for name in HERE:
        assert kernels(name).level == name
    fields = {one.__name__: ctypes.sizeof(one) for one in (library.Matrix, library.Layer, library.Model)}
    assert fields == {"Matrix": 48, "Layer": 232, "Model": 136}


@pytest.mark.parametrize(
    ("asked", "options", "reason"),
    [
        ("auto", {"block_size": 8}, "block_size=8 is no multiple of 16"),
        ("auto", {"dtype": torch.float16}, "float32 or bfloat16, not in float16"),
        ("native", {"block_size": 24}, "block_size=24 is no multiple of 16"),
        ("native", {"device": torch.device("meta")}, "compute on the CPU, not on meta"),
    ],
)
def test_what_the_kernels_cannot_do_falls_back_loudly_or_is_refused(
    events: Events, asked: KernelsName, options: dict[str, Any], reason: str
) -> None:
    given = {"device": torch.device("cpu"), "dtype": torch.float32, "block_size": 16, "num_threads": 1, **options}
    if asked == "native":
        with pytest.raises(SettingsError, match=reason):
            team_for(asked, **given)
    else:
        assert team_for(asked, **given) is None
        assert [reason in event["reason"] for event in events] == [True]
    assert team_for("torch", **given) is None


def test_settings_that_contradict_each_other_are_refused_by_name() -> None:
    for wanted in ({"quantization": "int8"}, {"batch_invariant": True}):
        with pytest.raises(
            ValueError, match=f"{next(iter(wanted))}=.* needs the compiled kernels, but kernels='torch'"
        ):
            WorkerSettings(kernels="torch", **wanted)  # type: ignore[arg-type]
        WorkerSettings(kernels="native", **wanted)  # type: ignore[arg-type]


def test_int8_and_batch_invariance_are_refused_where_they_cannot_be(tiny_llama: Path) -> None:
    for wanted in ({"quantization": "int8"}, {"batch_invariant": True}):
        with pytest.raises(SettingsError, match="needs the kernels and a native architecture"):
            load(tiny_llama, block_size=8, **wanted)
    with pytest.raises(SettingsError, match="quantization='int4' is unknown"):
        load(tiny_llama, quantization="int4")


@pytest.mark.parametrize("kernels_setting", ["auto", "native", "torch"])
def test_the_doctor_says_what_multiplies(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels_setting: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JITNEY_MODEL", str(tiny_llama))
    monkeypatch.setenv("JITNEY_KERNELS", kernels_setting)
    (found,) = (finding for finding in checks() if finding.name == "kernels")
    says = (
        "plain torch, as JITNEY_KERNELS says"
        if kernels_setting == "torch"
        else f"compiled for {level()}, in {kept_in()}"
    )
    assert (found.verdict, found.found) == ("ok", says)


@pytest.mark.parametrize(("kernels_setting", "verdict"), [("auto", "warn"), ("native", "fail")])
def test_the_doctor_says_that_there_is_no_compiler(
    no_compiler: None, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, kernels_setting: str, verdict: str
) -> None:
    monkeypatch.setenv("JITNEY_MODEL", str(tiny_llama))
    monkeypatch.setenv("JITNEY_KERNELS", kernels_setting)
    (found,) = (finding for finding in checks() if finding.name == "kernels")
    assert found.verdict == verdict
    assert "apt-get install g++" in found.found


def test_the_fingerprint_changes_with_quantisation_and_with_kernels_where_they_are_given(tiny_llama: Path) -> None:
    found = [
        fingerprint(tiny_llama, "bfloat16", "t"),
        fingerprint(tiny_llama, "bfloat16", "t", quantisation="int8"),
        fingerprint(tiny_llama, "bfloat16", "t", kernels="avx2"),
        fingerprint(tiny_llama, "bfloat16", "t", kernels="plain"),
    ]
    assert len(set(found)) == 4
    assert fingerprint(tiny_llama, "bfloat16", "t", kernels=None) == found[0]


@pytest.mark.skipif(len(HERE) < 2, reason="this CPU has one level")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_worker_of_another_level_may_go_on_unless_the_last_bit_counts(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    settings = WorkerSettings(
        model=str(tiny_llama), device="cpu", dtype="float32", num_threads=1, batch_invariant=batch_invariant
    )
    found = set()
    for name in (HERE[0], HERE[-1]):
        monkeypatch.setattr(choice, "kernels", lambda name=name: kernels(name))
        found.add(build_crew(settings).fingerprint)
    assert len(found) == (2 if batch_invariant else 1)
