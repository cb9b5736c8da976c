"""The cases of a one-pass model: texts of random tokens, or images of noise."""

from __future__ import annotations

import numpy as np

from engine.package.manifest import EncodingContract, ImageContract
from exporter.certificate.cases import MAX_PER_LENGTH, spread_lengths
from exporter.certificate.comparison import Floats
from exporter.samples import SEED, Tokens, random_tokens

NUM_IMAGES = 40


def random_groups(rng: np.random.Generator, contract: EncodingContract) -> list[list[Tokens]]:
    """Return texts of random tokens, those of one length together."""
    return [
        [random_tokens(rng, contract.vocab_size, length) for _ in range(MAX_PER_LENGTH)]
        for length in spread_lengths(contract.max_len)
    ]


def draw_images(contract: ImageContract) -> Floats:
    """Return images of noise, of different brightness and contrast, as a model takes them."""
    rng = np.random.default_rng(SEED)
    shape = (NUM_IMAGES, contract.channels, contract.size, contract.size)
    spread = rng.uniform(0.1, 2.0, (NUM_IMAGES, 1, 1, 1))
    noise = rng.standard_normal(shape) * spread + rng.uniform(-1, 1, spread.shape)
    return noise.astype(np.float32)
