"""The exit codes tell kinds of failure apart, the same for every command."""

from __future__ import annotations

import pytest
from tokenweir import _errors

from engine import errors
from loadtest.errors import LoadTestError, NoServerError
from server.cli.app import run
from server.cli.exit_codes import MEANINGS, code_of


def _tree(base: type[Exception]) -> list[type[Exception]]:
    return [base, *(below for child in base.__subclasses__() for below in _tree(child))]


@pytest.mark.parametrize(
    "error_class",
    [
        error
        for base in (errors.TokenweirError, _errors.TokenweirClientError, LoadTestError)
        for error in _tree(base)
        if error.__module__.partition(".")[0] in ("engine", "tokenweir", "loadtest")
    ],
    ids=lambda error: f"{error.__module__}.{error.__name__}",
)
def test_every_error_has_a_code_that_is_explained(error_class: type[Exception]) -> None:
    assert code_of(error_class.__new__(error_class)) in MEANINGS


def test_kinds_of_failure_have_different_codes() -> None:
    codes = [
        code_of(errors.CertificateError("x")),
        code_of(errors.PackageError("x")),
        code_of(errors.Draining("x", 1.0)),
    ]

    assert codes == [1, 3, 4]
    assert code_of(errors.ConfigError("x")) == code_of(OSError("x")) == 3
    assert code_of(NoServerError("x")) == 4
    assert code_of(ZeroDivisionError()) is None


def test_the_help_explains_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert all(f"{code} {meaning}" in out for code, meaning in MEANINGS.items())
