"""Signatures of packages: those of OpenSSF's model-signing, theirs taken here and ours there."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from model_signing import hashing, signing, verifying

from engine.errors import ConfigError, PackageError
from engine.package.package import load_package
from server.cli.app import run
from server.config import ServeConfig
from server.packages.pinned import pin
from server.packages.remote import RemotePackage
from server.packages.signature import sign
from server.ray.serving import serve_models
from tests.engine.test_package import FILES, write_package
from tests.server.signing import make_key

URL = "memory://signed/dates"
CURVES = ["prime256v1", "secp384r1", "secp521r1"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "dates")


@pytest.fixture
def bucket() -> Iterator[Callable[[Path], None]]:
    """Yield a function that puts a package, as it is now, at URL."""
    files = fsspec.filesystem("memory")
    yield lambda package: files.put(f"{package}/", "/signed/dates/", recursive=True)
    files.rm("/signed", recursive=True)


def model_signing(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def sign_as_they_do(package: Path, key: Path, config: hashing.Config | None = None) -> None:
    signer = signing.Config().use_elliptic_key_signer(private_key=key)
    signer.set_hashing_config(config or hashing.Config()).sign(package, package / "model.sig")


def verify_as_they_do(package: Path, public: Path) -> None:
    theirs = verifying.Config().use_elliptic_key_verifier(public_key=public)
    theirs.verify(package, package / "model.sig")


def test_what_the_command_signs_is_served_and_model_signing_verifies_it(
    package: Path, tmp_path: Path, bucket: Callable[[Path], None]
) -> None:
    key, public = make_key(tmp_path / "key.pem")

    assert run(["sign", str(package), "--key", str(key)]) == 0

    bucket(package)
    for address in (package, URL):
        assert pin(address, public)[1].name == "dates"
    verify = ["verify", "key", package, "--signature", package / "model.sig", "--public_key"]
    assert model_signing(*verify, public).returncode == 0
    (package / "decoder.onnx").write_bytes(b"changed")
    assert "Hash mismatch for 'decoder.onnx'" in model_signing(*verify, public).stderr


def test_what_model_signing_signs_is_served(
    package: Path, tmp_path: Path, bucket: Callable[[Path], None]
) -> None:
    key, public = make_key(tmp_path / "key.pem")

    to = ["--signature", package / "model.sig"]
    done = model_signing("sign", "key", package, "--private_key", key, *to)

    assert done.returncode == 0, done.stderr
    bucket(package)
    for address in (package, URL):
        assert pin(address, public)[1].name == "dates"


@pytest.mark.parametrize("curve", CURVES)
def test_both_sign_and_verify_with_every_curve(package: Path, tmp_path: Path, curve: str) -> None:
    key, public = make_key(tmp_path / "key.pem", curve)
    _, other = make_key(tmp_path / "other.pem", curve)

    sign(package, key)
    verify_as_they_do(package, public)
    with pytest.raises(ValueError, match="Key mismatch"):
        verify_as_they_do(package, other)

    sign_as_they_do(package, key)
    pin(package, public)
    with pytest.raises(PackageError, match="not by the required key"):
        pin(package, other)


def test_what_was_signed_with_more_beside_it_is_served(
    package: Path, tmp_path: Path, bucket: Callable[[Path], None]
) -> None:
    """A bucket may have a README; of a package only its own files are fetched."""
    key, public = make_key(tmp_path / "key.pem")
    (package / "README.md").write_text("about the model")
    sign_as_they_do(package, key)

    bucket(package)

    assert set(pin(URL, public)[0].load(tmp_path / "cache").manifest.files) == set(FILES)


@pytest.mark.parametrize("left_out", ["manifest.json", "decoder.onnx"])
def test_a_file_that_was_left_out_of_the_signature_is_refused(
    package: Path, tmp_path: Path, left_out: str
) -> None:
    key, public = make_key(tmp_path / "key.pem")
    config = hashing.Config().set_ignored_paths(paths=[left_out])

    sign_as_they_do(package, key, config)

    with pytest.raises(PackageError, match=f"{left_out} is not what model.sig has signed"):
        pin(package, public)


def test_hashes_of_another_kind_are_refused(package: Path, tmp_path: Path) -> None:
    key, public = make_key(tmp_path / "key.pem")

    sign_as_they_do(
        package, key, hashing.Config().use_file_serialization(hashing_algorithm="blake3")
    )

    with pytest.raises(PackageError, match="sign it again"):
        pin(package, public)


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
    with pytest.raises(PackageError, match="not by the required key"):
        pin(address, other_public)

    write_package(package, lambda manifest: manifest.update(version="2"))
    bucket(package)
    with pytest.raises(PackageError, match=r"manifest.json is not what .*the package was changed"):
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

    with pytest.raises(PackageError, match="not by the required key"):
        pin(URL, other_public)

    assert read == ["manifest.json", "model.sig"]


def _envelope(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def changed(signature: bytes) -> bytes:
        bundle = json.loads(signature)
        change(bundle["dsseEnvelope"])
        return json.dumps(bundle).encode()

    return changed


def _other_statement(envelope: dict[str, Any]) -> None:
    statement = json.loads(base64.b64decode(envelope["payload"]))
    statement["predicate"]["resources"][0]["digest"] = "0" * 64
    envelope["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda signature: b"", "JSON"),
        (lambda signature: b"\xff" * 64, "JSON"),
        (lambda signature: signature[:-1], "JSON"),
        (lambda signature: b"[" * 100_000, "JSON"),
        (lambda signature: b"{}", "mediaType"),
        (lambda signature: signature.replace(b"bundle.v0.3", b"bundle.v0.9"), "mediaType"),
        (_envelope(lambda envelope: envelope.update(signatures=[])), "signatures"),
        (_envelope(lambda envelope: envelope.update(payloadType="text/plain")), "payloadType"),
        (_envelope(lambda envelope: envelope.update(payload="e30=")), "not by the required key"),
        (_envelope(lambda envelope: envelope["signatures"][0].update(sig="")), "required key"),
        (_envelope(_other_statement), "not by the required key"),
    ],
)
def test_what_is_no_signature_is_refused(
    package: Path, tmp_path: Path, change: Callable[[bytes], bytes], told: str
) -> None:
    key, public = make_key(tmp_path / "key.pem")
    signature = sign(package, key)
    pin(package, public)

    signature.write_bytes(change(signature.read_bytes()))

    with pytest.raises(PackageError, match=f"model.sig.*{told}"):
        pin(package, public)


@pytest.mark.parametrize("part", ["_STATEMENT", "_PREDICATE"])
def test_what_the_key_has_signed_to_say_something_else_is_refused(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    key, public = make_key(tmp_path / "key.pem")
    monkeypatch.setattr(f"server.packages.signature.{part}", "https://slsa.dev/provenance/v1")

    sign(package, key)

    with pytest.raises(PackageError, match=r"not a signature .*ype: Input should be"):
        pin(package, public)


def test_a_damaged_package_is_not_signed(package: Path, tmp_path: Path) -> None:
    key, _ = make_key(tmp_path / "key.pem")
    (package / "decoder.onnx").write_bytes(b"changed")

    with pytest.raises(PackageError, match=r"decoder\.onnx"):
        sign(package, key)

    assert not (package / "model.sig").exists()


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
    config = ServeConfig(packages={"dates": package}, port=0)

    with pytest.raises(PackageError, match="has no signature"):
        serve_models(replace(config, require_signature=public), announce=lambda service: None)
