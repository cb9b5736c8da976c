from __future__ import annotations

import math

import pytest
import torch
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from exporter.models import TransformerConfig
from exporter.models.embeddings import Embeddings
from exporter.models.positions import LearnedPositions, SinusoidalPositions, sinusoidal_table


@pytest.mark.parametrize("width", [1, 2, 7, 16])
def test_sinusoidal_positions_are_the_formula_of_the_paper(width):
    table = sinusoidal_table(300, width)

    for position in (0, 1, 17, 299):
        for column in range(width):
            angle = position / 10000 ** (column // 2 * 2 / width)
            expected = math.sin(angle) if column % 2 == 0 else math.cos(angle)
            assert float(table[position, column]) == pytest.approx(expected, abs=1e-7)


def test_positions_in_halves_are_those_of_marian():
    expected = MarianSinusoidalPositionalEmbedding(300, 16).create_weight()

    torch.testing.assert_close(
        sinusoidal_table(300, 16, "sinusoidal_halves"), expected, rtol=0, atol=1e-7
    )


def test_positions_are_rounded_to_the_type_that_they_were_kept_in():
    positions = SinusoidalPositions(10, 6, layout="sinusoidal_halves", kept_in=torch.float16)

    found = positions(torch.tensor([1, 9]))

    exact = sinusoidal_table(10, 6, "sinusoidal_halves")[[1, 9]]
    assert found.dtype == torch.float32
    assert torch.equal(found, exact.half().float()) and not torch.equal(found, exact)


@pytest.mark.parametrize("width", [16, 7])
def test_positions_of_tensor2tensor_are_those_of_m2m(width):
    twin = M2M100SinusoidalPositionalEmbedding(300, width, padding_idx=1)
    positions = SinusoidalPositions(290, width, layout="sinusoidal_tensor2tensor", offset=2)
    ids = torch.full((1, 290), 5)  # none of them padding

    found = positions.first(290)

    assert torch.equal(found, twin(ids)[0])
    assert torch.equal(positions(torch.tensor([3, 289])), twin(ids)[0, [3, 289]])


@pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions])
def test_positions_say_how_long_a_sequence_may_be(kind):
    positions = kind(4, 6)

    assert torch.equal(positions(torch.tensor([[3, 0]]))[0], positions.rows[[3, 0]])
    for longer in (lambda: positions(torch.arange(5)[None]), lambda: positions.first(5)):
        with pytest.raises(ValueError, match="5 positions is longer than the 4"):
            longer()


def test_computed_positions_are_not_stored():
    assert not SinusoidalPositions(4, 6).state_dict()


def test_embeddings_are_scaled_tokens_plus_positions(translation_config, randomize):
    embeddings = randomize(Embeddings(translation_config, 14))
    ids = torch.randint(0, 29, (2, 5))

    hidden = embeddings(ids)

    expected = torch.nn.functional.embedding(ids, embeddings.token.weight) * 4.0
    torch.testing.assert_close(hidden, expected + sinusoidal_table(5, 16))


def test_embeddings_take_positions_from_position_ids(translation_config):
    embeddings = Embeddings(translation_config, 14).eval()
    ids = torch.randint(0, 29, (2, 5))

    whole = embeddings(ids)
    last = embeddings(ids[:, 3:], torch.tensor([[3, 4]]))

    torch.testing.assert_close(last, whole[:, 3:])


@torch.no_grad()
def test_scaled_embeddings_begin_with_unit_size():
    config = TransformerConfig(
        architecture="decoder",
        d_model=64,
        num_heads=2,
        d_ff=64,
        num_decoder_layers=1,
        vocab_size=500,
        max_target_len=8,
    )

    embeddings = Embeddings(config, 8)

    assert float((embeddings.token.weight * embeddings.scale).std()) == pytest.approx(1, rel=0.05)


@torch.no_grad()
def test_embedding_dropout_applies_to_the_sum(translation_config):
    embeddings = Embeddings(translation_config.model_copy(update={"dropout": 0.5}), 14)
    ids = torch.randint(0, 29, (64, 10))

    dropped = embeddings(ids)

    assert 0.45 < float((dropped == 0).float().mean()) < 0.55
