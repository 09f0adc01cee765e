"""The servers of the contract's tests: two makes of server, and each of them as a cluster of one node."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from jitney.embedded import EmbeddedServer, find_server
from jitney.errors import ServerError

SERVERS = ("valkey", "redis")
CLUSTERS = ("valkey-cluster", "redis-cluster")
NUM_SLOTS = 16_384
LIVENESS_S = 20.0


class ClusterNode(EmbeddedServer):
    """A node of a cluster. Without slots and without company until it is told otherwise."""

    bus_port = 0

    def _configuration(self) -> str:
        # The bus port is otherwise port + 10 000, which may be no port at all.
        self.bus_port = self.bus_port or _free_port()
        return super()._configuration() + f"cluster-enabled yes\ncluster-port {self.bus_port}\n"

    def call(self, *words: str | int) -> object:
        client = redis.Redis(host="127.0.0.1", port=self.port, password=self.password)
        with closing(client):
            return client.execute_command(*words)

    def take_slots(self, first: int = 0, last: int = NUM_SLOTS - 1) -> None:
        self.call("CLUSTER", "ADDSLOTSRANGE", first, last)

    def meet(self, other: ClusterNode) -> None:
        self.call("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)

    def wait_until_whole(self) -> None:
        """Until this node knows an owner of every slot."""
        give_up_at = time.monotonic() + LIVENESS_S
        while not self._is_whole():
            assert time.monotonic() < give_up_at, "the cluster did not come up"
            time.sleep(0.01)  # between two questions: a node tells nobody that its cluster has become whole

    def _is_whole(self) -> bool:
        told = self.call("CLUSTER", "INFO")  # a dict here, text there: as redis-py likes
        return told.get("cluster_state") == "ok" if isinstance(told, dict) else "cluster_state:ok" in str(told)


@contextmanager
def running(kind: str, folder: Path) -> Iterator[EmbeddedServer]:
    """`valkey`, `redis`, or either with `-cluster` behind it: one node that owns every slot.

    In a cluster a script that touches a key of another slot is refused.
    """
    make, _, shape = kind.partition("-")
    binary = binary_of(make)
    if not shape:
        with EmbeddedServer(folder, binary=binary, tethered=True) as server:
            yield server
        return
    with ClusterNode(folder, binary=binary, tethered=True) as node:
        node.take_slots()
        node.wait_until_whole()
        yield node


def binary_of(make: str) -> Path:
    try:
        return find_server("redis-server") if make == "redis" else find_server()
    except ServerError as error:
        pytest.skip(f"no second server to test against: {error}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
