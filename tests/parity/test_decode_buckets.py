"""Graphs for CUDA on the CPU provider: in calls of one size a row depends on no other row."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.sampling.logits import StepLogits
from engine.slots.batch import Encode, PrefillChunk, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from exporter.graphs.contracts import generation_contract
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.target import CUDA
from exporter.models import TransformerConfig
from tests.fakes.traces import Trace
from tests.parity.conftest import random_model

NUM_ROWS = 6
SMALL = {"d_model": 64, "num_heads": 4, "d_ff": 128, "vocab_size": 97, "max_target_len": 48}
MODELS = {
    "gemma2": {
        "architecture": "decoder",
        "num_decoder_layers": 2,
        "num_kv_heads": 2,
        "positions.kind": "rotary",
        "attention": {"window": 4, "windowed_layers": (0,), "softcap": 5.0},
    },
    "encoder-decoder": {
        "architecture": "encoder-decoder",
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "max_source_len": 24,
        "bos_token_id": 1,
    },
}
MODELS["t5"] = {**MODELS["encoder-decoder"], "positions.kind": "relative"}
NOTHING = ScheduledBatch()

Bits = tuple[bytes, ...]


LONG = pytest.param("t5", marks=pytest.mark.long)


@pytest.mark.parametrize("name", ["gemma2", "encoder-decoder", LONG])
def test_a_row_has_the_same_bits_however_many_decode(
    name: str, tmp_path: Path, traced: Trace
) -> None:
    runner = _load({**SMALL, **MODELS[name]}, tmp_path, traced)

    alone = _decoded(runner, num_decoding=1, num_held=1)

    for num_decoding, num_held in ((1, NUM_ROWS), (2, 2), (4, 5), (NUM_ROWS, NUM_ROWS)):
        assert _decoded(runner, num_decoding, num_held) == alone, (num_decoding, num_held)


@pytest.mark.parametrize("name", ["encoder-decoder", LONG])
def test_a_row_has_the_same_bits_however_many_sequences_a_source_has(
    name: str, tmp_path: Path, traced: Trace
) -> None:
    runner = _load({**SMALL, **MODELS[name]}, tmp_path, traced)
    encodes = (Encode(0, (5, 6, 7, 8)), Encode(1, (9, 10)))
    chunk = PrefillChunk(0, (7, 8, 9), 0, 0)

    def decoded(*sources: int) -> Bits:
        runner.reset()
        runner.run(NOTHING._replace(encodes=encodes, chunks=(chunk,)))
        ids = tuple(range(11, 11 + len(sources)))
        return _bits(
            runner.run(NOTHING._replace(decode_ids=ids, decode_sources=sources, num_top=4))
        )

    alone = decoded(0)

    for sources in ((0, 1), (0, 1, 1), (0, 0), (0, 0, 1, 0), (0,) * NUM_ROWS):
        assert decoded(*sources) == alone, sources


def _load(settings: dict[str, object], path: Path, traced: Trace) -> SlotModelRunner:
    config = TransformerConfig.of(settings)
    graphs = traced(random_model(config), target=CUDA)
    write_graphs(graphs, path)
    contract = generation_contract(config)
    assert contract is not None
    encoder = path / "encoder.onnx" if contract.cross_cache else None
    return SlotModelRunner.load(
        contract,
        path / "decoder.onnx",
        encoder,
        num_slots=NUM_ROWS,
        num_threads=2,
        buckets=(NUM_ROWS,),
    )


def _decoded(runner: SlotModelRunner, num_decoding: int, num_held: int) -> list[Bits]:
    """Return what row 0 gives at three steps, in the second beside a chunk of the last row."""
    runner.reset()
    has_source = len(runner.cache.cross_layers) > 0
    sources = tuple(Encode(row, (5,) * (4 + row)) for row in range(num_held))
    runner.run(NOTHING._replace(encodes=sources if has_source else ()))
    chunks = [PrefillChunk(row, (7, 8, 9) * (1 + row), 0, row) for row in range(num_held)]
    runner.run(NOTHING._replace(chunks=tuple(chunks)))
    found = []
    for token in (11, 12, 13):
        step = NOTHING._replace(
            decode_ids=tuple(token + row for row in range(num_decoding)),
            decode_sources=tuple(range(num_decoding)) if has_source else (),
            chunks=tuple(chunks[-1:]) if token == 12 and num_held > num_decoding else (),
            num_top=4,
        )
        found.append(_bits(runner.run(step)))
    return found


def _bits(step: StepLogits) -> Bits:
    arrays = (step.all_logits, step.top_ids, step.top_logits, step.top_logprobs)
    return tuple(array[0].tobytes() for array in arrays)
