"""Runs the graphs of a generating model on the rows of a cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.batch import ScheduledBatch
from engine.errors import PackageError
from engine.kv_cache import LayerCache, SlotCache
from engine.package import GenerationContract
from engine.session import Binding, Session, create_session

Logits = NDArray[np.float32]


class ModelRunner(Protocol):
    """What an engine needs of a model."""

    def run(self, batch: ScheduledBatch) -> Logits:
        """Run one step; return logits, float32 [N, vocab_size], in the order of ScheduledBatch.

        The array is overwritten by the next step.
        """

    def reset(self) -> None:
        """Forget all sequences, after a step that failed in the middle."""


class SlotModelRunner:
    """Runs a step on a SlotCache: one call per source, one per chunk, one for all decoding rows.

    The kernel takes several rows with one token each, or one row with several tokens. What is
    returned as logits is overwritten by later calls.
    """

    def __init__(
        self,
        contract: GenerationContract,
        decoder: Session,
        encoder: Session | None,
        *,
        num_slots: int,
    ) -> None:
        self._contract = contract
        self._decoder = decoder
        self._encoder = encoder
        self.num_slots = num_slots
        _check_graphs(contract, decoder, encoder)
        self._input_ids = np.zeros((num_slots, 1), np.int64)  # of a decode call
        self._position_ids = np.zeros((num_slots, 1), np.int64)
        self._logit_idx = np.arange(num_slots, dtype=np.int64)
        self._total_seq = np.zeros(1, np.int32)
        # One row more than there are: for a chunk whose logits nobody wants.
        self._logits = np.zeros((num_slots + 1, contract.vocab_size), np.float32)
        self.reset()

    @classmethod
    def load(
        cls,
        contract: GenerationContract,
        decoder_path: str | os.PathLike[str],
        encoder_path: str | os.PathLike[str] | None,
        *,
        num_slots: int,
        num_threads: int = 0,
    ) -> SlotModelRunner:
        """Load the graphs of a package; PackageError if they are not as the contract says."""
        decoder = create_session(decoder_path, num_threads=num_threads)
        encoder = create_session(encoder_path, num_threads=num_threads) if encoder_path else None
        return cls(contract, decoder, encoder, num_slots=num_slots)

    def reset(self) -> None:
        """Start with an empty cache; what the old one held is gone with it."""
        self._decode_bindings: dict[int, Binding] = {}
        self._prefill_bindings: dict[int, Binding] = {}
        self.cache = SlotCache(self.num_slots, self._contract.cache, self._contract.cross_cache)

    def run(self, batch: ScheduledBatch) -> Logits:
        """Run one step, see ModelRunner."""
        self.cache.apply(batch.row_ops)
        for encode in batch.encodes:
            self.encode(encode.row, encode.source_ids)
        num_logits = len(batch.decode_ids)
        for chunk in batch.chunks:
            self.prefill(chunk.row, chunk.token_ids, into=num_logits)
            num_logits += chunk.wants_logits
        if batch.decode_ids:
            self.decode(batch.decode_ids)
        return self._logits[:num_logits]

    def encode(self, row: int, source_ids: Sequence[int]) -> None:
        """Encode a source: fill the row's cross keys and values."""
        assert self._encoder is not None
        binding = self._encoder.bind()
        binding.input("input_ids", np.asarray([source_ids], np.int64))  # (1, S)
        for name, array in _named(self.cache.cross_layers, row, row + 1):
            binding.input(f"past_cross_key_values.{name}", array)
            binding.output(f"present_cross_key_values.{name}", array)
        binding.run()
        self.cache.source_lengths[row] = len(source_ids)

    def decode(self, token_ids: Sequence[int]) -> Logits:
        """Append a token to each of the first B rows; return the logits behind it, [B, V]."""
        B = len(token_ids)
        lengths = self.cache.lengths[:B]
        self._input_ids[:B, 0] = token_ids
        self._position_ids[:B, 0] = lengths
        self._total_seq[0] = lengths.max() + 1
        if B not in self._decode_bindings:
            self._decode_bindings[B] = self._bind_decode(B)
        self._decode_bindings[B].run()
        lengths += 1
        return self._logits[:B]

    def prefill(self, row: int, token_ids: Sequence[int], *, into: int = 0) -> Logits:
        """Append tokens to one row; return the logits behind the last one, [1, V].

        They are written to row `into` of the array that all logits are returned in.
        """
        S, start = len(token_ids), int(self.cache.lengths[row])
        if row not in self._prefill_bindings:
            self._prefill_bindings[row] = self._bind_rows(row, row + 1)
        binding = self._prefill_bindings[row]
        logits = self._logits[into : into + 1]
        self._total_seq[0] = start + S
        binding.input("input_ids", np.asarray([token_ids], np.int64))  # (1, S)
        binding.input("position_ids", np.arange(start, start + S, dtype=np.int64)[None])
        binding.input("logit_idx", np.asarray([S - 1], np.int64))
        binding.input("seqlens_k", np.asarray([start + S - 1], np.int32))
        binding.output("logits", logits)
        binding.run()
        self.cache.lengths[row] += S
        return logits

    def _bind_decode(self, B: int) -> Binding:
        binding = self._bind_rows(0, B)
        binding.input("input_ids", self._input_ids[:B])
        binding.input("position_ids", self._position_ids[:B])
        binding.input("logit_idx", self._logit_idx[:B])
        # The kernel wants the length after the call minus 1: with one token, that before it.
        binding.input("seqlens_k", self.cache.lengths[:B])
        binding.output("logits", self._logits[:B])
        return binding

    def _bind_rows(self, first: int, last: int) -> Binding:
        """Bind what depends on the rows only."""
        binding = self._decoder.bind()
        binding.input("total_seq", self._total_seq)
        for name, array in _named(self.cache.layers, first, last):
            binding.input(f"past_key_values.{name}", array)
            binding.output(f"present.{name}", array)
        if self._contract.cross_cache:
            binding.input("source_lengths", self.cache.source_lengths[first:last])
            for name, array in _named(self.cache.cross_layers, first, last):
                binding.input(f"cross_key_values.{name}", array)
        return binding


def _named(
    layers: Sequence[LayerCache], first: int, last: int
) -> Iterable[tuple[str, NDArray[Any]]]:
    for i, layer in enumerate(layers):
        yield f"{i}.key", layer.key[first:last]
        yield f"{i}.value", layer.value[first:last]


def _check_graphs(contract: GenerationContract, decoder: Session, encoder: Session | None) -> None:
    names = _layer_names(contract.cache.num_layers)
    inputs = ["input_ids", "position_ids", "logit_idx", "seqlens_k", "total_seq"]
    inputs += [f"past_key_values.{name}" for name in names]
    if contract.cross_cache:
        if encoder is None:
            raise PackageError(
                f"{decoder.path.parent}: cross_cache is set, but there is no encoder"
            )
        cross_names = _layer_names(contract.cross_cache.num_layers)
        inputs += ["source_lengths", *(f"cross_key_values.{name}" for name in cross_names)]
        encoder.require(
            inputs=["input_ids", *(f"past_cross_key_values.{name}" for name in cross_names)],
            outputs=[f"present_cross_key_values.{name}" for name in cross_names],
        )
    decoder.require(inputs=inputs, outputs=["logits", *(f"present.{name}" for name in names)])


def _layer_names(num_layers: int) -> list[str]:
    return [f"{i}.{part}" for i in range(num_layers) for part in ("key", "value")]
