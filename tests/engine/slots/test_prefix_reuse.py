"""Equal beginnings of prompts, and equal sources, are computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import EngineFailure
from engine.generation.core import EngineCore
from engine.requests.request import SamplingParams
from engine.scheduling.output import EngineOutput, FailedOutput, FinishedOutput
from engine.scheduling.sequence import TokenRequest

A, EOS = 65, 257
SHARED = tuple(range(10, 22))  # three chunks
Engine = tuple[EngineCore, object]


@pytest.fixture
def make_engine(make_core: Callable) -> Callable[..., Engine]:
    """Make an engine with chunks of four whose model says "A" behind everything."""

    def make(script: Callable | None = None, **options: int) -> Engine:
        shape = (
            {"max_source_len": options.pop("max_source_len")}
            if options.get("max_source_len")
            else {}
        )
        settings = {"max_num_seqs": 3, "prefill_chunk_size": 4, "max_num_batched_tokens": 32}
        config = EngineConfig(**(settings | options))
        return make_core(script or (lambda source, tokens: A), config=config, **shape)

    return make


def request(key: int, ids: Sequence[int], **params) -> TokenRequest:
    options = {"max_new_tokens": 2} | params
    return TokenRequest(key, f"r-{key}", tuple(ids), SamplingParams(**options), 7, 0.0)


def run(core: EngineCore) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while core.scheduler.has_work:
        outputs += core.step()
    return outputs


def ask(engine: Engine, one: TokenRequest) -> tuple[list[tuple[int, ...]], int]:
    """Return the chunks of the prompt that were computed, and the tokens that were not."""
    core, runner = engine
    first = len(runner.batches)
    core.scheduler.add(one)
    finished = [o for o in run(core) if isinstance(o, FinishedOutput) and o.key == one.key]
    chunks = [c.token_ids for batch in runner.batches[first:] for c in batch.chunks]
    return chunks, finished[0].cached_tokens


def test_a_prompt_that_begins_like_an_earlier_one_computes_the_rest_only(make_engine) -> None:
    engine = make_engine()
    cold = ask(engine, request(1, [*SHARED, 1, 2]))

    warm = ask(engine, request(2, [*SHARED, 3, 4, 5]))

    assert cold == ([SHARED[:4], SHARED[4:8], SHARED[8:], (1, 2)], 0)
    assert warm == ([(3, 4, 5)], 12)


def test_what_is_computed_is_cut_where_it_is_without_reuse(make_engine) -> None:
    engine = make_engine()
    prompt = [*SHARED[:6], *range(30, 40)]
    cold, _ = ask(make_engine(), request(1, prompt))
    ask(engine, request(1, SHARED))

    chunks, cached = ask(engine, request(2, prompt))

    assert cached == 4  # six tokens are equal, one chunk is whole
    assert chunks == cold[1:]


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("max_source_len", [0, 16])
def test_nothing_is_reused_across_tenants(
    make_engine, max_source_len: int, is_running: bool
) -> None:
    core, _ = engine = make_engine(**({"max_source_len": max_source_len} if max_source_len else {}))
    prompt = SHARED + (1,)
    first = request(1, prompt, max_new_tokens=50 if is_running else 1, ignore_eos=True)
    core.scheduler.add(replace(first, tenant="one"))
    core.step()

    cached = {
        tenant: ask(engine, replace(request(key, prompt), tenant=tenant))[1]
        for key, tenant in ((2, "other"), (3, "one"))
    }

    assert cached["other"] == 0
    assert cached["one"] == (len(prompt) if max_source_len else len(SHARED))


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_of_an_equal_prompt_the_last_chunk_or_token_is_computed(
    make_engine, length: int, cached: int
) -> None:
    engine = make_engine()
    ask(engine, request(1, SHARED[:length]))

    assert ask(engine, request(2, SHARED[:length]))[1] == cached


def test_a_running_row_is_copied_once_its_first_token_is_known(make_engine) -> None:
    core, runner = engine = make_engine()
    core.scheduler.add(request(1, SHARED, max_new_tokens=50))
    core.scheduler.add(request(2, SHARED, max_new_tokens=50))
    core.step()

    _, cached = ask(engine, request(3, [*SHARED, 1]))

    assert sum(len(chunk.token_ids) for chunk in runner.batches[0].chunks) == 2 * 12
    assert cached == 12


def test_the_least_recently_used_beginning_gives_its_row_away(make_engine) -> None:
    engine = make_engine()
    prompts = {key: [*range(key, key + 4), 1, 2] for key in (10, 20, 30, 40)}
    for key in (10, 20, 30):
        ask(engine, request(key, prompts[key]))
    ask(engine, request(11, prompts[10]))  # used again

    ask(engine, request(40, prompts[40]))

    cached = {key: ask(engine, request(100 + key, prompts[key]))[1] for key in (40, 10, 20)}
    assert cached == {40: 4, 10: 4, 20: 0}


def test_kept_rows_give_way_to_requests(make_engine) -> None:
    core, _runner = engine = make_engine()
    for key in (10, 20, 30):
        ask(engine, request(key, [*range(key, key + 4), 1]))

    core.scheduler.add(
        request(1, [9], strategy="sampling", num_outputs=3, max_new_tokens=4, ignore_eos=True)
    )
    outputs = run(core)

    assert len([o for o in outputs if isinstance(o, FinishedOutput)]) == 1
    assert core.scheduler.load().running == 0


def test_nothing_is_kept_of_a_request_that_was_cancelled_or_failed(make_engine) -> None:
    def script(source: list[int], tokens: list[int]) -> np.ndarray:
        return np.full(258, np.nan if 99 in tokens else 0.0, np.float32)

    core, runner = engine = make_engine(script)
    core.scheduler.add(request(1, [*SHARED, 99]))
    failed = run(core)
    core.scheduler.add(request(2, SHARED, max_new_tokens=50))
    core.step()
    core.scheduler.abort(2)
    run(core)

    assert any(isinstance(output, FailedOutput) for output in failed)
    assert runner.rows == [[]] * 3
    assert ask(engine, request(3, SHARED))[1] == 0


def test_nothing_is_kept_over_a_failed_step(make_engine) -> None:
    core, _ = engine = make_engine()
    ask(engine, request(1, SHARED))
    core.scheduler.add(request(2, [1, 2]))

    core.recover(EngineFailure)

    assert ask(engine, request(3, SHARED))[1] == 0


def test_a_prompt_whose_tokens_are_scored_is_computed_as_a_whole(make_engine) -> None:
    engine = make_engine()
    ask(engine, request(1, SHARED))

    scored = replace(request(2, SHARED, prompt_logprobs=0), score_from=1)

    assert ask(engine, scored)[1] == 0


def test_reuse_can_be_turned_off(make_engine) -> None:
    _core, runner = engine = make_engine(reuse_prefixes=False)
    ask(engine, request(1, SHARED))

    assert ask(engine, request(2, SHARED))[1] == 0
    assert runner.rows == [[]] * 3


def test_an_equal_source_is_copied_not_encoded(make_engine) -> None:
    _core, runner = engine = make_engine(max_source_len=20)
    ask(engine, request(1, SHARED))
    first = len(runner.batches)

    _, cached = ask(engine, request(2, SHARED))
    _, other = ask(engine, request(3, SHARED[:-1]))

    encoded = [e.source_ids for batch in runner.batches[first:] for e in batch.encodes]
    assert (cached, other) == (12, 0)
    assert encoded == [SHARED[:-1]]


def test_a_request_of_which_all_is_known_is_not_charged_for_its_source(make_engine) -> None:
    core, _ = engine = make_engine(max_source_len=20)
    ask(engine, request(1, SHARED))
    core.scheduler.add(request(2, SHARED, max_new_tokens=50))
    core.step()

    core.scheduler.abort(2)

    assert core.scheduler.load().wasted.cancelled_tokens == 1
