"""The configuration of a model: one set of blocks, families by option."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.package.manifest import (
    MAX_HEADS,
    MAX_IMAGE_SIZE,
    MAX_LAYERS,
    MAX_LENGTH,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
)

Family = Literal["encoder-decoder", "gpt", "bert", "labeller", "vit"]
NumLayers = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
NumHeads = Annotated[int, Field(gt=0, le=MAX_HEADS)]
Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]
Length = Annotated[int, Field(ge=0, le=MAX_LENGTH)]
VocabSize = Annotated[int, Field(ge=0, le=MAX_VOCAB_SIZE)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCAB_SIZE)]
ImageSize = Annotated[int, Field(gt=0, le=MAX_IMAGE_SIZE)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
_MAX_TABLE = 2**28  # numbers in a table of positions that is computed, not learned
ROTARY_HEAD_DIM_MULTIPLE = 16  # the attention kernels turn heads of no other widths
Probability = Annotated[float, Field(ge=0, lt=1)]


class ImageConfig(BaseModel):
    """What a vision model sees."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    size: ImageSize  # height and width in pixels
    patch_size: ImageSize
    channels: Literal[1, 3] = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # pixel_values = (pixel / 255 - mean) / std
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.size % self.patch_size:
            raise ValueError(f"size ({self.size}) must be a multiple of patch_size")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mean and std need one value for each of {self.channels} channels")
        return self


class RotaryScaling(BaseModel):
    """How Llama 3.1 stretches rotary positions beyond the length that it was first trained on.

    Waves longer than original_max_len / low_freq_factor are slowed down by `factor`, those shorter
    than original_max_len / high_freq_factor are left as they are, and those between are blended.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)]
    high_freq_factor: Annotated[float, Field(gt=0)]
    original_max_len: PositiveInt

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor "
                f"({self.low_freq_factor})"
            )
        return self


class TransformerConfig(BaseModel):
    """Every option of every family; an option that a family does not use keeps its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    family: Family
    d_model: Width
    num_heads: NumHeads
    num_kv_heads: NumHeads | None = None  # grouped queries: gpt; None: num_heads
    d_ff: Width
    num_encoder_layers: NumLayers = 0
    num_decoder_layers: NumLayers = 0

    # Attention (section 3.2 of Vaswani et al. 2017)
    key_dim: Width | None = None  # of a head's keys and queries; None: d_model / num_heads
    value_dim: Width | None = None  # of a head's values; None: d_model / num_heads
    attention_bias: bool = True
    attention_output: bool = True  # W_O; False: the values of a single head are the output
    attention_score: Literal["dot", "additive"] = "dot"  # additive: encoder-only families
    attention_normalizer: Literal["softmax", "relu"] = "softmax"  # relu: encoder-only families

    # Blocks
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    gated_feed_forward: bool = False  # down(activation(gate(x)) * up(x)), Shazeer 2020
    feed_forward_bias: bool = True
    norm: Literal["layer", "rms"] = "layer"
    norm_position: Literal["first", "last"] = "last"
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    final_norm: bool | None = None  # a norm after the last layer; None: if norm_position is first
    dropout: Probability = 0.1  # of sub-layer outputs and embeddings
    attention_dropout: Probability = 0.0  # of attention weights
    feed_forward_dropout: Probability = 0.0  # of the inner layer, behind its activation

    # Vocabulary and positions
    vocab_size: VocabSize = 0  # 0: vit
    max_source_len: Length = 0  # encoder positions
    max_target_len: Length = 0  # decoder positions
    # sinusoidal: sines and cosines in turn, as in the paper; sinusoidal_halves: all sines, then
    # all cosines (Marian); rotary: queries and keys are turned, nothing is added (gpt)
    positions: Literal["sinusoidal", "sinusoidal_halves", "learned", "rotary"] = "sinusoidal"
    rotary_base: Annotated[float, Field(gt=0)] = 10000.0
    rotary_scaling: RotaryScaling | None = None
    scale_embeddings: bool = True  # by sqrt(d_model), section 3.4
    share_embeddings: bool = True  # source and target
    tie_output: bool = True  # the output projection is the target embedding
    output_bias: bool = False
    embedding_norm: bool = False  # BERT
    num_token_types: VocabSize = 0  # BERT; 0: no token type embedding
    pad_token_id: TokenId = 0
    bos_token_id: TokenId | None = None  # also the first decoder token of an encoder-decoder
    eos_token_id: TokenId | None = None

    # Heads of one-pass families
    labels: tuple[str, ...] = ()
    image: ImageConfig | None = None

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values; each serves num_heads / kv_heads query heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_key_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.key_dim or self.d_model // self.num_heads

    @property
    def head_value_dim(self) -> int:
        """Width of a head's values."""
        return self.value_dim or self.d_model // self.num_heads

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in [*_problems(self), *_attention_problems(self), *_table_problems(self)]:
            raise ValueError(problem)
        return self


