"""The manifest of a package: what `manifest.json` may hold, and what the graphs are by contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.package.files import FileEntry
from engine.requests.generation_defaults import GenerationDefaults

FORMAT_VERSION = 3
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # of names and versions

Architecture = Literal["encoder-decoder", "decoder", "encoder", "vision-encoder"]
_GRAPHS: Mapping[Architecture, tuple[str, ...]] = MappingProxyType(
    {
        "encoder-decoder": ("encoder.onnx", "decoder.onnx"),
        "decoder": ("decoder.onnx",),
        "encoder": ("model.onnx",),
        "vision-encoder": ("model.onnx",),
    }
)
Task = Literal["generate", "classify", "label", "embed"]
Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
LabelScores = Literal["softmax", "sigmoid", "none"]
Target = Literal["cpu", "cuda"]
DEFAULT_TARGET: Target = "cpu"  # unless another is asked for
Precision = Literal["fp32", "fp16", "bf16"]
Weights = Literal["fp32", "fp16", "bf16", "int8", "int8-fixed", "int8-blocks", "int4"]
CacheDtype = Literal["fp32", "fp16", "bf16", "int8"]
_ROUNDED: tuple[Weights, ...] = ("int8", "int8-fixed", "int8-blocks", "int4")
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
# Far above any model that is known, and low enough that nothing built from them is without end.
MAX_LAYERS = 2**10
MAX_HEADS = 2**12
MAX_WIDTH = 2**20
MAX_LENGTH = 2**20
MAX_VOCAB_SIZE = 2**24
MAX_IMAGE_SIZE = 2**14
NumLayers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
NumHeads = Annotated[int, Field(gt=0, le=MAX_HEADS)]
Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]
Length = Annotated[int, Field(gt=0, le=MAX_LENGTH)]
VocabSize = Annotated[int, Field(gt=0, le=MAX_VOCAB_SIZE)]
ImageSize = Annotated[int, Field(gt=0, le=MAX_IMAGE_SIZE)]
TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
NumRows = Annotated[int, Field(gt=0, le=2**16)]
PrintedName = Annotated[str, Field(pattern=r"^[ -~]{1,128}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Points = Annotated[float, Field(ge=0, le=100.001)]  # float arithmetic may pass 100
MAX_BUCKETS = 64
# Of a logit in float32, for every FULL_SIZE of the largest one of its position.
LOGIT_TOLERANCE = 1e-4
FULL_SIZE = 16.0
# In half precision, of root mean squares of differences to those of the eager model in that type.
MAX_CASE_RATIO = 1.5
MAX_POSITION_RATIO = 3.0


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CacheShape(_Model):
    """A row of one layer's keys (or values): [num_kv_heads, max_len, head_dim]."""

    num_layers: NumLayers
    num_kv_heads: NumHeads
    max_len: Length
    head_dim: Width
    dtype: CacheDtype = "fp32"  # int8: the graph holds the scales


@dataclass(frozen=True)
class TargetFormats:
    """For which types of numbers a target has kernels."""

    precisions: tuple[Precision, ...]  # of activations
    no_int8_cache: tuple[Precision, ...] = ()  # of them, those without one for an int8 cache
    no_weights: tuple[tuple[Weights, Weights], ...] = ()  # without one, and what to take instead
    is_shown_on_device: bool = False  # by a second stage of the certificate


FORMATS: Mapping[Target, TargetFormats] = MappingProxyType(
    {
        "cpu": TargetFormats(("fp32",)),
        "cuda": TargetFormats(
            ("fp32", "fp16", "bf16"),
            no_int8_cache=("fp32",),
            no_weights=(("int8", "int8-blocks"), ("int8-fixed", "int8-blocks")),
            is_shown_on_device=True,
        ),
    }
)


