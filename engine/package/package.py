"""The exported package on disk, and the checks before anything of it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import PackageError
from engine.json_file import parse_object
from engine.package.contradictions import find_contradictions
from engine.package.files import Stamp, check_file, open_plain, read_stamp
from engine.package.manifest import FORMAT_VERSION, Manifest
from engine.package.recognised import recognise
from engine.wording import listed, problems_of, shortened

MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "manifest.sig"  # it may be there
_DIGEST = "digest"  # the key of the manifest's own
MAX_MANIFEST_BYTES = 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Package(BaseModel):
    """A checked package: every file is there, is not a link, and has the hash of the manifest."""

    model_config = ConfigDict(frozen=True)

    path: Path
    manifest: Manifest
    manifest_sha256: bytes
    stamps: dict[Path, Stamp | None] = {}  # directory and files, when they were hashed

    def file(self, name: str) -> Path:
        """Return the path of one of the package's files; PackageError if it has none such."""
        if name not in self.manifest.files:
            raise PackageError(f"{self.path}: the manifest lists no {name}; export the model again")
        return self.path / name

    def check_unchanged(self) -> None:
        """Raise PackageError if a file is not the one that was hashed; to be called after loading.

        Everything read between load_package and this call is then as it was hashed.
        """
        for path, stamp in self.stamps.items():
            if read_stamp(path) != stamp:
                raise PackageError(
                    f"{path} was changed while the package was loaded; load it again, and replace "
                    "a package by renaming its whole directory"
                )


def load_package(path: str | os.PathLike[str]) -> Package:
    """Read the manifest of a package and check every file against it.

    Raises PackageError, saying which file and what to do, for a missing, damaged or unlisted file,
    a file that is a link or lies outside the directory, a format of a newer release, a manifest
    that was changed or contradicts itself, and a certificate that was not passed.
    """
    directory, raw = open_package(path)
    manifest = parse_manifest(raw, str(directory))
    with _readable(path):
        stamps: dict[Path, Stamp | None] = {directory: read_stamp(directory)}
        known = {MANIFEST_NAME, SIGNATURE_NAME, *manifest.files}
        if unlisted := sorted(set(os.listdir(directory)) - known):
            # A graph could read weights from it, unchecked.
            raise PackageError(
                f"{directory} holds {listed([*map(repr, unlisted)])}, which the manifest does not "
                "list; a package holds its own files only, remove the others"
            )
        for name, entry in manifest.files.items():
            stamps[directory / name] = check_file(directory / name, entry)
    return Package(
        path=directory,
        manifest=manifest,
        manifest_sha256=hashlib.sha256(raw).digest(),
        stamps=stamps,
    )


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a package and look at none of its other files; errors as above."""
    directory, raw = open_package(path)
    return parse_manifest(raw, str(directory))


def open_package(path: str | os.PathLike[str]) -> tuple[Path, bytes]:
    """Return the package's directory and the bytes of its manifest; PackageError without one."""
    given = Path(path)
    if problem := recognise(path).problem("package"):
        raise PackageError(problem)
    with _readable(path):
        directory = given.resolve()  # a link that moves later changes nothing
        manifest_path = directory / MANIFEST_NAME
        with open_plain(manifest_path) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise PackageError(
            f"{manifest_path} has more than {MAX_MANIFEST_BYTES:,} bytes; no manifest is so large"
        )
    return directory, raw


def parse_manifest(raw: bytes, place: str) -> Manifest:
    """Return the manifest of these bytes, of the package at a place; PackageError if it is none."""
    path = f"{place}/{MANIFEST_NAME}"
    try:
        content = parse_object(raw)
    except ValueError as error:
        raise _invalid(path, str(error)) from error
    version = content.get("format_version")  # what is not a number is a wrong field
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise PackageError(
            f"{place}: package format {shortened(version)} is newer than {FORMAT_VERSION}, "
            "the newest that this release reads; upgrade tokenweir or export the model again"
        )
    given, digest = content.pop(_DIGEST, None), _digest(content)
    if given != digest:
        raise PackageError(
            f"{path} was damaged or edited: its content has the SHA-256 {digest[:16]}..., its "
            f"digest is {shortened(repr(given))}; copy the package again or export the model again"
        )
    try:
        manifest = Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise _invalid(path, problems_of(error, MANIFEST_NAME)) from error
    if problems := find_contradictions(manifest):
        raise _invalid(path, listed(problems, "; "))
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name) or name in (MANIFEST_NAME, SIGNATURE_NAME):
            raise PackageError(
                f"{place}: {shortened(repr(name))} is a path, not a file name in the package"
            )
    return manifest


def seal(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest of this content: as JSON, with its digest."""
    return f"{json.dumps({**content, _DIGEST: _digest(content)}, indent=2)}\n".encode()


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write the manifest of a package: whole, or the old one stays.

    Raises PackageError if it is larger than one may be, or if it cannot be written.
    """
    raw = seal(manifest.model_dump(mode="json"))
    path = directory / MANIFEST_NAME
    if len(raw) > MAX_MANIFEST_BYTES:
        raise PackageError(
            f"{path} would have {len(raw):,} bytes, more than {MAX_MANIFEST_BYTES:,}; "
            "give the model fewer or shorter labels"
        )
    # Not in the directory: there, what the manifest does not list is refused.
    whole = directory.parent / f".{directory.name}.{MANIFEST_NAME}-{os.getpid()}"
    try:
        whole.write_bytes(raw)
        whole.replace(path)
    except OSError as error:
        raise PackageError(
            f"cannot write {path}: {error}; free space and permissions beside {directory}"
        ) from error
    finally:
        whole.unlink(missing_ok=True)


def _digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything but the digest: JSON, keys sorted, ASCII, no spaces."""
    rest = {key: value for key, value in content.items() if key != _DIGEST}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@contextmanager
def _readable(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PackageError(f"{path} cannot be read: {error}; check its permissions") from error


def _invalid(path: str, problems: str) -> PackageError:
    return PackageError(f"{path} is not valid: {problems}; export the model again")
