"""Packages by content: fetched once a node, refused where they are not what was signed."""

from __future__ import annotations

import resource
import socket
import stat
import threading
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from engine.errors import PackageError, PackageUnreachable
from engine.package.files import FileEntry
from server.cli.app import run
from server.cli.exit_codes import UNAVAILABLE, code_of
from server.packages.cache import user_cache
from server.packages.pinned import PinnedPackage, manifest_at, pin
from server.packages.remote import RemotePackage
from server.ray.replica import _load_engines
from server.settings import Engine, Packages, Settings
from tests.engine.cuda.fake_cuda import FakeCuda
from tests.engine.package.test_package import FILES, write_package

URL = "memory://bucket/dates"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "dates")


@pytest.fixture
def remote(package: Path) -> Iterator[Path]:
    """The directory of a package that is in a bucket, too."""
    files = fsspec.filesystem("memory")
    files.put(str(package), "/bucket/dates", recursive=True)
    yield package
    files.rm("/bucket", recursive=True)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def refusal(pinned: PinnedPackage, cache: Path) -> str:
    with pytest.raises(PackageError) as caught:
        pinned.load(cache)
    assert not [one for one in cache.glob("*") if one.is_dir()], "nothing of it stays"
    return str(caught.value)


def upload(name: str, content: bytes) -> None:
    fsspec.filesystem("memory").pipe(f"/bucket/dates/{name}", content)


def test_a_package_is_fetched_into_a_private_directory_named_for_its_manifest(
    remote: Path, cache: Path
) -> None:
    pinned = pin(URL, key=None)

    package = pinned.load(cache)

    assert package.path == cache / pinned.manifest_sha256
    assert package.manifest == pinned.manifest == manifest_at(remote)
    assert {one.name: one.read_bytes() for one in package.path.iterdir() if one.name in FILES} == (
        FILES
    )
    for private in (cache, package.path):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_what_was_fetched_is_not_fetched_again(remote: Path, cache: Path) -> None:
    pinned = pin(URL, key=None)
    pinned.load(cache)
    fsspec.filesystem("memory").rm("/bucket/dates/decoder.onnx")

    assert pinned.load(cache).file("decoder.onnx").read_bytes() == FILES["decoder.onnx"]


def test_two_that_want_a_package_fetch_it_once(
    remote: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = pin(URL, key=None)
    copied, both, copy = [], threading.Barrier(2), RemotePackage.copy

    def counted(self: RemotePackage, name: str, *rest: object) -> None:
        copied.append(name)
        copy(self, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RemotePackage, "copy", counted)

    def load() -> None:
        both.wait()
        pinned.load(cache)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(copied) == sorted(FILES)


def test_what_was_changed_in_the_cache_is_fetched_again(remote: Path, cache: Path) -> None:
    pinned = pin(URL, key=None)
    pinned.load(cache).file("config.json").write_bytes(b"[]")

    assert pinned.load(cache).file("config.json").read_bytes() == FILES["config.json"]


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_copy_that_nothing_was_shown_of_is_to_be_changed_where_it_came_from(
    is_remote: bool, remote: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cuda.device.open_device", lambda: FakeCuda().device())
    write_package(remote, lambda manifest: manifest.update(target="cuda"))
    upload("manifest.json", (remote / "manifest.json").read_bytes())
    address = URL if is_remote else remote
    packages = Packages({"dates": address}, cache=cache)
    config = Settings(packages=packages, engine=Engine(own_process=False))

    with pytest.raises(PackageError, match=r"run `tokenweir verify .*--device cuda") as caught:
        _load_engines(config, {"dates": pin(address, key=None)})

    note = f"; that is a copy of {URL}, and a changed copy is fetched again: change the package "
    assert (note in str(caught.value)) == is_remote


def test_what_a_killed_process_has_left_does_not_stand_in_the_way(
    remote: Path, cache: Path
) -> None:
    pinned = pin(URL, key=None)
    part = cache / f".{pinned.manifest_sha256}.part"
    part.mkdir(parents=True, mode=0o700)
    (part / "decoder.onnx").write_bytes(b"half")
    cache.chmod(0o700)

    pinned.load(cache)

    assert not part.exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"decoder", "7 bytes came, its manifest says 13"),
        (b"decoder graph and more", "more than 13 bytes came"),
        (b"decoder grapj", "its SHA-256 is"),
    ],
)
def test_a_file_that_is_cut_off_or_wrong_is_refused_by_name_and_removed(
    remote: Path, cache: Path, content: bytes, problem: str
) -> None:
    pinned = pin(URL, key=None)
    upload("decoder.onnx", content)

    message = refusal(pinned, cache)

    assert f"{URL}/decoder.onnx was cut off or is wrong: {problem}" in message


def test_a_missing_file_and_a_missing_package_are_named(remote: Path, cache: Path) -> None:
    pinned = pin(URL, key=None)
    fsspec.filesystem("memory").rm("/bucket/dates/encoder.onnx")
    assert f"{URL}/encoder.onnx is missing" in refusal(pinned, cache)

    with pytest.raises(PackageError, match=r"memory://bucket/other/manifest.json is missing"):
        pin("memory://bucket/other", key=None)