@dataclass(frozen=True)
class PackageFormat:
    """Where the graphs of a package run, and the types of the numbers in them."""

    target: Target = DEFAULT_TARGET
    precision: Precision = "fp32"  # of activations
    weights: Weights = "fp32"  # that of activations, unless they are rounded
    kv_cache: CacheDtype = "fp32"  # likewise, of a decoder's own positions

    @classmethod
    def of(
        cls,
        target: Target = DEFAULT_TARGET,
        precision: Precision = "fp32",
        weights: Weights | None = None,
        kv_cache: CacheDtype | None = None,
    ) -> PackageFormat:
        """Return a format of which what is not said is not rounded."""
        return cls(target, precision, weights or precision, kv_cache or precision)

    @property
    def is_lossy(self) -> bool:
        """Whether it rounds weights or cache."""
        return self.weights != self.precision or self.kv_cache != self.precision

    @property
    def is_fitted(self) -> bool:
        """Whether it is made for a text: scales of inputs are fixed at export."""
        return self.weights == "int8-fixed"

    @property
    def has_half_stage(self) -> bool:
        """Whether the graphs themselves are held against the eager model in their own type.

        onnxruntime has no kernels for bf16 on a CPU; what rounds more is held to limits of its own.
        """
        return self.precision == "fp16" and not self.is_lossy

    @property
    def problems(self) -> list[str]:
        """Return a sentence, beginning with the field, for everything that does not go together."""
        found, allowed = [], FORMATS[self.target]
        if self.precision not in allowed.precisions:
            others = [name for name, one in FORMATS.items() if self.precision in one.precisions]
            found.append(f"precision: {self.precision} is for the target {' or '.join(others)}")
        if (instead := dict(allowed.no_weights).get(self.weights)) is not None:
            what = f"{self.weights} has no kernel for the target {self.target}; {instead} has"
            found.append(f"weights: {what}")
        if self.weights not in (self.precision, *_ROUNDED):
            found.append(f"weights: {self.weights} does not go with precision {self.precision}")
        if self.kv_cache not in (self.precision, "int8"):
            found.append(f"kv_cache: {self.kv_cache} does not go with precision {self.precision}")
        elif self.kv_cache != self.precision and self.precision in allowed.no_int8_cache:
            needed = " or ".join(p for p in allowed.precisions if p not in allowed.no_int8_cache)
            found.append(f"kv_cache: int8 needs precision {needed} for the target {self.target}")
        return found

    def __str__(self) -> str:
        cache = f", {self.kv_cache} KV cache" if self.kv_cache != self.precision else ""
        inside = f" in {self.precision}" if self.weights != self.precision != "fp32" else ""
        return f"{self.weights}{inside}{cache}"


class GenerationContract(_Model):
    """What the engine must know to run the graphs of a generating model.

    What `decoder.onnx` and `encoder.onnx` take and give by it says engine/package/graph_io.py.
    """

    vocab_size: VocabSize  # of what is generated
    source_vocab_size: VocabSize | None = None  # of the encoder's input; None: the same
    num_heads: NumHeads  # of the decoder's queries, a multiple of the cache's num_kv_heads
    cache: CacheShape  # of the decoder's self-attention; max_len is the longest sequence
    cross_cache: CacheShape | None  # of its cross-attention; max_len is the longest source
    decoder_start_token_id: TokenId | None  # encoder-decoder: the first decoder token
    eos_token_ids: tuple[TokenId, ...]
    alignment: bool = False  # only with cross_cache

    @property
    def prompt_vocab_size(self) -> int:
        """How many ids a source has, or a prompt of a model without an encoder."""
        return self.source_vocab_size or self.vocab_size


class EncodingContract(_Model):
    """What the engine must know to run `model.onnx` of a one-pass text model, see graph_io.py."""

    vocab_size: VocabSize
    max_len: Length
    pad_token_id: TokenId
    embedding_dim: Width | None  # None: it gives no vectors
    # 0: the model makes no difference; 1: a second text could not be told from the first; more: the
    # graph takes them
    num_token_types: TokenId = 1
    cuts_texts: bool = False  # longer texts lose their ends; else they are refused

    @property
    def cut_at(self) -> int | None:
        """How many tokens are left of a text, None where none is cut."""
        return self.max_len if self.cuts_texts else None


class ImageContract(_Model):
    """What the engine must know to run `model.onnx` of a vision model, see graph_io.py.

    A picture becomes numbers as (pixel / 255 - mean) / std. Where its size is another, it is
    stretched to `resize` by `resize` pixels, or with `keep_ratio` its shorter edge is; its middle
    is what the model sees.
    """

    size: ImageSize  # height and width in pixels
    channels: Literal[1, 3]
    mean: tuple[float, ...]  # one a channel
    std: tuple[float, ...]  # one a channel
    embedding_dim: Width | None  # None: it gives no vectors
    resize: ImageSize | None = None  # None: size
    keep_ratio: bool = False
    resample: Resample = "bilinear"


class Loss(_Model):
    """What a format that rounds weights or cache loses, and what was allowed when it was made."""

    mean_abs_logit_diff: Annotated[float, Field(ge=0)]
    logit_std: Annotated[float, Field(ge=0)]  # of the eager model's logits, within a position
    text_tokens: Count = 0  # of the text that both perplexities are of
    perplexity: Annotated[float, Field(gt=0)] | None = None
    eager_perplexity: Annotated[float, Field(gt=0)] | None = None
    text_lines: Count = 0  # of the text that were answered, each time with the likeliest token
    chrf: Points | None = None  # of the answers to references
    eager_chrf: Points | None = None
    chrf_between: Points | None = None  # of the answers to those of the eager model
    max_token_loss: Annotated[float, Field(ge=0)]  # share of greedy tokens that may differ
    max_logit_loss: Annotated[float, Field(ge=0)]  # largest difference, in logit_std
    max_perplexity_loss: Annotated[float, Field(ge=0)]  # share of eager_perplexity

    @property
    def has_text(self) -> bool:
        """Whether it was measured on a text besides."""
        return self.text_tokens > 0 or self.text_lines > 0


