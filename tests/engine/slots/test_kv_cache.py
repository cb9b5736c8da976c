"""The slot cache against a dictionary of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.package.manifest import CacheDtype, CacheShape
from engine.slots.batch import RowOp
from engine.slots.memory import STEPS_AT_HAND
from engine.slots.rows import SlotCache
from tests.engine.slots.test_pages import needs_page_map, resident

SLOTS, MAX_LEN, MAX_SOURCE = 4, 6, 5
SHAPE = CacheShape(num_layers=2, num_kv_heads=2, max_len=MAX_LEN, head_dim=3)
CROSS_SHAPE = SHAPE.model_copy(update={"max_len": MAX_SOURCE})

Row = tuple[float, int]  # the number that fills it, length
Rows = dict[int, Row]


def fill(cache: SlotCache, row: int, content: Row) -> None:
    value, length = content
    for i, layer in enumerate(cache.layers):
        layer.key[row, :, :length], layer.value[row, :, :length] = value + i, -value - i
    cache.lengths[row] = length


def fill_source(cache: SlotCache, row: int, content: Row) -> None:
    value, length = content
    for i, layer in enumerate(cache.cross_layers):
        layer.key[row, :, :length], layer.value[row, :, :length] = value * 2, i
    cache.source_lengths[row] = length


def contents(cache: SlotCache, row: int) -> list[np.ndarray]:
    length, source_length = cache.lengths[row], cache.source_lengths[row]
    return [
        *(array[row, :, :length] for layer in cache.layers for array in layer),
        *(array[row, :, :source_length] for layer in cache.cross_layers for array in layer),
    ]


def cache_of(rows: Rows, sources: Rows) -> SlotCache:
    cache = SlotCache(SLOTS, SHAPE, CROSS_SHAPE)
    for row, content in rows.items():
        fill(cache, row, content)
    for row, content in sources.items():
        fill_source(cache, row, content)
    return cache


def rows_up_to(length: int) -> st.SearchStrategy[Rows]:
    return st.dictionaries(
        st.integers(0, SLOTS - 1), st.tuples(st.floats(1, 9), st.integers(1, length))
    )


@st.composite
def rows_and_ops(draw: st.DrawFn) -> tuple[tuple[Rows, Rows], list[RowOp], tuple[Rows, Rows]]:
    rows, sources = draw(rows_up_to(MAX_LEN)), draw(rows_up_to(MAX_SOURCE))
    ops: list[RowOp] = []
    after, sources_after = dict(rows), dict(sources)
    for _ in range(draw(st.integers(0, 8))):
        one, other = draw(st.permutations(range(SLOTS)))[:2]
        kinds = ["cut", "clear", "cut_source", "clear_source", "copy_source", "swap", "copy"]
        kinds += ["move"] * (other not in after)
        if other in sources_after:
            kinds.remove("copy_source")  # its target is empty
        op = RowOp(draw(st.sampled_from(kinds)), one, other)
        ops.append(op)
        found, replaced = after.get(one), after.pop(other, None)
        if op.kind in ("cut_source", "clear_source"):
            sources_after.pop(other, None)
        if op.kind == "copy_source" and one in sources_after:
            sources_after[other] = sources_after[one]
        of_sources = op.kind.endswith("_source")
        kept = replaced if of_sources else None if op.kind in ("cut", "clear") else found
        if kept is not None:
            after[other] = kept
        if op.kind in ("move", "swap"):
            after.pop(one, None)
        if op.kind == "swap" and replaced is not None:
            after[one] = replaced
    return (rows, sources), ops, (after, sources_after)


@given(rows_and_ops())
def test_row_operations_do_what_a_dictionary_does(
    case: tuple[tuple[Rows, Rows], list[RowOp], tuple[Rows, Rows]],
) -> None:
    before, ops, after = case
    cache = cache_of(*before)

    cache.apply(ops)

    wanted = cache_of(*after)
    assert cache.lengths.tolist() == wanted.lengths.tolist()
    assert cache.source_lengths.tolist() == wanted.source_lengths.tolist()
    for row in range(SLOTS):
        for found, expected in zip(contents(cache, row), contents(wanted, row), strict=True):
            assert np.array_equal(found, expected)


def test_clearing_and_moving_leave_no_number_behind() -> None:
    cache = cache_of({0: (np.nan, 5), 1: (np.nan, 6), 2: (3.0, 4)}, {1: (np.nan, 5), 2: (1.0, 3)})

    cache.apply(
        [RowOp("clear", 0, 0, 2), RowOp("clear", 0, 0), RowOp("move", 1, 0), RowOp("clear", 0, 0)]
    )
    cache.apply([RowOp("clear_source", 1, 1), RowOp("cut", 2, 2, 1), RowOp("cut_source", 2, 2)])

    memory, cross_memory = cache.rows.memory, cache.sources.memory
    assert not memory[:, :, :2].any() and not cross_memory[:, :, :2].any()
    assert memory[:, :, 2, :, :4].all(), "a row that is cut stays in memory"
    assert (cache.lengths.tolist(), cache.source_lengths.tolist()) == ([0, 0, 1, 0], [0] * 4)


def test_the_beginning_of_a_row_can_be_copied_and_can_stay() -> None:
    cache = cache_of({0: (3.0, 5), 1: (7.0, 6), 2: (9.0, 4)}, {})

    cache.apply([RowOp("copy", 0, 1, 0, 2), RowOp("clear", 2, 2, 3), RowOp("copy", 2, 3, 0, 9)])

    wanted = cache_of({0: (3.0, 5), 1: (3.0, 2), 2: (9.0, 3), 3: (9.0, 3)}, {})
    assert list(cache.lengths) == [5, 2, 3, 3]
    for row in range(SLOTS):
        for found, expected in zip(contents(cache, row), contents(wanted, row), strict=True):
            assert np.array_equal(found, expected)


def test_the_first_rows_are_one_piece_of_memory() -> None:
    cache = SlotCache(SLOTS, SHAPE, CROSS_SHAPE)

    for layer in (*cache.layers, *cache.cross_layers):
        for array in layer:
            assert array[:3].flags.c_contiguous
            assert array[2:3].flags.c_contiguous


def test_a_decoder_has_no_cross_rows() -> None:
    cache = SlotCache(SLOTS, SHAPE)

    cache.apply([RowOp("move", 0, 1)])

    assert cache.cross_layers == ()


@needs_page_map
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_only_positions_in_use_are_resident(dtype: CacheDtype) -> None:
    shape = CacheShape(num_layers=2, num_kv_heads=4, max_len=8192, head_dim=64, dtype=dtype)
    cache = SlotCache(8, shape, shape)

    arrays = [array for layer in (*cache.layers, *cache.cross_layers) for array in layer]

    for array in arrays:
        array[:, :, :64] = 1

    for array in arrays:
        assert resident(array) == array[:, :, :64].nbytes, "64 positions are whole pages"


PAGED = CacheShape(num_layers=2, num_kv_heads=4, max_len=8192, head_dim=64)
PAGE = 16  # positions of a head in a small page


def bytes_of(length: int, num_rows: int = 1) -> int:
    """Return what rows of whole pages take, keys and values of all layers and heads."""
    return num_rows * 2 * PAGED.num_layers * PAGED.num_kv_heads * length * PAGED.head_dim * 4


@needs_page_map
@pytest.mark.parametrize(
    ("op", "in_use"),
    [
        (RowOp("cut", 0, 0), bytes_of(32)),
        (RowOp("cut", 0, 0, 64), bytes_of(64 + 32)),
        (RowOp("clear", 0, 0), bytes_of(32)),
        (RowOp("clear", 0, 0, 64), bytes_of(64 + 32)),
        (RowOp("copy", 1, 0), bytes_of(32 + 32)),
        (RowOp("copy", 0, 1, 0, 16), bytes_of(1600 + 16)),
        (RowOp("move", 0, 2), bytes_of(1600 + 32)),
        (RowOp("swap", 0, 1), bytes_of(1600 + 32)),
        (RowOp("swap", 0, 2), bytes_of(1600 + 32)),
    ],
)
def test_a_row_that_becomes_shorter_gives_its_pages_back(op: RowOp, in_use: int) -> None:
    cache = SlotCache(3, PAGED)
    fill(cache, 0, (3.0, 1600))
    fill(cache, 1, (5.0, 32))

    cache.apply([op])
    cache.release_pages(at_rest=True)

    assert resident(cache.rows.memory) == in_use


@needs_page_map
@pytest.mark.parametrize("kind", ["cut_source", "clear_source"])
def test_the_row_of_a_source_gives_its_pages_back(kind: str) -> None:
    cache = SlotCache(3, PAGED, PAGED)
    fill_source(cache, 0, (3.0, 1600))
    fill_source(cache, 1, (3.0, 32))

    cache.apply([RowOp(kind, 0, 0)])
    cache.release_pages(at_rest=True)

    assert resident(cache.sources.memory) == bytes_of(32)


@needs_page_map
@pytest.mark.parametrize("kind", ["cut", "cut_source"])
def test_what_sequences_leave_is_there_for_the_next_one_for_some_steps(kind: str) -> None:
    cache = SlotCache(3, PAGED, PAGED)
    memory, fill_row = (
        (cache.rows.memory, fill) if kind == "cut" else (cache.sources.memory, fill_source)
    )
    fill_row(cache, 0, (3.0, 1600))
    cache.apply([RowOp(kind, 0, 0)])

    assert STEPS_AT_HAND >= 32, "in fewer steps the next request of a closed loop has not joined"
    for _ in range(STEPS_AT_HAND // 2):
        cache.release_pages(at_rest=False)
    assert resident(memory) == bytes_of(1600)
    fill_row(cache, 0, (4.0, 320))
    cache.apply([RowOp(kind, 0, 0)])
    fill_row(cache, 0, (5.0, 160))
    rows = cache.rows if kind == "cut" else cache.sources
    written = rows.read(0, 160)
    for _ in range(STEPS_AT_HAND // 2):
        cache.release_pages(at_rest=False)
    assert resident(memory) == bytes_of(1600)
    cache.release_pages(at_rest=False)

    assert resident(memory) == bytes_of(160), "of the first cut on, whatever came in between"
    assert np.array_equal(rows.read(0, 160), written)


@needs_page_map
def test_a_cache_that_was_forgotten_has_nothing_to_give_back() -> None:
    cache = SlotCache(3, PAGED)
    fill(cache, 0, (3.0, 1600))
    cache.apply([RowOp("cut", 0, 0)])
    cache.forget()
    cache.rows.write(0, np.full((2, 2, 4, 320, 64), 4.0))  # the length does not count it yet

    cache.release_pages(at_rest=True)

    assert (cache.rows.read(0, 320) == 4.0).all()


@needs_page_map
@pytest.mark.parametrize("kind", ["cut", "cut_source"])
def test_less_than_a_page_of_a_head_is_not_worth_a_call(kind: str) -> None:
    cache = SlotCache(3, PAGED, PAGED)
    memory, fill_row = (
        (cache.rows.memory, fill) if kind == "cut" else (cache.sources.memory, fill_source)
    )
    fill_row(cache, 0, (3.0, PAGE - 1))

    cache.apply([RowOp(kind, 0, 0)])
    cache.release_pages(at_rest=True)

    assert resident(memory) == bytes_of(PAGE)


def test_a_swap_leaves_no_number_behind_the_shorter_row() -> None:
    cache = cache_of({0: (np.nan, 5), 1: (2.0, 2)}, {})

    cache.apply([RowOp("swap", 0, 1), RowOp("clear", 1, 1)])

    assert np.isfinite(cache.rows.memory).all()
    assert (cache.rows.memory[:, :, 0, :, :2] != 0).all()
    assert cache.lengths.tolist() == [2, 0, 0, 0]
