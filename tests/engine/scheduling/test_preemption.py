"""A cache without room for the next token: who has to wait again, and that no answer changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import EngineFailure, ExpiredInDecode
from engine.generation.core import EngineCore
from engine.package.manifest import GenerationContract
from engine.requests.events import FinishReason
from engine.requests.request import SamplingParams
from engine.scheduling import sequence
from engine.scheduling.output import (
    AdmittedOutput,
    CutOutput,
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    HypothesisOutput,
    ScoresOutput,
    TokensOutput,
)
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import TokenRequest
from tests.engine.blocks import BlockKVCache, BlockStepRunner
from tests.engine.generation.test_core import continuation

A = 65
CONFIG = EngineConfig(max_num_seqs=8, prefill_chunk_size=4, max_num_batched_tokens=24)
MANY = 400  # blocks: more than is ever needed


class Backwards(BlockKVCache):
    """Computes in another order than the scheduler names: any will do."""

    def arrange(self, decoding: list[sequence.Sequence]) -> list[sequence.Sequence]:
        return decoding[::-1]


def request(key: int, length: int = 4, **params) -> TokenRequest:
    options = {"max_new_tokens": 9, "ignore_eos": True} | params
    ids = tuple((key * 31 + n) % 250 for n in range(length))
    return TokenRequest(key, f"r-{key}", ids, SamplingParams(**options), key, 0.0)


@pytest.fixture
def make_blocks(make_contract: Callable[..., GenerationContract], clock) -> Callable:
    """Make a core on so many blocks of four tokens, and its cache."""

    def make(num_blocks: int, **shape: int) -> tuple[EngineCore, BlockKVCache]:
        cache = Backwards(num_blocks)
        scheduler = Scheduler(CONFIG, make_contract(**shape), cache, clock=clock)
        return EngineCore(scheduler, BlockStepRunner(continuation, cache)), cache

    return make


def run(core: EngineCore, cache: BlockKVCache) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(3000):
        if not core.scheduler.has_work:
            return outputs
        outputs += core.step()
        core.check_integrity()
    raise AssertionError("the engine does not come to an end")


def answers(outputs: Sequence[EngineOutput]) -> dict[tuple[int, object], list]:
    """Return what each sequence of each request was told, in order and without the times."""
    found: dict[tuple[int, object], list] = {}
    for output in outputs:
        of, told = type(output), [type(output)]
        if isinstance(output, TokensOutput):
            (token_id,) = output.token_ids
            of, told = output.index, [(token_id, output.sum_logprob, output.finish_reason)]
        elif isinstance(output, HypothesisOutput):
            of, told = output.index, [output.hypothesis]
        elif isinstance(output, ScoresOutput):
            told = list(output.positions)
        elif isinstance(output, FailedOutput):
            told = [type(output.error)]
        found.setdefault((output.key, of), []).extend(told)
    return found


def test_the_youngest_of_the_lowest_priority_waits_again(make_blocks) -> None:
    core, cache = make_blocks(6)
    for key, priority in ((1, 1), (2, 0), (3, 1)):
        core.scheduler.add(replace(request(key), priority=priority))

    running = []
    while core.scheduler.has_work:
        core.step()
        running.append({sequence.request.key for sequence in cache.tables})

    assert running[0] == {1, 2, 3}
    left = next(now for now in running if now != {1, 2, 3})
    assert left == {1, 2}


def test_what_was_said_is_not_said_again_and_the_answer_is_the_same(make_blocks) -> None:
    core, cache = make_blocks(6)
    plenty, all_of_it = make_blocks(MANY)
    for one in (core, plenty):
        for key in (1, 2, 3):
            one.scheduler.add(request(key, strategy="sampling", temperature=1.3))

    few, many = run(core, cache), run(plenty, all_of_it)

    assert answers(few) == answers(many)
    assert [o.key for o in few if isinstance(o, AdmittedOutput)] == [1, 2, 3]
    assert core.scheduler.load().wasted.preempted_tokens > 0
    assert plenty.scheduler.load().wasted.preempted_tokens == 0
    assert cache.used == 0


kinds = st.sampled_from(
    [
        {"strategy": "greedy"},
        {"strategy": "sampling", "temperature": 1.5},
        {"strategy": "sampling", "num_outputs": 3},
        {"strategy": "beam", "beam_width": 3, "num_outputs": 2},
        {"strategy": "greedy", "prompt_logprobs": 1},
        {"strategy": "greedy", "prompt_logprobs": 1, "max_new_tokens": 0},
    ]
)
described = st.lists(
    st.tuples(kinds, st.integers(2, 14), st.integers(1, 12), st.integers(0, 2), st.integers(0, 3)),
    min_size=2,
    max_size=9,
)


@pytest.mark.parametrize(
    ("shape", "least"),  # blocks, of which each request alone has enough
    [({}, 21), ({"max_source_len": 20}, 12)],
    ids=["decoder", "encoder-decoder"],
)
@pytest.mark.parametrize("examples", [25, pytest.param(500, marks=pytest.mark.long)])
def test_answers_on_few_blocks_are_those_on_many(
    make_blocks, shape: dict[str, int], least: int, examples: int
) -> None:
    wasted = []

    @settings(max_examples=examples)
    @given(described, st.integers(0, 6))
    @example([({"strategy": "sampling", "num_outputs": 3}, 14, 12, 0, 0)] * 3, 0)
    def check(requests: list[tuple[dict, int, int, int, int]], more: int) -> None:
        found = []
        for count in (least + more, MANY):
            core, cache = make_blocks(count, **shape)
            outputs = []
            for key, (options, length, new, priority, pause) in enumerate(requests):
                one = request(key, length, **({"max_new_tokens": new} | options))
                is_scored = "prompt_logprobs" in options
                if shape and is_scored:
                    one = replace(one, target_ids=(1, 2, 3, 4, 5, 6))
                one = replace(one, priority=priority, score_from=1 if is_scored else None)
                core.scheduler.add(one)
                for _ in range(pause):
                    outputs += core.step()
            found.append(answers([*outputs, *run(core, cache)]))
            assert cache.used == 0 and core.scheduler.load().running == 0
            wasted.append(core.scheduler.load().wasted.preempted_tokens)
        assert found[0] == found[1]

    check()
    assert sum(wasted) > 0, "nobody had to wait again"


def preempted(make_blocks, **options) -> tuple[EngineCore, BlockKVCache, list[EngineOutput]]:
    """Return an engine in which request 2 has begun and waits again."""
    core, cache = make_blocks(5)
    core.scheduler.add(request(1))
    core.scheduler.add(replace(request(2, **options), deadline=200.0))
    outputs = []
    while core.scheduler.load().waiting == 0:
        outputs += core.step()
    assert any(isinstance(o, TokensOutput) and o.key == 2 for o in outputs)
    return core, cache, outputs


def test_a_request_that_waits_again_ends_at_its_deadline_with_what_it_has(
    make_blocks, clock
) -> None:
    core, cache, _ = preempted(make_blocks, allow_partial=True)

    clock.now = 200.0
    outputs = run(core, cache)

    assert [o for o in outputs if isinstance(o, CutOutput)] == [
        CutOutput(2, 0, FinishReason.DEADLINE)
    ]
    assert {o.key for o in outputs if isinstance(o, FinishedOutput)} == {1, 2}


def test_a_request_that_waits_again_fails_at_its_deadline_as_one_that_runs(
    make_blocks, clock
) -> None:
    core, cache, before = preempted(make_blocks)

    clock.now = 200.0
    outputs = run(core, cache)

    (failed,) = [o for o in outputs if isinstance(o, FailedOutput)]
    made = sum(isinstance(o, TokensOutput) and o.key == 2 for o in before)
    assert isinstance(failed.error, ExpiredInDecode)
    assert str(failed.error).endswith(f"with {made} tokens generated")


def test_a_request_that_waits_again_can_be_aborted_or_drained(make_blocks) -> None:
    core, _cache, _ = preempted(make_blocks, allow_partial=True)
    other, _, _ = preempted(make_blocks)

    drained = core.scheduler.drain(EngineFailure)
    other.scheduler.abort(2)

    assert CutOutput(2, 0, FinishReason.DRAINED) in drained
    assert other.scheduler.load().waiting == 0
    assert other.scheduler.load().wasted.cancelled_tokens == 0  # they count as preempted


def test_a_request_that_has_no_room_even_alone_fails_and_says_so(make_blocks) -> None:
    core, cache = make_blocks(3)
    core.scheduler.add(request(1, 4, max_new_tokens=30))
    core.scheduler.add(request(2, 40))

    outputs = run(core, cache)

    errors = {o.key: str(o.error) for o in outputs if isinstance(o, FailedOutput)}
    assert set(errors) == {1, 2}
    assert "the cache has no room for its 13 tokens and the next" in errors[1]
    assert len([o for o in outputs if isinstance(o, TokensOutput)]) == 9


def test_a_tenant_does_not_pay_for_what_is_computed_again(make_blocks) -> None:
    core, cache, _ = preempted(make_blocks)

    run(core, cache)

    used = core.scheduler._waiting._idle[""]
    assert used == 2 * (4 + 8)  # each request's prompt and all new tokens but the last
