"""How many sequences have room on a device, and what is said when they have none."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.cuda.cache_memory import row_bytes
from engine.cuda.room import DeviceRoom, Fit, RoomNeeds, choose_num_slots, fit, without_room
from engine.errors import OutOfDeviceMemory
from engine.package.manifest import CacheShape, GenerationContract
from tests.engine.cuda.fake_cuda import FakeCuda

GB = 10**9
NEEDS = RoomNeeds(row=GB // 10, beside=2 * GB)
ROOM = DeviceRoom(free=14 * GB, total=20 * GB, utilization=0.9, weights=5 * GB)  # 13 GB usable
GPT2 = GenerationContract(
    vocab_size=50257,
    num_heads=12,
    cache=CacheShape(num_layers=12, num_kv_heads=12, max_len=1024, head_dim=64, dtype="fp16"),
    cross_cache=None,
    decoder_start_token_id=None,
    eos_token_ids=(50256,),
)


def test_who_names_a_number_gets_it_if_it_fits() -> None:
    assert choose_num_slots(110, NEEDS, ROOM, most=256) == 110


@pytest.mark.parametrize(("most", "chosen"), [(256, 110), (32, 32)])
def test_who_names_none_gets_what_fits_up_to_a_limit(most: int, chosen: int) -> None:
    assert choose_num_slots(0, NEEDS, ROOM, most=most) == chosen


def test_what_others_use_is_not_there() -> None:
    assert choose_num_slots(0, NEEDS, replace(ROOM, free=3 * GB), most=256) == 10


def test_replicas_that_share_a_device_get_the_same() -> None:
    first = replace(ROOM, utilization=0.45, weights=GB, free=19 * GB)
    second = replace(first, free=19 * GB - 8 * GB - GB)

    assert choose_num_slots(0, NEEDS, first, most=256) == 60
    assert choose_num_slots(0, NEEDS, second, most=256) == 60


@pytest.mark.parametrize(
    ("wanted", "room", "ways"),
    [
        (111, ROOM, "--max-num-seqs 110 or --gpu-memory-utilization 0.91$"),
        (121, ROOM, "--max-num-seqs 110$"),  # more is not free
        (11, replace(ROOM, free=3 * GB), "--max-num-seqs 10$"),
        (0, replace(ROOM, utilization=0.3), "--gpu-memory-utilization 0.36$"),
        (0, replace(ROOM, free=2 * GB), "a GPU with more memory is needed$"),
        (1, replace(ROOM, utilization=0.2), "--gpu-memory-utilization 0.36$"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    wanted: int, room: DeviceRoom, ways: str
) -> None:
    with pytest.raises(OutOfDeviceMemory, match=ways.replace("$", r"\Z")):
        choose_num_slots(wanted, NEEDS, room, most=256)


def test_the_message_names_what_is_needed_and_what_is_there() -> None:
    assert without_room(200, NEEDS, ROOM).startswith(
        "the GPU has no room for 200 sequences: 22.0 GB are needed, 100 MB for each and 2.0 GB "
        "beside them, and 13.0 GB may be used: 14.0 GB of 20.0 GB are free, and "
        "gpu_memory_utilization is 0.9, of which the weights take 5.0 GB; "
    )


def test_a_row_is_that_of_the_cache_and_of_the_source_and_its_logits() -> None:
    needs = RoomNeeds.of(GPT2, 1024)
    longer = GPT2.model_copy(update={"cross_cache": GPT2.cache})

    assert row_bytes(GPT2.cache) == 37_748_736
    assert needs.row - row_bytes(GPT2.cache) == 50257 * (16 + 104) + 8192
    assert RoomNeeds.of(longer, 1024).row - needs.row == row_bytes(GPT2.cache)
    assert RoomNeeds.of(GPT2, 2048).beside - needs.beside == 1024 * 16 * 50257
    assert needs.beside == GB + row_bytes(GPT2.cache) + 1024 * 16 * 50257


def test_an_h200_holds_as_many_of_gpt2_as_are_chosen_at_most() -> None:
    room = DeviceRoom(free=149 * GB, total=150 * GB, utilization=0.9, weights=GB // 4)

    assert choose_num_slots(0, RoomNeeds.of(GPT2, 1024), room, most=256) == 256
    assert 3000 < choose_num_slots(0, RoomNeeds.of(GPT2, 1024), room, most=10**6) < 3600


def test_settings_get_the_number_that_fits() -> None:
    config = EngineConfig(max_num_seqs=0, max_num_batched_tokens=178)
    needs = RoomNeeds.of(GPT2, 178)
    room = replace(ROOM, weights=0, free=needs.of_rows(40) + 5)

    assert fit(config, GPT2, room).config.max_num_seqs == 40
    assert fit(config, GPT2, ROOM).config.max_num_seqs == 50, "a prompt has room beside them"
    assert fit(replace(config, max_num_seqs=3), GPT2, room).config.max_num_seqs == 3


def test_a_device_that_others_fill_meanwhile_says_what_would_fit() -> None:
    fake = FakeCuda(10_000)
    device = fake.device()
    needs = RoomNeeds(row=500, beside=2000)
    room = DeviceRoom.read(device.runtime, 1, weights=1000)
    found = Fit(EngineConfig(max_num_seqs=10), needs, room)
    of_others = device.memory.zeros((6000,), "int8")

    def make() -> None:
        half = device.memory.zeros((3500,), "int8")
        device.memory.zeros((3500,), half.dtype)

    with pytest.raises(OutOfDeviceMemory, match=r"cudaMalloc.*3\.5 kB were wanted.*num-seqs 4$"):
        with found.explained(device.runtime):
            make()
    assert fake.num_used == of_others.num_bytes


sizes = st.integers(0, 10**12)


@given(
    st.integers(0, 300),
    st.builds(RoomNeeds, st.integers(1, 10**10), sizes),
    st.builds(DeviceRoom, sizes, st.integers(1, 10**12), st.floats(0.01, 1), sizes),
)
def test_what_is_chosen_fits_and_what_is_proposed_would_be_taken(
    wanted: int, needs: RoomNeeds, room: DeviceRoom
) -> None:
    try:
        chosen = choose_num_slots(wanted, needs, room, most=256)
    except OutOfDeviceMemory as error:
        if found := re.search(r"--max-num-seqs (\d+)", str(error)):
            fewer = int(found[1])
            assert choose_num_slots(fewer, needs, room, most=256) == fewer < wanted
        if found := re.search(r"--gpu-memory-utilization ([\d.]+)", str(error)):
            more = replace(room, utilization=float(found[1]))
            assert choose_num_slots(wanted, needs, more, most=256) >= max(1, wanted)
    else:
        assert needs.of_rows(chosen) <= room.usable
        assert chosen == wanted or not wanted
        assert chosen == wanted or chosen == 256 or needs.of_rows(chosen + 1) > room.usable
