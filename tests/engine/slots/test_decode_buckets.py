"""Decode calls of a fixed number of rows: what fills them up changes nothing for anybody."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.factory import core_on_slots
from engine.requests.request import LogitControls, SamplingParams
from engine.sampling.logits import StepLogits
from engine.scheduling.output import EngineOutput
from engine.scheduling.sequence import TokenRequest
from engine.session import Binding, Session
from engine.slots.batch import Encode, PrefillChunk, RowOp, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from tests.engine.row_steps import prefill
from tests.engine.slots.test_model_runner import MAX_LEN, MAX_SOURCE, VOCAB, TinyModel

SLOTS = 5
NOTHING = ScheduledBatch()


def load(model: TinyModel, path: Path, *buckets: int) -> SlotModelRunner:
    paths = model.write(path)
    return SlotModelRunner.load(
        model.contract, *paths, num_slots=SLOTS, num_threads=1, buckets=buckets
    )


def ids(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, VOCAB, length).tolist())


def bits(step: StepLogits, row: int) -> tuple[bytes, ...]:
    arrays = (step.all_logits, step.top_ids, step.top_logits, step.top_logprobs)
    return tuple(array[row].tobytes() for array in arrays)


@pytest.fixture
def decoder(tmp_path: Path) -> tuple[TinyModel, SlotModelRunner]:
    model = TinyModel(1, has_encoder=False)
    return model, load(model, tmp_path, SLOTS)


def test_the_largest_bucket_holds_all_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bucket \(4\) must be the number of rows, 5"):
        load(TinyModel(1, has_encoder=False), tmp_path, 2, 4)


def test_a_prompt_is_computed_in_chunks_while_others_decode(
    decoder: tuple[TinyModel, SlotModelRunner],
) -> None:
    model, runner = decoder
    decoding, prompt = list(ids(1, 6)), ids(2, 20)
    prefill(runner, 0, decoding[:3])

    for start in (0, 7, 14):
        chunk = PrefillChunk(2, prompt[start : start + 7], num_logits=2)
        token = (decoding[3 + start // 7],)
        step = runner.run(NOTHING._replace(chunks=(chunk,), decode_ids=token, num_top=3))
        before = decoding[: 4 + start // 7]
        np.testing.assert_allclose(step.all_logits[0], model.logits(before)[-1], atol=2e-5)
        whole = model.logits(list(prompt[: start + 7]))[-2:]
        np.testing.assert_allclose(step.all_logits[1:], whole, atol=2e-5)
        np.testing.assert_array_equal(step.top_ids[:, 0], step.all_logits.argmax(1))

    assert runner.num_padding == 3 * (SLOTS - 1)
    assert runner.cache.lengths.tolist() == [6, 0, 20, 0, 0]


def test_a_row_that_is_full_keeps_all_that_another_may_copy(
    decoder: tuple[TinyModel, SlotModelRunner],
) -> None:
    model, runner = decoder
    prompt = ids(3, MAX_LEN)
    chunk = PrefillChunk(1, prompt, num_logits=1)
    runner.run(NOTHING._replace(chunks=(chunk,), decode_ids=(4,)))  # row 1 fills the call up

    runner.cache.apply([RowOp("copy", 1, 2, 0, MAX_LEN - 1), RowOp("swap", 2, 1)])
    step = runner.run(NOTHING._replace(decode_ids=(5, prompt[-1])))

    np.testing.assert_allclose(step.all_logits[1], model.logits(list(prompt))[-1], atol=2e-5)


@pytest.mark.parametrize("how", ["clear", "move", "swap"])
def test_a_row_that_holds_nan_leaves_none_behind(
    decoder: tuple[TinyModel, SlotModelRunner], how: str
) -> None:
    _, runner = decoder
    prefill(runner, 3, ids(1, 4))
    for layer in runner.cache.layers:
        layer.key[3, :, :4] = layer.value[3, :, :4] = np.nan
    runner.run(NOTHING._replace(decode_ids=(4,)))  # writes NaN behind row 3
    assert np.isnan(runner.cache.layers[1].key[3, :, 4]).all()

    ops = {
        "clear": [RowOp("clear", 3, 3)],
        "move": [RowOp("move", 3, 4), RowOp("clear", 4, 4)],
        "swap": [RowOp("swap", 3, 0), RowOp("clear", 0, 0)],
    }
    runner.cache.apply(ops[how])

    for layer in runner.cache.layers:
        assert np.isfinite(layer.key).all() and np.isfinite(layer.value).all()


@pytest.mark.parametrize(("buckets", "calls"), [((SLOTS,), 3), ((1, SLOTS), 1), ((), 1)])
def test_where_calls_have_one_shape_a_source_is_encoded_without_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buckets: tuple[int, ...], calls: int
) -> None:
    runner = load(TinyModel(2, has_encoder=True), tmp_path, *buckets)
    bound: list[str] = []
    bind = Session.bind

    def counted(session: Session) -> Binding:
        bound.append(session.path.name)
        return bind(session)

    monkeypatch.setattr(Session, "bind", counted)

    runner.run(NOTHING._replace(encodes=tuple(Encode(row, ids(row, 4)) for row in range(3))))

    assert bound == ["encoder.onnx"] * calls


def test_the_smallest_bucket_that_holds_rows_and_sources_is_taken(tmp_path: Path) -> None:
    runner = load(TinyModel(2, has_encoder=True), tmp_path, 1, 3, SLOTS)
    encodes = tuple(Encode(row, ids(row, 4)) for row in range(4))
    runner.run(NOTHING._replace(encodes=encodes))

    for rows, sources, padding in (((4,), (0,), 0), ((4,), (2,), 2), ((4, 5), (3, 0), 3)):
        before = runner.num_padding
        runner.run(NOTHING._replace(decode_ids=rows, decode_sources=sources))
        assert runner.num_padding - before == padding


@pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_a_row_has_the_same_bits_whoever_else_decodes(tmp_path: Path, has_encoder: bool) -> None:
    model = TinyModel(5, has_encoder=has_encoder)
    runner = load(model, tmp_path, SLOTS)

    def run(num_decoding: int, num_held: int) -> list[tuple[bytes, ...]]:
        runner.reset()
        rows = range(max(num_decoding, num_held))
        if has_encoder:
            encodes = tuple(Encode(row, ids(row, 3 + row)) for row in rows)
            runner.run(NOTHING._replace(encodes=encodes))
        chunks = tuple(PrefillChunk(row, ids(9 + row, 8 - row), 0, row) for row in rows)
        runner.run(NOTHING._replace(chunks=chunks))
        found = []
        for token in (7, 8, 9):
            step = NOTHING._replace(
                decode_ids=tuple(token + row for row in range(num_decoding)),
                decode_sources=tuple(range(num_decoding)) if has_encoder else (),
                num_top=3,
            )
            found.append(bits(runner.run(step), 0))
        return found

    alone = run(1, 1)

    assert all(run(*others) == alone for others in ((1, 5), (2, 2), (3, 4), (5, 5)))


REQUESTS: list[tuple[int, SamplingParams]] = [
    (5, SamplingParams(max_new_tokens=9)),
    (11, SamplingParams(max_new_tokens=6, logprobs=3)),
    (1, SamplingParams("sampling", max_new_tokens=8, top_k=5, temperature=1.3)),
    (9, SamplingParams("beam", max_new_tokens=7, beam_width=3)),
    (12, SamplingParams("sampling", max_new_tokens=5, top_p=0.7, num_outputs=3)),
    (7, SamplingParams("beam", max_new_tokens=9, beam_width=2)),
    (6, SamplingParams(max_new_tokens=40, ignore_eos=True)),  # to the end of its row
    (8, SamplingParams(max_new_tokens=4, prompt_logprobs=2)),
    (10, SamplingParams(max_new_tokens=6, controls=LogitControls(repetition_penalty=1.5))),
]


def answers(runner: SlotModelRunner, model: TinyModel, seeds: Iterable[int]) -> list[EngineOutput]:
    """Give every kind of request, some of them twice, to an engine; return all that it tells."""
    config = EngineConfig(max_num_seqs=SLOTS, prefill_chunk_size=4, max_num_batched_tokens=12)
    core = core_on_slots(config, model.contract, runner, clock=lambda: 0.0)
    for key, seed in enumerate(seeds):
        length, params = REQUESTS[seed % len(REQUESTS)]
        if model.has_encoder:
            length = min(length, MAX_SOURCE)
            prompt, target = ids(seed % 20, length), (1,)
        else:
            prompt, target = ids(seed % 20, length), ()
        score_from = None if params.prompt_logprobs is None else 1
        request = TokenRequest(
            *(key, "", prompt, params, seed, 0.0), target_ids=target, score_from=score_from
        )
        core.scheduler.add(request)
    outputs: list[EngineOutput] = []
    while core.has_work:
        outputs += core.step()
    return outputs


@pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])
@pytest.mark.parametrize("buckets", [(SLOTS,), (1, 3, SLOTS)], ids=["one", "several"])
def test_an_engine_answers_every_kind_of_request_as_without_buckets(
    tmp_path: Path, has_encoder: bool, buckets: tuple[int, ...]
) -> None:
    model = TinyModel(4, has_encoder=has_encoder)
    seeds = range(45)

    found = answers(load(model, tmp_path, *buckets), model, seeds)

    assert found == answers(load(model, tmp_path), model, seeds)
