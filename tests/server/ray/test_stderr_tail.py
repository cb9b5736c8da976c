"""How a process has ended, by what it has written to its standard error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server.ray.stderr_tail import has_crashed, num_oom_kills, stderr_tail

_DIE = "import faulthandler, os, signal; faulthandler.enable(); os.kill(os.getpid(), signal.{})"


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        ("SIGSEGV", True),
        ("SIGABRT", True),
        ("SIGBUS", True),
        ("SIGKILL", False),
        ("SIGTERM", False),
    ],
)
def test_a_crash_leaves_words_and_a_kill_from_outside_does_not(
    signal: str, expected: bool, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("w") as file:
        file.write("a line of a library\n")
        file.flush()
        subprocess.run([sys.executable, "-c", _DIE.format(signal)], stderr=file)

    assert has_crashed(file.name, num_oom_kills()) is expected


def test_nobody_can_tell_of_another_machine_or_where_memory_was_short(tmp_path: Path) -> None:
    (tmp_path / "stderr").touch()

    assert has_crashed(str(tmp_path / "elsewhere"), num_oom_kills()) is None
    assert has_crashed(str(tmp_path / "stderr"), num_oom_kills() - 1) is None


def test_what_ray_writes_of_itself_is_no_last_word(tmp_path: Path) -> None:
    (path := tmp_path / "stderr").write_text(":job_id:01000000\n:actor_name:Worker\n")
    assert stderr_tail(str(path)) == ""

    path.write_text(f":job_id:01000000\n{'x' * 9000}\nabort\n:task_name:it\nat once\n")
    assert stderr_tail(str(path)) == "abort\nat once"
