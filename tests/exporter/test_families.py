"""The page of models says what the declarations of families and toolkits say."""

from __future__ import annotations

from exporter.families import PAGE, page


def test_the_page_is_that_of_the_declarations() -> None:
    assert PAGE.read_text() == page(), "python -m exporter.families writes it"
