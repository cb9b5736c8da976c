"""A request on its way through a one-pass engine."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter

import numpy as np

from engine.errors import ExpiredInDecode, ExpiredInQueue, TokenweirError
from engine.one_pass.prediction import ItemPrediction, Prediction
from engine.requests.events import Timing

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class PredictionJob:
    """The state of one call so far. Its engine changes it, holding a lock."""

    request_id: str
    deadline: float | None
    arrival: float
    loop: asyncio.AbstractEventLoop  # the caller's
    answer: asyncio.Future[Prediction]
    outputs: list[ItemPrediction | None] = field(default_factory=list)  # one an item or window
    places: list[int] = field(default_factory=list)  # the item that each is of
    started: float | None = None  # when its first item was taken
    batch_sizes: list[int] = field(default_factory=list)  # one a batch with an item of it
    is_open: bool = True  # False: answered, failed or cancelled; its items are void

    def take_part(self, now: float, batch_size: int) -> None:
        """Count a batch that has items of it."""
        self.started = now if self.started is None else self.started
        self.batch_sizes.append(batch_size)

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and now >= self.deadline

    def expired(self) -> TokenweirError:
        """Return what it ends with at its deadline."""
        if self.started is None:
            return ExpiredInQueue(
                f"request {self.request_id}: its deadline passed while it waited; allow more time"
            )
        return ExpiredInDecode(
            f"request {self.request_id}: its deadline passed before all items were done; allow "
            "more time or send fewer items"
        )

    def prediction(self, now: float) -> Prediction | None:
        """Return the answer, if all items are there."""
        outputs = [output for output in self.outputs if output is not None]
        if len(outputs) < len(self.outputs):
            return None
        grouped = groupby(zip(self.places, outputs, strict=True), key=itemgetter(0))
        items = tuple(_joined([output for _, output in group]) for _, group in grouped)
        started = self.arrival if self.started is None else self.started
        timing = Timing(
            queue=started - self.arrival,
            prefill=now - started,
            decode=0.0,
            time_to_first_token=now - self.arrival,
            steps=len(self.batch_sizes),
            mean_batch_size=sum(self.batch_sizes) / len(self.batch_sizes),
        )
        return Prediction(items, timing)

    def resolve(self, outcome: Prediction | TokenweirError) -> None:
        """Hand the outcome to the event loop of its caller; any thread may."""
        try:
            self.loop.call_soon_threadsafe(self._resolve, outcome)
        except RuntimeError:  # the loop is closed
            _log.warning("request %s: its caller is gone", self.request_id)

    def _resolve(self, outcome: Prediction | TokenweirError) -> None:
        if self.answer.done():
            return
        if isinstance(outcome, TokenweirError):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


def _joined(windows: list[ItemPrediction]) -> ItemPrediction:
    """Return the prediction of a text that was labelled in windows; that of one as it is."""
    if len(windows) == 1:
        return windows[0]
    return ItemPrediction(
        logits=np.concatenate([window.logits for window in windows]),
        embedding=np.zeros(0, np.float32),
        input_tokens=sum(window.input_tokens for window in windows),
        spans=tuple(chain.from_iterable(window.spans for window in windows)),
        continues=tuple(chain.from_iterable(window.continues for window in windows)),
    )
