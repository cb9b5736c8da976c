"""The cases of a one-pass model: texts of random tokens, or images of noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from engine.one_pass.item_encoder import EncodedItem
from engine.package.manifest import EncodingContract, ImageContract, Proof
from exporter.models.layers import EncoderOutput
from exporter.prover.cases import LEVELS, spread_lengths
from exporter.prover.eager import Floats
from exporter.samples import SEED, Tokens, TokenSampler, random_tokens

NUM_IMAGES = 40


class Text(NamedTuple):
    """A text, or a pair of texts."""

    ids: Tokens
    types: Tokens | None = None  # token types; None: the graph takes none


EagerInputs = tuple[torch.Tensor | None, ...]


def random_groups(contract: EncodingContract, proof: Proof = "standard") -> list[list[Text]]:
    """Return texts of random tokens, of random types, those of one length together."""
    rng = np.random.default_rng(SEED)
    sampler = TokenSampler(rng, contract.vocab_size)
    lengths = dict.fromkeys(spread_lengths(contract.max_len, proof), LEVELS[proof].per_length)
    if proof == "full":
        lengths = dict.fromkeys(range(1, contract.max_len + 1), 1) | lengths
    return [
        [_random_text(rng, contract, sampler.sample(length)) for _ in range(count)]
        for length, count in lengths.items()
    ]


def given_texts(samples: Sequence[Tokens], contract: EncodingContract) -> list[Text]:
    """Return sentences as texts, none of them a pair."""
    takes_types = contract.num_token_types > 1
    return [Text(ids, (0,) * len(ids) if takes_types else None) for ids in samples]


def text_items(texts: Sequence[Text]) -> list[EncodedItem]:
    """Return texts as the engine's model reads them."""
    return [
        EncodedItem(
            np.array(text.ids, np.int64),
            len(text.ids),
            len(text.ids),
            None if text.types is None else np.array(text.types, np.int64),
        )
        for text in texts
    ]


def image_items(pixels: Floats) -> list[EncodedItem]:
    """Return images as the engine's model sees them."""
    return [EncodedItem(image, length=0, cost=1) for image in pixels]


def eager_inputs(texts: Sequence[Text]) -> EagerInputs:
    """Return what an eager model takes for texts of one length: no mask, for none is padded."""
    ids = torch.tensor([text.ids for text in texts])  # [B, S]
    if texts[0].types is None:
        return (ids,)
    return ids, None, torch.tensor([text.types for text in texts])


def run_eager(model: nn.Module, given: EagerInputs) -> EncoderOutput:
    """Return what an eager model gives; pixels are rounded to the type of its weights."""
    dtype = next(model.parameters()).dtype
    taken = (x.to(dtype) if x is not None and x.is_floating_point() else x for x in given)
    with torch.no_grad():
        output: EncoderOutput = model(*taken)
    return output


def _random_text(rng: np.random.Generator, contract: EncodingContract, ids: Tokens) -> Text:
    num_types = contract.num_token_types
    return Text(ids, random_tokens(rng, num_types, len(ids)) if num_types > 1 else None)


def draw_images(contract: ImageContract, count: int = NUM_IMAGES) -> Floats:
    """Return images of noise, of different brightness and contrast, as a model takes them."""
    rng = np.random.default_rng(SEED)
    shape = (count, contract.channels, contract.size, contract.size)
    spread = rng.uniform(0.1, 2.0, (count, 1, 1, 1))
    noise = rng.standard_normal(shape) * spread + rng.uniform(-1, 1, spread.shape)
    return noise.astype(np.float32)
