"""The page of options says what the table of options says."""

from __future__ import annotations

from engine.requests.options import OPTIONS
from server.cli.options_page import PAGE, page


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m server.cli.options_page writes it"


def test_every_option_has_its_row() -> None:
    rows = [line.split(" ")[1] for line in page().splitlines() if line.startswith("| `")]

    assert {f"`{option.name}`" for option in OPTIONS} <= set(rows)
    assert len(rows) == len(set(rows))
