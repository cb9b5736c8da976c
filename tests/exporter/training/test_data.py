"""Batches: packed by tokens, padded with masks, in an order that any position can continue."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.package.manifest import Architecture
from exporter.models.config import ImageConfig, TransformerConfig
from exporter.training.data import IGNORED, BatchStream, Example, Position, collate, pack

SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 16, "pad_token_id": 9}
SEQ2SEQ = TransformerConfig(
    architecture="encoder-decoder",
    num_encoder_layers=1,
    num_decoder_layers=1,
    vocab_size=20,
    max_source_len=30,
    max_target_len=30,
    bos_token_id=1,
    **SIZES,
)
GPT = TransformerConfig(
    architecture="decoder", num_decoder_layers=1, vocab_size=20, max_target_len=30, **SIZES
)
BERT = TransformerConfig(
    architecture="encoder",
    num_encoder_layers=1,
    vocab_size=20,
    max_source_len=30,
    labels=("a", "b"),
    **SIZES,
)
VIT = TransformerConfig(
    architecture="vision-encoder",
    num_encoder_layers=1,
    labels=("a", "b"),
    image=ImageConfig(size=4, patch_size=2, channels=1, mean=(0.0,), std=(1.0,)),
    **SIZES,
)


def example(source: list[int], target: list[int]) -> Example:
    return Example(np.array(source), np.array(target))


def random_examples(count: int, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    return [
        example([rng.randrange(20)] * rng.randint(1, 12), [rng.randrange(20)] * rng.randint(1, 8))
        for _ in range(count)
    ]


def padded_size(batch: list[Example], architecture: Architecture) -> int:
    longest_source = max(len(e.source) for e in batch)
    longest_target = max(len(e.target) for e in batch) if architecture == "encoder-decoder" else 0
    return len(batch) * (longest_source + longest_target)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "encoder"])
def test_no_batch_with_its_padding_is_above_the_token_count(architecture: Architecture) -> None:
    examples = random_examples(300)

    batches = pack(examples, architecture, batch_tokens=64)

    assert max(padded_size(batch, architecture) for batch in batches) <= 64
    assert sorted(id(e) for batch in batches for e in batch) == sorted(map(id, examples))


def test_examples_of_like_length_share_a_batch_so_that_little_is_padding() -> None:
    batches = pack(random_examples(2000), "encoder-decoder", batch_tokens=512)

    real = sum(len(e.source) + len(e.target) for batch in batches for e in batch)
    assert real / sum(padded_size(batch, "encoder-decoder") for batch in batches) > 0.85


def test_translations_much_longer_or_shorter_than_their_source_leave_little_padding() -> None:
    rng = random.Random(0)
    lengths = [1 + round(rng.expovariate(1 / 12)) for _ in range(4000)]
    examples = [example([1] * n, [1] * (1 + round(n * rng.uniform(0.6, 1.8)))) for n in lengths]

    batches = pack(examples, "encoder-decoder", batch_tokens=2048)

    real = sum(len(e.source) + len(e.target) for batch in batches for e in batch)
    assert real / sum(padded_size(batch, "encoder-decoder") for batch in batches) > 0.86


def test_an_example_longer_than_a_batch_is_a_batch_of_its_own() -> None:
    batches = pack([example([1] * 50, [1]), example([1], [1])], "encoder-decoder", batch_tokens=10)

    assert [len(batch) for batch in batches] == [1, 1]


def test_seq2seq_batch_is_masked_shifted_and_padded() -> None:
    batch = collate([example([3, 4, 5], [6, 7]), example([8], [2, 3, 4])], SEQ2SEQ)

    assert batch.source.tolist() == [[3, 4, 5], [8, 9, 9]]
    assert batch.source_mask is not None and batch.decoder_input is not None
    assert batch.source_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.labels.tolist() == [[6, 7, IGNORED], [2, 3, 4]]
    assert batch.decoder_input.tolist() == [[1, 6, 7], [1, 2, 3]]
    assert batch.num_tokens == 9


def test_a_batch_without_padding_needs_no_mask() -> None:
    assert collate([example([3, 4], [1]), example([5, 6], [0])], BERT).source_mask is None


def test_bert_has_one_label_an_example() -> None:
    batch = collate([example([3, 4], [1]), example([5], [0])], BERT)

    assert batch.labels.tolist() == [1, 0]
    assert batch.source.tolist() == [[3, 4], [5, 9]]


def test_gpt_is_causal_and_needs_no_mask() -> None:
    batch = collate([example([1, 2, 3], [2, 3, 4]), example([5], [6])], GPT)

    assert batch.source_mask is None
    assert batch.source.tolist() == [[1, 2, 3], [5, 9, 9]]
    assert batch.labels.tolist() == [[2, 3, 4], [6, IGNORED, IGNORED]]


def test_images_are_stacked() -> None:
    images = [Example(np.full((1, 4, 4), i, dtype=np.float32), np.array([i])) for i in range(3)]

    batch = collate(images, VIT)

    assert batch.source.shape == (3, 1, 4, 4)
    assert batch.labels.tolist() == [0, 1, 2]
    assert [len(b) for b in pack(images, "vit", batch_tokens=2)] == [2, 1]


def make_stream(seed: int, position: Position | None = None) -> BatchStream:
    return BatchStream(
        lambda number: random_examples(40, seed=number),
        SEQ2SEQ,
        batch_tokens=64,
        seed=seed,
        position=position,
    )


def test_a_stream_goes_on_from_any_position_with_the_same_batches() -> None:
    stream = make_stream(seed=5)
    batches, positions = [], [stream.position]
    for _ in range(40):
        batches.append(stream.next())
        positions.append(stream.position)
    assert positions[-1].chunk > 1  # several chunks are passed

    for skipped in (0, 1, 13, 39):
        resumed = make_stream(seed=5, position=positions[skipped])
        for expected in batches[skipped:]:
            found = resumed.next()
            assert torch.equal(found.source, expected.source)
            assert torch.equal(found.labels, expected.labels)


def test_another_seed_is_another_order() -> None:
    one, other = make_stream(seed=1), make_stream(seed=2)

    orders = [[stream.next().source.tolist() for _ in range(5)] for stream in (one, other)]

    assert orders[0] != orders[1]
