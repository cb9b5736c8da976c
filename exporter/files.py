"""Files and directories that are made beside their place and take it when they are whole."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engine.errors import CheckpointError, PackageError, TokenweirError

_unfinished: set[Path] = set()  # hidden directories of this process
_EIGHT = "????????/"  # ends the name of a temporary directory
_UNLOCKED = ".new"  # ends the name of a directory that nobody has locked yet
Content = bytes | Iterable[bytes | memoryview]  # a whole file, or its pieces


class Staging:
    """One directory in the making; a hidden one beside its place holds it and what it replaces."""

    def __init__(self, out: Path, hidden: Path) -> None:
        self._out = out
        self._old = hidden / "old"
        self.directory = hidden / "new"
        self.directory.mkdir()

    def publish(self) -> None:
        """Put the finished directory in its place; what was there is gone."""
        if self._out.exists():
            self._out.rename(self._old)
        try:
            self.directory.rename(self._out)
        except OSError:
            _restore(self._old, self._out)
            raise


@contextmanager
def writing_to(
    path: Path,
    refusal: type[TokenweirError] = CheckpointError,
    way_out: str = "give a directory that you may write to",
) -> Iterator[None]:
    """Turn the operating system's refusals to write below `path` into an error of ours."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno is None and "writ" in reason:  # numpy tells how far it came, and not why
            reason = os.strerror(errno.ENOSPC)
        raise refusal(f"cannot write {path}: {reason}; free space there or {way_out}") from error


@contextmanager
def scratch_directory(purpose: str) -> Iterator[Path]:
    """Give a directory below TMPDIR, and remove it at the end.

    Directories that killed processes left there for the same purpose are removed first.
    """
    parent, prefix = Path(tempfile.gettempdir()), f"tokenweir-{purpose}-"
    for _ in _abandoned(parent, prefix, _EIGHT):
        pass
    with _locked_directory(parent, prefix) as directory:
        yield directory


@contextmanager
def writing_scratch(
    num_bytes: int | None = None, refusal: type[TokenweirError] = PackageError
) -> Iterator[None]:
    """Turn refusals to write below TMPDIR into an error, which says how much is wanted if known."""
    amount = "" if num_bytes is None else f" for {num_bytes:,} bytes"
    way_out = f"set TMPDIR to a directory with room{amount}"
    with writing_to(Path(tempfile.gettempdir()), refusal, way_out):
        yield


@contextmanager
def stage(out: Path, refusal: type[TokenweirError] = PackageError) -> Iterator[Staging]:
    """Give a directory to be filled and published; without that, nothing of it is left.

    Directories that killed processes left beside `out` are removed first. Raises `refusal` if the
    disk or its permissions do not let it be written.
    """
    with writing_to(out, refusal):
        out.parent.mkdir(parents=True, exist_ok=True)
        for hidden in _abandoned(out.parent, _prefix(out), _EIGHT):
            _restore(hidden / "old", out)
        with _locked_directory(out.parent, _prefix(out)) as hidden:
            yield Staging(out, hidden)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it, so that no reader sees half of it."""
    _replace_files(path.parent, {path.name: content})


def write_directory(directory: Path, files: Mapping[str, Content]) -> None:
    """Write a checkpoint's files: a new directory appears at once, in one that exists each file.

    Nothing of an existing one is replaced before all is written.
    """
    if directory.exists():
        _replace_files(directory, files)
        return
    with stage(directory, CheckpointError) as staging:
        for name, content in files.items():
            _write_synced(staging.directory / name, content)
        staging.publish()


def remove_unfinished(directory: Path, names: Iterable[str]) -> None:
    """Remove what processes that were killed have left of files that they had begun to write."""
    for name in names:
        for _ in _abandoned(directory, f".{name}.", "[0-9]*.tmp"):
            pass


def _replace_files(directory: Path, files: Mapping[str, Content]) -> None:
    remove_unfinished(directory, files)
    temporary = {name: directory / f".{name}.{os.getpid()}.tmp" for name in files}
    with ExitStack() as stack:
        for name, content in files.items():
            stack.callback(temporary[name].unlink, missing_ok=True)
            _write_synced(temporary[name], content)
        for name in files:
            os.replace(temporary[name], directory / name)


@contextmanager
def _locked_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a directory that is locked as long as this process lives, and remove it."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, suffix=_UNLOCKED, dir=parent))
    try:
        with _lock(directory):
            # Locked before it has its name: nobody may take it for that of a dead process.
            directory = directory.rename(str(directory).removesuffix(_UNLOCKED))
            _unfinished.add(directory)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        _unfinished.discard(directory)


def remove_own_directories() -> None:
    """Remove what this process has not finished: before it ends in the middle of a computation."""
    for directory in [*_unfinished]:
        shutil.rmtree(directory, ignore_errors=True)


def _abandoned(parent: Path, prefix: str, rest: str) -> Iterator[Path]:
    """Yield each directory or file that a dead process has left, and then remove it."""
    for path in parent.glob(f"{glob.escape(prefix)}{rest}"):
        with suppress(OSError), _lock(path):  # that of a living process cannot be had
            yield path
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a path; OSError if another holds it. It ends with the process."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _restore(old: Path, out: Path) -> None:
    if old.exists() and not out.exists():
        old.rename(out)


def _prefix(out: Path) -> str:
    return f".{out.name}.export-"


def _write_synced(path: Path, content: Content) -> None:
    with path.open("wb") as file:
        with suppress(OSError):  # some disks have no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for piece in [content] if isinstance(content, bytes) else content:
            file.write(piece)
            del piece  # before the next one is made
        file.flush()
        os.fsync(file.fileno())
