"""The cases of a one-pass model: texts of random tokens, or images of noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from engine.one_pass.batch import stack
from engine.one_pass.item_encoder import EncodedItem
from engine.package.graph_io import INPUT_IDS, PIXEL_VALUES, TOKEN_TYPE_IDS
from engine.package.manifest import EncodingContract, ImageContract, Proof
from exporter.models.layers import EncoderOutput
from exporter.prover.cases import LEVELS, spread_lengths
from exporter.samples import SEED, Tokens, TokenSampler, random_tokens

NUM_IMAGES = 40


def text_item(ids: Tokens, types: Tokens | None = None) -> EncodedItem:
    """Return a text, or a pair of texts, of these tokens; no types: the graph takes none."""
    of_tokens = None if types is None else np.array(types, np.int64)
    return EncodedItem(np.array(ids, np.int64), len(ids), len(ids), of_tokens)


def random_groups(contract: EncodingContract, proof: Proof = "standard") -> list[list[EncodedItem]]:
    """Return texts of random tokens, of random types, those of one length together."""
    rng = np.random.default_rng(SEED)
    sampler = TokenSampler(rng, contract.vocab_size)
    lengths = dict.fromkeys(spread_lengths(contract.max_len, proof), LEVELS[proof].per_length)
    if proof == "full":
        lengths = dict.fromkeys(range(1, contract.max_len + 1), 1) | lengths
    num_types = contract.num_token_types

    def text(length: int) -> EncodedItem:
        ids = sampler.sample(length)
        return text_item(ids, random_tokens(rng, num_types, length) if num_types > 1 else None)

    return [[text(length) for _ in range(count)] for length, count in lengths.items()]


def given_texts(samples: Sequence[Tokens], contract: EncodingContract) -> list[EncodedItem]:
    """Return sentences as texts, none of them a pair."""
    takes_types = contract.num_token_types > 1
    return [text_item(ids, (0,) * len(ids) if takes_types else None) for ids in samples]


def draw_images(contract: ImageContract, count: int = NUM_IMAGES) -> list[EncodedItem]:
    """Return images of noise, of different brightness and contrast, as a model takes them."""
    rng = np.random.default_rng(SEED)
    shape = (count, contract.channels, contract.size, contract.size)
    spread = rng.uniform(0.1, 2.0, (count, 1, 1, 1))
    noise = rng.standard_normal(shape) * spread + rng.uniform(-1, 1, spread.shape)
    return [EncodedItem(image, length=0, cost=1) for image in noise.astype(np.float32)]


def run_eager(model: nn.Module, items: Sequence[EncodedItem]) -> EncoderOutput:
    """Return what an eager model gives for items of one length: without a mask, none is padded.

    Pixels are rounded to the type of its weights.
    """
    given = {name: torch.from_numpy(values) for name, values in stack(items).items()}
    taken: list[Tensor | None]
    if PIXEL_VALUES in given:
        taken = [given[PIXEL_VALUES].to(next(model.parameters()).dtype)]
    else:
        types = [None, given[TOKEN_TYPE_IDS]] if TOKEN_TYPE_IDS in given else []
        taken = [given[INPUT_IDS], *types]
    with torch.no_grad():
        output: EncoderOutput = model(*taken)
    return output
