"""Runs a one-pass model (classifier, labeller, vision) for many callers at once."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.errors import (
    EngineFailure,
    QueueFull,
    TokenBudgetFull,
    TokenweirError,
)
from engine.lifecycle.engine import Engine, lifecycle_in_thread
from engine.lifecycle.lifecycle import EngineState, ErrorOf, WarmUpResult, draining, failure
from engine.metrics import DecayingRate
from engine.one_pass.batch import Graph, split, stack
from engine.one_pass.item_encoder import EncodedItem, ItemEncoder
from engine.one_pass.job import PredictionJob
from engine.one_pass.prediction import ItemPrediction, Prediction, PredictionItem
from engine.one_pass.queue import ItemQueue, WaitingItem
from engine.package.package import Package
from engine.requests.load import LoadSnapshot
from engine.requests.text import MAX_INLINE_CHARS
from engine.step_measures import StepMeasures
from engine.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_RETRY_AFTER = (0.1, 10.0)  # seconds: the least and the most that is advised


class EncoderEngine(Engine):
    """Batches the items of all waiting requests by equal length.

    A batch is formed whenever the model is free: the oldest waiting item and all that have its
    length, up to max_num_seqs and max_num_batched_tokens. Nobody waits for others to arrive, and
    no padding is computed, so an item gives bit for bit what it gives alone. One thread runs the
    model; answers are handed to the event loop of their caller.
    """

    def __init__(
        self,
        package: Package,
        graph: Graph,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        warm_up: Callable[[], WarmUpResult] = WarmUpResult,
    ) -> None:
        """`warm_up` runs the model before the first request, and returns what that has shown."""
        self._thread = lifecycle_in_thread(package, config, "encoder-engine", warm_up)
        super().__init__(package, config, self._thread)
        self._graph = graph
        self._encoder = ItemEncoder(package.manifest.contract, tokenizer, config)
        self._config = config
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below
        self._queue = ItemQueue()
        self._open: dict[PredictionJob, None] = {}  # in order of arrival
        self._num_encoding = 0  # requests whose items are being encoded
        self._num_running = 0  # items in the batch that runs
        self._throughput = DecayingRate()
        self.measures = StepMeasures()
        self._seconds_per_token = 0.0

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The capabilities of this model."""
        manifest = self._package.manifest
        contract = manifest.encoding or manifest.image
        gives_vectors = contract is not None and contract.embedding_dim is not None
        found = tuple(dict.fromkeys((manifest.task, *(["embed"] if gives_vectors else []))))
        return (*found, "batch_invariant") if self._lifecycle.is_invariant else found

    async def start(self) -> None:
        """Try the model out, then begin to take requests; PackageError if it fails."""
        await self._thread.start(self._serve, self._fail_open)

    async def stop(self, grace: float = 0.0) -> None:
        """Refuse new requests, wait up to `grace` seconds for open ones, then end the rest."""
        await self._lifecycle.stop(grace, self._wait_for_answers, self._end)

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is now."""
        with self._changed:
            return LoadSnapshot(
                running=self._num_running,
                waiting=self._queue.num_requests + self._num_encoding,
                waiting_tokens=self._queue.num_tokens,
                cache_used=0.0,
                tokens_per_second=self._throughput.at(self._clock()),
            )

    async def predict(
        self,
        items: Sequence[PredictionItem],
        *,
        request_id: str,
        deadline: float | None,
        path: str = "items",
    ) -> Prediction:
        """Return what the model says of each item, in order.

        `deadline` is on the engine's clock, time.monotonic. Raises InvalidRequest with the path of
        every wrong field, before anything waits; QueueFull, TokenBudgetFull, Starting, Draining,
        ReplicaLost, ExpiredInQueue, ExpiredInDecode or EngineFailure. Cancelling the call takes the
        request out.
        """
        loop = asyncio.get_running_loop()
        job = PredictionJob(request_id, deadline, self._clock(), loop, loop.create_future())
        self._enqueue(job, await self._encode(items, path))
        try:
            return await job.answer
        finally:  # nothing to do, unless this call was cancelled
            with self._changed:
                self._close(job)

    async def _encode(self, items: Sequence[PredictionItem], path: str) -> list[EncodedItem]:
        with self._changed:
            self._refuse_if_closed_or_full()
            self._num_encoding += 1
        try:
            self._encoder.check_count(items, path)
            # Texts of few characters are encoded here; images take long, and the first text that
            # may be cut makes another tokenizer.
            is_quick = not any(isinstance(i.content, bytes) or i.truncation for i in items)
            num_chars = sum(len(i.content) + len(i.text_pair or "") for i in items)
            if is_quick and num_chars <= MAX_INLINE_CHARS:
                return self._encoder.encode(items, path)
            return await asyncio.to_thread(self._encoder.encode, items, path)
        finally:
            with self._changed:
                self._num_encoding -= 1

    def _enqueue(self, job: PredictionJob, items: list[EncodedItem]) -> None:
        with self._changed:
            self._refuse_if_closed_or_full()
            if job.is_late(self._clock()):
                raise job.expired()
            tokens = sum(item.cost for item in items)
            allowed = self._config.max_waiting_tokens
            # A request that is larger than the whole budget is taken when nothing else waits.
            if self._queue.num_tokens and self._queue.num_tokens + tokens > allowed:
                raise TokenBudgetFull(
                    f"{self._queue.num_tokens} tokens are waiting and {tokens} more would exceed "
                    f"{allowed}; try again later",
                    self._retry_after(),
                )
            job.outputs, job.places = [None] * len(items), [item.place for item in items]
            self._open[job] = None
            self._queue.add(job, items)
            self._changed.notify()

    def _refuse_if_closed_or_full(self) -> None:
        self._lifecycle.refuse_if_closed()
        waiting = self._queue.num_requests + self._num_encoding
        if waiting >= self._config.max_queue_size:
            raise QueueFull(
                f"{waiting} requests are waiting, the most that may; try again later",
                self._retry_after(),
            )

    def _retry_after(self) -> float:
        least, most = _RETRY_AFTER
        return min(most, max(least, self._queue.num_tokens * self._seconds_per_token))

    async def _wait_for_answers(self) -> None:
        with self._changed:
            answers = [job.answer for job in self._open]
        if answers:
            await asyncio.wait(answers)

    def _end(self) -> None:
        self._fail_open(lambda request_id: draining())
        with self._changed:
            self._changed.notify_all()

    def _fail_open(self, error_of: ErrorOf) -> None:
        with self._changed:
            for job in list(self._open):
                self._close(job, error_of(job.request_id))

    # Below: the engine's thread.

    def _serve(self) -> None:
        while batch := self._next_batch():
            self._run_batch(batch)

    def _next_batch(self) -> list[WaitingItem]:
        """Wait for items and return those to run together; none when the engine is to stop."""
        with self._changed:
            while self._lifecycle.state is not EngineState.STOPPED:
                now = self._clock()
                for job in self._queue.jobs():
                    if job.is_late(now):
                        self._close(job, job.expired())
                if batch := self._queue.take(lambda item: self._config.most_items(item.cost)):
                    self._num_running = len(batch)
                    return batch
                self._changed.wait()
            return []

    def _run_batch(self, batch: list[WaitingItem]) -> None:
        started = self._clock()
        for job in _jobs(batch):
            job.take_part(started, len(batch))
        try:
            items = [waiting.item for waiting in batch]
            with self._thread.step():
                outputs = split(self._graph.run(stack(items)), items)
        except Exception:
            _log.exception("a batch failed; requests: %s", [j.request_id for j in _jobs(batch)])
            with self._changed:
                self._num_running = 0
                for job in _jobs(batch):
                    self._close(job, failure(job.request_id))
        else:
            self._deliver(batch, outputs, started)

    def _deliver(
        self, batch: list[WaitingItem], outputs: list[ItemPrediction | None], started: float
    ) -> None:
        now = self._clock()
        self.measures.took_step(started, now, batch_size=len(batch))
        tokens = sum(waiting.item.cost for waiting in batch)
        with self._changed:
            self._num_running = 0
            self._throughput.add(tokens, now)
            self._seconds_per_token = (now - started) / tokens
            for waiting, output in zip(batch, outputs, strict=True):
                waiting.job.outputs[waiting.index] = output
                if output is None:
                    error = EngineFailure(
                        f"request {waiting.job.request_id}: what the model gives for item "
                        f"{waiting.item.place} is not finite; the weights or the input drive it "
                        "out of range"
                    )
                    self._close(waiting.job, error)
            for job in _jobs(batch):
                if prediction := job.prediction(now):
                    self._close(job, prediction)

    def _close(
        self, job: PredictionJob, outcome: Prediction | TokenweirError | None = None
    ) -> None:
        """Take a job out, once, and hand its outcome to its caller; None: it is cancelled."""
        if not job.is_open:
            return
        job.is_open = False
        self._open.pop(job, None)
        self._queue.remove(job)
        if outcome is not None:
            job.resolve(outcome)


def _jobs(batch: list[WaitingItem]) -> list[PredictionJob]:
    return list({waiting.job: None for waiting in batch})
