"""Which rows the scheduler's steps get from slots; what any cache does says test_scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.config import EngineConfig
from engine.errors import EngineFailure
from engine.scheduling.scheduler import Scheduler
from engine.slots.cache import SlotKVCache
from tests.engine.scheduling.test_scheduler import EOS, A, B, C, Ran, request, small_config
from tests.engine.scheduling.test_scheduler import step as any_step


@pytest.fixture
def make_scheduler(make_contract, clock) -> Callable[..., Scheduler]:
    def make(config: EngineConfig | None = None, **shape: int) -> Scheduler:
        config, contract = config or EngineConfig(max_num_seqs=4), make_contract(**shape)
        return Scheduler(config, contract, SlotKVCache(config, contract), clock=clock)

    return make


def step(scheduler: Scheduler, *tokens: int) -> Ran:
    return any_step(scheduler, *tokens)[0]


def test_decoding_rows_stay_packed_whatever_leaves(make_scheduler) -> None:
    scheduler = make_scheduler()
    for key in (1, 2, 3, 4):
        scheduler.add(request(key))
    step(scheduler, A)
    step(scheduler, A, EOS, B, C)

    batch = step(scheduler)

    assert batch.decode_ids == (A, C, B)
    assert [op[:3] for op in batch.slot_mapping.row_ops] == [("cut", 1, 1), ("move", 3, 1)]


def test_rows_that_end_together_are_not_moved_into_the_holes_of_each_other(
    make_scheduler,
) -> None:
    scheduler = make_scheduler()
    for key in (1, 2, 3, 4):
        scheduler.add(request(key))
    step(scheduler, A)
    step(scheduler, EOS, EOS, A, EOS)

    batch = step(scheduler)

    assert batch.decode_ids == (A,)
    moves = [op[:3] for op in batch.slot_mapping.row_ops if op.kind != "cut"]
    assert moves == [("move", 2, 0)], "of the one that goes on, and no other"


def test_a_source_is_encoded_into_a_row(make_scheduler) -> None:
    scheduler = make_scheduler(max_source_len=30)
    scheduler.add(request(1, length=20))

    batch = step(scheduler, A)

    assert [(e.row, len(e.source_ids)) for e in batch.slot_mapping.encodes] == [(0, 20)]


def test_the_row_of_a_prompt_is_copied_for_its_group(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, strategy="sampling", num_outputs=3))

    step(scheduler, A, B, C)
    batch = step(scheduler, A)

    assert [op.kind for op in batch.slot_mapping.row_ops] == ["copy", "copy"]


def test_the_row_of_a_request_aborted_in_the_middle_of_its_prompt_is_cleared(
    make_scheduler,
) -> None:
    scheduler = make_scheduler(small_config())
    scheduler.add(request(1, length=20))
    step(scheduler)

    scheduler.abort(1)
    batch = step(scheduler)

    assert [op.kind for op in batch.slot_mapping.row_ops] == ["clear"]


def test_after_all_have_failed_the_first_row_is_given_again(make_scheduler) -> None:
    scheduler = make_scheduler(small_config())
    for key in (1, 2, 3):
        scheduler.add(request(key))
    scheduler.schedule()

    scheduler.fail_all(lambda request_id: EngineFailure(f"{request_id} failed"))
    scheduler.add(request(4))

    assert [chunk.row for chunk in step(scheduler).slot_mapping.chunks] == [0]


def test_rows_count_as_used_from_admission_on(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, strategy="sampling", num_outputs=3))
    scheduler.add(request(2, strategy="sampling", num_outputs=2, length=5, max_new_tokens=2))

    assert scheduler.load().cache_used == 0.75
