"""Tokens: whose they are, what is wrong with their file, and its changes."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from engine.errors import ConfigError, Unauthenticated
from server.auth.tokens import Identity, TokenFile
from tests.fakes.clock import FakeClock

ACME = hashlib.sha256(b"tw_acme").hexdigest()
OTHER = hashlib.sha256(b"tw_other").hexdigest()


def shown(token: str) -> list[tuple[str, str | bytes]]:
    return [("x-mine", "1"), ("authorization", f"Bearer {token}")]


def written(path: Path, text: str) -> Path:
    """Write a file of tokens as editors do, by another name first."""
    new = path.with_suffix(".new")
    new.write_text(f"\ufeff{text}")
    os.replace(new, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def test_a_token_tells_its_identity(path: Path) -> None:
    written(
        path,
        f"""
        [[token]]
        sha256 = "{ACME.upper()}"
        tenant = "acme"
        max_priority = -1
        max_requests = 8
        tokens_per_minute = 60_000
        models = ["dates", "iso"]

        [[token]]
        sha256 = "{OTHER}"
        tenant = "other"
        """,
    )

    tokens = TokenFile(path)

    models = frozenset({"dates", "iso"})
    assert tokens.identity(shown("tw_acme")) == Identity("acme", -1, 8, 60_000, models)
    assert tokens.identity(shown("tw_other")) == Identity("other")


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ([], "asks for a token"),
        (shown("tw_wrong"), "not known here"),
        (shown(ACME), "not known here"),  # the file's own entry opens nothing
        ([("authorization", "Basic dXNlcjpwYXNz")], "must be `Bearer`"),
        (shown("tw_acme") * 2, "must be `Bearer` and one token"),
    ],
)
def test_without_a_known_token_nobody_is_known(
    metadata: list[tuple[str, str | bytes]], problem: str, path: Path
) -> None:
    tokens = TokenFile(written(path, f'[[token]]\nsha256 = "{ACME}"\ntenant = "acme"\n'))

    with pytest.raises(Unauthenticated, match=problem):
        tokens.identity(metadata)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[token]\n", r"not TOML: .*line 1"),
        ("", r"has no \[\[token\]\]"),
        ("tokens = 1", "has 'tokens'; every entry is"),
        ("token = 1", r"every entry is a \[\[token\]\]"),
        ('\n[[token]]\ntenant = "a"\n', "token 1, line 2: sha256 is missing: .* 64 characters"),
        ('[[token]]\nsha256 = "abc"\ntenant = "a"\n', r"line 1: sha256 \('abc'\) must be"),
        (
            f'[[token]]\nsha256 = "{ACME}"\ntenant = "a"\n\n'
            f'[[token]]\nsha256 = "{OTHER}"\ntenant = "b"\nmax_requests = 0\n',
            r"token 2, line 5: max_requests \('0'\) must be a whole number from 1",
        ),
        (
            f'[[token]]\nsha256 = "{ACME}"\ntenant = "a"\nmax_request = 4\n',
            "line 1: there is no max_request; the nearest is max_requests",
        ),
        (
            f'[[token]]\nsha25 = "{ACME}"\ntenant = "a"\n',
            "line 1: there is no sha25; the nearest is sha256",
        ),
        (
            f'[[token]]\nsha256 = "{ACME}"\ntenant = "a"\nmodels = [1]\n',
            r"models \('\[1\]'\) must be a list of models, each a name",
        ),
        (
            f'[[token]]\nsha256 = "{ACME}"\ntenant = "a"\n[[token]]\nsha256 = "{ACME.upper()}"\n'
            'tenant = "b"\n',
            "token 2, line 4: sha256 stands in an entry before",
        ),
        (
            f'[[token]]\nsha256 = "{ACME}"\ntenant = "a"\nmax_requests = 1\n'
            f'[[token]]\nsha256 = "{OTHER}"\ntenant = "a"\n',
            "token 2, line 5: max_requests and tokens_per_minute are those of all tokens",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(text: str, problem: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        TokenFile(written(path, text))

    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot be read from {path}"):
        TokenFile(path)


def test_a_changed_file_counts_within_a_second(path: Path) -> None:
    clock = FakeClock(0.0)
    tokens = TokenFile(written(path, f'[[token]]\nsha256 = "{ACME}"\ntenant = "acme"\n'), clock)
    written(path, f'# now another\n[[token]]\nsha256 = "{OTHER}"\ntenant = "other"\n')

    assert tokens.identity(shown("tw_acme")).tenant == "acme"
    clock.now = 1.0

    assert tokens.identity(shown("tw_other")).tenant == "other"
    with pytest.raises(Unauthenticated):
        tokens.identity(shown("tw_acme"))


def test_a_change_to_something_wrong_is_logged_and_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock(0.0)
    tokens = TokenFile(written(path, f'[[token]]\nsha256 = "{ACME}"\ntenant = "acme"\n'), clock)
    written(path, "[[token]]\n")

    with caplog.at_level(logging.ERROR, "server.auth"):
        for clock.now in (1.0, 2.0):
            assert tokens.identity(shown("tw_acme")).tenant == "acme"

    (record,) = caplog.records
    assert "line 1: sha256 is missing" in record.message
    assert "what was read before goes on" in record.message
