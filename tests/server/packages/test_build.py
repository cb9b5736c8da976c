"""Packages are built of what a person has, once, and kept; the commands here are a script."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.errors import PackageError
from server.cli.app import run
from server.cli.serving.cache import cache
from server.packages import build
from server.packages.build import BuildOptions, build_checkpoint, build_package
from server.packages.cache import ORIGIN, locked
from server.packages.kept import kept

DIGEST = 8 * "0123abcd"
# Writes the file that makes its --out a checkpoint or a package, and notes what it was asked.
COMMAND = """
import json, os, sys, pathlib
log = pathlib.Path(os.environ["COMMANDS"])
command, source, out = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
with log.open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if os.environ.get("FAILS") == command:
    print("a warning is no error: it goes on", file=sys.stderr)
    said = os.environ.get("SAYS", "there is a fault in it")
    sys.exit(f"error: {said.format(out=out)}")
if pipe := os.environ.get("WAITS"):
    open(pipe).read()
if os.environ.get("CHANGES") == command:
    pathlib.Path(source, "added").touch()
out.mkdir(exist_ok=True)
(out / "config.json").write_text('{"model": {}}')
if command == "export":
    (out / "manifest.json").write_text("{}")
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the file in which every command that is run stands, in a line."""
    monkeypatch.setenv("TOKENWEIR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COMMANDS", str(tmp_path / "commands"))
    monkeypatch.setattr(build, "COMMAND", (sys.executable, "-c", COMMAND))
    (tmp_path / "commands").touch()
    yield tmp_path / "commands"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Give a directory of Hugging Face, with a large file."""
    directory = tmp_path / "opus"
    (directory / "1_Pooling").mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "marian"}')
    (directory / "1_Pooling" / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(2**20 + 1))
    return directory


def asked(commands: Path) -> list[list[str]]:
    return [json.loads(line) for line in commands.read_text().splitlines()]


def names(commands: Path) -> list[str]:
    return [command[0] for command in asked(commands)]


def ended_while_it_builds(
    number: signal.Signals, commands: Path, original: Path, pipe: Path
) -> str:
    """Send a signal to a start whose first command waits; return what it printed."""
    code = (
        "import sys; from server.packages import build; build.COMMAND = (sys.executable, '-c', "
        f"{COMMAND!r}); build.build_package({str(original)!r})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "WAITS": str(pipe)},
        stderr=None if number == signal.SIGKILL else subprocess.PIPE,  # its command lives on
        text=True,
    ) as process:
        while not asked(commands):
            assert process.poll() is None
        process.send_signal(number)
        return process.stderr.read() if process.stderr else ""


def test_what_is_missing_is_made_once(commands: Path, original: Path) -> None:
    said: list[str] = []

    package = build_package(original, say=said.append)
    again = build_package(original, say=said.append)

    assert names(commands) == ["import", "export"] and package == again
    (_, source, *_), (_, checkpoint, _, out, *options) = asked(commands)
    assert source == str(original) and out == str(package) and options == ["--proof", "quick"]
    assert Path(checkpoint).name == Path(package).name == "opus"
    assert [line.partition(",")[0] for line in said] == [
        f"building the checkpoint of {original}",
        f"building the package of {original}",
    ]


def test_a_checkpoint_is_exported_with_the_weights_asked_for(
    commands: Path, original: Path
) -> None:
    checkpoint = build_checkpoint(original)

    packages = [build_package(checkpoint, BuildOptions(name)) for name in (None, "int8", "int8")]

    assert names(commands) == ["import", "export", "export"]
    assert packages[0] != packages[1] == packages[2]
    assert asked(commands)[2][-2:] == ["--weights", "int8"]


def test_what_would_not_run_on_the_device_is_not_built(commands: Path, original: Path) -> None:
    with pytest.raises(PackageError, match="opus is no package, and packages are built for CPUs"):
        build_package(original, BuildOptions(device="cuda"))

    assert asked(commands) == []


