"""Signatures of packages: what OpenSSL signs is taken here, what is signed here OpenSSL checks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from engine.errors import ConfigError, PackageError
from engine.package.package import load_package
from server.cli.app import run
from server.packages.pinned import pin
from server.packages.remote import RemotePackage
from server.packages.signature import sign
from server.ray.serving import serve_models
from server.settings import Listen, Packages, Settings
from tests.engine.package.test_package import FILES, write_package
from tests.fakes.signing import make_key

URL = "memory://signed/dates"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "dates")


@pytest.fixture
def bucket() -> Iterator[Callable[[Path], None]]:
    """Yield a function that puts a package, as it is now, at URL."""
    files = fsspec.filesystem("memory")
    yield lambda package: files.put(f"{package}/", "/signed/dates/", recursive=True)
    files.rm("/signed", recursive=True)


def openssl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["openssl", "dgst", "-sha256", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("curve", ["prime256v1", "secp384r1", "secp521r1"])
def test_openssl_checks_what_the_command_signs_and_its_signatures_are_taken(
    package: Path, tmp_path: Path, bucket: Callable[[Path], None], curve: str
) -> None:
    key, public = make_key(tmp_path / "key.pem", curve)
    manifest, signature = package / "manifest.json", package / "manifest.sig"

    assert run(["sign", str(package), "--key", str(key)]) == 0
    assert openssl("-verify", public, "-signature", signature, manifest).returncode == 0
    assert pin(package, public).manifest.name == "dates"

    signature.unlink()
    assert openssl("-sign", key, "-out", signature, manifest).returncode == 0
    (package / "README.md").write_text("about the model, beside it in the bucket")
    bucket(package)
    pinned = pin(URL, public)
    assert pinned.manifest.name == "dates"
    assert set(pinned.load(tmp_path / "cache").manifest.files) == set(FILES)


@pytest.mark.parametrize("is_local", [True, False])
def test_what_the_key_has_not_signed_is_refused(
    package: Path, tmp_path: Path, bucket: Callable[[Path], None], is_local: bool
) -> None:
    key, public = make_key(tmp_path / "key.pem")
    _, other_public = make_key(tmp_path / "other.pem")
    address: Path | str = package if is_local else URL

    bucket(package)
    with pytest.raises(PackageError, match=r"has no signature .*tokenweir sign"):
        pin(address, public)

    sign(package, key)
    bucket(package)
    with pytest.raises(PackageError, match="not the required key's"):
        pin(address, other_public)

    write_package(package, lambda manifest: manifest.update(version="2"))
    bucket(package)
    with pytest.raises(PackageError, match="the package was changed since; sign it again"):
        pin(address, public)


def test_what_is_not_signed_is_refused_before_its_graphs_are_fetched(
    package: Path, tmp_path: Path, bucket: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = make_key(tmp_path / "key.pem")
    _, other_public = make_key(tmp_path / "other.pem")
    sign(package, key)
    bucket(package)
    read: list[str] = []
    reading = RemotePackage.small_file
    monkeypatch.setattr(
        RemotePackage,
        "small_file",
        lambda self, name, most: read.append(name) or reading(self, name, most),
    )
    monkeypatch.setattr(RemotePackage, "copy", lambda *_: pytest.fail("a graph was fetched"))

    with pytest.raises(PackageError, match="not the required key's"):
        pin(URL, other_public)

    assert read == ["manifest.json", "manifest.sig"]


@pytest.mark.parametrize(
    "change",
    [
        lambda signature: b"",
        lambda signature: b"\xff" * 4096,
        lambda signature: signature[:-1],
        lambda signature: signature[:-1] + bytes([signature[-1] ^ 1]),
        lambda signature: b"{}",
    ],
)
@pytest.mark.parametrize("is_local", [True, False])
def test_a_changed_signature_is_refused(
    package: Path,
    tmp_path: Path,
    bucket: Callable[[Path], None],
    change: Callable[[bytes], bytes],
    is_local: bool,
) -> None:
    key, public = make_key(tmp_path / "key.pem")
    signature = sign(package, key)
    pin(package, public)

    signature.write_bytes(change(signature.read_bytes()))
    bucket(package)

    with pytest.raises(PackageError, match=r"manifest\.sig"):
        pin(package if is_local else URL, public)


def test_a_damaged_package_is_not_signed(package: Path, tmp_path: Path) -> None:
    key, _ = make_key(tmp_path / "key.pem")
    (package / "decoder.onnx").write_bytes(b"changed")

    with pytest.raises(PackageError, match=r"decoder\.onnx"):
        sign(package, key)

    assert not (package / "manifest.sig").exists()


def test_a_signed_package_is_still_one(package: Path, tmp_path: Path) -> None:
    before = load_package(package)

    sign(package, make_key(tmp_path / "key.pem")[0])

    assert load_package(package).manifest_sha256 == before.manifest_sha256


def test_keys_that_cannot_be_used_are_refused_with_how_to_make_one(
    package: Path, tmp_path: Path
) -> None:
    key, public = make_key(tmp_path / "key.pem")
    bitcoin, bitcoin_public = make_key(tmp_path / "bitcoin.pem", "secp256k1")
    locked, ed25519 = tmp_path / "locked.pem", tmp_path / "ed25519.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", ed25519], check=True)
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked], check=True
    )

    for wrong in (public, package / "config.json", bitcoin, ed25519, locked):
        with pytest.raises(ConfigError, match="openssl ecparam"):
            sign(package, wrong)
    for wrong in (key, package / "config.json", bitcoin_public):
        with pytest.raises(ConfigError, match="openssl pkey"):
            pin(package, wrong)
    with pytest.raises(ConfigError, match="cannot be read"):
        pin(package, tmp_path / "nowhere")


def test_an_unsigned_package_is_refused_before_ray_starts(package: Path, tmp_path: Path) -> None:
    _, public = make_key(tmp_path / "key.pem")
    packages = Packages({"dates": package}, require_signature=public)

    with pytest.raises(PackageError, match="has no signature"):
        serve_models(Settings(listen=Listen(port=0), packages=packages), announce=print)


def test_what_is_no_package_is_not_built_where_signatures_are_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, public = make_key(tmp_path / "key.pem")
    (model := tmp_path / "net").mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2"}')

    assert run(["serve", str(model), "--require-signature", str(public)]) == 3

    assert f"error: {model} is no package, and with --require-signature" in capsys.readouterr().err
