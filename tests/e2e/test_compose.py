"""The compose file: valid, consistent with what it starts, and its services run as plain programs.

There need be no Docker engine. Each service's own command, environment and health check is taken from the
file; only addresses, paths and the names of programs are replaced by those of this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import yaml
from celery import Celery
from pydantic import BaseModel
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from jitney.celery.settings import CelerySettings
from jitney.embedded import find_server
from jitney.rq.settings import RqSettings
from jitney.settings import ClientSettings
from jitney.webhooks.settings import WebhookSettings
from jitney_api.batches.settings import BatchSettings
from jitney_api.settings import ApiSettings
from jitney_worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
LIVENESS_S = 90.0

# The file

STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
DURATION = {"type": "string", "pattern": r"^(\d+(\.\d+)?(us|ms|s|m|h))+$"}
PLAIN = {"type": ["string", "number", "boolean", "null"]}
TABLE = {"type": "object", "additionalProperties": PLAIN}


def thing(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """A schema of an object that has these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


SERVICE = thing(
    ("image", "command", "healthcheck"),
    image={"type": "string"},
    build=thing(("context",), context={"type": "string"}, dockerfile={"type": "string"}, args=TABLE),
    command=STRINGS,
    environment={"type": "object", "additionalProperties": {"type": "string"}},
    depends_on={
        "type": "object",
        "additionalProperties": thing(
            ("condition",),
            condition={"enum": ["service_started", "service_healthy", "service_completed_successfully"]},
        ),
    },
    healthcheck=thing(
        ("test",),
        test={**STRINGS, "prefixItems": [{"enum": ["CMD", "CMD-SHELL", "NONE"]}]},
        interval=DURATION,
        timeout=DURATION,
        retries={"type": "integer", "minimum": 1},
        start_period=DURATION,
    ),
    volumes={**STRINGS, "items": {"type": "string", "pattern": r"^[\w./-]+:/[\w./-]+(:(ro|rw))?$"}},
    ports={**STRINGS, "items": {"type": "string", "pattern": r"^(127\.0\.0\.1:)?(\d+|\$\{\w+:-\d+\}):\d+$"}},
    profiles=STRINGS,
    stop_grace_period=DURATION,
    restart={"enum": ["no", "always", "on-failure", "unless-stopped"]},
    init={"type": "boolean"},
    deploy=thing(
        resources=thing(
            reservations=thing(
                devices={
                    "type": "array",
                    "items": thing(
                        ("capabilities",),
                        driver={"type": "string"},
                        count={"type": ["integer", "string"]},
                        capabilities=STRINGS,
                    ),
                }
            )
        )
    ),
)
"""The part of the Compose Specification that the file uses. Whatever else is written there is a slip."""

