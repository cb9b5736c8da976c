"""The table of toolkits says what their declarations say."""

from __future__ import annotations

import re
from pathlib import Path

from exporter.toolkits.table import toolkit_table

README = Path(__file__).parents[3] / "exporter" / "README.md"


def test_the_table_of_the_readme_is_that_of_the_declarations() -> None:
    found = re.search(r"^\| toolkit \|(.*\n)+?(?=\n)", README.read_text(), re.M)

    assert found is not None
    assert found[0].strip() == toolkit_table(), "python -m exporter.toolkits.table prints it"
