"""All options of a model, one set of blocks and architectures by option; and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.package.manifest import Architecture, Prompts
from engine.wording import listed
from exporter.models.config.groups import (
    AttentionConfig,
    FeedForwardConfig,
    HeadConfig,
    ImageConfig,
    Length,
    NumHeads,
    NumLayers,
    Options,
    OriginalCode,
    Pooler,
    PositionConfig,
    PositiveFloat,
    Probability,
    TokenId,
    VocabSize,
    Width,
)

_CACHE_WIDTHS = 8  # the attention kernels take multiples of it only
_ROTARY_HEAD_DIM_MULTIPLE = 16  # the attention kernels turn heads of no other widths
_MAX_TABLE = 2**28  # numbers in a table of positions that is computed, not learned
_WITH_DECODER: tuple[Architecture, ...] = ("encoder-decoder", "decoder")

_ONLY_FOR: Mapping[str, tuple[Architecture, ...]] = {  # the others have nothing that it changes
    "source_vocab_size": ("encoder-decoder",),
    "token_dim": ("decoder",),
    "cut_at": ("encoder",),
    "prompts": ("encoder",),
    "num_token_types": ("encoder",),
    "labels": ("encoder", "vision-encoder"),
    "image": ("vision-encoder",),
    "logit_softcap": _WITH_DECODER,
    "parallel_residual": ("decoder",),
    "code": ("decoder",),
    "attention.softcap": ("decoder",),
    "attention.qk_norm": ("decoder",),
    "attention.window": ("decoder", "encoder"),
    "head.each_token": ("encoder",),
}
_NEEDED_BY: Mapping[str, tuple[Architecture, ...]] = {
    "vocab_size": (*_WITH_DECODER, "encoder"),
    "max_source_len": ("encoder-decoder", "encoder"),
    "max_target_len": _WITH_DECODER,
    "image": ("vision-encoder",),
}
_NEEDS: Mapping[str, str] = {  # options, and those without which they say nothing
    "cuts_left": "cut_at",
    "default_prompt": "prompts",
    "head.each_token": "labels",
    "attention.windowed_layers": "attention.window",
    "positions.local_rotary_base": "attention.window",
}

_Check = tuple[bool, str]  # whether it is good, what is wrong if it is not


class TransformerConfig(Options):
    """Every option of every model; an option that an architecture does not use keeps its default.

    Wrong fields are refused with all of them, then fields that do not go together likewise.
    """

    architecture: Architecture

    # Sizes (table 3 of the paper)
    d_model: Width
    num_heads: NumHeads
    num_kv_heads: NumHeads | None = None  # grouped queries: decoder; None: num_heads
    key_dim: Width | None = None  # width of a head's keys and queries; None: d_model / num_heads
    value_dim: Width | None = None  # width of a head's values; None: d_model / num_heads
    d_ff: Width
    num_encoder_layers: NumLayers = 0
    num_decoder_layers: NumLayers = 0

    # Blocks
    attention: AttentionConfig = AttentionConfig()
    positions: PositionConfig = PositionConfig()
    feed_forward: FeedForwardConfig = FeedForwardConfig()
    parallel_residual: bool = False  # x + attention(x) + feed_forward(x)
    norm: Literal["layer", "rms"] = "layer"
    # both: the sublayer's output has a norm of its own before it is added
    norm_position: Literal["first", "last", "both"] = "last"
    norm_bias: bool = True  # layer norms only
    norm_eps: PositiveFloat = 1e-5
    final_norm: bool | None = None  # a norm after the last layer; None: unless they are last
    # The first layer's, before its attention; ModernBERT: the embedding's norm stands there
    first_norm: bool = True
    dropout: Probability = 0.1  # sub-layer outputs and embeddings

    # Texts
    vocab_size: VocabSize = 0  # 0: vision-encoder
    # The vocabulary of the encoder before a decoder; None: vocab_size
    source_vocab_size: VocabSize | None = None
    # Width of the tokens' vectors where a product makes them as wide as the model, and one makes
    # what the output reads as narrow: decoder; None: d_model
    token_dim: Width | None = None
    max_source_len: Length = 0  # encoder positions
    max_target_len: Length = 0  # decoder positions
    # encoder: longer texts are cut to so many tokens; None: texts that are longer than
    # max_source_len are refused
    cut_at: Length | None = None
    cuts_left: bool = False  # a text that is cut keeps its end
    prompts: Prompts = Field({})  # encoder: stand in front of texts, by their names
    default_prompt: str | None = None  # stands in front of a text of which nothing else is said
    scale_embeddings: bool = True  # by sqrt(d_model), section 3.4
    share_embeddings: bool = True  # source and target
    embedding_norm: bool = False  # BERT
    num_token_types: VocabSize = 0  # BERT; 0: no token type embedding
    pad_token_id: TokenId = 0
    # Encoders: positions skip this token, whose own is the one before the first (RoBERTa, M2M)
    uncounted_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None  # also the first decoder token of an encoder-decoder
    eos_token_id: TokenId | None = None
    # These end a sequence as well.
    other_eos_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=64)] = ()
    tie_output: bool = True  # the output projection is the target embedding
    output_bias: bool = False
    output_scale: PositiveFloat = 1.0  # factor of the output layer's input (T5)
    logit_softcap: PositiveFloat | None = None  # c * tanh(logit / c)

    # One-pass models
    head: HeadConfig = HeadConfig()
    labels: tuple[str, ...] = ()  # none: a model that gives vectors only
    image: ImageConfig | None = None

    # decoder: the code that computes it, in place of our blocks; the others say how its layers
    # attend
    code: OriginalCode | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the configuration of options by their paths, such as `attention.bias`."""
        found: dict[str, Any] = {}
        for path, value in options.items():
            group, _, name = path.rpartition(".")
            found |= {group: {**found.get(group, {}), name: value}} if group else {name: value}
        return cls.model_validate(found)

    def changed(self, options: Mapping[str, Any]) -> Self:
        """Return a configuration with other values of some options, by their paths likewise."""
        return self.of({**self.model_dump(), **options})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := _problems(self):
            raise ValueError("; ".join(problems))
        return self

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

    @property
    def cache_head_dim(self) -> int:
        """Width of a head in the cache: the wider of keys and values, up to a multiple of 8."""
        widest = max(self.head_key_dim, self.head_value_dim)
        return -(-widest // _CACHE_WIDTHS) * _CACHE_WIDTHS

    @property
    def turned_dim(self) -> int:
        """How many numbers of a head turn: the first of each half of it."""
        return self.positions.rotary_dim or self.head_key_dim

    @property
    def has_final_norm(self) -> bool:
        """Whether there is a norm after the last layer."""
        return self.norm_position != "last" if self.final_norm is None else self.final_norm

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a sequence."""
        first = () if self.eos_token_id is None else (self.eos_token_id,)
        return (*first, *self.other_eos_token_ids)

    @property
    def is_of_texts(self) -> bool:
        """Whether it gives one vector, or tells one label, of a whole text."""
        return self.architecture == "encoder" and not self.head.each_token

    @property
    def pooler_kind(self) -> Pooler:
        """The layer between the last layer and the classifier."""
        return self.head.pooler or ("tanh" if self.is_of_texts else "none")

    @property
    def head_dim(self) -> int:
        """Width of what the classifier reads, and of the vector of a text."""
        return self.head.embedding_dim or self.d_model

    @property
    def vector_dim(self) -> int | None:
        """Width of the vector of a text or picture, None if the model gives none."""
        return self.head_dim

    @property
    def gives_alignment(self) -> bool:
        """Whether a decoder tells what it attends to in its source."""
        return self.architecture == "encoder-decoder"


def _problems(config: TransformerConfig) -> list[str]:
    """Return what is wrong between options that are each possible, a row for each rule."""

    def has(name: str) -> bool:
        return bool(attrgetter(name)(config))

    named = config.architecture
    checks = (
        *(
            (named in known or not has(name), f"{name} is for {' and '.join(known)}, got {named}")
            for name, known in _ONLY_FOR.items()
        ),
        *(
            (named not in needing or has(name), f"{named} needs {name}")
            for name, needing in _NEEDED_BY.items()
        ),
        *((not has(name) or has(other), f"{name} needs {other}") for name, other in _NEEDS.items()),
        *_check_shape(config),
        *_check_tokens(config),
        *_check_attention(config),
        *_check_positions(config),
        *_check_head(config),
    )
    return [what for is_good, what in checks if not is_good]


def _check_shape(config: TransformerConfig) -> Iterator[_Check]:
    named = config.architecture
    needs_encoder, needs_decoder = named != "decoder", named in _WITH_DECODER
    has_encoder, has_decoder = config.num_encoder_layers > 0, config.num_decoder_layers > 0
    yield (
        (has_encoder, has_decoder) == (needs_encoder, needs_decoder),
        f"{named} has {'' if needs_encoder else 'no '}encoder layers and "
        f"{'' if needs_decoder else 'no '}decoder layers, got num_encoder_layers "
        f"{config.num_encoder_layers} and num_decoder_layers {config.num_decoder_layers}",
    )
    yield (
        config.d_model % config.num_heads == 0 or None not in (config.key_dim, config.value_dim),
        f"d_model ({config.d_model}) must be a multiple of num_heads ({config.num_heads}), "
        "or key_dim and value_dim must be given",
    )
    yield (
        config.num_heads % config.kv_heads == 0,
        f"num_heads ({config.num_heads}) must be a multiple of num_kv_heads "
        f"({config.num_kv_heads})",
    )
    yield (
        config.kv_heads == config.num_heads or named == "decoder",
        f"num_kv_heads ({config.num_kv_heads}) below num_heads ({config.num_heads}) is for "
        f"decoder, got {named}",
    )
    yield (
        not config.parallel_residual or config.norm_position == "first",
        f"parallel_residual needs norm_position first, got {config.norm_position}",
    )


def _check_tokens(config: TransformerConfig) -> Iterator[_Check]:
    size, named = config.vocab_size, config.architecture
    special = ("pad_token_id", "bos_token_id", "eos_token_id", "uncounted_token_id")
    tokens = [(name, getattr(config, name)) for name in special]
    tokens += [("other_eos_token_ids", token) for token in config.other_eos_token_ids]
    for name, token in tokens:
        yield (
            token is None or not size or token < size,
            f"{name} {token} is not in the vocabulary, whose ids are 0 to {size - 1}",
        )
    yield (
        named != "encoder-decoder" or config.bos_token_id is not None,
        f"{named} needs bos_token_id, its first decoder token",
    )
    has_place_before = config.positions.kind == "learned" or config.positions.offset > 0
    yield (
        config.uncounted_token_id is None or (config.num_encoder_layers > 0 and has_place_before),
        "uncounted_token_id needs an encoder with a place before the first",
    )
    yield (
        not config.share_embeddings or config.source_vocab_size in (None, size),
        f"share_embeddings needs source_vocab_size ({config.source_vocab_size}) to be "
        f"vocab_size ({size})",
    )
    yield (
        config.cut_at is None or 0 < config.cut_at <= config.max_source_len,
        f"cut_at ({config.cut_at}) must be 1 to max_source_len ({config.max_source_len})",
    )


def _check_attention(config: TransformerConfig) -> Iterator[_Check]:
    attention, width = config.attention, config.head_key_dim
    is_one_head = config.num_heads == 1 and config.head_value_dim == config.d_model
    yield (
        attention.output or is_one_head,
        "attention without an output projection needs one head with values as wide as the "
        f"model, got num_heads {config.num_heads}, value_dim {config.head_value_dim} and "
        f"d_model {config.d_model}",
    )
    yield (
        attention.score == "dot" or attention.scale is None,
        f"attention.scale ({attention.scale}) is for dot scores, got additive",
    )
    num_layers = config.num_encoder_layers + config.num_decoder_layers
    outside = [n for n in attention.windowed_layers or () if not 0 <= n < num_layers]
    yield (
        not outside,
        f"attention.windowed_layers has {listed(outside)}; the layers are 0 to {num_layers - 1}",
    )
    is_plain = (attention.score, attention.normalizer) == ("dot", "softmax")
    yield (
        is_plain or config.architecture not in _WITH_DECODER,
        "additive scores and the relu normaliser are for encoder and vision-encoder",
    )
    yield (
        not attention.qk_norm or width % 8 == 0,
        f"attention.qk_norm needs a key_dim that is a multiple of 8, got {width}",
    )


def _check_positions(config: TransformerConfig) -> Iterator[_Check]:
    named, positions, key_dim = config.architecture, config.positions, config.head_key_dim
    kind = positions.kind
    if not kind.startswith("sinusoidal"):
        needs = f"needs sinusoidal positions, got {kind}"
        yield positions.offset == 0, f"positions.offset {needs}"
        yield positions.dtype == "float32", f"positions.dtype {needs}"
    if kind == "rotary":
        turned, scaling, width = config.turned_dim, positions.rotary_scaling, config.head_value_dim
        yield (
            named in ("decoder", "encoder"),
            f"rotary positions are for decoder and encoder, got {named}",
        )
        # The two halves of a head turn together, so a head cannot be widened for the kernels.
        yield (
            named not in _WITH_DECODER
            or (key_dim % _ROTARY_HEAD_DIM_MULTIPLE == 0 and width <= key_dim),
            f"rotary positions need heads whose key_dim is a multiple of "
            f"{_ROTARY_HEAD_DIM_MULTIPLE} and at least value_dim, got {key_dim} and {width}",
        )
        yield (
            turned % 2 == 0 and turned <= key_dim,
            f"positions.rotary_dim ({turned}) must be even and at most key_dim ({key_dim})",
        )
        if scaling is not None:
            yield (
                len(scaling.frequencies) == turned // 2,
                f"positions.rotary_scaling needs a frequency for each of {turned // 2} waves, "
                f"got {len(scaling.frequencies)}",
            )
    else:
        for name in ("rotary_scaling", "rotary_dim", "local_rotary_base"):
            is_given = getattr(positions, name) is not None
            yield not is_given, f"positions.{name} needs rotary positions, got {kind}"
    if kind == "relative":
        buckets, furthest = positions.relative_buckets, positions.relative_max_distance
        yield (
            named == "encoder-decoder",
            f"relative positions are for encoder-decoder, got {named}",
        )
        yield (
            buckets % 4 == 0 and furthest > buckets // 2,
            "relative positions need relative_buckets that are a multiple of 4 and a "
            f"relative_max_distance above the half of them, got {buckets} and {furthest}",
        )
    # No weight could tell that a table is too large which is computed from the options alone.
    width = {"rotary": key_dim, "relative": config.num_heads}.get(kind, config.d_model)
    num_patches = config.image.num_tokens if config.image else 0
    length = positions.offset + max(config.max_source_len, config.max_target_len, num_patches)
    yield (
        kind == "learned" or length * width <= _MAX_TABLE,
        f"{length:,} {kind} positions of {width:,} numbers are more than "
        f"{_MAX_TABLE:,} numbers; lower max_source_len or max_target_len",
    )


def _check_head(config: TransformerConfig) -> Iterator[_Check]:
    head, has_pooler = config.head, config.pooler_kind != "none"
    yield (
        has_pooler or config.head_dim == config.d_model,
        f"head.embedding_dim ({head.embedding_dim}) other than d_model ({config.d_model}) needs a "
        "pooler, which makes such vectors",
    )
    yield (
        config.architecture == "encoder" or not has_pooler,
        f"head.pooler ({head.pooler}) is for encoder, got {config.architecture}",
    )
    yield (
        not head.each_token or (config.head_dim == config.d_model and config.cut_at is None),
        "head.embedding_dim and cut_at are for one label or vector a text, got head.each_token",
    )
