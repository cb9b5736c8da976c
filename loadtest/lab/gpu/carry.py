#!/usr/bin/env python3
"""Packs what the rented machine lacks into `.carry/`, small enough to travel with one call.

Runs from the project's root with any Python from 3.11 on that has pip and zstandard. It downloads
wheels for the rented machine's Python in the versions of constraints.txt, takes out of onnxruntime
what no session of ours loads, and of the provider for CUDA the kernels that are not for Hopper
(sm_90: H100 and H200 alike), and packs the rest. `.carry/dropped.json` lists what is left out.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_LIMIT = 64 * 2**20  # bytes of the project's files and what is carried, together
_ARCHITECTURE = 90
_NAMES = (
    *("onnxruntime-gpu", "llguidance", "pydantic", "pydantic_core", "typing_extensions"),
    *("typing-inspection", "annotated-types", "protobuf", "googleapis-common-protos"),
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"),
)
_PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
# Nothing that `import onnxruntime` and a session for CUDA load is among them.
_DROPPED = (
    r"onnxruntime/capi/libonnxruntime_providers_tensorrt\.so"
    r"|onnxruntime/capi/libonnxruntime\.so.*"  # Python has the same inside its own module
    r"|onnxruntime/(tools|quantization|transformers|datasets|backend)/.*"
    r"|onnxruntime/ThirdPartyNotices\.txt"
    r"|.*/(tests?|__pycache__)/.*"
    r"|.*\.data/.*"
)
# Mixtures of experts, which no graph of ours has: all kernels of an entry have one of these names.
_EXPERTS = re.compile(rb"[Mm]oe|GroupProblemShape")
_MAGIC, _CODE = 0xBA55ED50, 2


def main() -> None:
    """Pack, and weigh what was packed with the project."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default="3.12", help="of the rented machine [%(default)s]")
    parser.add_argument("--wheels", type=Path, help="where wheels are kept and looked for first")
    parser.add_argument(
        "--all-kernels", action="store_true", help="prune nothing; in parts, one for each call"
    )
    given = parser.parse_args()
    root = Path.cwd()
    if not (root / "constraints.txt").is_file() or not (root / "engine").is_dir():
        sys.exit("run this from the project's root: there is no constraints.txt and engine/ here")
    carry = root / ".carry"
    shutil.rmtree(carry, ignore_errors=True)
    carry.mkdir()
    commit = _git(root, "rev-parse", "HEAD")
    (carry / "commit").write_text(commit)  # the copy on the rented machine may have no history
    exclude = root / _git(root, "rev-parse", "--git-path", "info/exclude").strip()
    if "/.carry/" not in (lines := exclude.read_text() if exclude.is_file() else ""):
        exclude.parent.mkdir(parents=True, exist_ok=True)
        exclude.write_text(f"{lines}\n/.carry/\n")
    with tempfile.TemporaryDirectory(prefix="carry-") as scratch:
        tree = Path(scratch) / "tree"
        wheels = given.wheels or Path(scratch) / "wheels"
        for name, version in _pins(root / "constraints.txt").items():
            _unpack(_wheel(name, version, wheels, given.python), tree)
        _say_installed(root, tree)
        report = prune(tree / _PROVIDER) if not given.all_kernels else {}
        (carry / "dropped.json").write_text(json.dumps(report, indent=1) + "\n")
        pack(tree, carry / "site.tar.xz")
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = [root / name for name in listed.split("\0") if name]
    of_project = sum(path.lstat().st_size for path in paths if os.path.lexists(path))
    of_carry = sum(path.stat().st_size for path in carry.rglob("*"))
    share = (of_project + of_carry) / _LIMIT
    print(f"project {of_project:,} + .carry {of_carry:,} bytes: {share:.0%} of {_LIMIT:,}")
    if given.all_kernels:
        split(carry, _LIMIT - of_project - 2**20)
    elif share > 1:
        sys.exit("too much for one call: remove files that are not ignored")


