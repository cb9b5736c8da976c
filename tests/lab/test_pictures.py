"""The pictures of the pages: each is there, small, and shown by a page of its room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtest.lab.pictures.command import ATTENTION, LOAD_TEST, MAX_BYTES, SPEED, WEB_PAGE

ROOT = Path(__file__).parents[2]
PICTURES = sorted(path.relative_to(ROOT) for path in ROOT.glob("*/docs/pictures/*.png"))


def test_every_picture_is_made_by_the_study() -> None:
    assert sorted([ATTENTION, LOAD_TEST, SPEED, WEB_PAGE]) == PICTURES


@pytest.mark.parametrize("picture", PICTURES, ids=str)
def test_a_picture_is_small_and_shown_by_a_page_of_its_room(picture: Path) -> None:
    room = ROOT / picture.parts[0]
    shown = {
        (page.parent / link).resolve()
        for page in room.glob("**/*.md")
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    }

    assert (ROOT / picture).stat().st_size <= MAX_BYTES
    assert ROOT / picture in shown
