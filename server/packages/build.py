"""Packages that are built of something else: a checkpoint, or a model of Hugging Face or its Hub.

The commands that a person would type make the missing parts, `tokenweir import` and `tokenweir
export --proof quick`, each in a process of its own, which gives back its memory. The results lie in
the user's cache, one directory for each state of a source and each set of options: its path, the
names, sizes and times of all its files count, and the content of small ones.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, Literal

from engine.config import Device
from engine.errors import PackageError
from engine.package.manifest import FORMAT_VERSION
from engine.package.recognised import recognise
from server.packages.address import is_remote
from server.packages.cache import BUILT, ORIGIN, locked, make_private, user_cache
from server.packages.hub import download
from server.packages.kept import remove_unfinished

_SMALL = 2**20  # bytes of a file whose content is looked at each time
_MOST_FILES = 10_000
# `tokenweir` of this environment, whatever PATH says.
COMMAND: tuple[str, ...] = (sys.executable, "-P", "-c", "from server.cli import main; main()")
_MAKE_ROOM = "make room by `tokenweir cache --max-size`"
_ENDS_WITHIN = 10.0  # seconds, in which an interrupted command has removed what it had begun
Kind = Literal["checkpoint", "package"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class BuildOptions:
    """Options of the packages that are built, for CPUs."""

    weights: str | None = None  # as `tokenweir export` takes it
    device: Device | None = None  # that is to run it; None: any
    rehash: bool = False  # compare the content of large files as well


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def is_package(given: Path | str) -> bool:
    """Say whether there is nothing to build."""
    stage = recognise(given).stage
    return stage == "package" or (is_remote(given) and stage != "name")


def build_package(
    given: Path | str, options: BuildOptions = BuildOptions(), say: Say = _say
) -> Path | str:
    """Return a package: the given one, or one that is built and kept for the next time.

    Raises PackageError if it is nothing that a package can be built of, or if that fails.
    """
    if is_package(given):
        if options.weights is not None and not is_remote(given):
            raise PackageError(
                f"{given} is a package, whose weights are what they are; give the checkpoint or "
                "model that it was made of, or leave out --weights"
            )
        return given
    if options.device == "cuda":
        raise PackageError(
            f"{given} is no package, and packages are built for CPUs; make one for a GPU with "
            "`tokenweir export --target cuda` and `tokenweir verify --device cuda`, or leave out "
            "the device"
        )
    source = _source(given)
    weights = [] if options.weights is None else ["--weights", options.weights]

    def commands(out: Path) -> Iterator[list[str]]:
        checkpoint = build_checkpoint(source, options, say, called=given)
        yield ["export", str(checkpoint), "--out", str(out), "--proof", "quick", *weights]

    return _built(source, "package", given, weights, commands, options, say)


def build_checkpoint(
    given: Path | str,
    options: BuildOptions = BuildOptions(),
    say: Say = _say,
    *,
    called: Path | str | None = None,
) -> Path:
    """Return a checkpoint: the given one, or one that is imported; raises as above.

    `called` is what the user gave, if that is the name of a model whose files are given.
    """
    source = _source(given)
    if recognise(source).stage == "checkpoint":
        return source

    def commands(out: Path) -> Iterator[list[str]]:
        yield ["import", str(source), "--out", str(out)]

    return _built(source, "checkpoint", called or given, [], commands, options, say)


def _source(given: Path | str) -> Path:
    """Return the directory or file of a model; one of the Hub is fetched."""
    found = recognise(given)
    if found.stage == "name":
        name, _, revision = found.given.partition("@")
        return download(name, revision or None)
    if problem := found.problem("original", "checkpoint"):
        raise PackageError(problem)
    return Path(given)


def _built(
    source: Path,
    kind: Kind,
    given: Path | str,
    options: list[str],
    commands: Callable[[Path], Iterator[list[str]]],
    build: BuildOptions,
    say: Say,
) -> Path:
    cache, name = user_cache(), recognise(given).name
    try:
        files = _files(source)
        state = _state(source, files)
    except OSError as error:
        raise PackageError(
            f"{error.filename or source} cannot be read: {error.strerror}; let this user read it, "
            "and start again"
        ) from error
    try:
        make_private(cache)
        make_private(cache / BUILT)
        digest = sha256(
            json.dumps([FORMAT_VERSION, kind, name, options, state]).encode()
        ).hexdigest()
        key = f"{name}-{digest[:16]}"
        entry = cache / BUILT / key
        with locked(cache / BUILT, key) as lock:
            if _is_whole(entry, name, source, files, build):
                os.utime(entry / ORIGIN)  # used last
                return entry / name
            entry.mkdir(mode=0o700, exist_ok=True)
            (entry / ORIGIN).unlink(missing_ok=True)
            shutil.rmtree(entry / name, ignore_errors=True)  # damaged
            remove_unfinished()
            try:
                for command in commands(entry / name):
                    called = str(given).removeprefix("hf://")
                    say(f"building the {kind} of {called}, kept in {entry / name}")
                    _run(command, source, lock)
                if not source.exists() or _state(source, _files(source)) != state:
                    shutil.rmtree(entry)
                    raise PackageError(f"{source} was changed while it was read; start again")
            except BaseException:
                with suppress(OSError):  # it is not empty
                    entry.rmdir()
                raise
            origin = {
                "built_of": str(source.absolute()),
                "kind": kind,
                "options": options,
                "built_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "sha256": _digests(source, files),
                "num_bytes": _sizes(entry / name),
            }
            (part := entry / f".{ORIGIN}").write_text(json.dumps(origin, indent=1))
            part.rename(entry / ORIGIN)
            return entry / name
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = f"{_MAKE_ROOM}, or " if is_full else ""
        raise PackageError(
            f"{source} cannot be kept as a {kind} in {cache}: {error}; {way_out}set "
            "TOKENWEIR_CACHE to another directory"
        ) from error


def _files(source: Path) -> Mapping[str, os.stat_result]:
    """Return the files of a model by their names below its directory."""
    if source.is_file():
        return {source.name: source.stat()}
    files: dict[str, os.stat_result] = {}
    for folder, folders, names in os.walk(source, onerror=_raise, followlinks=True):
        folders[:] = [one for one in folders if not one.startswith(".")]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if path.is_file():
                files[str(path.relative_to(source))] = path.stat()
        if len(files) > _MOST_FILES:
            raise PackageError(
                f"{source} has more than {_MOST_FILES:,} files, and no model has so many; give a "
                "directory that holds the model alone"
            )
    return dict(sorted(files.items()))


def _raise(error: OSError) -> None:
    raise error


def _state(source: Path, files: Mapping[str, os.stat_result]) -> list[Any]:
    small = {name: found for name, found in files.items() if found.st_size <= _SMALL}
    times = [[name, found.st_size, found.st_mtime_ns] for name, found in files.items()]
    # Two models of one shape may have all of these in common: archives often have no times.
    return [str(source.resolve()), times, _digests(source, small)]


def _digests(source: Path, files: Mapping[str, os.stat_result]) -> dict[str, str]:
    def digest(name: str) -> str:
        with (source if source.is_file() else source / name).open("rb") as file:
            return file_digest(file, "sha256").hexdigest()

    return {name: digest(name) for name in files}


def _sizes(result: Path) -> dict[str, int]:
    return {name: found.st_size for name, found in _files(result).items()}


def _is_whole(
    entry: Path, name: str, source: Path, files: Mapping[str, os.stat_result], build: BuildOptions
) -> bool:
    """Say whether the result is there whole; with `rehash`, if it is that of these very bytes."""
    try:
        origin = json.loads((entry / ORIGIN).read_bytes())
        if not origin["num_bytes"].items() <= _sizes(entry / name).items():  # a signature is more
            return False
        return not build.rehash or origin["sha256"] == _digests(source, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _run(command: list[str], source: Path, lock: int) -> None:
    """Run a command of ours, which tells its progress; PackageError if it fails.

    It holds the lock as well: where this process is killed, the next one waits for its end.
    """
    piped = not sys.stderr.isatty()
    with subprocess.Popen(
        [*COMMAND, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if piped else None,
        text=True,
        pass_fds=[lock],
        process_group=0,  # Ctrl-C is told to it once, by this process
    ) as process:
        try:
            reasons = [] if process.stderr is None else _pass_on(process.stderr)
            code = process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(_ENDS_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if code:
        said = "; ".join(reasons) or f"`tokenweir {command[0]}` ended with {code}"
        if os.strerror(errno.ENOSPC) in said and str(user_cache()) in said:
            said += f" ({_MAKE_ROOM}, or set TOKENWEIR_CACHE)"
        raise PackageError(f"{source} does not become a package: {said}")


def _pass_on(lines: Iterable[str]) -> list[str]:
    """Print the lines of a command, and return its error, which its caller tells."""
    reasons = []
    for line in lines:
        if line.startswith("error: "):
            reasons.append(line.removeprefix("error: ").rstrip("\n"))
        else:
            sys.stderr.write(line)
    return reasons
