"""From source to library: compiled once for what the CPU can, kept in the cache, found again by what it was made of."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from jitney.errors import JitneyError
from jitney.logs import logger

SOURCES = Path(__file__).parent / "kernels"
MAIN = "jitney.cpp"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread"),
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
    "-Wno-maybe-uninitialized",  # GCC 12 says it of its own intrinsics
)
LEVELS = {
    "avx512bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx2": ("-march=x86-64-v3",),
    "plain": (),
}
"""What is compiled for which CPU, the best first. `plain` runs anywhere."""

COMPILE_TIMEOUT_S = 300.0
SEAL_BYTES = 32


class NativeUnavailable(JitneyError):
    """The kernels cannot be had here; plain torch can do their work."""


@cache
def level() -> str:
    """The best of LEVELS that this CPU can run."""
    can = torch.cpu.get_capabilities()
    if can.get("avx512_bf16") and can.get("avx512_vnni") and can.get("avx512_vl") and can.get("avx512_bw"):
        return "avx512bf16"
    if can.get("avx512_f") and can.get("avx512_vl") and can.get("avx512_bw") and can.get("avx512_dq"):
        return "avx512"
    return "avx2" if can.get("avx2") and can.get("fma3") else "plain"


def levels_of_machine() -> tuple[str, ...]:
    """Those of LEVELS that a compiler of this machine knows, for CPUs that may be better or worse than this one."""
    return tuple(LEVELS) if platform.machine().lower() in ("x86_64", "amd64") else ("plain",)


def kept_in() -> Path:
    """Where compiled libraries lie: JITNEY_NATIVE_DIR, or the user's cache."""
    named = os.environ.get("JITNEY_NATIVE_DIR")
    if named:
        return Path(named)
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "jitney" / "native"


def built(name: str) -> Path:
    """The library for one of LEVELS, compiled if it is not there yet, or not whole. Raises NativeUnavailable."""
    library = kept_in() / f"{name}-{_digest(name)}.so"
    if _is_sealed(library):
        return library
    compiler = next((found for one in COMPILERS if (found := shutil.which(one))), None)
    if compiler is None:
        raise NativeUnavailable(
            f"no C++ compiler found ({', '.join(COMPILERS)}): install one (Debian: apt-get install g++)"
        )
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as folder:
            made = Path(folder) / library.name
            logger().info("kernels_compiling", kernels=name, compiler=compiler, into=str(library.parent))
            _compile(compiler, name, made)
            _seal(made)
            made.replace(library)  # a reader never sees half a library, and of two builders either's will do
    except OSError as error:
        raise NativeUnavailable(
            f"{library.parent} cannot hold compiled kernels: {error}; JITNEY_NATIVE_DIR names another place"
        ) from error
    return library


def _seal(library: Path) -> None:
    """End it with the digest of what stands before: a loader does not look there."""
    with library.open("ab") as file:
        file.write(hashlib.sha256(library.read_bytes()).digest())


def _is_sealed(library: Path) -> bool:
    """Whether it is there and whole. Half a library (a disk that was full, a copy cut off) would end this process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-SEAL_BYTES]).digest() == content[-SEAL_BYTES:]


def _digest(name: str) -> str:
    """Of all that decides what the library does."""
    digest = hashlib.sha256(repr((FLAGS, LEVELS[name], sys.platform, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, name: str, to: Path) -> None:
    command = [compiler, *FLAGS, *LEVELS[name], "-o", str(to), str(SOURCES / MAIN)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(f"{compiler} did not end within {COMPILE_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise NativeUnavailable(f"{compiler} refused the kernels: {_complaint(done.stderr)}")


def _complaint(said: str) -> str:
    """What a compiler calls an error, without the path it took there."""
    errors = [line.strip() for line in said.splitlines() if "error" in line]
    return "; ".join(errors[:3]) or said.strip()[:500]
