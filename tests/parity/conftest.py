"""Tiny exported models of every kind that generates or labels, shared by the parity tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from exporter.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from exporter.export import export_package
from exporter.models import TransformerConfig, build_model

VOCAB_SIZE = 61
BOS, EOS = 1, 2
SHAPE = {
    "d_model": 24,
    "num_heads": 3,
    "d_ff": 32,
    "vocab_size": VOCAB_SIZE,
    "tie_output": False,  # a tied one repeats its last token
}
CONFIGS = {
    "gpt": TransformerConfig(
        family="gpt", num_decoder_layers=1, max_target_len=40, eos_token_id=EOS, **SHAPE
    ),
    "encoder-decoder": TransformerConfig(
        family="encoder-decoder",
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_source_len=20,
        max_target_len=16,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **SHAPE,
    ),
    "labeller": TransformerConfig(
        family="labeller",
        num_encoder_layers=1,
        max_source_len=20,
        labels=("NOUN", "VERB", "DET"),
        **SHAPE,
    ),
}
_BYTES = "abcdefghijklmnopqrstuvwxyz0123456789.,:;-+*/=<>()[]{}!?\"'"


class Exported(NamedTuple):
    """A checkpoint and the package that was exported from it."""

    checkpoint: Checkpoint
    package: Path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch from waiting for its own threads: a model this small has nothing to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Export the model of a family, once."""

    @cache
    def export(family: str) -> Exported:
        path = tmp_path_factory.mktemp(family)
        tokenizer = word_tokenizer() if family == "labeller" else byte_tokenizer()
        save_checkpoint(path / "checkpoint", "tiny", random_model(CONFIGS[family]), tokenizer)
        export_package(path / "checkpoint", path / "package")
        return Exported(load_checkpoint(path / "checkpoint"), path / "package")

    return export


def random_model(config: TransformerConfig) -> nn.Module:
    """Make a model with weights so large that what it reads shows in what it writes."""
    torch.manual_seed(1)
    model = build_model(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 1.5 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3
            centre = 1.0 if "norm.weight" in name else 0.0
            weight.copy_(centre + spread * torch.randn(weight.shape))
    return model


def word_tokenizer() -> Tokenizer:
    """Return a tokenizer of numbered words."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of one-letter tokens; ids 0 to 2 are special."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", *_BYTES])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer
