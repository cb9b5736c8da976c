"""Packages in buckets of S3 and of Google's cloud, by emulators on this machine.

They are skipped without `pip install s3fs moto[server] gcsfs gcp-storage-emulator`, which bring
more than everything else that tests need.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from engine.errors import PackageError
from server.packages.pinned import pin
from tests.engine.package.test_package import FILES, write_package

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # others' libraries warn


@contextmanager
def running(port: int, *words: str | Path) -> Iterator[None]:
    """Run a server that listens at a port of this machine."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline, words
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of S3."""
    for name in ("s3fs", "moto.server"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with running(port, sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)):
        files = fsspec.filesystem("s3")
        files.mkdir("models")
        yield files


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of Google's cloud."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    if (emulator := shutil.which("gcp-storage-emulator")) is None:
        pytest.skip("gcp-storage-emulator is not installed")
    port = free_port()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks by gRPC
    options = ("--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=models")
    with running(port, emulator, "start", *options):
        yield fsspec.filesystem("gs")


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_package_in_a_bucket_is_fetched_and_checked(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bucket, url = request.getfixturevalue(kind), f"{kind}://models/dates"
    for file in write_package(tmp_path / "dates").iterdir():
        bucket.pipe(f"models/dates/{file.name}", file.read_bytes())

    pinned = pin(url, key=None)
    package = pinned.load(tmp_path / "cache")
    bucket.pipe("models/dates/config.json", b"[]")
    with pytest.raises(PackageError, match=f"{url}/config.json was cut off or is wrong"):
        pinned.load(tmp_path / "second")
    bucket.pipe("models/dates/config.json", FILES["config.json"])
    bucket.rm_file("models/dates/decoder.onnx")
    with pytest.raises(PackageError, match=f"{url}/decoder.onnx is missing"):
        pinned.load(tmp_path / "third")
    with pytest.raises(PackageError, match=f"{kind}://models/other/manifest.json is missing"):
        pin(f"{kind}://models/other", key=None)

    assert package.manifest == pinned.manifest
    assert {name: package.file(name).read_bytes() for name in FILES} == FILES