def _pins(constraints: Path) -> dict[str, str]:
    """Return the version of each distribution that is carried."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    known = dict(line.split("==") for line in lines if "==" in line)
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in known.items()}
    return {name: pinned[name.replace("_", "-")] for name in _NAMES}


def _wheel(name: str, version: str, wheels: Path, python: str) -> Path:
    """Return a distribution's wheel for the rented machine, downloaded unless it is there."""
    wheels.mkdir(parents=True, exist_ok=True)
    tag = f"cp{python.replace('.', '')}"

    def found() -> list[Path]:
        seen = sorted(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        return [path for path in seen if re.search(rf"{tag}|-py3-|abi3", path.name)]

    if not found():
        tags = [f"manylinux_2_{n}_x86_64" for n in range(40, 4, -1)]
        platforms = [*tags, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        command += [str(wheels), "--only-binary=:all:", "--implementation", "cp"]
        command += ["--python-version", python, *(f"--platform={one}" for one in platforms)]
        environment = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
        subprocess.run([*command, f"{name}=={version}"], check=True, env=environment)
    return found()[-1]


def _unpack(wheel: Path, tree: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        kept = [name for name in archive.namelist() if not re.fullmatch(_DROPPED, name)]
        archive.extractall(tree, kept)


def _say_installed(root: Path, tree: Path) -> None:
    """Write what pip would of the project itself: a worker asks for its own version."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    place = tree / f"{name}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


# -- the provider for CUDA -------------------------------------------------------------------------


class _Entry(NamedTuple):
    """A program of one architecture in the section of device code."""

    architecture: int
    start: int  # place of its bytes in the file
    size: int
    packed: int  # bytes of the compressed program; 0: it is not compressed


def prune(path: Path) -> dict[str, Any]:
    """Write zeros over device code that is not needed: offsets stay, and zeros pack to nothing.

    The header of an entry is left, which names its architecture, so the runtime of CUDA never looks
    at one that is not of the GPU; a kernel of a mixture of experts fails when it is asked for.
    """
    data = bytearray(path.read_bytes())
    counts: collections.Counter[str] = collections.Counter()
    experts: set[str] = set()
    for entry in _entries(data, *_section(data, b".nv_fatbin")):
        verdict = "kept"
        if entry.architecture != _ARCHITECTURE:
            verdict = "dropped: other architectures"
        else:
            raw = bytes(data[entry.start : entry.start + (entry.packed or entry.size)])
            names = set(re.findall(rb"\.text\.(_Z\w+)", _decompressed(raw)))
            if names and all(map(_EXPERTS.search, names)):
                verdict = "dropped: mixtures of experts"
                experts |= {name.decode(errors="replace")[:120] for name in names}
        if verdict != "kept":
            data[entry.start : entry.start + entry.size] = bytes(entry.size)
        counts[verdict] += entry.size
    if not counts["kept"]:
        sys.exit(f"nothing is left for sm_{_ARCHITECTURE}: the format of the provider is another")
    path.write_bytes(data)
    print(f"device code, bytes: {dict(counts)}")
    return {"bytes": counts, "kernels": sorted(experts)}


def _decompressed(program: bytes) -> bytes:
    if program.startswith(b"\x7fELF"):
        return program
    import zstandard  # here, for nothing else is to be installed

    raw: bytes = zstandard.ZstdDecompressor().decompress(program, max_output_size=2**30)
    return raw


def _section(data: bytearray, wanted: bytes) -> tuple[int, int]:
    """Return the place and size of a section of a 64-bit ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        sys.exit("the provider is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, offset, length in headers:
        if data[names + name : data.index(b"\0", names + name)] == wanted:
            return offset, length
    sys.exit(f"the provider has no section {wanted.decode()}")


def _entries(data: bytearray, offset: int, size: int) -> Iterator[_Entry]:
    at, end = offset, offset + size
    while at + 16 <= end:
        magic, _, header_size, length = struct.unpack_from("<IHHQ", data, at)
        if magic != _MAGIC:
            at += 4  # containers are aligned
            continue
        start, at = at + header_size, at + header_size + length
        while start < at:
            kind, _, header, entry_size = struct.unpack_from("<HHIQ", data, start)
            packed, architecture = struct.unpack_from("<I8xI", data, start + 16)
            if kind != _CODE or header < 32:  # no PTX, which a newer GPU would compile
                sys.exit(f"an entry of kind {kind} at {start:#x}: the format is another")
            yield _Entry(architecture, start + header, entry_size, packed)
            start += header + entry_size


# -- the archive -----------------------------------------------------------------------------------


def pack(tree: Path, target: Path) -> None:
    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 2**26}
    with lzma.open(target, "wb", filters=[{"id": lzma.FILTER_X86}, lzma2]) as packed:
        with tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(tree.rglob("*")):
                if path.is_file():
                    archive.add(path, str(path.relative_to(tree)), filter=anonymous)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    (target.parent / "site.sha256").write_text(f"{digest}\n")


def split(carry: Path, room: int) -> None:
    """Cut the archive into parts, each small enough beside the project."""
    whole = carry / "site.tar.xz"
    with whole.open("rb") as file:
        for number, part in enumerate(iter(lambda: file.read(room), b"")):
            folder = carry / f"part{number}"
            folder.mkdir()
            (folder / f"{whole.name}.{number}").write_bytes(part)
            print(f"  .carry/part{number}: {len(part):,}; see README.md")
    whole.unlink()


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    main()
