"""Writes the page of all settings, `settings.md`: `python -m server.settings_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.setting import told_bounds
from server.given_settings import KNOWN, SECTIONS, Known, as_toml, default_of


def page() -> str:
    """Return the page, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "Made of `server/settings.py` by `python -m server.settings_page`. Times are in seconds."
    for section, owner in SECTIONS.items():
        yield from ("", f"## [{section}]", "", f"{owner.__doc__}", "")
        yield from ("| setting | option | default | |", "|---|---|---|---|")
        yield from (_row(known) for known in KNOWN.values() if known.section == section)


def _row(known: Known) -> str:
    told, default = known.field.metadata, default_of(known.field)
    option = f"`{told['option']}`" if told["option"] else ""
    value = told.get("unset", "") if default in (None, ()) else f"`{as_toml(default)}`"
    bounds = f" Must be {told_bounds(told)}." if told_bounds(told) else ""
    return f"| `{known.field.name}` | {option} | {value} | {told['help']}{bounds} |"


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(page())