def test_a_package_is_taken_as_it_is(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "manifest.json").write_text("{}")

    assert build_package(tmp_path / "package") == tmp_path / "package"
    assert build_package("s3://models/dates") == "s3://models/dates"
    with pytest.raises(PackageError, match="is a package, whose weights are what they are"):
        build_package(tmp_path / "package", BuildOptions("int8"))

    assert asked(commands) == []


@pytest.mark.parametrize("part", ["config.json", "1_Pooling/config.json", "model.safetensors"])
def test_a_directory_that_changes_is_built_anew(commands: Path, original: Path, part: str) -> None:
    first = build_package(original)
    times = (original / part).stat()
    content = (original / part).read_bytes()
    (original / part).write_bytes(content.replace(b"}", b" }") if b"}" in content else content[:-1])
    os.utime(original / part, ns=(times.st_atime_ns, times.st_mtime_ns))

    second = build_package(original)

    assert names(commands) == ["import", "export"] * 2 and first != second
    assert Path(first).is_dir()  # a server may have it open


def test_content_of_large_files_is_compared_if_asked(commands: Path, original: Path) -> None:
    weights = original / "model.safetensors"
    build_package(original)
    times = weights.stat()
    weights.write_bytes(b"\x01" * times.st_size)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))

    build_package(original)
    assert names(commands) == ["import", "export"]
    build_package(original, BuildOptions(rehash=True))

    assert names(commands) == ["import", "export"] * 2


