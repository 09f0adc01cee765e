"""A hub on the loopback interface: one repository, as `huggingface_hub` asks for it over HTTP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "1" * 40


@dataclass
class Hub:
    """Where it is, and the files that were fetched from it so far."""

    address: str
    fetched: list[str]


def _sha1(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving(repository: str, directory: Path) -> Iterator[Hub]:
    """A hub that has the files of `directory` under that name."""
    fetched: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.split("?")[0]
            files = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*") if file.is_file()}
            name = path.removeprefix(f"/{repository}/resolve/{COMMIT}/")
            if path == f"/api/models/{repository}/revision/main":
                siblings = [{"rfilename": each} for each in files]
                self._send(json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode(), with_body)
            elif path == f"/api/models/{repository}/tree/{COMMIT}":
                entries = [
                    {"type": "file", "path": each, "size": file.stat().st_size, "oid": _sha1(file)}
                    for each, file in files.items()
                ]
                self._send(json.dumps(entries).encode(), with_body)
            elif name in files:
                if with_body:
                    fetched.append(name)
                self._send(files[name].read_bytes(), with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _send(self, content: bytes, with_body: bool) -> None:
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", fetched)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
