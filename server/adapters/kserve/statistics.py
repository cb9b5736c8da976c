"""Counts the inferences of this process, as Triton's ModelStatistics tells them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenweir import ModelInfo


class Statistics:
    """The requests so far, by model and version, and the time that they took."""

    def __init__(self) -> None:
        self._count: Counter[tuple[str, ...]] = Counter()
        self._ns: Counter[tuple[str, ...]] = Counter()
        self._last_ms: Counter[tuple[str, ...]] = Counter()  # since 1970

    @contextmanager
    def counting(self, model: str, version: str) -> Iterator[list[str]]:
        """Count a request. It succeeds if the block adds the version that has answered.

        Otherwise it is a failure of `version`, which has to be a known one: counts stay for good.
        """
        began, at_ms = time.perf_counter_ns(), time.time_ns() // 1_000_000
        answered: list[str] = []
        try:
            yield answered
        finally:
            names = model, answered[0] if answered else version
            key = *names, "success" if answered else "fail"
            self._count[key] += 1
            self._ns[key] += time.perf_counter_ns() - began
            self._last_ms[names] = max(at_ms, self._last_ms[names])

    def of(self, model: ModelInfo) -> dict[str, Any]:
        """Return what was counted of a version of a model."""
        names = model.model, model.model_version
        keys = {outcome: (*names, outcome) for outcome in ("success", "fail")}
        done = self._count[keys["success"]]
        return {
            "name": model.model,
            "version": model.model_version,
            "last_inference": self._last_ms[names],
            "inference_count": done,
            "execution_count": done,
            "inference_stats": {
                outcome: {"count": self._count[key], "ns": self._ns[key]}
                for outcome, key in keys.items()
            },
        }
