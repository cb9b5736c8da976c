from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from exporter.models import build_model
from exporter.models.cache import (
    LayerCache,
)
from exporter.models.layers import Decoder
from exporter.operators.cached_attention import cached_attention
from exporter.operators.cross_attention import SourceRow, cross_attention_over_row

ATOL = 2e-5


def empty_caches(
    decoder: Decoder, batch_size: int, max_len: int, sources: list[SourceRow] | None = None
) -> list[LayerCache]:
    caches = []
    for i, layer in enumerate(decoder.layers):
        num_heads = layer.self_attention.num_heads
        shape = (batch_size, num_heads, max_len, decoder.cache_head_dim)
        caches.append(
            LayerCache(
                key=torch.zeros(shape),
                value=torch.zeros(shape),
                seqlens_k=torch.zeros(batch_size, dtype=torch.int32),
                total_seq=torch.zeros(1, dtype=torch.int32),
                position_ids=torch.zeros(batch_size, 1, dtype=torch.int64),
                cross=sources[i] if sources else None,
            )
        )
    return caches


def source_rows(
    decoder: Decoder, memory: Tensor, lengths: list[int], max_len: int
) -> list[SourceRow]:
    """The cross cache, one row after the other as a server fills it, with rubbish in its tail."""
    rows = []
    for i in range(len(decoder.layers)):
        keys, values = [], []
        for b, length in enumerate(lengths):
            key, value = decoder.cross_key_values(memory[b : b + 1, :length])[i]
            row_key = torch.randn(1, key.shape[1], max_len, key.shape[3])
            row_value = torch.randn_like(row_key)
            row_key[:, :, :length], row_value[:, :, :length] = key, value
            keys.append(row_key)
            values.append(row_value)
        rows.append(SourceRow.one_each(torch.cat(keys), torch.cat(values), torch.tensor(lengths)))
    return rows


def step(
    decoder: Decoder, caches: list[LayerCache], ids: Tensor, lengths_before: list[int]
) -> Tensor:
    """Run the newest tokens `ids` (B, S) of rows that hold `lengths_before` positions."""
    start = torch.tensor(lengths_before)
    lengths = start + ids.shape[1]
    position_ids = start[:, None] + torch.arange(ids.shape[1])
    for cache in caches:
        cache.seqlens_k = (lengths - 1).int()
        cache.total_seq = lengths.max().int()[None]
        cache.position_ids = position_ids
    return decoder(ids, position_ids=position_ids, caches=caches)


@pytest.fixture(params=["equal widths", "own widths"])
def widths(request) -> dict[str, int]:
    return {} if request.param == "equal widths" else {"key_dim": 5, "value_dim": 11}


@pytest.fixture(params=["first", "last"])
def options(request, widths) -> dict[str, object]:
    return {**widths, "norm_position": request.param}


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 4, 1], [9], [3, 1, 5]])
def test_chunks_through_the_cache_equal_the_whole(gpt_config, options, chunks, randomize):
    gpt = randomize(build_model(gpt_config.model_copy(update=options)))
    ids = torch.randint(0, 29, (1, 9))
    caches = empty_caches(gpt.decoder, 1, 12)

    logits, done = [], 0
    for size in chunks:
        logits.append(step(gpt.decoder, caches, ids[:, done : done + size], [done]))
        done += size

    torch.testing.assert_close(torch.cat(logits, dim=1), gpt(ids), rtol=0, atol=ATOL)


@torch.no_grad()
def test_rows_with_their_own_lengths_equal_each_alone(gpt_config, options, randomize):
    gpt = randomize(build_model(gpt_config.model_copy(update=options)))
    ids = torch.randint(0, 29, (3, 12))
    prompts = [1, 4, 7]
    caches = empty_caches(gpt.decoder, 3, 12)
    for b, length in enumerate(prompts):
        alone = empty_caches(gpt.decoder, 1, 12)
        step(gpt.decoder, alone, ids[b : b + 1, :length], [0])
        for cache, row in zip(caches, alone, strict=True):
            cache.key[b], cache.value[b] = row.key[0], row.value[0]

    for n in range(5):
        lengths = [length + n for length in prompts]
        newest = ids[torch.arange(3), torch.tensor(lengths)][:, None]
        logits = step(gpt.decoder, caches, newest, lengths)

        for b, length in enumerate(lengths):
            whole = gpt(ids[b : b + 1, : length + 1])
            torch.testing.assert_close(logits[b, -1], whole[0, -1], rtol=0, atol=ATOL)


