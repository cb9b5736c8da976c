"""An encoder-decoder writes greedily while it is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.requests.generation_defaults import GenerationDefaults
from exporter.likeness import likeness
from exporter.models import EncoderDecoder
from exporter.models.config import TransformerConfig
from exporter.training.writing import write_greedily

CONFIG = TransformerConfig(
    architecture="encoder-decoder",
    d_model=16,
    num_heads=2,
    d_ff=32,
    num_encoder_layers=1,
    num_decoder_layers=1,
    vocab_size=12,
    max_source_len=20,
    max_target_len=16,
    bos_token_id=1,
    eos_token_id=2,
)

SHORT_AND_LONG = [np.array([4]), np.array([4, 5, 6, 7])]  # up to 12 tokens, and 18


def test_it_writes_for_each_source_beside_others_what_it_writes_alone() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(CONFIG).eval()
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, 12, length) for length in (5, 1, 9, 2, 5)]

    together = write_greedily(model, CONFIG, sources)

    assert together == [write_greedily(model, CONFIG, [source])[0] for source in sources]
    assert len({tuple(ids) for ids in together}) > 1


def test_rows_that_have_ended_are_not_computed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = CONFIG.model_copy(update={"output_bias": True, "max_target_len": 64})
    model = EncoderDecoder(config).eval()
    decode, computed = model.decode, []

    def counted(target: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        computed.append(len(target))
        return decode(target, memory, mask)

    monkeypatch.setattr(model, "decode", counted)
    with torch.no_grad():
        model.decoder.output.bias[2] = -100  # no sequence ends before its limit
        write_greedily(model, config, SHORT_AND_LONG)

    assert computed == [2] * 12 + [1] * 6


def test_it_ends_where_the_model_ends_and_at_the_limit() -> None:
    torch.manual_seed(0)
    config = CONFIG.model_copy(update={"output_bias": True, "max_target_len": 64})
    model = EncoderDecoder(config).eval()
    bias = model.decoder.output.bias
    with torch.no_grad():
        bias[2] = -100
        (endless,) = write_greedily(model, CONFIG, [np.array([4, 5, 6])])
        bias[2] = 100
        (nothing,) = write_greedily(model, CONFIG, [np.array([4, 5, 6])])

    assert len(endless) == CONFIG.max_target_len - 1
    assert nothing == []


def test_any_token_that_ends_an_output_ends_it() -> None:
    torch.manual_seed(0)
    config = CONFIG.model_copy(update={"output_bias": True, "other_eos_token_ids": (5,)})
    model = EncoderDecoder(config).eval()
    with torch.no_grad():
        model.decoder.output.bias[5] = 100
        (written,) = write_greedily(model, config, [np.array([4, 5, 6])])

    assert written == []


def test_it_begins_as_it_must_and_writes_no_banned_token() -> None:
    torch.manual_seed(0)
    config = CONFIG.model_copy(update={"output_bias": True, "max_target_len": 64})
    model = EncoderDecoder(config).eval()
    with torch.no_grad():
        model.decoder.output.bias[[5, 7]] = torch.tensor([100.0, 50.0])
    generation = GenerationDefaults(forced_begin=(9, 8), banned_tokens=(5,))

    (freely,) = write_greedily(model, CONFIG, [np.array([4, 5, 6])])
    (written,) = write_greedily(model, CONFIG, [np.array([4, 5, 6])], generation)

    assert set(freely) == {5}
    assert written == [9, 8, *[7] * (len(freely) - 2)]


def test_equal_texts_are_wholly_alike_and_others_less() -> None:
    texts = ["the cat sat on the mat", "a dog ran away from home"]

    assert likeness(texts, texts) == pytest.approx((100.0, 100.0))
    chrf, bleu = likeness(texts, ["the cat sat on a mat", "a dog came home"])
    assert 30 < chrf < 90 and 0 < bleu < 60
