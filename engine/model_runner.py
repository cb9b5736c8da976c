"""Runs the graphs of a generating model on the rows of a cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.batch import Encode, Floats, ScheduledBatch, StepLogits
from engine.cache_memory import LayerCache
from engine.device_memory import DeviceArray
from engine.errors import PackageError
from engine.graph_contract import check_graphs, decoder_shape, encoder_shape
from engine.kv_cache import SlotCache
from engine.package import GenerationContract
from engine.pages import zeros
from engine.session import Binding, Session, create_session
from engine.threads import decoder_threads, num_cores

_log = logging.getLogger(__name__)

_TOP = ("top_ids", "top_logits", "top_logprobs")
_MAX_BINDINGS = 256


_Top = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # ids, logits, log-probabilities


class ModelRunner(Protocol):
    """What an engine needs of a model."""

    num_padding: int  # query rows computed for nobody, in all

    def run(self, batch: ScheduledBatch) -> StepLogits:
        """Run one step; return logits in the order of ScheduledBatch.

        The arrays are overwritten by the next step.
        """

    def reset(self) -> None:
        """Forget all sequences, after a step that failed in the middle."""


class SlotModelRunner:
    """Runs a step on a SlotCache: a call per length of source, one per chunk, one for all decoding.

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
        self.num_padding = 0
        _check_graphs(contract, decoder, encoder)
        self._input_ids = np.zeros((num_slots, 1), np.int64)  # of a decode call
        self._position_ids = np.zeros((num_slots, 1), np.int64)
        self._alignment_idx = np.zeros(num_slots, np.int64)
        self._alignment_sources = np.zeros(num_slots, np.int64)
        self._total_seq = np.zeros(1, np.int32)
        self._sources = _SourceIndex(num_slots)
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
        """Load the graphs of a package; PackageError if they are not as the contract says.

        The decoder runs on no more threads than `decoder_threads` says.
        """
        usable = decoder_threads(contract, num_threads)
        if usable < (offered := num_threads or num_cores()):
            _log.warning(
                "%s runs on %d of %d threads: more than it has heads would make answers depend "
                "on the batch; more replicas use the others",
                decoder_path,
                usable,
                offered,
            )
        decoder = create_session(decoder_path, num_threads=usable)
        encoder = create_session(encoder_path, num_threads=num_threads) if encoder_path else None
        return cls(contract, decoder, encoder, num_slots=num_slots)

    def beside(self, *, num_slots: int) -> SlotModelRunner:
        """Return a runner on the same graphs with a cache of its own."""
        return SlotModelRunner(self._contract, self._decoder, self._encoder, num_slots=num_slots)

    def reset(self) -> None:
        """Start with an empty cache; what the old one held is gone with it."""
        self.cache = SlotCache(self.num_slots, self._contract.cache, self._contract.cross_cache)
        # One row more than there are: for a chunk whose logits nobody wants.
        self._make_room(self.num_slots + 1)

    def run(self, batch: ScheduledBatch) -> StepLogits:
        """Run one step, see ModelRunner."""
        self.cache.apply(batch.row_ops)
        for row, sources in _of_equal_length(batch.encodes):
            self.encode(row, *sources)
        first = num_decoding = len(batch.decode_ids)
        num_logits = first + sum(chunk.num_logits for chunk in batch.chunks)
        self._fit_room(num_logits)
        k = min(batch.num_top, self._contract.vocab_size)
        for chunk in batch.chunks:
            last = first + chunk.num_logits
            self.prefill(
                chunk.row,
                chunk.token_ids,
                source_row=chunk.source_row,
                into=first,
                num_logits=chunk.num_logits,
                num_top=k,
                aligned=[row for row in batch.aligned if first <= row < last],
                aligned_into=sum(row < first for row in batch.aligned),
            )
            first = last
        if batch.decode_ids:
            aligned = [row for row in batch.aligned if row < num_decoding]
            self.decode(batch.decode_ids, batch.decode_sources, num_top=k, aligned=aligned)
        top_ids, top_logits, top_logprobs = (array[:num_logits] for array in self._top_of(k))
        alignment = self._alignment[: len(batch.aligned)] if batch.aligned else None
        return StepLogits(self._logits[:num_logits], top_ids, top_logits, top_logprobs, alignment)

    def encode(self, row: int, *sources: Sequence[int]) -> None:
        """Encode sources of one length: fill the cross keys and values of rows from `row` on."""
        assert self._encoder is not None
        binding, last = self._encoder.bind(), row + len(sources)
        binding.input("input_ids", np.asarray(sources, np.int64))  # (B, S)
        for name, array in _named(self.cache.cross_layers, row, last):
            binding.input(f"past_cross_key_values.{name}", array)
            binding.output(f"present_cross_key_values.{name}", array)
        binding.run()
        self.cache.source_lengths[row:last] = len(sources[0])

    def decode(
        self,
        token_ids: Sequence[int],
        sources: Sequence[int] = (),
        *,
        num_top: int = 1,
        aligned: Sequence[int] = (),
    ) -> Floats:
        """Append a token to each of the first B rows; return the logits behind it, [B, V].

        Row i attends to the source in row sources[i], without `sources` in row i. The attention of
        the rows in `aligned` becomes the first of what a step returns.
        """
        B = len(token_ids)
        lengths = self.cache.lengths[:B]
        self._input_ids[:B, 0] = token_ids
        self._position_ids[:B, 0] = lengths
        self._total_seq[0] = lengths.max() + 1
        self._alignment_idx[: len(aligned)] = aligned
        of_rows = sources or range(B)
        self._alignment_sources[: len(aligned)] = [of_rows[row] for row in aligned]
        self._bound_decode(B, sources, num_top, len(aligned)).run()
        lengths += 1
        return self._logits[:B]

    def prefill(
        self,
        row: int,
        token_ids: Sequence[int],
        *,
        source_row: int | None = None,
        into: int = 0,
        num_logits: int = 1,
        num_top: int = 1,
        aligned: Sequence[int] = (),
        aligned_into: int = 0,
    ) -> Floats:
        """Append tokens to one row; return the logits behind the last ones, [num_logits, V].

        They are written to the rows from `into` on of the array that all logits are returned in.
        The row attends to the source in row `source_row`, without it in its own. Likewise the
        attention of the positions whose logits come into the rows in `aligned` is written to the
        rows from `aligned_into` on.
        """
        S, start = len(token_ids), int(self.cache.lengths[row])
        count = max(1, num_logits)  # the graph wants one
        source_row = row if source_row is None else source_row
        binding = self._bound_prefill(row, source_row, is_aligned=len(aligned) > 0)
        self._total_seq[0] = start + S
        if self._contract.cross_cache:
            binding.input("row_queries", np.arange(S, dtype=np.int64)[None])
        binding.input("input_ids", np.asarray([token_ids], np.int64))  # (1, S)
        binding.input("position_ids", np.arange(start, start + S, dtype=np.int64)[None])
        binding.input("logit_idx", np.arange(S - count, S, dtype=np.int64))
        binding.input("seqlens_k", np.asarray([start + S - 1], np.int32))
        self._bind_logits(binding, into, into + count, num_top)
        if aligned:
            positions = np.asarray(aligned, np.int64) - into + S - count
            self._bind_alignment(binding, positions, np.zeros_like(positions), aligned_into)
        binding.run()
        self.cache.lengths[row] += S
        return self._logits[into : into + count]

    def _bound_decode(
        self, B: int, sources: Sequence[int], num_top: int, num_aligned: int
    ) -> Binding:
        num_sources = group = 0
        if self._contract.cross_cache:
            num_sources, group = self._sources.update(sources or range(B))
            self.num_padding += num_sources * group - B
            self._sources.set_lengths(self.cache.source_lengths, num_sources)
        key = (B, num_sources, group, num_top, num_aligned)
        if key not in self._decode_bindings:
            if len(self._decode_bindings) >= _MAX_BINDINGS:
                self._decode_bindings.clear()
            self._decode_bindings[key] = self._bind_decode(*key)
        return self._decode_bindings[key]

    def _bind_decode(
        self, B: int, num_sources: int, group: int, num_top: int, num_aligned: int
    ) -> Binding:
        binding = self._decoder.bind()
        self._bind_rows(binding, 0, B)
        binding.input("input_ids", self._input_ids[:B])
        binding.input("position_ids", self._position_ids[:B])
        binding.input("logit_idx", np.arange(B, dtype=np.int64))
        # The kernel wants the length after the call minus 1: with one token, that before it.
        binding.input("seqlens_k", self.cache.lengths[:B])
        if num_sources:
            self._bind_sources(binding, 0, num_sources)
            binding.input("source_lengths", self._sources.lengths[:num_sources])
            binding.input("beam_rows", self._sources.beam_rows(num_sources, group))
            binding.input("row_queries", self._sources.row_queries[:B])
        wanted = self._alignment_idx[:num_aligned], self._alignment_sources[:num_aligned]
        self._bind_alignment(binding, *wanted, 0)
        self._bind_logits(binding, 0, B, num_top)
        return binding

    def _bound_prefill(self, row: int, source_row: int, *, is_aligned: bool) -> Binding:
        key = (row, source_row, is_aligned)  # an output cannot be unbound
        if key in self._prefill_bindings:
            binding = self._prefill_bindings[key]
        else:
            if len(self._prefill_bindings) >= _MAX_BINDINGS:
                self._prefill_bindings.clear()
            binding = self._prefill_bindings[key] = self._decoder.bind()
            self._bind_rows(binding, row, row + 1)
            if self._contract.cross_cache:
                self._bind_sources(binding, source_row, source_row + 1)
                binding.input("beam_rows", np.zeros((1, 1), np.int64))
                lengths = self.cache.source_lengths[source_row : source_row + 1]
                binding.input("source_lengths", lengths)
            if not is_aligned:
                nothing = np.empty(0, np.int64)
                self._bind_alignment(binding, nothing, nothing, 0)
        return binding

    def _bind_rows(self, binding: Binding, first: int, last: int) -> None:
        binding.input("total_seq", self._total_seq)
        for name, array in _named(self.cache.layers, first, last):
            binding.input(f"past_key_values.{name}", array)
            binding.output(f"present.{name}", array)

    def _bind_sources(self, binding: Binding, first: int, last: int) -> None:
        for name, array in _named(self.cache.cross_layers, first, last):
            binding.input(f"cross_key_values.{name}", array)

    def _bind_logits(self, binding: Binding, first: int, last: int, num_top: int) -> None:
        binding.input("num_top", np.asarray([num_top], np.int64))
        binding.output("logits", self._logits[first:last])
        for name, array in zip(_TOP, self._top_of(num_top), strict=True):
            binding.output(name, array[first:last])

    def _bind_alignment(
        self, binding: Binding, idx: NDArray[np.int64], sources: NDArray[np.int64], first: int
    ) -> None:
        """Ask for the attention of positions, into rows from `first` on; with none, it is free."""
        if self._contract.alignment:
            binding.input("alignment_idx", idx)
            binding.input("alignment_sources", sources)
        if len(idx):
            binding.output("alignment", self._alignment[first : first + len(idx)])

    def _top_of(self, k: int) -> _Top:
        """Return the arrays of the k best."""
        if k not in self._top:
            size = (self._num_logits, k)
            self._top[k] = (
                np.zeros(size, np.int64),
                np.zeros(size, np.float32),
                np.zeros(size, np.float32),
            )
        return self._top[k]

    def _fit_room(self, num_logits: int) -> None:
        """Grow for a step that wants more logits than there are rows; the next gives it back."""
        wanted = max(num_logits, self.num_slots) + 1
        if wanted > self._num_logits or wanted == self.num_slots + 1 < self._num_logits:
            self._make_room(wanted)

    def _make_room(self, num_logits: int) -> None:
        """Allocate rows for logits; whatever is bound is bound to the old ones."""
        self._num_logits = num_logits
        self._logits = zeros((num_logits, self._contract.vocab_size), np.float32)
        self._top: dict[int, _Top] = {}
        longest = self._contract.cross_cache.max_len if self._contract.cross_cache else 0
        self._alignment = np.zeros((num_logits, longest), np.float32)
        self._decode_bindings: dict[tuple[int, int, int, int, int], Binding] = {}
        self._prefill_bindings: dict[tuple[int, int, bool], Binding] = {}


