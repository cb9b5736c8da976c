"""The results of the client's calls, as frozen dataclasses without protobuf in them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar, overload

T = TypeVar("T")


@dataclass(frozen=True)
class Usage:
    """Tokens consumed."""

    input_tokens: int
    output_tokens: int
    cached_input_tokens: int = 0
    discarded_tokens: int = 0
    reasoning_tokens: int = 0  # a part of the output: between "<think>" and "</think>"


@dataclass(frozen=True)
class Timing:
    """Time by phase, in seconds on the server's monotonic clock."""

    queue: float  # arrival to admission
    prefill: float  # admission to the first token
    decode: float  # first to last token
    time_to_first_token: float  # arrival to first token
    steps: int  # steps of the engine in which the request took part
    mean_batch_size: float  # sequences that shared those steps, mean


@dataclass(frozen=True)
class Provenance:
    """The model, server and machine behind an answer, so that it can be reproduced."""

    model: str
    model_version: str
    manifest_sha256: str  # hexadecimal
    seed: int  # that was in fact used
    determinism: str  # "batch_invariant" or "best_effort": what was in fact used
    replica_id: str
    server_version: str = ""
    processor: str = ""  # a CPU's name, instruction sets and L2 cache, or a GPU's name
    threads: int = 0  # CPU threads that the model may use


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its natural log-probability, before penalties and truncation."""

    token_id: int
    piece: bytes  # added to the text; need not be whole characters
    logprob: float
    rank: int  # 1: the most likely


@dataclass(frozen=True)
class PositionLogprobs:
    """Log-probabilities at one position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]  # as many as were asked for, best first


@dataclass(frozen=True)
class GeneratedSequence:
    """One finished output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "eos", "stop", "length", "context_full", ...
    matched_stop: str | int | None
    sum_logprob: float
    score: float = 0.0  # sequences are ordered by it: beam search and best_of
    logprobs: tuple[PositionLogprobs, ...] = ()  # if asked for
    alignment: tuple[tuple[float, ...], ...] = ()  # [generated, source] attention, if asked for


class _Sequence(Sequence[T]):
    """A sequence of what it holds, with a length and indexes; numpy takes numbers and vectors."""

    @abstractmethod
    def _items(self) -> tuple[T, ...]: ...

    def __len__(self) -> int:
        return len(self._items())

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[T, ...]: ...
    def __getitem__(self, place: int | slice) -> T | tuple[T, ...]:
        return self._items()[place]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """The cost of a call, and the name that logs have for it."""

    usage: Usage
    timing: Timing  # each the longest of any input
    provenance: Provenance
    request_id: str = field(compare=False)


@dataclass(frozen=True)
class Result:
    """All outputs for one of several prompts, best first; text, ... are those of the best."""

    sequences: tuple[GeneratedSequence, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # from the second token on, if asked for
    source_pieces: tuple[bytes, ...] = ()  # the prompt's, with their ids or alignment
    prompt_token_ids: tuple[int, ...] = ()  # if asked for
    # How an answer in a conversation begins with reasoning, which ends with "</think>": "marked",
    # if it begins with "<think>"; "begun", since the prompt ends so; "unspecified", with none.
    reasoning: str = "unspecified"

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.sequences[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.sequences[0].finish_reason


@dataclass(frozen=True)
class Generation(_Call, Result):
    """All outputs for one prompt, best first; text, token_ids, ... are those of the best."""


@dataclass(frozen=True)
class Answers(_Call, _Sequence[T]):
    """The answers to the items of a call, in their order, and what all of them took together.

    A score is a TargetScore, a classification its labels, best first, a labelling its spans, and
    an embedding its values. It is a sequence of the `results`.
    """

    results: tuple[T, ...]

    def _items(self) -> tuple[T, ...]:
        return self.results


@dataclass(frozen=True)
class Generations(Answers[Result]):
    """The results for several prompts, in their order, and what all of them took together."""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(result.text for result in self.results)


@dataclass(frozen=True)
class TargetScore:
    """The log-probability of one target of several."""

    sum_logprob: float
    positions: tuple[PositionLogprobs, ...]  # one per token of the target


@dataclass(frozen=True)
class Score(_Call, TargetScore):
    """The log-probability of a target behind its source."""


@dataclass(frozen=True)
class ScoredLabel:
    """A class of the model's head with its probability."""

    label: str
    probability: float
    index: int


@dataclass(frozen=True)
class Classification(_Call):
    """Classes of one item, best first."""

    labels: tuple[ScoredLabel, ...]

    @property
    def label(self) -> str:
        return self.labels[0].label


@dataclass(frozen=True)
class LabelledSpan:
    """A labelled span of a text."""

    text: str  # empty if the item was given as token ids
    start_byte: int  # in the UTF-8 text
    end_byte: int
    label: ScoredLabel