FILE = {
    "type": "object",
    "properties": {
        "services": {"type": "object", "additionalProperties": SERVICE, "minProperties": 1},
        "volumes": {"type": "object", "additionalProperties": {"type": ["object", "null"]}},
    },
    "patternProperties": {"^x-": {}},
    "required": ["services"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return content


def compose_client() -> list[str] | None:
    """The command of a compose client on this machine."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            answer = subprocess.run([*command, "version"], capture_output=True, check=False)
            if answer.returncode == 0:
                return command
    return None


def test_the_file_is_valid(compose: dict[str, Any]) -> None:
    """By the compose client where there is one, and by the schema in any case."""
    jsonschema.Draft202012Validator(FILE).validate(compose)
    client = compose_client()
    if client is not None:
        command = [*client, "-f", str(COMPOSE), "--profile", "gpu", "--profile", "obs", "config", "--quiet"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize(
    ("service", "change"),
    [
        ("api", {"comand": ["jitney"]}),
        ("api", {"ports": ["8000"]}),
        ("api", {"healthcheck": {"test": ["curl", "x"]}}),
        ("worker", {"depends_on": {"redis": {"condition": "healthy"}}}),
        ("worker", {"stop_grace_period": "30"}),
        ("worker", {"environment": {"JITNEY_OFFLINE": True}}),
        ("worker-gpu", {"deploy": {"resources": {"reservation": {}}}}),
        ("rq-worker", {"volumes": ["batch-files"]}),
    ],
)
def test_the_schema_refuses_slips(compose: dict[str, Any], service: str, change: dict[str, Any]) -> None:
    services = {**compose["services"], service: {**compose["services"][service], **change}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(FILE).validate({**compose, "services": services})


def test_the_services_are_redis_the_api_a_worker_and_the_bridges_with_one_for_a_gpu_on_demand(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    assert {name: service.get("profiles") for name, service in services.items()} == {
        "redis": None,
        "api": None,
        "worker": None,
        "worker-gpu": ["gpu"],
        "rq-worker": None,
        "celery": None,
        "prometheus": ["obs"],
        "grafana": ["obs"],
    }
    assert services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    ]
    assert services["worker-gpu"]["environment"]["JITNEY_DEVICE"] == "cuda"
    for name in ("api", "worker", "worker-gpu", "rq-worker", "celery"):
        assert services[name]["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert any(volume.partition(":")[0] in compose["volumes"] for volume in services["redis"]["volumes"])


def test_the_api_and_the_bridges_from_rq_and_celery_are_one_image_and_reach_the_same_files_of_batches(
    compose: dict[str, Any],
) -> None:
    """What the API takes in, the RQ worker reads and writes, and the upkeep sweeps."""
    services = [compose["services"][name] for name in ("api", "rq-worker", "celery")]
    assert {service["image"] for service in services} == {"jitney-api"}
    assert {service["build"]["dockerfile"] for service in services} == {"ops/api.Dockerfile"}
    (mount,) = {tuple(service["volumes"]) for service in services}
    (volume, _, folder) = mount[0].partition(":")
    assert volume in compose["volumes"]
    assert {service["environment"]["JITNEY_BATCH__FILES"] for service in services} == {f"{folder}/files"}
    image = (ROOT / "ops/api.Dockerfile").read_text()
    assert '".[api,http,rq,celery,otel]"' in image
    assert f"install -d -o jitney {folder} {folder}/files" in image, "a volume of its own would be root's"


def test_nothing_is_published_beyond_this_host(compose: dict[str, Any]) -> None:
    """Redis has no password inside the network, and the API no keys."""
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)


def settings_names() -> set[str]:
    """Every environment variable that some process of ours reads."""
    names = {f"JITNEY_{name.upper()}" for name in ClientSettings.model_fields}
    names |= {f"JITNEY_API__{name.upper()}" for name in ApiSettings.model_fields}
    names |= {f"JITNEY_BATCH__{name.upper()}" for name in BatchSettings.model_fields}
    names |= {f"JITNEY_RQ__{name.upper()}" for name in RqSettings.model_fields}
    names |= {f"JITNEY_CELERY__{name.upper()}" for name in CelerySettings.model_fields}
    names |= {f"JITNEY_WEBHOOKS__{name.upper()}" for name in WebhookSettings.model_fields}
    for name, field in WorkerSettings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            names |= {f"JITNEY_{name.upper()}__{inner.upper()}" for inner in section.model_fields}
        else:
            names.add(f"JITNEY_{name.upper()}")
    return names


def test_every_variable_is_a_setting_and_none_is_the_one_that_kubernetes_sets(compose: dict[str, Any]) -> None:
    """A service called jitney would set JITNEY_PORT=tcp://… in every pod."""
    assert "jitney" not in compose["services"]
    assert "JITNEY_PORT" not in settings_names()
    given = {name for service in compose["services"].values() for name in service.get("environment", {})}
    given = {name for name in given if not name.startswith("GF_")}  # Grafana's own
    for dockerfile in sorted(ROOT.glob("ops/*.Dockerfile")):
        given |= set(re.findall(r"\b(JITNEY_\w+)=", dockerfile.read_text()))
    assert given <= settings_names()
    assert {"JITNEY_REDIS_URL", "JITNEY_MODEL"} <= given


def test_the_api_says_who_may_come_in_and_asks_nobody_only_behind_a_loopback_port(compose: dict[str, Any]) -> None:
    """On every address of its container it would not start otherwise; the way out of there is the published port."""
    service = compose["services"]["api"]
    assert service["command"][service["command"].index("--host") + 1] == "0.0.0.0"
    assert service["environment"]["JITNEY_API__ACCESS"] == "${JITNEY_API__ACCESS:-open}"
    published = [port for name in ("api", "redis") for port in compose["services"][name]["ports"]]
    assert len(published) == 2
    assert all(port.startswith("127.0.0.1:") for port in published)


def seconds(duration: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([smh])", duration))


def test_a_stop_leaves_time_to_drain(compose: dict[str, Any]) -> None:
    drains = {
        "worker": "JITNEY_WORKER__DRAIN_TIMEOUT_S",
        "api": "JITNEY_API__DRAIN_TIMEOUT_S",
        "rq-worker": "JITNEY_RQ__DRAIN_TIMEOUT_S",
        "celery": "JITNEY_CELERY__DRAIN_S",
    }
    for name, variable in drains.items():
        service = compose["services"][name]
        assert seconds(service["stop_grace_period"]) >= float(service["environment"][variable]) + 5


def test_redis_keeps_what_was_accepted() -> None:
    directives = dict(
        line.split(None, 1)
        for line in (ROOT / "ops/redis.conf").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert directives["appendonly"] == "yes"
    assert directives["maxmemory-policy"] == "noeviction"
    assert directives["dir"] == "/data"


@pytest.mark.parametrize("name", ["api", "worker", "worker-gpu"])
def test_an_image_is_made_of_files_that_exist_and_says_what_the_service_says(
    compose: dict[str, Any], name: str
) -> None:
    build = compose["services"][name]["build"]
    instructions = (ROOT / build["context"] / build["dockerfile"]).read_text()
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", instructions, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert sources
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    said = re.findall(r"^CMD (.+)$", instructions, re.MULTILINE)
    assert [yaml.safe_load(command) for command in said] == [compose["services"][name]["command"]]
    assert set(build.get("args", {})) <= set(re.findall(r"^ARG (\w+)", instructions, re.MULTILINE))
    assert re.search(r"^USER (?!root)", instructions, re.MULTILINE)


# The services, as plain programs


class Here:
    """This machine in place of the compose network: addresses, paths and programs."""

    def __init__(self, directory: Path, model: Path, ports: tuple[int, int]) -> None:
        self.directory, self.model = directory, model
        self.redis_port, self.api_port = ports

    def word(self, word: str) -> str:
        """One word of a command or a variable's value, with the file's address of things replaced by ours."""
        word = word.replace("redis://redis:6379/", f"redis://127.0.0.1:{self.redis_port}/")
        word = word.replace("127.0.0.1:8000", f"127.0.0.1:{self.api_port}")
        word = word.replace("${JITNEY_MODEL:-smollm2-135m-instruct}", str(self.model))
        word = re.sub(r"\$\{\w+:-(\w*)\}", r"\1", word)  # nobody has set it
        words = {
            "/var/lib/jitney/files": str(self.directory / "files"),
            "0.0.0.0": "127.0.0.1",
            "8000": str(self.api_port),
            "redis-server": str(find_server()),
            "/etc/jitney/redis.conf": str(self.directory / "redis.conf"),
        }
        return words.get(word, word)

    def command(self, words: list[str]) -> list[str]:
        first, *rest = (self.word(word) for word in words)
        programs = {name: [str(Path(sys.executable).with_name(name))] for name in ("jitney", "celery")}
        programs["python"] = [sys.executable]
        if first == "redis-cli":
            rest = ["-p", str(self.redis_port), *rest]
        return [*programs.get(first, [first]), *rest]

    def environment(self, service: Mapping[str, Any]) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("JITNEY_")}
        given = {name: self.word(value) for name, value in service.get("environment", {}).items()}
        return {**ours, "OMP_NUM_THREADS": "1", **given}

    def write_redis_conf(self) -> None:
        """ops/redis.conf, but on loopback, on our port and in our directory."""
        conf = (ROOT / "ops/redis.conf").read_text()
        for theirs, ours in (
            ("bind * -::*", "bind 127.0.0.1"),
            ("port 6379", f"port {self.redis_port}"),
            ("dir /data", f'dir "{self.directory}"'),
        ):
            assert theirs in conf
            conf = conf.replace(theirs, ours)
        (self.directory / "redis.conf").write_text(conf)


class Running:
    """One service of the file as a program."""

    def __init__(self, name: str, service: dict[str, Any], here: Here) -> None:
        self.name, self._service, self._here = name, service, here
        self._log = here.directory / f"{name}.log"
        with self._log.open("wb") as log:
            self.program = subprocess.Popen(
                here.command(service["command"]),
                env=here.environment(service),
                cwd=here.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.program.poll() is None:
            self.program.kill()
            self.program.wait()

    @property
    def words(self) -> str:
        return self._log.read_text(errors="replace")[-2_000:]

    def until_healthy(self, *, path: str = "/readyz") -> None:
        """Ask again and again, as the engine would; each time is a program of its own."""
        deadline = time.monotonic() + LIVENESS_S
        while not is_healthy(self._service, self._here, path):
            assert self.program.poll() is None, f"{self.name} ended: {self.words}"
            assert time.monotonic() < deadline, f"{self.name} never became healthy: {self.words}"

    def stop(self) -> int:
        """As `docker stop`: SIGTERM, and the grace of the file. Raises TimeoutExpired."""
        self.program.send_signal(signal.SIGTERM)
        return self.program.wait(seconds(self._service["stop_grace_period"]))


def is_healthy(service: dict[str, Any], here: Here, path: str = "/readyz") -> bool:
    """Run the service's check. path: what the API's check asks for, in place of its own."""
    kind, *words = service["healthcheck"]["test"]
    assert kind == "CMD"
    command = here.command([word.replace("/readyz", path) for word in words])
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine")
    answer = subprocess.run(
        command, env=here.environment(service), cwd=here.directory, capture_output=True, timeout=LIVENESS_S, check=False
    )
    return answer.returncode == 0


@pytest.fixture
def here(tmp_path: Path, tiny_model: Path, free_ports: tuple[int, int]) -> Here:
    made = Here(tmp_path, tiny_model, free_ports)
    made.write_redis_conf()
    return made


@pytest.fixture
def free_ports() -> tuple[int, int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(2)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    return (ports[0], ports[1])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_services_start_stream_an_answer_and_stop(compose: dict[str, Any], here: Here, tiny_model: Path) -> None:
    services = compose["services"]
    assert not is_healthy(services["redis"], here)
    with ExitStack() as stack:

        def start(name: str) -> Running:
            return stack.enter_context(Running(name, services[name], here))

        redis = start("redis")
        redis.until_healthy()
        api = start("api")
        api.until_healthy(path="/livez")
        assert not is_healthy(services["api"], here)  # no worker has said yet what there is to serve
        assert not is_healthy(services["worker"], here)
        worker = start("worker")
        worker.until_healthy()
        api.until_healthy()

        client = openai.OpenAI(base_url=f"http://127.0.0.1:{here.api_port}/v1", api_key="none", max_retries=0)
        with client:
            (model,) = client.models.list().data
            options: dict[str, Any] = {"model": model.id, "max_tokens": 24, "temperature": 0.0}
            chat = [{"role": "user", "content": "What is the capital of France?"}]
            chunks = list(client.chat.completions.create(messages=chat, stream=True, **options))  # type: ignore[arg-type]
            whole = client.chat.completions.create(messages=chat, **options)  # type: ignore[arg-type]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert len(chunks) > 2
        assert text == whole.choices[0].message.content != ""
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason

        assert worker.stop() == 0, worker.words
        assert not is_healthy(services["worker"], here)
        assert is_healthy(services["api"], here)  # jobs may wait for a worker
        assert api.stop() == 0, api.words
        assert redis.stop() == 0, redis.words
        assert not is_healthy(services["redis"], here)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_bridges_take_rq_jobs_and_celery_tasks_are_healthy_meanwhile_and_stop(
    compose: dict[str, Any], here: Here
) -> None:
    services = compose["services"]
    with ExitStack() as stack:

        def start(name: str) -> Running:
            return stack.enter_context(Running(name, services[name], here))

        redis = start("redis")
        redis.until_healthy()
        bridges = [start("rq-worker"), start("celery")]
        for bridge in bridges:
            bridge.until_healthy()
        assert not is_healthy(services["worker"], here), "they need no worker to be well: jobs wait for one"
        worker = start("worker")
        worker.until_healthy()

        url, options = f"redis://127.0.0.1:{here.redis_port}/0", {"max_tokens": 8, "ignore_eos": True}
        job = Queue("jitney", connection=Redis.from_url(url), serializer=JSONSerializer).enqueue(
            "jitney.rq.generate", args=([1, 2, 3],), kwargs=options
        )
        app = Celery("shop", broker=url, backend=url, set_as_current=False)
        app.conf.task_default_queue = "jitney"
        answer = app.send_task("jitney.generate", [[1, 2, 3]], options).get(timeout=LIVENESS_S)
        assert answer["usage"]["completion_tokens"] == 8
        deadline = time.monotonic() + LIVENESS_S
        while job.get_status() != "finished":
            assert time.monotonic() < deadline, f"{job.get_status()}: {bridges[0].words}"

        for bridge in bridges:
            assert bridge.stop() == 0, bridge.words
            assert not is_healthy(services[bridge.name], here), f"{bridge.name} is said to be well, and gone"
        assert worker.stop() == 0, worker.words
        assert redis.stop() == 0, redis.words
