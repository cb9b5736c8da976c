"""The studies of the lab: each is there, and says how it is asked."""

from __future__ import annotations

import sys

import pytest

from loadtest.lab.__main__ import COMMAND, STUDIES, main
from loadtest.lab.result import heading


def run(*args: str) -> object:
    """Return how a run of the lab ends."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    return ended.value.code


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_says_how_it_is_asked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run(name, "--help")

    assert f"{COMMAND} {name} " in capsys.readouterr().out


def test_without_a_name_all_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run()

    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[2:]] == sorted(STUDIES)


def test_a_study_that_is_not_there_is_named_with_those_that_are() -> None:
    assert run("families") == f"no study is called 'families'; known: {', '.join(STUDIES)}"


def test_a_result_says_by_which_command_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "chaos", "a package", "--out", "x"])

    head = heading()

    assert head["command"] == "python -m loadtest.lab chaos 'a package' --out x"
    assert head["commit"] and head["machine"] and head["written_at"]
    assert isinstance(head["versions"], dict) and "numpy" in head["versions"]
