"""How many threads a decoder gets."""

from __future__ import annotations

import pytest

from engine.machine import num_cores
from engine.package.manifest import CacheShape, GenerationContract
from engine.slots.generation_sessions import decoder_threads


def contract(num_kv_heads: int, num_heads: int) -> GenerationContract:
    return GenerationContract(
        vocab_size=10,
        cache=CacheShape(num_layers=1, num_kv_heads=num_kv_heads, max_len=8, head_dim=8),
        cross_cache=None,
        decoder_start_token_id=None,
        eos_token_ids=(),
        num_heads=num_heads,
    )


@pytest.mark.parametrize(
    ("num_kv_heads", "num_heads", "given", "used"),
    [
        (12, 12, 2, 2),
        (12, 12, 16, 12),
        (3, 9, 16, 9),
        (1, 1, 0, 1),
        (1000, 1000, 0, num_cores()),
    ],
)
def test_a_decoder_gets_no_more_threads_than_it_has_heads(
    num_kv_heads: int, num_heads: int, given: int, used: int
) -> None:
    assert decoder_threads(contract(num_kv_heads, num_heads), given) == used
