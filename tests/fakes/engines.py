"""Engines that do what a test tells them, and packages without files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from engine.config import RequestLimits
from engine.errors import (
    Draining,
    ExpiredInDecode,
    ExpiredInQueue,
    FieldViolation,
    InvalidRequest,
    TokenweirError,
)
from engine.one_pass.prediction import ItemPrediction, Prediction, PredictionItem
from engine.package.manifest import (
    Answers,
    CacheShape,
    EncodingContract,
    GenerationContract,
    ImageContract,
    Manifest,
)
from engine.package.package import Package
from engine.requests.checks import check_sampling_params, raise_if_any
from engine.requests.events import (
    Admitted,
    FinishReason,
    GenerationEvent,
    PositionLogprobs,
    RequestFinished,
    Score,
    SequenceFinished,
    TextDelta,
    Timing,
    TokenLogprob,
    Usage,
)
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.load import LoadSnapshot, WastedWork
from engine.requests.request import Chat, GenerationRequest, ScoreRequest
from engine.requests.token_ids import check_token_ids
from engine.step_measures import StepMeasures
from server.config import WorkerConfig
from server.worker.worker import Worker
from tests.fakes.stand_in_certificate import certificate

VOCAB_SIZE = 100
ANSWERS = Answers(items=8, labels=40, labels_turned=1, max_probability_diff=2.5e-6)
MAX_PROMPT = 16  # tokens = words of a text
TIMING = Timing(
    queue=0.01, prefill=0.02, decode=0.03, time_to_first_token=0.03, steps=3, mean_batch_size=2.0
)
LABELS = ("NOUN", "VERB", "DET")
OPTIONS = (
    "beam",
    "best_of",
    "typical_p",
    "controls",
    "forced_tokens",
    "constraint",
    "logprobs",
    "prompt_logprobs",
    "alignment",
    "allow_partial",
    "target_prefix",
    "priority",
    "fair_share",
    "batch_invariant",
    "score",
)  # every capability beyond plain generation


def generation_package(
    name: str = "dates", *, version: str = "7", batch_invariant: bool = True, **defaults: object
) -> Package:
    cache = CacheShape(num_layers=1, num_kv_heads=1, max_len=64, head_dim=8)
    manifest = Manifest(
        format_version=1,
        name=name,
        version=version,
        architecture="encoder-decoder",
        task="generate",
        target="cpu",
        layout="slots",
        weights="fp32",
        generation=GenerationContract(
            vocab_size=VOCAB_SIZE,
            num_heads=1,
            cache=cache,
            cross_cache=cache.model_copy(update={"max_len": MAX_PROMPT}),
            decoder_start_token_id=0,
            eos_token_ids=(1,),
        ),
        defaults=GenerationDefaults.model_validate(defaults),
        files={},
        toolchain={"torch": "2.13.0", "threads": "2", "instruction_sets": "avx2 avx512f"},
        certificate=certificate(cases=12, batch_invariant=batch_invariant),
    )
    return Package(path=Path("nowhere"), manifest=manifest, manifest_sha256=b"\x01" * 32)


def prediction_package(
    name: str = "tags",
    *,
    version: str = "1",
    task: str = "label",
    takes: str = "",
    labels: Sequence[str] = LABELS,
) -> Package:
    """Return a package that `takes` a "text" or "image"; if that is left out, the task decides."""
    takes = takes or ("image" if task == "classify" else "text")
    image = ImageContract(size=8, channels=1, mean=(0.5,), std=(0.5,), embedding_dim=2)
    text = EncodingContract(vocab_size=VOCAB_SIZE, max_len=32, pad_token_id=0, embedding_dim=2)
    manifest = Manifest(
        format_version=1,
        name=name,
        version=version,
        architecture="encoder" if takes == "text" else "vision-encoder",
        task=task,
        target="cpu",
        layout=None,
        weights="fp32",
        encoding=text if takes == "text" else None,
        image=image if takes == "image" else None,
        labels=tuple(labels),
        label_scores="sigmoid" if len(labels) == 1 else "softmax",
        files={},
        toolchain={},
        certificate=certificate(task=task, answers=ANSWERS),
    )
    return Package(path=Path("nowhere"), manifest=manifest, manifest_sha256=b"\x02" * 32)


class _Lifecycle:
    def __init__(self, package: Package) -> None:
        self.package = package
        self.device = "cpu"
        self.num_threads = 1
        self.is_warming = False
        self.measures = StepMeasures()
        self.healthy = True
        self.started = False
        self.stopped = False
        self._open: set[asyncio.Task[object]] = set()
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        self.started = True

    async def stop(self, grace: float = 0.0) -> None:
        self.stopped = True
        self._stopping.set()


class FakeGenerator(_Lifecycle):
    """Echoes the words of the prompt, a word a token, its length the id; capitals are orders.

    HOLD waits until `release` is set, FAIL raises `error`, CRASH raises a bug, SLOW takes 10 ms a
    token, HUGE makes 2,000 tokens of 1,000 letters. `aborted` holds what was closed too early.
    """

    capabilities: tuple[str, ...] = ("generate", "stream")

    def __init__(self, package: Package | None = None) -> None:
        super().__init__(package or generation_package())
        self.requests: list[GenerationRequest] = []
        self.scored: list[ScoreRequest] = []
        self.num_discarded = 0  # tokens of every answer
        self.aborted: list[str] = []
        self.release = asyncio.Event()
        self.admit = asyncio.Event()
        self.admit.set()
        self.error: TokenweirError | None = None
        self.seen = asyncio.Event()  # some request has reached HOLD
        self.done = asyncio.Event()  # some request has ended or was aborted

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            running=3,
            waiting=1,
            waiting_tokens=9,
            cache_used=0.25,
            tokens_per_second=50.0,
            wasted=WastedWork(1, 2, 3, 4, 5, 6),
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        words = self._checked(request)
        self.requests.append(request)
        finished = False
        try:
            await self._until(self.admit, request, ExpiredInQueue)
            ids = (4, 9) if request.params.prompt_token_ids else ()
            yield Admitted(request.request_id, len(words), ids)
            is_streamed = request.params.strategy != "beam" and not request.params.best_of
            for index in range(request.params.num_outputs):
                text = []
                for word in _expanded(words):
                    await self.obey(word, request)
                    text.append(word + " ")
                    if is_streamed:
                        logprobs = _logprobs([len(word)], request.params.logprobs)
                        yield TextDelta(index, word + " ", (len(word),), logprobs)
                yield _finished(request, index, _expanded(words), is_streamed)
            finished = True
            yield RequestFinished(
                request.request_id,
                Usage(len(words), len(text), discarded_tokens=self.num_discarded),
                TIMING,
                seed=request.params.seed,
                prompt_logprobs=_logprobs([1] * (len(words) - 1), request.params.prompt_logprobs),
                source_ids=(4, 9)
                if request.params.alignment or request.params.prompt_token_ids
                else (),
            )
        finally:
            if not finished:
                self.aborted.append(request.request_id)
            self.done.set()

    async def score(self, request: ScoreRequest) -> Score:
        self.scored.append(request)
        if request.target in ("", ()):
            path = f"{request.input_path}.prefix_text"
            raise InvalidRequest([FieldViolation(path, "is empty; give at least one token")])
        if request.target == "FAIL":
            assert self.error is not None
            raise self.error
        words = request.target.split() if isinstance(request.target, str) else request.target
        positions = _logprobs([3] * len(words), request.top_logprobs)
        return Score(-0.5 * len(words), positions, Usage(len(words), 0), TIMING)

    def token_bytes(self, token_id: int) -> bytes:
        return b"<%d>" % token_id

    source_token_bytes = token_bytes

    def _checked(self, request: GenerationRequest) -> list[str]:
        violations = check_sampling_params(
            request.params, limits=RequestLimits(), vocab_size=VOCAB_SIZE
        )
        path = request.input_path
        prompt = request.prompt
        if isinstance(prompt, Chat):
            said = prompt.messages[-1].content
            prompt = said if isinstance(said, str) else " ".join(said)
        words = prompt.split() if isinstance(prompt, str) else [str(i) for i in prompt]
        where = f"{path}.text" if isinstance(prompt, str) else f"{path}.tokens"
        if not words:
            violations.append(FieldViolation(where, "it is empty"))
        if len(words) > MAX_PROMPT:
            violations.append(FieldViolation(where, f"{len(words)} tokens, at most {MAX_PROMPT}"))
        if not isinstance(prompt, str):
            violations += [
                FieldViolation(f"{path}.tokens.ids[{i}]", f"{token} is outside 0 to 99")
                for i, token in enumerate(prompt)
                if not 0 <= token < VOCAB_SIZE
            ]
        if violations:
            raise InvalidRequest(violations)
        return words

    async def obey(self, word: str, request: GenerationRequest) -> None:
        match word:
            case "HOLD":
                self.seen.set()
                await self._until(self.release, request, ExpiredInDecode)
            case "FAIL":
                assert self.error is not None
                raise self.error
            case "CRASH":
                raise ZeroDivisionError("secret of the server")
        await asyncio.sleep(0.01 if "SLOW" in str(request.prompt) else 0)

    async def _until(
        self, event: asyncio.Event, request: GenerationRequest, expired: type[TokenweirError]
    ) -> None:
        timeout = None if request.deadline is None else request.deadline - time.monotonic()
        waiting = [asyncio.ensure_future(e.wait()) for e in (event, self._stopping)]
        try:
            done, _ = await asyncio.wait(
                waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for one in waiting:
                one.cancel()
        if not done:
            raise expired(f"request {request.request_id} ran out of time")
        if self._stopping.is_set():
            raise Draining("the engine is stopping", 0.2)


def _finished(
    request: GenerationRequest, index: int, words: list[str], is_streamed: bool
) -> SequenceFinished:
    ids = [len(word) for word in words]
    return SequenceFinished(
        index=index,
        reason=FinishReason.STOP if "STOP" in words else FinishReason.EOS,
        text="".join(word + " " for word in words),
        token_ids=tuple(ids),
        matched_stop="STOP" if "STOP" in words else None,
        sum_logprob=-0.5 * (index + 1),
        score=0.0 if is_streamed else -0.25 * (index + 1),
        logprobs=_logprobs(ids, request.params.logprobs),
        alignment=((0.25, 0.75),) * len(ids) if request.params.alignment else (),
        was_streamed=is_streamed,
    )


def _logprobs(ids: list[int], num_alternatives: int | None) -> tuple[PositionLogprobs, ...]:
    """Say that every token was the second best, with log-probability -2."""
    if num_alternatives is None:
        return ()
    top = tuple(TokenLogprob(90 + i, -1.0 - i, 1 + i) for i in range(num_alternatives))
    return tuple(PositionLogprobs(TokenLogprob(i, -2.0, 2), top) for i in ids)


def _expanded(words: list[str]) -> list[str]:
    return ["x" * 1_000] * 2_000 if "HUGE" in words else words


def able(*more: str, package: Package | None = None) -> FakeGenerator:
    """Return a generator that has every option, and more capabilities."""
    generator = FakeGenerator(package)
    generator.capabilities += (*OPTIONS, *more)
    return generator


class FakePredictor(_Lifecycle):
    """Says the same of every item: logits 0, 1, 2 and embedding (3, 4), until it is told others."""

    def __init__(self, package: Package | None = None) -> None:
        super().__init__(package or prediction_package())
        self.capabilities = tuple(dict.fromkeys((self.package.manifest.task, "embed")))
        self.items: list[PredictionItem] = []
        self.logits, self.embedding = (0.0, 1.0, 2.0), (3.0, 4.0)

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            running=0, waiting=0, waiting_tokens=0, cache_used=0.0, tokens_per_second=0.0
        )

    async def predict(
        self,
        items: Sequence[PredictionItem],
        *,
        request_id: str,
        deadline: float | None,
        path: str = "items",
    ) -> Prediction:
        self.items.extend(items)
        for i, item in enumerate(items):
            if isinstance(item.content, bytes) and not item.content.startswith(b"\x89PNG"):
                raise InvalidRequest(
                    [FieldViolation(f"{path}[{i}].image", "no PNG or JPEG image; send one")]
                )
            if isinstance(item.content, tuple):
                where = f"{path}[{i}].tokens.ids"
                ids = check_token_ids(
                    item.content, VOCAB_SIZE, lambda at, _, where=where: f"{where}[{at}]"
                )
                raise_if_any(ids)
        return Prediction(tuple(self._predict(item) for item in items), TIMING)

    def _predict(self, item: PredictionItem) -> ItemPrediction:
        logits = np.array(self.logits, dtype=np.float32)  # (num_labels,)
        spans: tuple[tuple[int, int], ...] = ()
        if self.package.manifest.task == "label":
            spans = _word_spans(str(item.content))
            logits = np.tile(logits, (len(spans), 1))  # (num_tokens, num_labels)
        embedding = np.array(self.embedding, dtype=np.float32)
        return ItemPrediction(logits, embedding, input_tokens=5, spans=spans)


def _word_spans(text: str) -> tuple[tuple[int, int], ...]:
    spans, start = [], 0
    for word in text.encode().split(b" "):
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return tuple(spans)


@asynccontextmanager
async def running_worker(
    *engines: FakeGenerator | FakePredictor,
    config: WorkerConfig | None = None,
) -> AsyncIterator[tuple[Worker, str]]:
    """Serve fakes under the names of their packages; yield the worker and its address."""
    models = {engine.package.manifest.name: engine for engine in engines}
    worker = Worker(models, config or WorkerConfig())
    address = await worker.start()
    try:
        yield worker, address
    finally:
        await worker.drain(0)