def _problems(c: TransformerConfig) -> list[str]:
    found = []
    needs_encoder = c.family != "gpt"
    needs_decoder = c.family in {"encoder-decoder", "gpt"}
    if (c.num_encoder_layers > 0) != needs_encoder or (c.num_decoder_layers > 0) != needs_decoder:
        found.append(
            f"{c.family} has {'' if needs_encoder else 'no '}encoder layers and "
            f"{'' if needs_decoder else 'no '}decoder layers, got num_encoder_layers "
            f"{c.num_encoder_layers} and num_decoder_layers {c.num_decoder_layers}"
        )
    if c.d_model % c.num_heads and (c.key_dim is None or c.value_dim is None):
        found.append(
            f"d_model ({c.d_model}) must be a multiple of num_heads ({c.num_heads}), "
            "or key_dim and value_dim must be given"
        )
    if c.family == "vit" and c.image is None:
        found.append("vit needs image")
    if c.family != "vit" and c.vocab_size == 0:
        found.append(f"{c.family} needs vocab_size")
    if c.family in {"encoder-decoder", "bert", "labeller"} and c.max_source_len == 0:
        found.append(f"{c.family} needs max_source_len")
    if needs_decoder and c.max_target_len == 0:
        found.append(f"{c.family} needs max_target_len")
    if c.family in {"bert", "labeller", "vit"} and not c.labels:
        found.append(f"{c.family} needs labels")
    if c.family == "encoder-decoder" and c.bos_token_id is None:
        found.append("encoder-decoder needs bos_token_id, its first decoder token")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(c, name)
        if token is not None and c.vocab_size and token >= c.vocab_size:
            found.append(
                f"{name} {token} is not in the vocabulary, whose ids are 0 to {c.vocab_size - 1}"
            )
    return found


def _attention_problems(c: TransformerConfig) -> list[str]:
    found = []
    if c.family in {"encoder-decoder", "gpt"} and (
        c.attention_score != "dot" or c.attention_normalizer != "softmax"
    ):
        found.append("additive scores and the relu normaliser are for encoder-only families")
    if not c.attention_output and (c.num_heads != 1 or c.head_value_dim != c.d_model):
        found.append(
            "attention without an output projection needs one head with values as wide as the "
            f"model, got num_heads {c.num_heads}, value_dim {c.head_value_dim} and d_model "
            f"{c.d_model}"
        )
    if c.num_heads % c.kv_heads:
        found.append(
            f"num_heads ({c.num_heads}) must be a multiple of num_kv_heads ({c.num_kv_heads})"
        )
    if c.kv_heads != c.num_heads and c.family != "gpt":
        found.append(
            f"num_kv_heads ({c.num_kv_heads}) below num_heads ({c.num_heads}) is for gpt, "
            f"got {c.family}"
        )
    if c.positions == "rotary":
        found += _rotary_problems(c)
    elif c.rotary_scaling is not None:
        found.append(f"rotary_scaling needs rotary positions, got {c.positions}")
    return found


def _table_problems(c: TransformerConfig) -> list[str]:
    """Bound what is computed from the options alone; no weight could tell that it is too large."""
    width = c.head_key_dim if c.positions == "rotary" else c.d_model
    if c.positions == "learned":
        return []
    patches = (c.image.size // c.image.patch_size) ** 2 + 1 if c.image else 0
    length = max(c.max_source_len, c.max_target_len, patches)
    if length * width <= _MAX_TABLE:
        return []
    return [
        f"{length:,} {c.positions} positions of {width:,} numbers are more than {_MAX_TABLE:,} "
        "numbers; lower max_source_len or max_target_len"
    ]


def _rotary_problems(c: TransformerConfig) -> list[str]:
    found = []
    if c.family != "gpt":
        found.append(f"rotary positions are for gpt, got {c.family}")
    # The two halves of a head turn together, so a head cannot be widened for the kernels.
    if c.head_key_dim % ROTARY_HEAD_DIM_MULTIPLE or c.head_value_dim > c.head_key_dim:
        found.append(
            f"rotary positions need heads whose key_dim is a multiple of "
            f"{ROTARY_HEAD_DIM_MULTIPLE} and at least value_dim, got {c.head_key_dim} and "
            f"{c.head_value_dim}"
        )
    return found