def test_two_starts_at_once_build_once(commands: Path, original: Path) -> None:
    found: list[Path | str] = []
    threads = [
        threading.Thread(target=lambda: found.append(build_package(original))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert names(commands) == ["import", "export"] and len(set(found)) == 1 and len(found) == 4


def test_only_what_is_imported_needs_transformers(
    commands: Path,
    original: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def found(name: str) -> object:
        return None if name == "transformers" else find_spec(name)

    monkeypatch.setattr("server.cli.extras.find_spec", found)
    monkeypatch.setattr("server.cli.serving.service.serve_until_ended", lambda _: None)
    (checkpoint := tmp_path / "ours").mkdir()
    (checkpoint / "config.json").write_text('{"model": {}}')

    assert run(["serve", str(original)]) != 0
    assert "needs transformers; install it with" in capsys.readouterr().err
    assert run(["serve", str(checkpoint)]) == 0
    assert names(commands) == ["export"]


@pytest.mark.parametrize("fails", ["import", "export"])
def test_a_failure_is_told_and_nothing_is_taken_for_whole(
    commands: Path, original: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", fails)
    with pytest.raises(PackageError, match="does not become a package: there is a fault in it"):
        build_package(original)
    monkeypatch.delenv("FAILS")

    build_package(original)

    assert names(commands)[-1] == "export" and names(commands).count(fails) == 2


def test_a_killed_start_leaves_its_lock_to_its_command(
    commands: Path, original: Path, tmp_path: Path
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    ended_while_it_builds(signal.SIGKILL, commands, original, pipe)

    assert [one.kind for one in kept()] == ["unfinished"] * 2
    importing = next(one for one in kept() if one.key in asked(commands)[0][-1])
    with pytest.raises(PackageError, match="is being made or read; remove it later"):
        importing.remove()
    pipe.write_text("go on")
    build_package(original)

    assert {one.kind for one in kept()} == {"checkpoint", "package"}


def test_ctrl_c_ends_the_command_too_and_leaves_nothing(
    commands: Path, original: Path, tmp_path: Path
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")

    said = ended_while_it_builds(signal.SIGINT, commands, original, pipe)

    assert said.rstrip().endswith("KeyboardInterrupt")
    with pytest.raises(OSError, match="No such device"):  # nobody reads it any more
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    assert kept() == []


def test_a_full_disk_is_told_and_the_next_start_goes_on(
    commands: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with (
        monkeypatch.context() as patch,
        pytest.raises(
            PackageError,
            match=r"No space left .*; make room by `tokenweir cache --max-size`, or set",
        ),
    ):
        patch.setattr(Path, "write_text", full)
        build_package(original)
    assert {one.kind for one in kept()} == {"unfinished"}

    build_package(original)

    assert {one.kind for one in kept()} == {"checkpoint", "package"}


def test_a_disk_that_a_command_finds_full_is_told_with_the_same_way_out(
    commands: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "export")
    monkeypatch.setenv("SAYS", "cannot write {out}: No space left on device")

    with pytest.raises(PackageError, match=r"device \(make room by `tokenweir cache --max-size`"):
        build_package(original)


def test_a_file_is_no_cache(
    commands: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENWEIR_CACHE", str(original / "config.json"))

    with pytest.raises(PackageError, match=r"config\.json is a file; set it to a directory"):
        build_package(original)
    assert "is a file" in str(CliRunner().invoke(cache).exception)


def test_the_cache_is_private(commands: Path, original: Path, tmp_path: Path) -> None:
    build_package(original)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700

    (tmp_path / "cache").chmod(0o777)

    with pytest.raises(PackageError, match="can be written by others"):
        build_package(original)


def test_a_source_that_is_nothing_is_refused(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(PackageError, match="empty is empty; give the directory of a model"):
        build_package(tmp_path / "empty")


def test_the_cache_is_listed_and_emptied(commands: Path, original: Path) -> None:
    build_package(original)
    run = CliRunner().invoke
    entries = [json.loads(line) for line in run(cache, ["--json"]).stdout.splitlines()]
    assert {entry["kind"] for entry in entries} == {"checkpoint", "package"}
    assert {entry["built_of"] for entry in entries} == {str(original)}
    key = next(entry["key"] for entry in entries if entry["kind"] == "package")

    assert "the cache has no such" in run(cache, ["--remove", "such"]).stderr
    assert "is no size" in run(cache, ["--max-size", "much"]).stderr
    assert key not in run(cache, ["--remove", key]).stdout and len(kept()) == 1
    for size in ("1GB", "1 gib", "900K"):
        assert " bytes in 1 directory" in run(cache, ["--max-size", size]).stdout
    run(cache, ["--max-size", "0"])

    assert kept() == []


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"kind": "package"}'])
def test_a_damaged_entry_is_listed_as_unfinished(
    commands: Path, original: Path, content: str
) -> None:
    build_package(original)
    for one in kept():
        (one.directory / ORIGIN).write_text(content)

    assert CliRunner().invoke(cache).stdout.count("unfinished") == 2
    assert CliRunner().invoke(cache, ["--max-size", f"{'9' * 400}GB"]).exit_code == 0


def test_what_is_being_made_stays_and_all_others_are_removed(
    commands: Path, original: Path, tmp_path: Path
) -> None:
    build_package(original)
    (part := tmp_path / "cache" / "packages" / f".{DIGEST}.part").mkdir(parents=True)

    with locked(part.parent, DIGEST):  # by a worker that fetches it
        done = CliRunner().invoke(cache, ["--clear"])
    assert isinstance(done.exception, PackageError)
    assert str(done.exception) == f".{DIGEST}.part is being made or read; remove it later"

    assert [one.directory for one in kept()] == [part]
    assert CliRunner().invoke(cache, ["--clear"]).exit_code == 0 and kept() == []


def test_a_removal_that_is_cut_off_leaves_nothing_that_looks_whole(
    commands: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_package(original)
    monkeypatch.setattr("shutil.rmtree", lambda _: None)

    for one in kept():
        one.remove()

    assert {one.kind for one in kept()} == {"unfinished"}


def test_what_is_removed_by_name_takes_no_room_of_the_rest(commands: Path, original: Path) -> None:
    build_package(original)
    one, other = kept()
    for size, entry in ((2000, one), (1000, other)):
        (entry.directory / "more").write_bytes(bytes(size))

    CliRunner().invoke(cache, ["--remove", one.key, "--max-size", "2k"])

    assert [entry.key for entry in kept()] == [other.key]


def test_a_directory_that_changes_while_it_is_read_leaves_nothing(
    commands: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHANGES", "import")

    with pytest.raises(PackageError, match="was changed while it was read; start again"):
        build_package(original)

    assert kept() == []


def test_hidden_files_do_not_count_and_too_many_others_are_refused(
    commands: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_MOST_FILES", 4)
    (original / ".git").mkdir()
    for number in range(5):
        (original / ".git" / f"{number}").touch()
    first = build_package(original)
    (original / "model.safetensors").write_bytes(b"another")
    assert build_package(original) != first

    for number in range(5):
        (original / f"{number}").touch()
    with pytest.raises(PackageError, match="has more than 4 files"):
        build_package(original)


def test_models_that_differ_in_large_files_alone_are_two(commands: Path, original: Path) -> None:
    other = original.parent / "other" / original.name
    shutil.copytree(original, other)
    (other / "model.safetensors").write_bytes(b"\x01" * (2**20 + 1))
    for path in (*original.rglob("*"), *other.rglob("*")):
        os.utime(path, (0, 0))  # as archives have it that are the same each time

    assert build_package(original) != build_package(other)


def test_a_result_that_somebody_has_removed_is_built_anew(commands: Path, original: Path) -> None:
    shutil.rmtree(build_package(original))

    assert Path(build_package(original)).is_dir()


def test_a_source_that_may_not_be_read_is_told_as_that(
    commands: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(original / "config.json"))

    monkeypatch.setattr(build, "_digests", refuse)
    with pytest.raises(PackageError, match=r"config\.json cannot be read: Permission denied"):
        build_package(original)


@pytest.mark.parametrize("harm", ["cut", "removed"])
def test_a_damaged_result_is_built_anew(commands: Path, original: Path, harm: str) -> None:
    part = Path(build_package(original)) / "manifest.json"
    part.write_text("{") if harm == "cut" else part.unlink()

    assert (Path(build_package(original)) / "manifest.json").read_text() == "{}"
    assert names(commands) == ["import", "export", "export"]


def test_a_result_that_was_signed_is_not_built_anew(commands: Path, original: Path) -> None:
    (Path(build_package(original)) / "manifest.sig").write_text("signature")

    assert (Path(build_package(original)) / "manifest.sig").exists()
    assert names(commands) == ["import", "export"]


def test_what_killed_commands_had_begun_is_removed_by_the_next(
    commands: Path, original: Path, tmp_path: Path
) -> None:
    begun = [tmp_path / "cache" / "built" / f"opus-{DIGEST[:16]}"]
    begun.append(tmp_path / "cache" / "packages" / f".{DIGEST}.part")
    for directory in begun:
        (directory / "half").mkdir(parents=True, mode=0o700)
    (held := tmp_path / "cache" / "built" / f"net-{DIGEST[:16]}").mkdir()
    (yours := tmp_path / "cache" / "packages" / "notes").mkdir()

    with locked(held.parent, held.name):  # another start is at it
        build_package(original)

    assert [one.exists() for one in (*begun, held, yours)] == [False, False, True, True]
    assert yours not in [one.directory for one in kept()]


def test_a_change_in_a_linked_folder_is_seen(commands: Path, original: Path) -> None:
    (original / "1_Pooling").rename(shared := original.parent / "shared")
    (original / "1_Pooling").symlink_to(shared)
    first = build_package(original)

    (shared / "config.json").write_text("{ }")

    assert build_package(original) != first


def test_links_in_the_cache_are_left_alone(commands: Path, original: Path, tmp_path: Path) -> None:
    build_package(original)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for folder, mark in (("packages", "manifest.json"), ("built", ORIGIN)):
        (elsewhere / mark).write_text("{}")
        (tmp_path / "cache" / folder).mkdir(exist_ok=True)
        (tmp_path / "cache" / folder / f"net-{DIGEST[:16]}").symlink_to(elsewhere)

    assert CliRunner().invoke(cache, ["--clear"]).exit_code == 0

    assert kept() == []
    assert sorted(os.listdir(elsewhere)) == ["manifest.json", ORIGIN]
