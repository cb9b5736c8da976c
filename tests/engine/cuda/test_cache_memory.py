"""Rows in memory of a device are what they are in memory of the host."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cuda.cache_memory import row_bytes
from engine.cuda.memory import DeviceArray
from engine.errors import OutOfDeviceMemory
from engine.package.manifest import CacheDtype, CacheShape
from engine.slots.batch import RowOp
from engine.slots.memory import Allocate, CacheMemory, HostCacheMemory
from engine.slots.rows import SlotCache
from tests.engine.cuda.fake_cuda import FakeCuda
from tests.engine.row_changes import run_random_changes

SHAPE = CacheShape(num_layers=3, num_kv_heads=2, max_len=6, head_dim=4)
DTYPES: tuple[CacheDtype, ...] = ("fp32", "fp16", "bf16", "int8")


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def allocate(fake: FakeCuda) -> Allocate:
    return fake.device().cache_memory


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, allocate: Allocate) -> CacheMemory:
    return (HostCacheMemory if request.param == "host" else allocate)(3, SHAPE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_changes_of_rows_are_those_of_the_host(
    dtype: CacheDtype, allocate: Allocate
) -> None:
    assert run_random_changes(allocate, dtype, seed=0, count=60) == 60


def numbers_of(row: int, length: int) -> np.ndarray:
    size = (SHAPE.num_layers, 2, SHAPE.num_kv_heads, length, SHAPE.head_dim)
    return np.random.default_rng(row).standard_normal(size, np.float32)


def test_what_is_written_can_be_read(memory: CacheMemory) -> None:
    memory.write(1, numbers_of(1, 6))
    memory.write(1, numbers_of(2, 2))
    memory.write(0, numbers_of(0, 0))

    assert np.array_equal(memory.read(1, 2), numbers_of(2, 2))
    assert np.array_equal(memory.read(1, 6)[..., 2:, :], numbers_of(1, 6)[..., 2:, :])
    assert not memory.read(0, 6).any() and not memory.read(2, 6).any()
    assert memory.read(1, 0).shape == (3, 2, 2, 0, 4)


def test_filling_reaches_the_first_rows_and_forgetting_all(memory: CacheMemory) -> None:
    memory.write(2, numbers_of(2, 6))

    memory.fill(1e4, 2)

    assert [float(memory.read(row, 6).min()) for row in (0, 1)] == [1e4, 1e4]
    assert np.array_equal(memory.read(2, 6), numbers_of(2, 6))
    memory.forget()
    assert not any(memory.read(row, 6).any() for row in range(3))


@pytest.mark.parametrize(("dtype", "bits"), [("fp16", 0x70E2), ("bf16", 0x461C), ("int8", 127)])
def test_numbers_are_stored_as_the_type_has_them(
    dtype: CacheDtype, bits: int, allocate: Allocate
) -> None:
    for kind in (HostCacheMemory, allocate):
        memory = kind(1, SHAPE.model_copy(update={"dtype": dtype}))
        memory.fill(1e4, 1)

        stored = memory.read(0, 6)
        memory.write(0, stored)

        assert set(stored.view(f"u{stored.itemsize}").ravel().tolist()) == {bits}
        assert np.array_equal(memory.read(0, 6), stored), "what was read is written as it is"


def test_a_swap_needs_no_number_of_the_spare_row(fake: FakeCuda, allocate: Allocate) -> None:
    cache = SlotCache(2, SHAPE, None, allocate)
    for row, length in ((0, 5), (1, 2)):
        cache.rows.write(row, numbers_of(row, length))
        cache.lengths[row] = length

    cache.apply([RowOp("swap", 0, 1)])

    assert cache.lengths.tolist() == [2, 5]
    assert np.array_equal(cache.rows.read(0, 2), numbers_of(1, 2))
    assert np.array_equal(cache.rows.read(1, 5), numbers_of(0, 5))
    assert not cache.rows.read(0, 5)[..., 2:, :].any(), "the longer row's end is gone"


@pytest.mark.parametrize(
    ("op", "calls"),
    [
        (RowOp("copy", 0, 1), ["cudaMemcpy3DAsync"]),
        (RowOp("move", 0, 1), ["cudaMemcpy3DAsync", "cudaMemset3DAsync"]),
        (RowOp("clear", 0, 0), ["cudaMemset3DAsync"]),
        (RowOp("cut", 0, 0), []),
        (RowOp("swap", 0, 2), ["cudaMemcpy3DAsync"] * 3),
    ],
)
def test_a_change_is_one_call_for_all_layers_and_waits_for_nothing(
    op: RowOp, calls: list[str], fake: FakeCuda, allocate: Allocate
) -> None:
    cache = SlotCache(3, SHAPE, None, allocate)
    cache.lengths[:] = [4, 0, 4]
    fake.calls.clear()

    cache.apply([op])

    assert fake.calls == calls


def test_what_is_written_has_arrived_before_the_memory_that_it_came_from_is_given_back(
    fake: FakeCuda, allocate: Allocate
) -> None:
    memory = allocate(3, SHAPE)
    fake.calls.clear()

    memory.write(1, numbers_of(1, 4))

    waited, given_back = map(fake.calls.index, ("cudaStreamSynchronize", "cudaFreeHost"))
    assert fake.calls.index("cudaMemcpy3DAsync") < waited < given_back


def test_the_first_rows_of_a_layer_are_neighbours(allocate: Allocate) -> None:
    layers = allocate(3, SHAPE).layers

    row = 2 * 6 * 4 * 4
    assert len(layers) == 3
    for layer in layers:
        for array in layer:
            assert isinstance(array, DeviceArray)
            assert (array.shape, array.dtype) == ((3, 2, 6, 4), "float32")
            assert array[2:].address == array.address + 2 * row
        assert layer.value.address == layer.key.address + 4 * row


def test_memory_is_exactly_that_of_the_rows_and_a_spare_one(
    fake: FakeCuda, allocate: Allocate
) -> None:
    cache = SlotCache(3, SHAPE, None, allocate)

    assert row_bytes(SHAPE) == 3 * 2 * 2 * 6 * 4 * 4
    assert fake.num_used == 4 * row_bytes(SHAPE)
    del cache
    assert fake.num_used == 0


def test_a_device_that_is_too_small_refuses_the_cache() -> None:
    allocate = FakeCuda(4 * row_bytes(SHAPE) - 1).device().cache_memory

    with pytest.raises(OutOfDeviceMemory):
        SlotCache(3, SHAPE, None, allocate)


def test_an_empty_cache_is_empty_after_it_was_forgotten(allocate: Allocate) -> None:
    cache = SlotCache(3, SHAPE, SHAPE, allocate)
    cache.fill(2.0, 2)
    cache.lengths[:], cache.source_lengths[:] = 3, 2

    cache.forget()

    assert not cache.lengths.any() and not cache.source_lengths.any()
    assert cache.sources is not None
    assert not cache.rows.read(0, 6).any() and not cache.sources.read(1, 6).any()
