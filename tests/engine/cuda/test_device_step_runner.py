"""Steps on a device: the next one is queued before the host looks at what the last one has brought.

Calls on the fake device run as late as they may, so that what is overwritten too soon is seen.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import DeviceError, EngineFailure
from engine.factory import core_on_slots
from engine.generation.core import EngineCore
from engine.requests.request import LogitControls, SamplingParams
from engine.scheduling import scheduler
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.output import EngineOutput, FailedOutput, FinishedOutput, TokensOutput
from engine.scheduling.sequence import TokenRequest
from engine.slots.batch import PrefillChunk
from engine.slots.runner import SlotModelRunner
from tests.engine.cuda.fake_cuda import FakeCuda
from tests.engine.cuda.fake_device_session import load_on, write_sampling_graphs
from tests.engine.generation.test_steps_under_way import random_request, step_all, told
from tests.engine.slots.test_decode_buckets import NOTHING, SLOTS, ids, load
from tests.engine.slots.test_model_runner import MAX_SOURCE, VOCAB, TinyModel

LARGE_VOCAB = 700  # so large that a draw may look beyond the likeliest tokens

CONFIG = EngineConfig(
    max_num_seqs=SLOTS, prefill_chunk_size=4, max_num_batched_tokens=12, max_queue_size=1000
)
ENCODERS = pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])


def core_on(runner: SlotModelRunner, model: TinyModel) -> EngineCore:
    return core_on_slots(CONFIG, model.contract, runner, clock=lambda: 0.0)


def on_device(
    path: Path, *, has_encoder: bool = False, vocab_size: int = VOCAB
) -> tuple[FakeCuda, EngineCore]:
    cuda, model = FakeCuda(), TinyModel(4, has_encoder=has_encoder, vocab_size=vocab_size)
    write_sampling_graphs(path, vocab_size)
    runner, _ = load_on(cuda, model, path, num_slots=SLOTS)
    return cuda, core_on(runner, model)


def request(key: int, params: SamplingParams, *, has_encoder: bool = False) -> TokenRequest:
    length = 1 + key % (MAX_SOURCE if has_encoder else 14)
    score_from = None if params.prompt_logprobs is None else 1
    return TokenRequest(key, f"r-{key}", ids(key, length), params, key, 0.0, score_from=score_from)


def decoding(core: EngineCore, *kinds: SamplingParams) -> EngineCore:
    """Let requests come so far that all of them have had two tokens."""
    for key, params in enumerate(kinds):
        core.scheduler.add(request(key, params))
    had: Counter[int] = Counter()
    while min(had[key] for key in range(len(kinds))) < 2:
        had += nums_told(core.step())
    return core


def nums_told(outputs: list[EngineOutput]) -> Counter[int]:
    """Count the tokens that each request is told."""
    told = [output for output in outputs if isinstance(output, TokensOutput)]
    return Counter(output.key for output in told for _ in output.token_ids)


GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams("sampling", top_k=5, max_new_tokens=12, ignore_eos=True)
PENALISED = replace(GREEDY, controls=LogitControls(repetition_penalty=1.5))


@pytest.mark.parametrize(
    ("has_encoder", "count", "vocab_size"),
    [
        pytest.param(False, 200, VOCAB, id="decoder"),
        pytest.param(False, 1000, VOCAB, id="decoder, more", marks=pytest.mark.long),
        pytest.param(False, 1000, LARGE_VOCAB, id="decoder, of many", marks=pytest.mark.long),
        pytest.param(True, 200, LARGE_VOCAB, id="encoder-decoder"),
        pytest.param(True, 1000, VOCAB, id="encoder-decoder, more", marks=pytest.mark.long),
    ],
)
def test_random_requests_of_every_kind_get_what_they_get_in_lockstep(
    tmp_path: Path, has_encoder: bool, count: int, vocab_size: int
) -> None:
    model = TinyModel(4, has_encoder=has_encoder, vocab_size=vocab_size)
    on_host = core_on(load(model, tmp_path, SLOTS), model)
    _, ahead = on_device(tmp_path, has_encoder=has_encoder, vocab_size=vocab_size)

    def any_request(key: int, draw: random.Random) -> TokenRequest:
        prompt = ids(key, 2 + key % ((MAX_SOURCE if has_encoder else 14) - 1))
        given = {"target_ids": ids(key + 1, key % 4)} if has_encoder else {}
        return random_request(key, draw, prompt, vocab_size, **given)

    lockstep, found = (told(core, count, any_request) for core in (on_host, ahead))

    assert len(lockstep) > count
    assert sum(part == "scores" for _, part in lockstep) > count / 20
    assert found == lockstep


@ENCODERS
def test_requests_that_are_fed_come_and_go_while_steps_are_under_way(
    tmp_path: Path, has_encoder: bool
) -> None:
    def random_request(key: int, draw: random.Random) -> TokenRequest:
        params = draw.choice([GREEDY, SAMPLED])
        stops = tuple(draw.sample(range(VOCAB), 2))
        params = replace(params, max_new_tokens=draw.randint(1, 20), stop_token_ids=stops)
        return request(key, params, has_encoder=has_encoder)

    model = TinyModel(4, has_encoder=has_encoder)
    on_host = core_on(load(model, tmp_path, SLOTS), model)
    _, ahead = on_device(tmp_path, has_encoder=has_encoder)
    num_steps: Counter[bool] = Counter()
    step = ahead.step

    def counted() -> list[EngineOutput]:
        outputs = step()
        num_steps[bool(ahead.under_way)] += 1
        return outputs

    ahead.step = counted  # type: ignore[method-assign]
    lockstep, found = (told(core, 100, random_request) for core in (on_host, ahead))

    assert found == lockstep
    assert num_steps[True] > num_steps[False]


def test_a_step_is_queued_before_the_one_before_it_is_waited_for(tmp_path: Path) -> None:
    cuda, core = on_device(tmp_path)
    decoding(core, GREEDY, GREEDY, GREEDY)
    cuda.calls.clear()

    core.step()

    upload = ["cudaEventSynchronize", "cudaMemcpyAsync", "cudaEventRecord"]
    feed, download = ["cudaMemcpyAsync"], ["cudaMemcpyAsync", "cudaEventRecord"]
    assert cuda.calls == [*upload, *feed, *download, "cudaEventSynchronize"]
    assert len(core.under_way) == 1


ALL, EVERY_SECOND = {(0, 1)}, {(0,), (0, 1)}


@pytest.mark.parametrize(
    ("params", "ahead"),
    [
        (SAMPLED, ALL),
        (replace(SAMPLED, top_p=0.8, min_p=0.01, temperature=0.7), ALL),
        (replace(SAMPLED, top_k=0), ALL),
        (replace(SAMPLED, top_k=0, min_p=0.01), ALL),
        (replace(SAMPLED, top_k=0, top_p=0.8), ALL),
        (replace(SAMPLED, top_k=0, top_p=0.8, temperature=0.7), ALL),
        (replace(SAMPLED, typical_p=0.8), EVERY_SECOND),
        (replace(SAMPLED, top_k=0, top_p=0.8, temperature=101.0), EVERY_SECOND),
        (replace(SAMPLED, top_k=300), EVERY_SECOND),  # more than graphs are asked for
        (replace(GREEDY, logprobs=2), EVERY_SECOND),
        (PENALISED, EVERY_SECOND),
    ],
)
@pytest.mark.parametrize("vocab_size", [VOCAB, LARGE_VOCAB])
def test_a_token_that_the_host_draws_is_not_fed(
    tmp_path: Path,
    params: SamplingParams,
    ahead: set[tuple[int, ...]],
    vocab_size: int,
) -> None:
    _, core = on_device(tmp_path, vocab_size=vocab_size)
    decoding(core, GREEDY, params)
    seen = set()

    for _ in range(4):
        core.step()
        seen.add(tuple(sorted(step_keys(core))))

    assert seen == ahead


def test_a_temperature_below_all_numbers_of_a_graph_draws_the_likeliest(tmp_path: Path) -> None:
    """As a float32 it is 0, by which nothing can be divided."""
    _, core = on_device(tmp_path)
    coldest = replace(SAMPLED, temperature=1e-300)

    core.scheduler.add(request(0, GREEDY))
    core.scheduler.add(replace(request(0, coldest), key=1))
    found: dict[int, list[int]] = {0: [], 1: []}
    for output in step_all(core):
        if isinstance(output, TokensOutput):
            found[output.key] += output.token_ids

    assert found[1] == found[0] and len(found[0]) == 12


def step_keys(core: EngineCore) -> list[int]:
    """Return the requests that decode in the steps that are under way."""
    return [one.request.key for step in core.under_way for one in step.parts.decoding]


def test_a_few_that_the_host_draws_for_hold_nobody_else_back(tmp_path: Path) -> None:
    """They are in every second step, the others in all of them, and steps follow at once."""
    _, core = on_device(tmp_path)
    decoding(core, GREEDY, PENALISED, GREEDY, replace(GREEDY, logprobs=1))
    seen = []
    for _ in range(6):
        core.step()
        seen.append(sorted(step_keys(core)))

    assert {tuple(keys) for keys in seen[::2]} | {tuple(keys) for keys in seen[1::2]} == {
        (0, 2),
        (0, 1, 2, 3),
    }
    assert seen[0] != seen[1] and seen[:2] * 3 == seen


def test_who_decodes_together_is_worked_out_once_where_some_pause_in_every_second_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, core = on_device(tmp_path)
    long = replace(SAMPLED, max_new_tokens=30)
    decoding(core, long, replace(PENALISED, max_new_tokens=30), long, long)
    made: list[DecodeGroup] = []

    def make(*given: Any) -> DecodeGroup:
        made.append(DecodeGroup(*given))
        return made[-1]

    monkeypatch.setattr(scheduler, "DecodeGroup", make)

    sizes = []
    for _ in range(12):
        core.step()
        sizes.append(len(step_keys(core)))

    assert Counter(sizes) == {3: 6, 4: 6}
    assert len(made) <= len({3, 4})


def test_many_that_the_host_draws_for_are_in_every_step(tmp_path: Path) -> None:
    _, core = on_device(tmp_path)
    decoding(core, GREEDY, PENALISED, PENALISED)

    for _ in range(4):
        assert nums_told(core.step()) == {0: 1, 1: 1, 2: 1}
        assert core.under_way == deque()


def test_a_sequence_that_begins_behind_an_encoder_lets_no_step_wait(tmp_path: Path) -> None:
    _, core = on_device(tmp_path, has_encoder=True)
    decoding(core, GREEDY)
    core.scheduler.add(request(1, GREEDY, has_encoder=True))

    num_ahead = []
    for _ in range(4):
        outputs = core.step()
        num_ahead.append(len(core.under_way))

    assert nums_told(outputs) == {0: 1, 1: 1}
    assert num_ahead == [1, 1, 1, 1]


def test_a_row_takes_its_token_from_where_it_was_before_others_left(tmp_path: Path) -> None:
    cuda, core = on_device(tmp_path)
    ends = [replace(GREEDY, max_new_tokens=count) for count in (4, 12, 6, 12)]
    decoding(core, *ends)
    outputs: list[EngineOutput] = []
    most_copies = 0
    while core.has_work:
        cuda.calls.clear()
        outputs += core.step()
        most_copies = max(most_copies, cuda.calls.count("cudaMemcpyAsync"))

    assert most_copies > 3  # inputs, outputs and more than one piece of ids
    assert len([output for output in outputs if isinstance(output, FinishedOutput)]) == 4


def test_rows_of_logits_that_the_next_step_has_overwritten_are_not_read(tmp_path: Path) -> None:
    model = TinyModel(4, has_encoder=False)
    runner, _ = load_on(FakeCuda(), model, tmp_path, num_slots=SLOTS)
    chunk = NOTHING._replace(chunks=(PrefillChunk(0, ids(1, 4), 1),))

    first = runner.start(chunk)
    second = runner.start(NOTHING._replace(decode_ids=(5,)))
    early, late = first(), second()

    assert early.top_ids.shape == late.top_ids.shape == (1, 1)
    assert late.logits[0].shape == (VOCAB,)
    with pytest.raises(RuntimeError, match="the next one has overwritten"):
        early.logits[0]


def test_a_device_that_fails_under_a_step_takes_those_behind_it_along(tmp_path: Path) -> None:
    cuda, core = on_device(tmp_path)
    decoding(core, GREEDY, GREEDY)

    cuda.codes["cudaEventSynchronize"] = 700
    with pytest.raises(DeviceError, match="illegal memory access"):
        core.step()
    cuda.codes.clear()
    failed = core.recover(lambda request_id: EngineFailure(request_id))
    core.scheduler.add(request(7, GREEDY))

    assert sorted(o.key for o in failed if isinstance(o, FailedOutput)) == [0, 1]
    assert [o.key for o in step_all(core) if isinstance(o, FinishedOutput)] == [7]
