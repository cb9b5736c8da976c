"""All options of a model: one set of blocks, families by option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engine.package.manifest import MAX_LAYERS
from engine.wording import shortened
from exporter.models.config.attention import AttentionOptions
from exporter.models.config.checked import Checks
from exporter.models.config.dropout import DropoutOptions
from exporter.models.config.feed_forward import FeedForwardOptions
from exporter.models.config.heads import HeadOptions
from exporter.models.config.image import ImageConfig
from exporter.models.config.norm import NormOptions
from exporter.models.config.positions import PositionOptions
from exporter.models.config.sizes import WITH_DECODER, PositiveFloat, TokenId, VocabSize
from exporter.models.config.vocabulary import VocabularyOptions

_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "uncounted_token_id")

_NOT_PLAIN = ("quantization_config", "auto_map")  # rounded weights, and code of strangers
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class OriginalCode(BaseModel):
    """From what a model is built whose blocks are those of transformers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[str, Field(pattern=r"^\d+\.\d+")]  # transformers' own
    config: dict[str, Any]  # `config.json` of the original

    @field_validator("config")
    @classmethod
    def _is_plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        if refused := [name for name in _NOT_PLAIN if given.get(name)]:
            raise ValueError(f"{' and '.join(refused)} is not supported")
        try:
            json.dumps(given, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                "numbers that are not finite (NaN, Infinity) are no options"
            ) from error
        for name in _LAYER_COUNTS:  # transformers makes lists as long
            if name in given and given[name] not in range(1, MAX_LAYERS + 1):
                said = f"{name} is {shortened(given[name])}"
                raise ValueError(f"{said}; supported: 1 to {MAX_LAYERS:,}")
        return given


class TransformerConfig(
    HeadOptions,
    PositionOptions,
    VocabularyOptions,
    DropoutOptions,
    NormOptions,
    FeedForwardOptions,
    AttentionOptions,
):
    """Every option of every family; an option that a family does not use keeps its default."""

    # Vocabulary
    scale_embeddings: bool = True  # by sqrt(d_model), section 3.4
    share_embeddings: bool = True  # source and target
    tie_output: bool = True  # the output projection is the target embedding
    output_bias: bool = False
    logit_softcap: PositiveFloat | None = None  # c * tanh(logit / c)
    parallel_residual: bool = False  # x + attention(x) + feed_forward(x)
    output_scale: PositiveFloat = 1.0  # factor of the output layer's input (T5)
    embedding_norm: bool = False  # BERT
    num_token_types: VocabSize = 0  # BERT; 0: no token type embedding
    pad_token_id: TokenId = 0
    # Encoders: positions skip this token, whose own is the one before the first (RoBERTa, M2M)
    uncounted_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None  # also the first decoder token of an encoder-decoder
    eos_token_id: TokenId | None = None
    # These end a sequence as well.
    other_eos_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=64)] = ()

    # Heads of one-pass families
    labels: tuple[str, ...] = ()  # none: a bert or vit that gives vectors only
    image: ImageConfig | None = None

    # gpt: the code that computes it, in place of our blocks; the others say how its layers attend
    code: OriginalCode | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a sequence."""
        first = () if self.eos_token_id is None else (self.eos_token_id,)
        return (*first, *self.other_eos_token_ids)

    @property
    def vector_dim(self) -> int | None:
        """Width of the vector of a text or picture, None if the model gives none."""
        return self.head_dim

    @property
    def gives_alignment(self) -> bool:
        """Whether a decoder tells what it attends to in its source."""
        return self.family == "encoder-decoder"

    @property
    def checks(self) -> Checks:
        """The rules between options, group by group."""
        return (
            *self.size_checks,
            *self.vocabulary_checks,
            self._check_softcap,
            self._check_parallel,
            self._check_image,
            self._check_labels,
            *self.head_option_checks,
            self._check_start,
            *(partial(self._check_token_id, name) for name in _SPECIAL_TOKENS),
            self._check_other_ends,
            self._check_uncounted,
            self._check_shared,
            *self.attention_checks,
            *self.position_checks,
            self._check_table,
        )

    def _check_softcap(self) -> Iterator[str]:
        if self.logit_softcap is not None and self.family not in WITH_DECODER:
            yield f"logit_softcap is for {' and '.join(WITH_DECODER)}, got {self.family}"

    def _check_parallel(self) -> Iterator[str]:
        if self.parallel_residual and (self.family, self.norm_position) != ("gpt", "first"):
            yield (
                "parallel_residual is for gpt with norm_position first, got "
                f"{self.family} and {self.norm_position}"
            )

    def _check_image(self) -> Iterator[str]:
        if self.family == "vit" and self.image is None:
            yield "vit needs image"

    def _check_labels(self) -> Iterator[str]:
        if self.family == "labeller" and not self.labels:
            yield "labeller needs labels"

    def _check_start(self) -> Iterator[str]:
        if self.family == "encoder-decoder" and self.bos_token_id is None:
            yield "encoder-decoder needs bos_token_id, its first decoder token"

    def _check_token_id(self, name: str) -> Iterator[str]:
        yield from self._unknown_token(name, getattr(self, name))

    def _check_other_ends(self) -> Iterator[str]:
        for token in self.other_eos_token_ids:
            yield from self._unknown_token("other_eos_token_ids", token)

    def _check_uncounted(self) -> Iterator[str]:
        is_added = self.positions == "learned" or self.position_offset > 0
        if self.uncounted_token_id is not None and not (self.num_encoder_layers and is_added):
            yield "uncounted_token_id needs an encoder with a place before the first"

    def _unknown_token(self, name: str, token: int | None) -> Iterator[str]:
        if token is not None and self.vocab_size and token >= self.vocab_size:
            yield (
                f"{name} {token} is not in the vocabulary, whose ids are 0 to {self.vocab_size - 1}"
            )

    def _check_table(self) -> Iterator[str]:
        yield from self.table_problems(self.image.num_tokens if self.image else 0)

    def _check_shared(self) -> Iterator[str]:
        if self.share_embeddings and self.source_vocab_size not in (None, self.vocab_size):
            yield (
                f"share_embeddings needs source_vocab_size ({self.source_vocab_size}) to be "
                f"vocab_size ({self.vocab_size})"
            )