@torch.no_grad()
def test_translation_through_the_cache_equals_the_whole(translation_config, options, randomize):
    model = randomize(build_model(translation_config.model_copy(update=options)))
    source, target = torch.randint(3, 29, (3, 9)), torch.randint(3, 29, (3, 6))
    source_lengths = [9, 1, 5]
    mask = torch.arange(9) < torch.tensor(source_lengths)[:, None]
    memory = model.encode(source, mask)
    rows = source_rows(model.decoder, memory, source_lengths, 14)
    caches = empty_caches(model.decoder, 3, 12, rows)

    stepped = [step(model.decoder, caches, target[:, t : t + 1], [t] * 3) for t in range(6)]

    expected = model(source, target, mask)
    torch.testing.assert_close(torch.cat(stepped, dim=1), expected, rtol=0, atol=ATOL)


@torch.no_grad()
def test_translation_in_a_chunk_through_the_cache_equals_the_whole(translation_config, options):
    model = build_model(translation_config.model_copy(update=options)).eval()
    source, target = torch.randint(3, 29, (1, 9)), torch.randint(3, 29, (1, 6))
    rows = source_rows(model.decoder, model.encode(source), [9], 14)
    caches = empty_caches(model.decoder, 1, 12, rows)

    first = step(model.decoder, caches, target[:, :4], [0])
    second = step(model.decoder, caches, target[:, 4:], [4])

    expected = model(source, target)
    torch.testing.assert_close(torch.cat([first, second], 1), expected, rtol=0, atol=ATOL)


def test_cached_attention_writes_only_the_new_positions():
    past = torch.randn(2, 2, 10, 8)
    query, key, value = (torch.randn(2, 3, 16) for _ in range(3))

    _, present_key, _ = cached_attention(
        query,
        key,
        value,
        past,
        past,
        torch.tensor([2, 7], dtype=torch.int32),
        torch.tensor([8], dtype=torch.int32),
        torch.tensor([[0, 1, 2], [5, 6, 7]]),
        num_heads=2,
        num_kv_heads=2,
        scale=1.0,
    )

    new = key.view(2, 3, 2, 8).transpose(1, 2)
    assert torch.equal(present_key[0, :, :3], new[0])
    assert torch.equal(present_key[0, :, 3:], past[0, :, 3:])
    assert torch.equal(present_key[1, :, 5:8], new[1])
    assert torch.equal(present_key[1, :, :5], past[1, :, :5])
    assert torch.equal(present_key[1, :, 8:], past[1, :, 8:])


def test_first_call_padded_on_the_right_is_exact_where_tokens_are_real():
    query, key, value = (torch.randn(2, 5, 16) for _ in range(3))
    past = torch.zeros(2, 2, 10, 8)
    numbers = {"num_heads": 2, "num_kv_heads": 2, "scale": 0.5}

    together, _, _ = cached_attention(
        query,
        key,
        value,
        past,
        past,
        torch.tensor([4, 2], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.arange(5).expand(2, -1),
        **numbers,
    )
    alone, _, _ = cached_attention(
        query[1:, :3],
        key[1:, :3],
        value[1:, :3],
        past[1:],
        past[1:],
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        torch.arange(3)[None],
        **numbers,
    )

    torch.testing.assert_close(together[1:, :3], alone)
    assert together.isfinite().all()


def test_fewer_key_heads_than_query_heads_are_shared():
    query, key, value = torch.randn(1, 3, 4 * 8), torch.randn(1, 3, 2 * 8), torch.randn(1, 3, 2 * 8)
    past = torch.zeros(1, 2, 6, 8)

    output, _, _ = cached_attention(
        query,
        key,
        value,
        past,
        past,
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        torch.arange(3)[None],
        num_heads=4,
        num_kv_heads=2,
        scale=8**-0.5,
    )

    heads = query.view(1, 3, 4, 8).transpose(1, 2)
    shared_key = key.view(1, 3, 2, 8).transpose(1, 2).repeat_interleave(2, dim=1)
    shared_value = value.view(1, 3, 2, 8).transpose(1, 2).repeat_interleave(2, dim=1)
    causal = torch.ones(3, 3).tril().bool()
    expected = F.scaled_dot_product_attention(heads, shared_key, shared_value, causal)
    torch.testing.assert_close(output, expected.transpose(1, 2).flatten(2))


def test_an_empty_source_gives_numbers():
    row = torch.randn(1, 2, 6, 8)

    output = cross_attention_over_row(
        torch.randn(1, 3, 16),
        SourceRow.one_each(row, row, torch.tensor([0])),
        num_heads=2,
        scale=1.0,
    )

    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "expected"), [(None, None, 8), (5, 11, 16), (16, 16, 16), (17, 8, 24)]
)
def test_cache_width_holds_keys_and_values_in_multiples_of_8(
    translation_config, key_dim, value_dim, expected
):
    config = translation_config.model_copy(update={"key_dim": key_dim, "value_dim": value_dim})

    assert config.cache_head_dim == expected
