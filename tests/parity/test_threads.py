"""More threads than heads: a row's bits still do not depend on the rows beside it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from engine.config import RequestLimits
from engine.slots.invariance import rows_are_bit_equal
from exporter.models import TransformerConfig
from tests.engine.row_steps import decode, prefill
from tests.parity.bare import Bare, write_bare

NUM_THREADS = 16
# Wide heads: the kernel divides a row among threads above 2 MiB of L2 / (32 * 256) = 256 positions.
CONFIG = TransformerConfig(
    architecture="decoder",
    d_model=32,
    num_heads=2,
    key_dim=256,
    value_dim=256,
    d_ff=32,
    vocab_size=61,
    num_decoder_layers=1,
    max_target_len=600,
)


@pytest.fixture(scope="module", params=["fp32", pytest.param("int8", marks=pytest.mark.long)])
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    path = tmp_path_factory.mktemp("threads") / "graphs"
    return write_bare(CONFIG, path, kv_cache=request.param)


def test_a_long_row_is_bit_equal_alone_and_among_others_with_more_threads_than_heads(
    bare: Bare,
) -> None:
    runner = bare.load(num_slots=9, num_threads=NUM_THREADS)
    prompt = np.random.default_rng(1).integers(0, 61, 590).tolist()
    prefill(runner, 0, prompt)

    alone = [decode(runner, [token])[0].copy() for token in range(5)]
    runner.reset()
    prefill(runner, 0, prompt)
    for row in range(1, 9):
        prefill(runner, row, [row] * row)
    together = [decode(runner, [token] * 9)[0].copy() for token in range(5)]

    np.testing.assert_array_equal(alone, together)


def test_the_proof_at_start_up_sees_rows_that_threads_divide(bare: Bare) -> None:
    wrong = bare.contract.model_copy(update={"num_heads": NUM_THREADS})  # in fact there are two

    sound = bare.load(num_slots=4, num_threads=NUM_THREADS)
    divided = bare._replace(contract=wrong).load(num_slots=4, num_threads=NUM_THREADS)

    assert rows_are_bit_equal(sound, bare.contract, 16)
    assert not rows_are_bit_equal(divided, wrong, 16)


def test_threads_that_a_decoder_does_not_use_are_told_once(
    bare: Bare, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "engine.slots.generation_sessions"):
        bare.load(num_slots=1, num_threads=2)
        bare.load(num_slots=1, num_threads=NUM_THREADS)

    (line,) = (record.getMessage() for record in caplog.records)
    assert "decoder.onnx runs on 2 of 16 threads" in line


@pytest.mark.long
def test_the_proof_at_start_up_sees_that_more_than_16_sequences_of_a_source_take_other_kernels(
    tmp_path: Path,
) -> None:
    config = TransformerConfig(
        architecture="encoder-decoder",
        d_model=64,
        num_heads=4,
        d_ff=64,
        vocab_size=61,
        num_encoder_layers=1,
        num_decoder_layers=2,
        max_source_len=40,
        max_target_len=24,
        bos_token_id=1,
        eos_token_id=2,
    )
    bare = write_bare(config, tmp_path / "graphs")
    runner = bare.load(num_slots=17, num_threads=1)

    assert rows_are_bit_equal(runner, bare.contract, RequestLimits().most_sequences)
    assert not rows_are_bit_equal(runner, bare.contract, 17)