@dataclass(frozen=True)
class Labelling(_Call):
    """The labelled stretches of one text, in its order."""

    spans: tuple[LabelledSpan, ...]


@dataclass(frozen=True)
class Embedding(_Call, _Sequence[float]):
    """The vector of one item, and a sequence of its values."""

    values: tuple[float, ...]

    def _items(self) -> tuple[float, ...]:
        return self.values


@dataclass(frozen=True)
class ModelLimits:
    """Limits that requests are checked against; 0: the model cannot, or the server did not say."""

    max_input_tokens: int
    max_output_tokens: int
    max_inputs: int
    max_beam_width: int
    max_num_outputs: int
    max_stop_strings: int
    max_logprobs: int
    max_request_bytes: int


@dataclass(frozen=True)
class TextQuality:
    """How near the answers of a format that rounds are, on a person's lines: chrF, 0 to 100."""

    lines: int
    chrf: float | None  # the package's answers, to references; None: there are none
    eager_chrf: float | None  # the eager model's answers, to references
    chrf_between: float | None  # the package's answers, to those of the eager model


@dataclass(frozen=True)
class ParityLoss:
    """Differences to the eager model in float64, the largest number of each position."""

    play: str  # how the positions were computed: "alone", "prompt in one piece", ...
    what: str  # "logits", "log-probabilities", "alignment", "vectors"
    positions: int
    median: float
    largest: float
    eager_median: float  # the eager model itself, in the type of the package
    eager_largest: float


@dataclass(frozen=True)
class ParityAnswers:
    """A package's answers to items, compared with those of the eager model."""

    items: int
    labels: int
    labels_turned: int
    max_probability_diff: float | None  # None: there are no probabilities
    max_score_diff: float | None  # None: it tells no numbers
    pairs: int  # pairs of items whose scores differ
    pairs_turned: int
    max_vector_loss: float | None  # 1 - cosine; None: there are no vectors
    max_number_diff: float | None
    neighbours_kept: int  # items whose nearest other item is the same


@dataclass(frozen=True)
class ParityCertificate:
    """How a model was shown to agree with its eager PyTorch form."""

    cases: int
    tokens_compared: int
    tokens_equal: int
    max_abs_logit_diff: float
    tolerance: float
    dtype: str
    toolchain: Mapping[str, str]
    batch_invariant: bool  # rows were bit-equal alone and in a batch
    text_quality: TextQuality | None = None  # None: none was measured
    proof: str = ""  # how much was tried: "quick", "standard" or "full"
    losses: tuple[ParityLoss, ...] = ()  # empty for a format that rounds further
    answers: ParityAnswers | None = None  # None: the model generates
    largest_float16: float | None = None  # number in the eager model; None: another type
    original: str = ""  # with what an imported model was compared; "": it is the original itself


@dataclass(frozen=True)
class VersionTraffic:
    """The part of a model's calls that one of its versions has."""

    share: float  # percent of the new calls that name no version
    replicas: int  # that take calls


@dataclass(frozen=True)
class ModelInfo:
    """A model that the server has."""

    model: str
    model_version: str
    state: str  # "loading", "warming", "ready", "draining", "failed"
    message: str  # why, if it failed
    architecture: str
    capabilities: tuple[str, ...]
    limits: ModelLimits
    manifest_sha256: str  # hexadecimal
    parity: ParityCertificate | None
    labels: tuple[str, ...]  # by class, in the order of the model's head
    device: str  # "cpu", or the name of the GPU it runs on
    precision: str  # in which it computes: "fp32", "fp16", "bf16"
    # The values of options that a generation leaves away, by their names.
    defaults: Mapping[str, object] = field(default_factory=dict)
    traffic: VersionTraffic | None = None  # told at an admin port


@dataclass(frozen=True)
class ServerInfo:
    """The server."""

    version: str
    api_minor: int
    instance_id: str
    start_time: datetime  # UTC
    features: tuple[str, ...]
    replicas: tuple[ReplicaInfo, ...] = ()  # those that answer, if it is a gateway


@dataclass(frozen=True)
class ReplicaInfo:
    """A replica behind a gateway."""

    replica_id: str
    version: str
    start_time: datetime  # UTC


@dataclass(frozen=True)
class WastedWork:
    """Tokens computed that are in no answer, since the model was loaded."""

    padding_tokens: int = 0
    cancelled_tokens: int = 0
    expired_tokens: int = 0  # their deadline passed
    failed_tokens: int = 0
    discarded_tokens: int = 0  # beams, and samples that are not returned
    preempted_tokens: int = 0  # requests that had to make room, and are computed again


@dataclass(frozen=True)
class ReplicaLoad:
    """How busy one replica is now with one of its models."""

    replica_id: str
    model: str  # empty: all that the replica has
    running: int  # sequences in the running batch
    waiting: int  # requests
    waiting_tokens: int
    cache_used: float  # 0 to 1
    tokens_per_second: float
    wasted: WastedWork = WastedWork()
