"""Two steps under way at once: what the second may compute before the first was taken in."""

from __future__ import annotations

import random
import string
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import EngineFailure
from engine.generation.core import EngineCore
from engine.requests.request import Constraint, Deltas, LogitControls, SamplingParams
from engine.sampling.sampler import Sampler
from engine.scheduling.output import (
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    HypothesisOutput,
    ScoresOutput,
    TokensOutput,
)
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import TokenRequest
from engine.scheduling.step import Step
from engine.slots.step_runner import SlotStepRunner
from tests.engine.blocks import BlockKVCache, BlockStepRunner
from tests.engine.generation.test_core import continuation
from tests.engine.scheduling.test_preemption import answers, kinds

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
    core.runner.submit(step)
    for other in pending:
        assert not set(step.parts.decoding) & set(other.parts.decoding)
    pending.append(step)


def take_in(core: EngineCore, pending: Pending) -> list[EngineOutput]:
    return core.scheduler.update(pending.popleft(), core.runner.collect())


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

    @settings(max_examples=40)
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


# Steps whose tokens the one before draws


def feeding(make_core: Callable, config: EngineConfig = CONFIG) -> EngineCore:
    """Return a core that begins each step before it takes in the one before."""
    core, model = make_core(continuation, config=config)
    return EngineCore(core.scheduler, SlotStepRunner(model, Sampler(), overlaps=True))


def step_all(core: EngineCore) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(20_000):
        if not core.has_work:
            core.check_integrity()
            return outputs
        outputs += core.step()
    raise AssertionError("the engine does not come to an end")


class Alternating:
    """A constraint that allows even tokens and odd ones in turns."""

    error = None

    def __init__(self, vocab_size: int, turn: int = 0) -> None:
        self._is_even, self._turn = np.arange(vocab_size) % 2 == 0, turn

    def allowed(self) -> np.ndarray:
        return self._is_even == (self._turn % 2 == 0)

    def advance(self, token_id: int) -> None:
        assert self.allowed()[token_id]
        self._turn += 1

    def fork(self) -> Alternating:
        return Alternating(len(self._is_even), self._turn)


CONTROLS = (
    LogitControls(repetition_penalty=1.5, banned_tokens=(3, 4)),
    LogitControls(frequency_penalty=0.7, presence_penalty=-0.4),
    LogitControls(no_repeat_ngram=2, encoder_no_repeat_ngram=2),
    LogitControls(logit_bias=((5, 3.0), (6, -9.0)), begin_banned_tokens=(5,)),
    LogitControls(banned_sequences=((1, 2), (7,))),
)


def random_params(draw: random.Random, vocab_size: int = 256) -> SamplingParams:
    share = draw.choice([0, 0, 0.08, 0.24])  # share of tokens that stop; one comes early or late
    stops = tuple(draw.sample(range(vocab_size), int(share * vocab_size)))
    common = {
        "max_new_tokens": draw.randint(1, 12),
        "stop_token_ids": stops,
        "ignore_eos": draw.random() < 0.5,
        "min_new_tokens": draw.choice([0, 0, 0, 2]),
    }
    if draw.random() < 0.2:
        common["forced_begin"], common["forced_end"] = (9, 8), draw.choice([None, 7])
    kind = draw.randrange(10)
    if kind < 3:
        return SamplingParams(**common)
    if kind == 3:
        return SamplingParams(controls=draw.choice(CONTROLS), **common)
    if kind == 4:
        return SamplingParams(logprobs=2, **common)
    if kind == 5:
        controls = draw.choice([LogitControls(), CONTROLS[0]])
        is_whole = draw.random() < 0.5
        beams = {"beam_width": 3, "num_outputs": 2, "renormalize": is_whole, "controls": controls}
        return SamplingParams("beam", **beams, **common)
    truncation = draw.choice(
        [{"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.95}, {}, {"typical_p": 0.7}]
        + [{"top_k": 300}, {"top_p": 0.7, "controls": draw.choice(CONTROLS)}]
    )
    truncation |= draw.choice([{}, {"temperature": 0.6}, {"temperature": 1.5, "min_p": 0.01}])
    outputs = draw.choice([{}, {}, {"num_outputs": 3}, {"num_outputs": 2, "best_of": 4}])
    return SamplingParams("sampling", **outputs, **truncation, **common)


def random_request(
    key: int, draw: random.Random, ids: tuple[int, ...], vocab_size: int, **given: Any
) -> TokenRequest:
    """Return a request of any kind; a few are constrained, or have what is given scored."""
    params = random_params(draw, min(vocab_size, 256))
    kind, has_target = draw.randrange(10), len(given.get("target_ids", ids)) > 0
    if given.get("target_ids"):  # they take the place of it
        params = replace(params, forced_begin=())
    if kind == 0:
        constraint = Constraint("regex", ("in the place of one",))
        params = replace(params, constraint=constraint, forced_begin=(), forced_end=None)
        given["matcher"] = Alternating(vocab_size)
    elif kind == 1 and has_target:
        params = SamplingParams(prompt_logprobs=2, max_new_tokens=draw.choice([0, 3]))
        given["score_from"] = 1
    return TokenRequest(key, f"r-{key}", ids, params, key, 0.0, **given)


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.long)])
def test_random_requests_get_what_they_get_in_lockstep(make_core: Callable, count: int) -> None:
    def any_request(key: int, draw: random.Random) -> TokenRequest:
        ids = tuple(draw.choices(range(256), k=draw.randint(2, 14)))
        deltas = draw.choice([Deltas(), Deltas(4), Deltas(2, 1e-5, 1e-6), None])
        found = random_request(key, draw, ids, 258, deltas=deltas)
        stops = draw.choice([(), (), tuple(string.ascii_letters)])
        return replace(found, params=replace(found.params, stop_strings=stops))

    config = replace(CONFIG, max_queue_size=count)  # more come than are answered meanwhile
    in_turn, _ = make_core(continuation, config=config)
    cores = in_turn, feeding(make_core, config)
    lockstep, ahead = (told(core, count, any_request) for core in cores)

    assert len(lockstep) > count
    assert sum(part == "scores" for _, part in lockstep) > count / 20
    ends = [told[-1] for told in lockstep.values()]
    assert sum(isinstance(stop, str) for stop in ends) > count / 20
    assert ahead == lockstep


