"""The calls for threads are those for asyncio."""

from __future__ import annotations

import runpy
from pathlib import Path

import tokenweir

MAKER = Path(tokenweir.__file__).parents[2] / "sync_calls.py"


def test_the_calls_for_threads_are_made_of_those_for_asyncio() -> None:
    maker = runpy.run_path(str(MAKER))

    assert maker["MADE"].read_text() == maker["made"](), "run `make proto`"
