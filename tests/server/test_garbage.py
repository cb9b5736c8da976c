"""Objects that a server has when it begins are not looked at again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from server.garbage import keep_what_is_there


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_passes_over_what_was_there_and_sees_what_is_new(unfrozen: None) -> None:
    old = [object]

    keep_what_is_there()

    new = [object]
    seen = {id(each) for each in gc.get_objects()}
    assert id(new) in seen and id(old) not in seen