def told(
    core: EngineCore, count: int, make: Callable[[int, random.Random], TokenRequest]
) -> dict[tuple[int, object], list]:
    """Let random requests come and some of them leave; return what each was told."""
    draw, outputs = random.Random(1), []
    for key in range(count):
        core.scheduler.add(make(key, draw))
        is_unwanted = draw.random() < 0.05
        for _ in range(draw.randint(0, 3)):
            outputs += core.step() if core.has_work else []
        if is_unwanted:
            core.scheduler.abort(key)
            outputs = [output for output in outputs if output.key != key]
    outputs += step_all(core)
    assert not [output for output in outputs if isinstance(output, FailedOutput)]
    return whole_answers(outputs)


def whole_answers(outputs: list[EngineOutput]) -> dict[tuple[int, object], list]:
    """Return what every sequence was told in all, however it was cut."""
    found: dict[tuple[int, object], list] = {}
    for output in outputs:
        match output:
            case TokensOutput():
                told = found.setdefault((output.key, output.index), [[], [], 0.0, None, None])
                told[0] += output.token_ids
                told[1] += output.positions
                told[2:] = output.sum_logprob, output.finish_reason, output.matched_stop
            case HypothesisOutput():
                found[output.key, ("beam", output.index)] = [output.hypothesis]
            case ScoresOutput():
                found.setdefault((output.key, "scores"), []).extend(output.positions)
            case FailedOutput():
                found[output.key, "failed"] = [output.error]
    return found


def test_the_next_step_begins_before_the_last_one_is_taken_in(make_core: Callable) -> None:
    core = feeding(make_core)
    for key in range(3):
        core.scheduler.add(request(key, 4, max_new_tokens=6))
    core.step()
    core.step()

    (under_way,) = core.under_way
    under_way_ids = [sequence.request.key for sequence in under_way.parts.decoding]

    assert under_way_ids == [0, 1, 2]
    assert under_way.parts.future_tokens == (0, 1, 2)


def test_a_sequence_at_its_limit_is_in_no_further_step(make_core: Callable) -> None:
    core = feeding(make_core)
    core.scheduler.add(request(1, 4, max_new_tokens=3))
    core.scheduler.add(request(2, 4, max_new_tokens=6))

    outputs = step_all(core)

    finished = {o.key: o.timing.steps for o in outputs if isinstance(o, FinishedOutput)}
    assert finished == {1: 3, 2: 6}


def test_what_comes_for_a_sequence_that_has_ended_is_dropped(make_core: Callable) -> None:
    core, alone = feeding(make_core), make_core(continuation, config=CONFIG)[0]
    stops = tuple(range(0, 256, 2))
    for one in (core, alone):
        for key in range(6):
            one.scheduler.add(request(key, 4, stop_token_ids=stops, max_new_tokens=20))

    ahead, lockstep = step_all(core), step_all(alone)

    assert answers(ahead).keys() == answers(lockstep).keys()
    assert whole_answers(ahead) == whole_answers(lockstep)
    assert core.scheduler.load().running == 0


def test_a_step_that_fails_takes_the_one_behind_it_along(make_core: Callable) -> None:
    core = feeding(make_core)
    core.scheduler.add(request(1, 4, max_new_tokens=9))
    core.step()
    core.step()

    failed = core.recover(lambda request_id: EngineFailure(request_id))
    core.scheduler.add(request(2, 4, max_new_tokens=3))

    assert [output.key for output in failed if isinstance(output, FailedOutput)] == [1]
    assert [o.key for o in step_all(core) if isinstance(o, FinishedOutput)] == [2]
