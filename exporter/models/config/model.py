"""All options of a model: one set of blocks, families by option."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from exporter.models.config.attention import AttentionOptions
from exporter.models.config.dropout import DropoutOptions
from exporter.models.config.feed_forward import FeedForwardOptions
from exporter.models.config.heads import HeadOptions
from exporter.models.config.image import ImageConfig
from exporter.models.config.norm import NormOptions
from exporter.models.config.positions import PositionOptions
from exporter.models.config.sizes import WITH_DECODER, PositiveFloat, TokenId, VocabSize, unless
from exporter.models.config.vocabulary import VocabularyOptions

_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


class TransformerConfig(
    HeadOptions,
    PositionOptions,
    VocabularyOptions,
    DropoutOptions,
    NormOptions,
    FeedForwardOptions,
    AttentionOptions,
):
    """Every option of every family; an option that a family does not use keeps its default.

    On disk the groups stand one behind the other, the last of the bases first.
    """

    # Vocabulary
    scale_embeddings: bool = True  # by sqrt(d_model), section 3.4
    share_embeddings: bool = True  # source and target
    tie_output: bool = True  # the output projection is the target embedding
    output_bias: bool = False
    logit_softcap: Annotated[PositiveFloat | None, unless(None)] = None  # c * tanh(logit / c)
    parallel_residual: Annotated[bool, unless(False)] = False  # x + attention(x) + feed_forward(x)
    output_scale: Annotated[PositiveFloat, unless(1.0)] = 1.0  # of what the output reads (T5)
    embedding_norm: bool = False  # BERT
    num_token_types: VocabSize = 0  # BERT; 0: no token type embedding
    pad_token_id: TokenId = 0
    bos_token_id: TokenId | None = None  # also the first decoder token of an encoder-decoder
    eos_token_id: TokenId | None = None
    # These end a sequence as well.
    other_eos_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=64), unless(())] = ()

    # Heads of one-pass families
    labels: tuple[str, ...] = ()  # none: a bert or vit that gives vectors only
    image: ImageConfig | None = None

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

    @model_validator(mode="after")
    def _check(self) -> Self:
        patches = self.image.num_tokens if self.image else 0
        problems = [
            *self.size_problems,
            *self.vocabulary_problems,
            *self._head_problems(),
            *self.head_option_problems,
            *self._token_problems(),
            *self.attention_problems,
            *self.position_problems,
            *self.table_problems(patches),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _head_problems(self) -> list[str]:
        found = []
        if self.logit_softcap is not None and self.family not in WITH_DECODER:
            found.append(f"logit_softcap is for {' and '.join(WITH_DECODER)}, got {self.family}")
        if self.parallel_residual and (self.family, self.norm_position) != ("gpt", "first"):
            found.append(
                "parallel_residual is for gpt with norm_position first, got "
                f"{self.family} and {self.norm_position}"
            )
        if self.family == "vit" and self.image is None:
            found.append("vit needs image")
        if self.family == "labeller" and not self.labels:
            found.append("labeller needs labels")
        return found

    def _token_problems(self) -> list[str]:
        found = []
        if self.family == "encoder-decoder" and self.bos_token_id is None:
            found.append("encoder-decoder needs bos_token_id, its first decoder token")
        named = [(name, getattr(self, name)) for name in _SPECIAL_TOKENS]
        named += [("other_eos_token_ids", token) for token in self.other_eos_token_ids]
        for name, token in named:
            if token is not None and self.vocab_size and token >= self.vocab_size:
                found.append(
                    f"{name} {token} is not in the vocabulary, whose ids are 0 to "
                    f"{self.vocab_size - 1}"
                )
        if self.share_embeddings and self.source_vocab_size not in (None, self.vocab_size):
            found.append(
                f"share_embeddings needs source_vocab_size ({self.source_vocab_size}) to be "
                f"vocab_size ({self.vocab_size})"
            )
        return found
