"""Two steps under way at once: what the second may compute before the first was taken in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.generation.core import EngineCore
from engine.requests.request import SamplingParams
from engine.scheduling.output import EngineOutput, FailedOutput, FinishedOutput, TokensOutput
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import TokenRequest
from engine.scheduling.step import Step
from tests.engine.blocks import BlockKVCache, BlockStepRunner
from tests.engine.test_core import continuation
from tests.engine.test_preemption import answers, kinds

CONFIG = EngineConfig(max_num_seqs=6, prefill_chunk_size=4, max_num_batched_tokens=12)
Pending = deque[Step]


def request(key: int, length: int = 6, **params) -> TokenRequest:
    options = {"max_new_tokens": 5, "ignore_eos": True} | params
    ids = tuple((key * 31 + n) % 250 for n in range(length))
    return TokenRequest(key, f"r-{key}", ids, SamplingParams(**options), key, 0.0)


@pytest.fixture(params=["slots", "blocks"])
def make_engine(make_core: Callable, make_contract: Callable, clock, request) -> Callable:
    """Make a core on slots, or on blocks that are too few for all."""

    def make() -> EngineCore:
        if request.param == "slots":
            return make_core(continuation, config=CONFIG)[0]
        cache = BlockKVCache(22)
        scheduler = Scheduler(CONFIG, make_contract(), cache, clock=clock)
        return EngineCore(scheduler, BlockStepRunner(continuation, cache))

    return make


def begin(core: EngineCore, pending: Pending) -> None:
    step = core.scheduler.schedule()
    core._runner.submit(step)
    for other in pending:
        assert not set(step.parts.decoding) & set(other.parts.decoding)
    pending.append(step)


def take_in(core: EngineCore, pending: Pending) -> list[EngineOutput]:
    return core.scheduler.update(pending.popleft(), core._runner.collect())


def run(core: EngineCore, num_under_way: int) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    pending: Pending = deque()
    for _ in range(500):
        if not core.scheduler.has_work and not pending:
            return outputs
        while core.scheduler.has_work and len(pending) < num_under_way:
            begin(core, pending)
        outputs += take_in(core, pending)
    raise AssertionError("the engine does not come to an end")


def test_two_steps_decode_other_sequences_and_are_taken_in_in_order(make_engine) -> None:
    core, pending = make_engine(), deque()
    core.scheduler.add(request(1, 4))
    begin(core, pending)
    core.scheduler.add(request(2, 4))
    begin(core, pending)

    first = take_in(core, pending)
    begin(core, pending)
    second = take_in(core, pending)
    begin(core, pending)

    assert [o.key for o in first if isinstance(o, TokensOutput)] == [1]
    assert [o.key for o in second if isinstance(o, TokensOutput)] == [2]
    assert [[s.request.key for s in step.parts.decoding] for step in pending] == [[1], [2]]


def test_a_sequence_whose_token_is_being_drawn_has_nothing_to_compute(make_engine) -> None:
    core, pending = make_engine(), deque()
    core.scheduler.add(request(1, 4))
    begin(core, pending)
    begin(core, pending)
    take_in(core, pending)
    take_in(core, pending)

    begin(core, pending)
    begin(core, pending)

    assert [len(step.parts.decoding) for step in pending] == [1, 0]


def test_chunks_of_one_prompt_may_be_under_way_together(make_engine) -> None:
    core, pending = make_engine(), deque()
    core.scheduler.add(request(1, 20))
    begin(core, pending)
    begin(core, pending)

    assert [[(c.start, c.end) for c in step.parts.chunks] for step in pending] == [
        [(0, 4), (4, 8), (8, 12)],
        [(12, 16), (16, 20)],
    ]


def test_what_a_step_brings_for_a_request_that_has_ended_is_dropped(make_engine) -> None:
    core, pending = make_engine(), deque()
    for key in (1, 2):
        core.scheduler.add(request(key, 4))
    begin(core, pending)
    core.scheduler.abort(1)

    outputs = take_in(core, pending)

    assert [o.key for o in outputs if isinstance(o, TokensOutput)] == [2]
    assert core.scheduler.load().running == 1


def test_answers_are_the_same_with_one_or_two_steps_under_way(make_engine) -> None:
    described = st.lists(
        st.tuples(kinds, st.integers(2, 14), st.integers(1, 10)), min_size=1, max_size=7
    )

    @settings(max_examples=40, deadline=None)
    @given(described)
    def check(requests: list[tuple[dict, int, int]]) -> None:
        found = []
        for num_under_way in (1, 2):
            core = make_engine()
            for key, (options, length, new) in enumerate(requests):
                one = request(key, length, **({"max_new_tokens": new} | options))
                is_scored = "prompt_logprobs" in options
                core.scheduler.add(replace(one, score_from=1 if is_scored else None))
            outputs = run(core, num_under_way)
            assert not [o for o in outputs if isinstance(o, FailedOutput)]
            assert len([o for o in outputs if isinstance(o, FinishedOutput)]) == len(requests)
            found.append(answers(outputs))
        assert found[0] == found[1]

    check()
