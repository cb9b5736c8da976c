"""Scores of given targets, on an engine with a scripted model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import EngineFailure
from engine.generation.async_engine import AsyncEngine
from engine.requests.request import ScoreRequest

VOCAB = 258
MakeEngine = Callable[..., Awaitable[tuple[AsyncEngine, object]]]
TARGET = tuple(range(40, 59))


def noise(source: list[int], tokens: list[int]) -> np.ndarray:
    return np.random.default_rng(tokens).normal(0, 2, VOCAB).astype(np.float32)


def expected(prompt: list[int]) -> list[float]:
    tokens, found = list(prompt), []
    for token_id in TARGET:
        logits = noise([], tokens)
        found.append(logits[token_id] - np.log(np.exp(logits).sum()))
        tokens.append(token_id)
    return found


@pytest.mark.parametrize("chunks_in_a_step", [1, 3])
@pytest.mark.parametrize("shape", [{}, {"max_source_len": 20}], ids=["decoder", "encoder-decoder"])
async def test_a_target_of_many_chunks_is_scored_whole(
    make_engine: MakeEngine, shape: dict[str, int], chunks_in_a_step: int
) -> None:
    config = EngineConfig(
        max_num_seqs=2, prefill_chunk_size=4, max_num_batched_tokens=max(6, 4 * chunks_in_a_step)
    )
    engine, _ = await make_engine(noise, config=config, **shape)

    score = await engine.score(ScoreRequest("r-1", (7, 8, 9), TARGET))

    found = [position.chosen.logprob for position in score.positions]
    np.testing.assert_allclose(found, expected([256] if shape else [7, 8, 9]), atol=1e-4)
    assert score.sum_logprob == sum(found)


async def test_a_score_of_several_chunks_that_are_not_finite_fails_once(
    make_engine: MakeEngine,
) -> None:
    config = EngineConfig(max_num_seqs=2, prefill_chunk_size=4, max_num_batched_tokens=12)
    engine, _ = await make_engine(
        lambda source, tokens: np.full(VOCAB, np.nan, np.float32), config=config
    )

    with pytest.raises(EngineFailure, match="r-1.*not finite"):
        await engine.score(ScoreRequest("r-1", (7, 8, 9), TARGET))

    assert engine.load().running == 0 and engine.healthy
