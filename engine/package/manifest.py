"""The manifest of a package: what `manifest.json` may hold, and what the graphs are by contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.package.files import FileEntry
from engine.requests.generation_defaults import GenerationDefaults

# A release reads this number and all before it, so 0.1.y reads every package of 0.1.x. A new field
# has a default and raises the number: a release that does not know the field says "upgrade".
FORMAT_VERSION = 1
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # names and versions

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
Proof = Literal["quick", "standard", "full"]  # how much of a package was tried
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
Amount = Annotated[float, Field(ge=0)]
Points = Annotated[float, Field(ge=0, le=100.001)]  # float arithmetic may pass 100
Prompts = Annotated[
    dict[Annotated[str, Field(max_length=256)], Annotated[str, Field(max_length=2**13)]],
    Field(max_length=2**10),
]
MAX_BUCKETS = 64
MAX_ORIGINAL = 400  # characters that tell of a comparison
NEAR_OVERFLOW = 65_504 / 2  # the largest number of float16, by two
# How often a quantile of what graphs lose may be that of the eager model itself, and of how many
# positions at least it means something.
MOST_TIMES: Mapping[str, float] = MappingProxyType(
    {"median": 2.5, "p90": 2.5, "p99": 10.0, "largest": 10.0}
)
LEAST_POSITIONS: Mapping[str, int] = MappingProxyType(
    {"median": 1, "p90": 100, "p99": 1000, "largest": 1}
)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class CacheShape(_Model):
    """A row of one layer's keys (or values): [num_kv_heads, max_len, head_dim]."""

    num_layers: NumLayers
    num_kv_heads: NumHeads
    max_len: Length
    head_dim: Width
    dtype: CacheDtype = "fp32"  # int8: the graph holds the scales


@dataclass(frozen=True)
class TargetFormats:
    """The types of numbers that a target has kernels for."""

    precisions: tuple[Precision, ...]  # activations
    no_int8_cache: tuple[Precision, ...] = ()  # those without one for an int8 cache
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
    """The target of a package's graphs, and the types of the numbers in them."""

    target: Target = DEFAULT_TARGET
    precision: Precision = "fp32"  # activations
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
        """Whether the graphs themselves are judged by the eager model in their own type.

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
    """Facts that the engine needs to run the graphs of a generating model.

    engine/package/graph_io.py says which inputs and outputs `decoder.onnx` and `encoder.onnx` have.
    """

    vocab_size: VocabSize  # the output's
    source_vocab_size: VocabSize | None = None  # the encoder's; None: the same
    num_heads: NumHeads  # the decoder's queries, a multiple of the cache's num_kv_heads
    cache: CacheShape  # decoder's self-attention; max_len is the longest sequence
    cross_cache: CacheShape | None  # its cross-attention; max_len is the longest source
    decoder_start_token_id: TokenId | None  # encoder-decoder: the first decoder token
    eos_token_ids: tuple[TokenId, ...]
    alignment: bool = False  # only with cross_cache

    @property
    def prompt_vocab_size(self) -> int:
        """How many ids a source has, or a prompt of a model without an encoder."""
        return self.source_vocab_size or self.vocab_size

    @property
    def max_prompt_len(self) -> int:
        """How many tokens a source may have, or a prompt of a model without an encoder."""
        return (self.cross_cache or self.cache).max_len


class EncodingContract(_Model):
    """Facts that the engine needs to run `model.onnx` of a text model, see graph_io.py."""

    vocab_size: VocabSize
    max_len: Length
    pad_token_id: TokenId
    embedding_dim: Width | None  # None: it gives no vectors
    # 0: the model makes no difference; 1: a second text could not be told from the first; more: the
    # graph takes them
    num_token_types: TokenId = 1
    cuts_texts: bool = False  # longer texts lose their ends; else they are refused
    cuts_left: bool = False  # they lose their beginnings instead
    prompts: Prompts = {}  # texts that stand in front of others, by their names
    default_prompt: str | None = None  # the name of one that stands there unless another is asked

    @property
    def cut_at(self) -> int | None:
        """How many tokens are left of a text, None where none is cut."""
        return self.max_len if self.cuts_texts else None


class ImageContract(_Model):
    """Facts that the engine needs to run `model.onnx` of a vision model, see graph_io.py.

    A picture becomes numbers as (pixel / 255 - mean) / std. A picture of another size is stretched
    to `resize` by `resize` pixels, or with `keep_ratio` until its shorter edge has so many; the
    model sees its middle.
    """

    size: ImageSize  # height and width in pixels
    channels: Literal[1, 3]
    mean: tuple[float, ...]  # one a channel
    std: tuple[float, ...]  # one a channel
    embedding_dim: Width | None  # None: it gives no vectors
    resize: ImageSize | None = None  # None: size
    keep_ratio: bool = False
    resample: Resample = "bilinear"


class Quantiles(_Model):
    """Quantiles of each position's largest difference to the eager model in float64."""

    median: Amount
    p90: Amount
    p99: Amount
    largest: Amount


class Judged(_Model):
    """The losses of the graphs and of the eager model itself in a play, at the same positions."""

    play: PrintedName
    what: PrintedName  # logits, log-probabilities, alignment, vectors
    positions: PositiveInt
    exported: Quantiles
    eager: Quantiles  # in the type of the graphs
    runs: Annotated[
        int, Field(ge=1, le=4)
    ]  # eager runs; 4: with other orders of sums, the largest loss counts
    floor: Amount  # below it nothing counts


