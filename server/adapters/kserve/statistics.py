"""Counts the inferences of this process, as Triton's ModelStatistics tells them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenweir import ModelInfo

from server.adapters.kserve.tasks import Answered

# perf_analyzer ends without any of these, and if counts of the parts of a computation differ.
_PARTS = (
    *("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"),
    *("cache_hit", "cache_miss"),
)


class Statistics:
    """The requests so far, by model and version, and the time that they took."""

    def __init__(self) -> None:
        self._count: Counter[tuple[str, ...]] = Counter()
        self._ns: Counter[tuple[str, ...]] = Counter()
        self._last_ms: Counter[tuple[str, ...]] = Counter()  # since 1970

    @contextmanager
    def counting(self, model: str, version: str) -> Iterator[list[Answered]]:
        """Count a request. It succeeds if the block adds the answer, or the last piece of it.

        Otherwise it is a failure of `version`, which has to be a known one: counts stay for good.
        """
        began, at_ms = time.perf_counter_ns(), time.time_ns() // 1_000_000
        answers: list[Answered] = []
        try:
            yield answers
        finally:
            seconds = (time.perf_counter_ns() - began) / 1e9
            parts = {"fail": seconds}
            for found in answers:
                version = found.version
                parts = {"success": seconds, "queue": found.queue, "compute_infer": found.compute}
                parts |= {"compute_input": 0.0, "compute_output": 0.0}  # not told by the server
            for part, took in parts.items():
                self._count[model, version, part] += 1
                self._ns[model, version, part] += round(took * 1e9)
            self._last_ms[model, version] = max(at_ms, self._last_ms[model, version])

    def of(self, model: ModelInfo) -> dict[str, Any]:
        """Return what was counted of a version of a model."""
        names = model.model, model.model_version
        done = self._count[*names, "success"]
        return {
            "name": model.model,
            "version": model.model_version,
            "last_inference": self._last_ms[names],
            "inference_count": done,
            "execution_count": done,
            "inference_stats": {
                part: {"count": self._count[*names, part], "ns": self._ns[*names, part]}
                for part in _PARTS
            },
        }
