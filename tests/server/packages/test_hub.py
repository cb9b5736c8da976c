"""Names of the Hub of Hugging Face: fetched from a stand-in, found again without it, refused."""

from __future__ import annotations

import errno
import json
import os
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.errors import PackageError
from server.packages.hub import download
from tests.fakes.hub import fake_hub

PROGRAM = """
import json, sys
from engine.errors import TokenweirError
from server.packages.hub import download
for name in sys.argv[1:]:
    try:
        found = download(*name.split("@")) if "@" in name else download(name, None)
        print(json.dumps(sorted(str(p.relative_to(found)) for p in found.rglob("*.*"))))
    except TokenweirError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def downloads(endpoint: str, home: Path, *names: str, **environment: str) -> list[str | list[str]]:
    """Download in a process of its own: the library reads its environment once."""
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env={**os.environ, **own, **environment},
        stdout=subprocess.PIPE,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_name_is_fetched_once_and_what_cannot_be_is_told(tmp_path: Path) -> None:
    (model := tmp_path / "model" / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "tf.h5", "onnx/a.onnx"):
        (model.parent / name).parent.mkdir(exist_ok=True)
        (model.parent / name).write_text(name)
    (model / "config.json").write_text("{}")
    (old := tmp_path / "old").mkdir()
    (old / "pytorch_model.bin").write_text("weights")
    wanted = ["1_Pooling/config.json", "config.json", "model.safetensors"]

    with fake_hub({"me/it": model.parent, "me/old": old}) as endpoint:
        found = downloads(endpoint, tmp_path, "me/it", "me/it@v2", "me/old", "me/no", "me/it@v9")
    later = downloads(endpoint, tmp_path, "me/it", "me/other")
    offline = downloads(endpoint, tmp_path, "me/it", "me/other", HF_HUB_OFFLINE="1")

    assert found[:3] == [wanted, wanted, ["pytorch_model.bin"]]
    assert found[3:] == [
        "PackageError: there is no me/no here, and the Hub has none for you; give a directory, the "
        "full ORG/NAME, or HF_TOKEN for a private one",
        "PackageError: the Hub has me/it, but no revision v9 of it",
    ]
    refusal = (
        "PackageUnreachable: there is no me/other here nor in the cache of the Hub, and the Hub "
        "cannot be asked; try again with a connection and without HF_HUB_OFFLINE, or give a "
        "directory"
    )
    assert later == offline == [wanted, refusal]


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"])
def test_a_hub_that_breaks_off_or_says_something_else_is_told(tmp_path: Path, head: bytes) -> None:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(head)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        (told,) = downloads(f"http://127.0.0.1:{hub.server_address[1]}", tmp_path, "me/it")
        hub.shutdown()
    (wrong,) = downloads("nonsense", tmp_path, "me/it")

    for one in (told, wrong):
        assert str(one).startswith("PackageUnreachable: me/it cannot be fetched from the Hub: ")


def test_a_full_disk_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a write names no file

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)

    with pytest.raises(PackageError, match=r"kept in /.*: No space left on device; set HF_HOME"):
        download("me/it", None)
