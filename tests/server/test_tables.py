"""What tables say of a package."""

from __future__ import annotations

import pytest

from server.cli.tables import certificate_table, print_table
from tests.server.fakes import generation_package


def test_the_certificate_shows_what_a_package_gives_to_requests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ids = range(100, 150)
    package = generation_package(
        beam=4, length_power=1.0, forced_begin=[7], forced_end=1, banned_tokens=ids
    )

    print_table(certificate_table(package.manifest, package.manifest.certificate))

    out = capsys.readouterr().out
    told = " ".join(part for line in out.splitlines() for part in line.strip("│└┘─ ").split("│"))
    assert "banned_tokens [100 101 102 103 104 105 106 107, 50 in all]" in " ".join(told.split())
    assert "beam 4, forced_begin [7], forced_end 1, length_power 1" in " ".join(told.split())
    assert max(map(len, out.splitlines())) <= 80


def test_the_certificate_of_a_package_without_defaults_has_no_row_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = generation_package()

    print_table(certificate_table(package.manifest, package.manifest.certificate))

    assert "defaults" not in capsys.readouterr().out
