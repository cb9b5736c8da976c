"""Settings of an engine: where it runs, and how many sequences at once."""

from __future__ import annotations

import dataclasses

import pytest

from engine.config import Device, EngineConfig
from engine.errors import ConfigError


def test_an_engine_runs_where_its_package_was_made_for() -> None:
    assert EngineConfig().device_for("cpu") == "cpu"
    assert EngineConfig().device_for("cuda") == "cuda"


def test_a_package_for_cuda_can_be_asked_to_run_on_a_cpu() -> None:
    assert EngineConfig(device="cpu").device_for("cuda") == "cpu"


def test_a_package_for_the_cpu_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"device \(cuda\) .* target cpu.*--target cuda"):
        EngineConfig(device="cuda").device_for("cpu")


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_of_memory_that_there_is_not_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=rf"gpu_memory_utilization \({value}\) .* above 0 .* 1"):
        EngineConfig(gpu_memory_utilization=value)


@pytest.mark.parametrize("buckets", [(8, 4), (4, 4), (0, 4), (-1, 4)])
def test_buckets_that_do_not_rise_are_refused(buckets: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"decode_buckets \(.*\) .* rise"):
        EngineConfig(max_num_seqs=4, decode_buckets=buckets)


@pytest.mark.parametrize("num_seqs", [0, 16, 64])
def test_the_largest_bucket_holds_all_sequences_and_no_more(num_seqs: int) -> None:
    with pytest.raises(ConfigError, match=rf"\(1, 8, 32\).*max_num_seqs \({num_seqs}\).*32"):
        EngineConfig(max_num_seqs=num_seqs, decode_buckets=(1, 8, 32))


def test_the_number_of_sequences_can_be_left_to_the_engine() -> None:
    left_open = EngineConfig(max_num_seqs=0)

    assert left_open.with_num_seqs(88).max_num_seqs == 88
    assert EngineConfig(max_num_seqs=4).with_num_seqs(88).max_num_seqs == 4


def test_what_is_left_open_becomes_no_more_than_a_step_has_tokens_for() -> None:
    assert EngineConfig(max_num_seqs=0).most_num_seqs == 256
    assert EngineConfig(max_num_seqs=0, max_num_batched_tokens=192).most_num_seqs == 64
    assert EngineConfig(max_num_seqs=4).most_num_seqs == 4
    dataclasses.replace(EngineConfig(max_num_seqs=0, max_num_batched_tokens=192), max_num_seqs=64)


def test_a_step_without_room_for_a_sequence_beside_a_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(128\) must be at least"):
        EngineConfig(max_num_seqs=0, max_num_batched_tokens=128)


def test_fewer_sequences_than_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs \(-1\) must be at least 0"):
        EngineConfig(max_num_seqs=-1)


@pytest.mark.parametrize(
    ("asked", "device", "has"),
    [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_an_engine_has_a_process_for_itself_on_a_gpu_unless_it_is_told_otherwise(
    asked: bool | None, device: Device, has: bool
) -> None:
    assert EngineConfig(own_process=asked).has_own_process(device) is has
