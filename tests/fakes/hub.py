"""A stand-in for the Hub of Hugging Face on a loopback port: the calls that a download makes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(models: dict[str, Path]) -> Iterator[str]:
    """Serve directories as models by name, with the revisions main and v2; give the address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self._answer(self.command == "GET")

        do_HEAD = do_GET

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            for name, directory in models.items():
                files = sorted(p for p in directory.rglob("*") if p.is_file())
                names = [str(p.relative_to(directory)) for p in files]
                if path.startswith(f"/api/models/{name}/"):
                    return self._api(path, names, files, with_body)
                for revision in (COMMIT, "main", "v2"):
                    prefix = f"/{name}/resolve/{revision}/"
                    if path.startswith(prefix) and path[len(prefix) :] in names:
                        content = (directory / path[len(prefix) :]).read_bytes()
                        return self._send(200, content, with_body)
            self._send(404, b"{}", with_body, **{"X-Error-Code": "RepoNotFound"})

        def _api(self, path: str, names: list[str], files: list[Path], with_body: bool) -> None:
            revision = next((r for r in ("main", "v2", COMMIT) if f"/{r}" in path), None)
            if revision is None:
                self._send(404, b"{}", with_body, **{"X-Error-Code": "RevisionNotFound"})
            elif "/tree/" in path:
                entries = [
                    {"type": "file", "path": n, "size": f.stat().st_size, "oid": _etag(f)}
                    for n, f in zip(names, files, strict=True)
                ]
                self._send(200, json.dumps(entries).encode(), with_body)
            else:
                siblings = [{"rfilename": name} for name in names]
                answer = {"id": "x", "sha": COMMIT, "siblings": siblings}
                self._send(200, json.dumps(answer).encode(), with_body)

        def _send(self, code: int, content: bytes, with_body: bool, **headers: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