class _SourceIndex:
    """Which decoding rows attend to which source, in arrays that stay bound."""

    def __init__(self, num_slots: int) -> None:
        self.lengths = np.ones(num_slots, np.int64)  # the kernel wants a key in an empty row too
        self.row_queries = np.zeros((num_slots, 1), np.int64)
        # Room for the worst: all rows have the last source, beside others that have none.
        self._beam_rows = np.zeros(num_slots * _group_of(num_slots), np.int64)
        self._sources: tuple[int, ...] = ()
        self._shape = (0, 0)

    def update(self, sources: Sequence[int]) -> tuple[int, int]:
        """Take in the source of every row; return the number of sources and of rows each."""
        if self._sources == tuple(sources):
            return self._shape
        rows: list[list[int]] = [[] for _ in range(max(sources) + 1)]
        for row, source in enumerate(sources):
            rows[source].append(row)
        group = _group_of(max(map(len, rows)))
        self._sources, self._shape = tuple(sources), (len(rows), group)
        beam_rows = self.beam_rows(*self._shape)
        beam_rows[:] = 0
        for source, members in enumerate(rows):
            beam_rows[source, : len(members)] = members
            for place, row in enumerate(members):
                self.row_queries[row] = source * group + place
        return self._shape

    def beam_rows(self, num_sources: int, group: int) -> NDArray[np.int64]:
        """Return the memory as [num_sources, group]."""
        return self._beam_rows[: num_sources * group].reshape(num_sources, group)

    def set_lengths(self, lengths: NDArray[np.int64], num_sources: int) -> None:
        """Take in the lengths of the sources."""
        np.maximum(lengths[:num_sources], 1, out=self.lengths[:num_sources])