class HalfPrecision(_Model):
    """How far graphs in half precision are from the eager model in float64.

    Beside them stands the eager model in the same type: what the type itself costs. The other
    fields of the certificate are then of the same graphs in float32.
    """

    positions: PositiveInt
    tokens_decided: Count  # where the eager model's lead is far above what the type may turn
    tokens_equal: Count
    max_abs_logit_diff: Annotated[float, Field(ge=0)]
    # Of the eager model's logits, within a position; of a single label the size.
    logit_std: Annotated[float, Field(gt=0)]
    rms_diff: Annotated[float, Field(ge=0)]
    eager_rms_diff: Annotated[float, Field(ge=0)]
    # Of the two, over all cases or over one; of one, the most that random roundings lose counts.
    max_case_ratio: Annotated[float, Field(ge=0, le=MAX_CASE_RATIO)]
    # Likewise of one position.
    max_position_ratio: Annotated[float, Field(ge=0, le=MAX_POSITION_RATIO)]


class DeviceCertificate(_Model):
    """What the same cases gave on a device, with the kernels that serve there."""

    gpu: PrintedName
    driver: PrintedName
    onnxruntime: PrintedName
    # Rows that a decode call is padded to, rising; none for a one-pass model.
    buckets: Annotated[tuple[NumRows, ...], Field(max_length=MAX_BUCKETS)]
    cases: PositiveInt
    tokens_compared: Count
    tokens_equal: Count
    max_abs_logit_diff: Annotated[float, Field(ge=0)]
    tolerance: Annotated[float, Field(gt=0)] | None  # None: `half` says what it was held to
    batch_invariant: bool  # rows were bit-equal wherever they stood and whatever stood beside them
    digest: Sha256  # of fixed outputs, which another process on the same GPU finds again
    half: HalfPrecision | None = None  # None: in float32, or rounded further


class Certificate(_Model):
    """The outcome of comparing the package with the eager PyTorch model."""

    cases: PositiveInt
    tokens_compared: Count
    tokens_equal: Count
    max_abs_logit_diff: Annotated[float, Field(ge=0)]
    max_abs_logit: Annotated[float, Field(ge=0)] | None = None  # of the eager model
    max_abs_vector_diff: Annotated[float, Field(ge=0)] | None = None  # of a model without logits
    # Of attention to the source, each between 0 and 1; None: it was not compared.
    max_abs_alignment_diff: Annotated[float, Field(ge=0)] | None = None
    alignment_tolerance: Annotated[float, Field(gt=0)] | None = None  # None: it was held to none
    # 1e-4 for every 16 of the largest logit; of a format with loss: max_logit_loss * logit_std
    tolerance: Annotated[float, Field(gt=0)]
    batch_invariant: bool  # rows were bit-equal alone and in a batch; of a device, `device` says
    dtype: str
    loss: Loss | None = None  # None: a format without loss
    half: HalfPrecision | None = None  # None: nothing was computed in half precision
    covered: dict[str, list[Count] | Count]  # prompt lengths, steps, ... that were tried
    device: DeviceCertificate | None = None  # None: nothing was computed on a device

    @property
    def bans(self) -> bool:
        """Whether what the package bans was left out; earlier releases chose it too."""
        return "banned_tokens" in self.covered

    @property
    def shows_invariance(self) -> bool:
        """Whether rows were bit-equal where the package is served, on a device if it has one."""
        return self.batch_invariant if self.device is None else self.device.batch_invariant


class Manifest(_Model):
    """`manifest.json`."""

    format_version: Annotated[int, Field(gt=0, le=FORMAT_VERSION)]
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    version: Annotated[str, Field(pattern=NAME_PATTERN)] = "1"
    architecture: Architecture
    task: Task
    target: Target
    precision: Precision = "fp32"
    layout: Literal["slots"] | None  # None: no cache
    weights: Weights
    generation: GenerationContract | None = None
    encoding: EncodingContract | None = None
    image: ImageContract | None = None
    labels: tuple[str, ...] = ()
    # Probabilities of one label of many, or of each by itself; none: logits are what is told
    label_scores: LabelScores = "softmax"
    defaults: GenerationDefaults = GenerationDefaults()  # of requests that leave options away
    files: dict[str, FileEntry]
    toolchain: dict[str, str]
    certificate: Certificate

    @property
    def graphs(self) -> tuple[str, ...]:
        """The names of its graphs; beside each lie its weights, in a file that ends with .data."""
        return _GRAPHS[self.architecture]

    @property
    def format(self) -> PackageFormat:
        """The types of its numbers."""
        kv_cache = self.generation.cache.dtype if self.generation else self.precision
        return PackageFormat(self.target, self.precision, self.weights, kv_cache)
