"""The decoder's graph on the rows of a cache: what every call of it is bound to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.package.graph_io import (
    CROSS,
    DTYPES,
    NUM_TOP,
    PAST,
    PRESENT,
    TOTAL_SEQ,
    layer_names,
)
from engine.package.manifest import GenerationContract
from engine.session import Binding, Session
from engine.slots.calls.graph_call import rows_of
from engine.slots.rows import SlotCache


class DecoderGraph:
    """Makes bindings of the decoder to rows and sources."""

    def __init__(
        self,
        contract: GenerationContract,
        decoder: Session,
        cache: SlotCache,
        *,
        is_on_device: bool,
        graph_ids: Iterator[int],
    ) -> None:
        """`graph_ids` are those of captured calls."""
        self.contract = contract
        self.cache = cache
        self.is_on_device = is_on_device
        self.graph_ids = graph_ids
        # The running call's; kernels read it on the host.
        self.total_seq = np.zeros(1, DTYPES[TOTAL_SEQ])
        self._decoder = decoder
        self._num_tops: dict[int, NDArray[Any]] = {}

    def bind(self, first: int, last: int) -> Binding:
        """Return a binding to rows `first` to `last` - 1 of the cache."""
        binding = self._decoder.bind()
        binding.input(TOTAL_SEQ, self.total_seq)
        layers = self.cache.layers
        names = (layer_names(prefix, len(layers)) for prefix in (PAST, PRESENT))
        for past, present, array in zip(*names, rows_of(layers, first, last), strict=True):
            binding.input(past, array)
            binding.output(present, array)
        return binding

    def bind_sources(self, binding: Binding, first: int, last: int) -> None:
        """Bind rows of the sources."""
        layers = self.cache.cross_layers
        names = layer_names(CROSS, len(layers))
        for name, array in zip(names, rows_of(layers, first, last), strict=True):
            binding.input(name, array)

    def total_of(self, longest: int) -> int:
        """Return the `total_seq` of a call after which no row is longer than `longest`.

        It is always the whole row on a device, whose kernels divide their work by it: a row's bits
        would depend on its neighbours.
        """
        return self.contract.cache.max_len if self.is_on_device else longest

    def num_top(self, k: int) -> NDArray[Any]:
        """Return the input that asks for so many of the largest logits; it is on the host."""
        if k not in self._num_tops:
            self._num_tops[k] = np.asarray([k], DTYPES[NUM_TOP])
        return self._num_tops[k]