class Answers(_Model):
    """The scores, labels and vectors of a one-pass model beside the eager model's."""

    items: PositiveInt
    # Labels of a classifier, one an item, or of a labeller, one a token.
    labels: Count = 0
    labels_turned: Count = 0
    max_probability_diff: Amount | None = None  # None: there are no probabilities
    # Scores of a reranker, numbers of a regression.
    max_score_diff: Amount | None = None
    pairs: Count = 0  # pairs of items whose scores differ
    pairs_turned: Count = 0  # pairs in which the other one is the higher
    # Vectors of an embedder.
    max_vector_loss: Amount | None = None  # 1 - cosine
    max_number_diff: Amount | None = None
    neighbours_kept: Count = 0  # items whose nearest other item is the same


class Loss(_Model):
    """Losses of a format that rounds weights or cache, and those allowed when it was made."""

    max_abs_logit_diff: Amount = 0.0
    mean_abs_logit_diff: Amount
    logit_std: Amount  # the eager model's, within a position
    max_abs_alignment_diff: Amount | None = None  # None: it was not compared
    text_tokens: Count = 0  # tokens that both perplexities are measured on
    perplexity: Annotated[float, Field(gt=0)] | None = None
    eager_perplexity: Annotated[float, Field(gt=0)] | None = None
    text_lines: Count = 0  # lines that were answered, each time with the likeliest token
    chrf: Points | None = None  # answers to references
    eager_chrf: Points | None = None
    chrf_between: Points | None = None  # answers to the eager model's
    max_token_loss: Amount  # share of greedy tokens, or of labels, that may differ
    max_logit_loss: Amount  # largest difference, in logit_std
    max_perplexity_loss: Amount  # share of eager_perplexity
    max_vector_loss: Amount  # 1 - cosine of an embedding

    @property
    def has_text(self) -> bool:
        """Whether it was measured on a text besides."""
        return self.text_tokens > 0 or self.text_lines > 0


class Comparison(_Model):
    """The result of a comparison with the eager PyTorch model, wherever the graphs were run."""

    cases: PositiveInt
    tokens_compared: Count  # those that the eager model chooses by more than rounding turns
    tokens_equal: Count
    judged: tuple[Judged, ...] = ()  # (): a format that rounds further
    loss: Loss | None = None  # None: one that does not
    batch_invariant: bool  # rows were bit-equal wherever they stood and whatever stood beside them

    @property
    def max_abs_logit_diff(self) -> float:
        """Return the largest difference of a logit; 0 if the model has none."""
        found = [one.exported.largest for one in self.judged if one.what == "logits"]
        return max(found, default=self.loss.max_abs_logit_diff if self.loss else 0.0)

    @property
    def tolerance(self) -> float:
        """Return the largest difference of a logit that was allowed."""
        if self.loss is not None:
            return self.loss.max_logit_loss * (self.loss.logit_std or 1)
        logits = [one for one in self.judged if one.what == "logits"]
        return max(
            (max(MOST_TIMES["largest"] * x.eager.largest, x.floor) for x in logits), default=0
        )


class DeviceCertificate(Comparison):
    """The result of the same cases on a device, with the kernels that serve there."""

    gpu: PrintedName
    driver: PrintedName
    onnxruntime: PrintedName
    # Rows that a decode call is padded to, rising; none for a one-pass model.
    buckets: Annotated[tuple[NumRows, ...], Field(max_length=MAX_BUCKETS)]
    digest: Sha256  # fixed outputs', the same in every process on the same GPU


class Certificate(Comparison):
    """The outcome of comparing the package with the eager PyTorch model.

    Graphs for a device were computed on a CPU: what is here is of the same bodies in float32.
    """

    proof: Proof
    dtype: str
    reference: Literal["float64", "mean of runs"] = "float64"
    half: tuple[Judged, ...] = ()  # graphs in float16, as they are; (): there are none
    largest_float16: Amount | None = None  # number that the eager model computes in float16
    answers: Answers | None = None  # None: it generates
    # The original that an imported model was compared with, in words; "": it was trained here.
    original: Annotated[str, Field(max_length=MAX_ORIGINAL)] = ""
    covered: dict[str, list[Count] | Count]  # prompt lengths, steps, ... that were tried
    device: DeviceCertificate | None = None  # None: nothing was computed on a device

    @property
    def is_near_overflow(self) -> bool:
        """Whether the eager model comes within a factor of two of the largest float16."""
        return self.largest_float16 is not None and self.largest_float16 > NEAR_OVERFLOW

    @property
    def shows_invariance(self) -> bool:
        """Whether rows were bit-equal where the package is served, on a device if it has one."""
        return self.batch_invariant if self.device is None else self.device.batch_invariant


@dataclass(frozen=True)
class Contract:
    """All that the engine must know of a model, as its manifest has it."""

    architecture: Architecture
    task: Task
    generation: GenerationContract | None  # one of the three is there
    encoding: EncodingContract | None
    image: ImageContract | None
    labels: tuple[str, ...]
    label_scores: LabelScores = "softmax"

    @property
    def most_tokens(self) -> int:
        """How long a prompt, a source or a text may be; 0: the model sees images."""
        if self.generation:
            return self.generation.max_prompt_len
        return self.encoding.max_len if self.encoding else 0


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
    # Probabilities of one label of many, or of each by itself; none: the logits themselves.
    label_scores: LabelScores = "softmax"
    defaults: GenerationDefaults = GenerationDefaults()  # for options that a request leaves out
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

    @property
    def contract(self) -> Contract:
        """All that the engine must know of the model."""
        return Contract(**{part.name: getattr(self, part.name) for part in fields(Contract)})
