"""The directory of a run: whose it is, and what becomes of it when its owner is killed."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from server.ray.processes.run_directory import remove_what_dead_owners_left, run_directory

_OWNER = """
import sys
from pathlib import Path
from server.ray.processes.run_directory import run_directory
with run_directory(Path(sys.argv[1])) as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_directory_is_its_users_alone_and_goes_at_the_end(tmp_path: Path) -> None:
    with run_directory(tmp_path) as directory:
        mode = stat.S_IMODE(directory.stat().st_mode)

    assert mode == 0o700
    assert list(tmp_path.iterdir()) == []


def test_paths_of_sockets_are_short_enough() -> None:
    socket = "session_2026-11-22_00-02-04_123456_12345678/sockets/plasma_store.1"

    with run_directory() as directory:
        assert len(str(directory / "ray" / socket)) <= 107


def test_sockets_lie_in_tmp_and_where_nobody_may_write_there_in_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with run_directory() as directory:
        assert directory.parent == Path("/tmp")
        assert (directory / "owner").exists()  # else it stays when its owner is killed

    monkeypatch.setattr("os.access", lambda *_: False)
    with run_directory() as directory:
        assert directory.parent == tmp_path


def test_what_a_killed_owner_left_is_removed(tmp_path: Path) -> None:
    owner, path = _start_owner(tmp_path)

    owner.kill()
    owner.communicate()

    assert remove_what_dead_owners_left(tmp_path) == [path]
    assert not path.exists()


def test_what_a_living_owner_has_is_left_alone(tmp_path: Path) -> None:
    owner, path = _start_owner(tmp_path)

    removed = remove_what_dead_owners_left(tmp_path)

    assert (removed, path.is_dir()) == ([], True)
    owner.communicate("")
    assert not path.exists()


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o701])
def test_directory_that_others_can_enter_is_left_alone(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "tokenweir-x"
    path.mkdir()
    path.chmod(mode)
    (path / "owner").touch()

    assert remove_what_dead_owners_left(tmp_path) == []
    assert path.is_dir()


def test_directory_of_somebody_elses_making_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenweir-x").mkdir(0o700)

    assert remove_what_dead_owners_left(tmp_path) == []


def _start_owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())