def test_an_address_where_nobody_answers_is_no_package_that_is_missing() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/dates"

        with pytest.raises(
            PackageUnreachable, match=f"{url} does not answer: .*[Cc]onnect"
        ) as found:
            pin(url, key=None)

    assert code_of(found.value) == UNAVAILABLE, "a supervisor starts the command again"


def test_a_package_that_was_replaced_since_the_start_is_refused(
    remote: Path, cache: Path, tmp_path: Path
) -> None:
    pinned, local = pin(URL, key=None), pin(remote, key=None)
    other = write_package(tmp_path / "other", lambda manifest: manifest.update(version="2"))
    manifest = (other / "manifest.json").read_bytes()
    upload("manifest.json", manifest)
    (remote / "manifest.json").write_bytes(manifest)

    assert f"{URL} is another package than when the server was started" in refusal(pinned, cache)
    assert f"{remote} is another package" in refusal(local, cache)


def test_a_manifest_without_end_and_paths_in_it_are_refused(
    remote: Path, cache: Path, tmp_path: Path
) -> None:
    upload("manifest.json", b" " * (2**20 + 1))
    with pytest.raises(PackageError, match=r"manifest.json has more than 1,048,576 bytes"):
        pin(URL, key=None)

    entry = {"sha256": "0" * 64, "size": 2}
    other = write_package(tmp_path / "p", lambda m: m["files"].update({"../x": entry}))
    upload("manifest.json", (other / "manifest.json").read_bytes())
    with pytest.raises(PackageError, match="is a path, not a file name"):
        pin(URL, key=None)


def test_a_package_that_does_not_fit_is_refused_before_it_is_fetched(
    remote: Path, cache: Path, tmp_path: Path
) -> None:
    entry = {"sha256": "0" * 64, "size": 2**62}
    large = write_package(tmp_path / "p", lambda m: m["files"].update({"weights.data": entry}))
    upload("manifest.json", (large / "manifest.json").read_bytes())

    message = refusal(pin(URL, key=None), cache)

    assert "has room for" in message
    assert "--package-cache" in message


def test_a_cache_that_others_can_write_is_refused(remote: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)

    with pytest.raises(PackageError, match=r"can be written by others.*--package-cache"):
        pin(URL, key=None).load(cache)


def test_a_cache_that_cannot_be_made_is_named(remote: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(PackageError, match=r"cannot be kept in .*file/cache"):
        pin(URL, key=None).load(tmp_path / "file/cache")


def test_a_disk_that_takes_no_more_is_not_the_fault_of_the_address(
    remote: Path, tmp_path: Path
) -> None:
    content = bytes(1 << 20)
    upload("weights", content)
    whole = FileEntry(sha256=sha256(content).hexdigest(), size=len(content))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # bytes of a file

    try:
        with pytest.raises(OSError, match="too large"):
            RemotePackage(URL).copy("weights", whole, tmp_path / "weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [("oci://b/p", "ocifs"), ("nonsense://b/p", "not the address of a package.*nonsense")],
)
def test_what_is_missing_to_read_an_address_is_named(url: str, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        pin(url, key=None)


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache() == Path("/somewhere/tokenweir")

    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache() == Path.home() / ".cache/tokenweir"


@pytest.mark.parametrize("home", [None, "relative"])
def test_a_user_without_a_home_directory_is_told_to_choose_one(
    home: str | None, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"XDG_CACHE_HOME": None, "HOME": home}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as of a number without an entry
    fetched = pin(package.as_uri(), key=None)

    with pytest.raises(PackageError, match="no home directory .* TOKENWEIR_CACHE to a"):
        fetched.load(None)


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_package_comes_from_a_web_server_and_from_a_mounted_folder(
    package: Path, cache: Path
) -> None:
    handler = partial(_QuietHandler, directory=str(package.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            web = pin(f"http://127.0.0.1:{server.server_port}/dates", key=None).load(cache)
        finally:
            server.shutdown()
            serving.join()
    folder = pin(f"file://{package}", key=None).load(cache / "other")

    assert web.manifest == folder.manifest
    assert folder.path.parent == cache / "other"


def test_serve_takes_addresses_and_keeps_them_as_they_are(
    remote: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("server.cli.serving.service.serve_until_ended", served.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.toml").write_text(
        f'[packages]\nmodels = {{ a = "{URL}", b = "dates" }}\ncache = "cache"\n'
    )

    assert run(["serve", URL, "--model", f"iso={URL}", "--package-cache", "cache"]) == 0
    assert run(["serve", "--config", "serve.toml"]) == 0

    typed, read = served
    assert typed.packages.models == {"dates": URL, "iso": URL}
    assert read.packages.models == {"a": URL, "b": tmp_path / "dates"}
    assert typed.packages.cache == read.packages.cache == tmp_path / "cache"


@pytest.mark.parametrize("url", ["https://me:secret@h/p", "simplecache::sftp://me:secret@h:22/p"])
def test_a_password_in_an_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(PackageError, match="has a password") as refused:
        pin(url, None)

    assert "secret" not in str(refused.value)
