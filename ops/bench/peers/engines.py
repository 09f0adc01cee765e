"""Who is compared: how each engine is started on a workload, what it was tuned with, and what of it must be here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ops.bench import page

from jitney.errors import SettingsError

Settings = Mapping[str, int | str]

PEERS_DIR = Path(os.environ.get("JITNEY_PEERS_DIR", Path.home() / ".cache" / "jitney-peers"))
SET_UP = "ops/bench/peers/setup.sh"


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine in a comparison.

    about: for tables. tuning: settings it may be tried with, the first being what it runs with untuned; `seats` stands
    for as many as the workload has. only: workloads it is for; empty = all. is_peer: somebody else's engine, which may
    be the best peer of ours at the same precision. precision: of the weights. limits: jobs of a workload that it does,
    where all would take too long.
    """

    name: str
    about: str
    tuning: tuple[Settings, ...] = ({},)
    only: tuple[str, ...] = ()
    is_peer: bool = False
    precision: str = "bf16"
    limits: Mapping[str, int] = field(default_factory=dict)

    def runs(self, workload: str) -> bool:
        return not self.only or workload in self.only


@dataclass(frozen=True, slots=True)
class Ours(Contender):
    """`jitney bench`. mode: of it. instead: workloads of other names that it runs for one."""

    mode: str = "path"
    instead: Mapping[str, str] = field(default_factory=dict)

    def command(self, workload: Path, name: str, model: str, settings: Settings, figures: Path) -> list[str]:
        """The words of a run that leaves its figures in a file."""
        words = [sys.executable, "-m", "jitney", "bench", "--workload", str(workload), "--model", model]
        words += ["--name", self.instead.get(name, name), "--mode", self.mode, "--json", str(figures)]
        if name in self.limits:
            words += ["--limit", str(self.limits[name])]
        return words + [
            word for flag, value in settings.items() for word in (f"--{flag.replace('_', '-')}", str(value))
        ]


@dataclass(frozen=True, slots=True)
class Peer(Contender):
    """A module of this folder, in an environment of its own. weights: format of the model that it reads."""

    module: str = ""
    environment: str = ""
    weights: str = ""
    program: str = ""

    @property
    def python(self) -> Path:
        """Its interpreter; ours for what needs nothing that we have not."""
        return PEERS_DIR / f"venv-{self.environment}" / "bin" / "python" if self.environment else Path(sys.executable)

    def model(self, directory: Path, name: str) -> Path:
        """Where the same weights lie in its own format."""
        return PEERS_DIR / "models" / f"{name}{self.weights}" if self.weights else directory

    def check_set_up(self, directory: Path, name: str) -> None:
        """Raise SettingsError that says what is missing, and what to run."""
        for wanted in (self.python, self.model(directory, name), *([PEERS_DIR / self.program] if self.program else [])):
            if not wanted.exists():
                raise SettingsError(f"--engines {self.name} is not set up ({wanted} is missing): {SET_UP} {self.name}")

    def variables(self) -> dict[str, str]:
        """Its environment: what it may import of ours, and no hub."""
        path = os.pathsep.join((str(page.ROOT), str(page.ROOT / "worker")))
        program = {"LLAMA_SERVER": str(PEERS_DIR / self.program)} if self.program else {}
        return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **program}


_QUANTISED = ("W1", "W2", "W3", "W4", "W5")


def _steps(*sizes: int) -> tuple[Settings, ...]:
    return ({}, *({"max_num_batched_tokens": size} for size in sizes))


CONTENDERS: Mapping[str, Contender] = {
    one.name: one
    for one in (
        Ours("jitney", "jitney, whole path", _steps(512, 1_024)),
        Ours("jitney-engine", "jitney, engine alone", _steps(512, 1_024), mode="engine"),
        Ours("jitney-int8", "jitney, int8 weights", ({"quantization": "int8"},), only=_QUANTISED, precision="int8"),
        Ours("jitney-greedy", "jitney, the same jobs greedy", only=("W7",), instead={"W7": "W7G"}),
        Ours(
            "naive",
            "transformers' generate, one at a time",
            only=("W1", "W2", "W3", "W4", "W5"),
            mode="naive",
            limits={"W1": 8, "W2": 8, "W5": 8},
        ),
        Peer(
            "static",
            "transformers, static batches",
            ({"batch": 16}, {"batch": 8}, {"batch": 32}),
            only=("W1", "W2", "W5"),
            limits={"W1": 32, "W2": 32, "W5": 48},
            module="transformers_static",
        ),
        Peer(
            "openvino",
            "OpenVINO GenAI, bf16",
            _steps(512, 2_048),
            is_peer=True,
            module="openvino_genai",
            environment="ov",
            weights="-openvino",
        ),
        Peer("vllm", "vLLM CPU, bf16", _steps(1_024, 2_048), is_peer=True, module="vllm_cpu", environment="vllm"),
        Peer(
            "llamacpp",
            "llama.cpp server, BF16",
            ({}, {"slots": 16}, {"slots": 8}),
            is_peer=True,
            module="llama_server",
            weights="-bf16.gguf",
            program="llama.cpp/bin/llama-server",
        ),
        Peer(
            "openvino-int8",
            "OpenVINO GenAI, int8 weights",
            _steps(512, 2_048),
            only=_QUANTISED,
            is_peer=True,
            precision="int8",
            module="openvino_genai",
            environment="ov",
            weights="-openvino-int8",
        ),
        Peer(
            "llamacpp-int8",
            "llama.cpp server, Q8_0",
            ({}, {"slots": 16}, {"slots": 8}),
            only=_QUANTISED,
            is_peer=True,
            precision="int8",
            module="llama_server",
            weights="-q8_0.gguf",
            program="llama.cpp/bin/llama-server",
        ),
    )
}
