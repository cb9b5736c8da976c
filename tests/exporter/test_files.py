"""A file in the making stands beside its place, and the remains of a dead process there go."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import CheckpointError, PackageError
from exporter.files import (
    remove_unfinished,
    scratch_directory,
    stage,
    write_directory,
    writing_scratch,
    writing_to,
)

UNFINISHED = """
    import sys
    from pathlib import Path
    from exporter.files import scratch_directory, stage

    with {begun} as made:
        (getattr(made, "directory", made) / "file").write_text("half")
        {interrupted}
        print("ready", flush=True)
        sys.stdin.read()
"""


def _killed(out: Path, begun: str = "stage(Path(sys.argv[1]))", interrupted: str = "") -> None:
    """Let a process begin to make `out`, and kill it where it cannot clean up."""
    code = textwrap.dedent(UNFINISHED.format(begun=begun, interrupted=interrupted))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()


def test_what_is_made_appears_whole_in_the_place_of_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "package"
    for text in ("first", "second"):
        with stage(out) as staging:
            (staging.directory / "file").write_text(text)
            staging.publish()

    assert (out / "file").read_text() == "second"
    assert out.stat().st_mode & 0o777 == 0o755
    assert os.listdir(tmp_path) == ["package"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_is_not_finished_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error), stage(tmp_path / "package") as staging:
        (staging.directory / "file").write_text("half")
        raise error

    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    out = tmp_path / "package"
    _killed(out)
    assert len(os.listdir(tmp_path)) == 1, "hidden, and left behind"

    with stage(out):
        pass

    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_had_begun_to_write_is_removed_by_the_next_one(
    tmp_path: Path,
) -> None:
    (tmp_path / ".state.1234.tmp").write_bytes(b"half")
    (tmp_path / ".state.notes.tmp").write_bytes(b"of somebody else")

    def pieces() -> Iterator[bytes]:
        yield b"whole"
        remove_unfinished(tmp_path, ["state"])  # as another process would
        (temporary,) = tmp_path.glob(".state.[0-9]*.tmp")
        assert temporary.name != ".state.1234.tmp"

    write_directory(tmp_path, {"state": pieces()})

    assert sorted(os.listdir(tmp_path)) == [".state.notes.tmp", "state"]
    assert (tmp_path / "state").read_bytes() == b"whole"


def test_what_another_process_is_making_stays(tmp_path: Path) -> None:
    out = tmp_path / "package"
    (tmp_path / ".package.export-notes").write_text("a file of somebody else")
    with stage(out) as running:
        (running.directory / "file").write_text("half")

        with stage(out) as other:
            (other.directory / "file").write_text("whole")
            other.publish()

        assert (running.directory / "file").read_text() == "half"
        running.publish()

    assert (out / "file").read_text() == "half"
    assert sorted(os.listdir(tmp_path)) == [".package.export-notes", "package"]


def test_what_was_moved_aside_when_the_process_died_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "package"
    with stage(out) as staging:
        (staging.directory / "file").write_text("good")
        staging.publish()
    _killed(out, interrupted='Path(sys.argv[1]).rename(made.directory.with_name("old"))')
    assert not out.exists()

    with stage(out):
        assert (out / "file").read_text() == "good"

    assert os.listdir(tmp_path) == ["package"]


def test_what_a_killed_process_left_in_the_temporary_directory_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "tokenweir-twin-notes").write_text("a file of somebody else")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with scratch_directory("twin") as running:
        _killed(tmp_path, begun='scratch_directory("twin")')
        assert len(os.listdir(tmp_path)) == 3

        with scratch_directory("twin") as another:
            assert sorted(tmp_path.glob("*-twin-????????")) == sorted([running, another])

    assert os.listdir(tmp_path) == ["tokenweir-twin-notes"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError("problem writing element 5")],
)
def test_a_full_disk_is_told_with_its_place_and_the_way_out(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with pytest.raises(CheckpointError, match=r"write out: No space left on device; free space"):
        with writing_to(Path("out")):
            raise error
    with pytest.raises(PackageError, match=rf"write {tmp_path}: No space.* TMPDIR .* 28,000 bytes"):
        with writing_scratch(28_000):
            raise error