def _group_of(num_rows: int) -> int:
    """Return what so many rows are padded to: a power of 2, fast in the graph up to 16."""
    return 1 << (num_rows - 1).bit_length()


def _of_equal_length(
    encodes: Sequence[Encode],
) -> Iterable[tuple[int, list[tuple[int, ...]]]]:
    """Group sources of one length in neighbouring rows: first row, sources.

    Sources of other lengths would have to be padded, and padding changes bits.
    """
    group: list[Encode] = []
    for encode in sorted(encodes):
        if group and (
            encode.row != group[-1].row + 1 or len(encode.source_ids) != len(group[-1].source_ids)
        ):
            yield group[0].row, [member.source_ids for member in group]
            group = []
        group.append(encode)
    if group:
        yield group[0].row, [member.source_ids for member in group]


def _named(
    layers: Sequence[LayerCache], first: int, last: int
) -> Iterable[tuple[str, NDArray[Any] | DeviceArray]]:
    for i, layer in enumerate(layers):
        yield f"{i}.key", layer.key[first:last]
        yield f"{i}.value", layer.value[first:last]


def _check_graphs(contract: GenerationContract, decoder: Session, encoder: Session | None) -> None:
    graphs = [(decoder, decoder_shape(contract))]
    if contract.cross_cache:
        if encoder is None:
            raise PackageError(
                f"{decoder.path.parent}: cross_cache is set, but there is no encoder"
            )
        graphs.append((encoder, encoder_shape(contract.cross_cache)))
    check_graphs(*graphs)
