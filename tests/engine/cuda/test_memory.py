"""Arrays on a device, and copies between it and the host."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cuda.memory import ALIGNMENT, DeviceMemory, aligned
from engine.errors import OutOfDeviceMemory
from tests.engine.cuda.fake_cuda import FakeCuda


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def memory(fake: FakeCuda) -> DeviceMemory:
    return DeviceMemory(fake.runtime())


def test_new_arrays_hold_zeros(fake: FakeCuda, memory: DeviceMemory) -> None:
    array = memory.zeros((3, 5), "float16")

    assert (array.num_bytes, fake.num_used) == (30, 30)
    assert fake.content(array) == bytes(30)


def test_what_is_uploaded_can_be_downloaded(memory: DeviceMemory) -> None:
    sent, received = np.arange(12, dtype=np.int32).reshape(3, 4), np.zeros((2, 4), np.int32)
    array = memory.zeros((3, 4), "int32")

    memory.upload(array, sent)
    memory.download(received, array[1:])

    memory.runtime.synchronize()
    assert received.tolist() == sent[1:].tolist()


def test_views_have_the_addresses_of_their_rows(memory: DeviceMemory) -> None:
    array = memory.zeros((4, 2, 3), "bfloat16")

    assert array[1:3] == array.view(12, "bfloat16", (2, 2, 3))
    assert array[3:1].shape == (0, 2, 3)
    assert array[2:][1:].address == array.address + 36
    assert array.view(16, "int64", (4,)).num_bytes == 32


@pytest.mark.parametrize(("offset", "length"), [(0, 13), (4, 12), (52, 0)])
def test_a_view_outside_of_its_array_is_refused(
    offset: int, length: int, memory: DeviceMemory
) -> None:
    with pytest.raises(ValueError, match=rf"from {offset} on .*48 bytes"):
        memory.zeros((12,), "int32").view(offset, "int32", (length,))


def test_memory_is_given_back_with_the_last_view(fake: FakeCuda, memory: DeviceMemory) -> None:
    array = memory.zeros((8,), "int8")
    view = array[2:4]

    del array
    assert fake.num_used == 8
    del view

    assert fake.num_used == 0


def test_pinned_memory_is_given_back_with_its_last_view(
    fake: FakeCuda, memory: DeviceMemory
) -> None:
    numbers = memory.pinned(16).view(np.int64)[1:]

    assert numbers.tolist() == [0] and len(fake.pinned) == 1
    numbers[:] = 7
    del numbers

    assert not fake.pinned


def test_nothing_takes_no_room_on_the_host(memory: DeviceMemory) -> None:
    assert memory.pinned(0).shape == (0,)


def test_a_full_device_keeps_what_it_has(fake: FakeCuda, memory: DeviceMemory) -> None:
    kept = memory.zeros((2**29,), "int8")

    with pytest.raises(OutOfDeviceMemory):
        memory.zeros((2**29, 2), "int8")

    assert fake.num_used == kept.num_bytes


@pytest.mark.parametrize(
    ("host", "why"),
    [(np.zeros((2, 4))[:, :2], "not contiguous"), (np.zeros(3), "24 bytes .* 32 on the device")],
)
def test_a_copy_of_other_bytes_is_refused(host: np.ndarray, why: str, memory: DeviceMemory) -> None:
    array = memory.zeros((4,), "int64")

    with pytest.raises(ValueError, match=why):
        memory.upload(array, host)
    with pytest.raises(ValueError, match=why):
        memory.download(host, array)


@pytest.mark.parametrize(("given", "wanted"), [(0, 0), (1, 1), (ALIGNMENT, 1), (ALIGNMENT + 1, 2)])
def test_sizes_are_rounded_up_to_the_alignment(given: int, wanted: int) -> None:
    assert aligned(given) == wanted * ALIGNMENT


@pytest.mark.parametrize("width", [1, 128])
def test_the_first_column_of_an_array_is_copied_alone(memory: DeviceMemory, width: int) -> None:
    sent, received = np.arange(4 * width).reshape(4, width), np.full((5, 1), -1)
    origin, target = memory.zeros((4, width), "int64"), memory.zeros((5, 1), "int64")
    memory.upload(origin, sent)
    memory.upload(target, received)

    memory.copy_column(target[2:4], origin[1:3])

    memory.download(received, target)
    memory.runtime.synchronize()
    assert received[:, 0].tolist() == [-1, -1, width, 2 * width, -1]


def test_a_column_of_another_length_or_type_is_refused(memory: DeviceMemory) -> None:
    origin = memory.zeros((4, 2), "int64")

    for target in (memory.zeros((3, 1), "int64"), memory.zeros((4, 1), "int32")):
        with pytest.raises(ValueError, match="is not of the shape"):
            memory.copy_column(target, origin)


def test_a_mark_is_waited_for_and_what_is_queued_behind_it_is_not(memory: DeviceMemory) -> None:
    array, seen = memory.zeros((2,), "int32"), [np.zeros(2, np.int32) for _ in range(2)]
    memory.upload(array, np.array([5, 6], np.int32))
    mark = memory.mark()
    mark.wait()  # it was never put

    memory.download(seen[0], array)
    mark.put()
    memory.download(seen[1], array)
    mark.wait()

    assert [each.tolist() for each in seen] == [[5, 6], [0, 0]]
