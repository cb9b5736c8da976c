"""However much a file holds, an error about it stays readable."""

from __future__ import annotations

from exporter.listing import listed, shortened


def test_few_things_are_all_named() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed({"a": 1}, "; ") == "a"
    assert shortened([1, "two", None]) == "[1, 'two', None]"


def test_of_many_the_first_are_named_and_the_others_counted() -> None:
    found = listed(range(3_000_000))

    assert found.startswith("0, 1, 2, ")
    assert found.endswith(", 31, and 2,999,968 more")


def test_long_ones_are_cut() -> None:
    assert len(listed(["x" * 10**6] * 100)) < 32 * 310
    assert len(shortened(list(range(10**6)))) < 100
    assert len(shortened("x" * 10**6)) <= 300
    assert len(shortened({"x" * 10**6: ["y" * 10**6] * 100})) < 5_000
