"""Runs the graphs of a generating model on the rows of a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Protocol

from engine.config import RequestLimits
from engine.errors import PackageError
from engine.package.graph_io import Bound, check_graphs, decoder_shape, encoder_shape
from engine.package.manifest import GenerationContract
from engine.sampling.logits import StepLogits
from engine.sampling.plain import SamplingInputs
from engine.session import Session
from engine.slots.batch import Encode, RowLengths, ScheduledBatch
from engine.slots.calls.chunk_calls import ChunkCalls
from engine.slots.calls.decode_calls import CAPTURED_TOPS, DecodeCalls
from engine.slots.calls.decoder_graph import DecoderGraph
from engine.slots.calls.encode_calls import EncodeCalls
from engine.slots.calls.graph_call import GraphCall
from engine.slots.calls.source_index import padded
from engine.slots.device import Device
from engine.slots.generation_sessions import load_sessions
from engine.slots.memory import HostCacheMemory
from engine.slots.rows import SlotCache
from engine.slots.step_block import HostStepBlock, Pending, StepBlock, StepSize

_NUM_TOKENS = 1024  # tokens of a step on a device, if none are named
_WIDEST = RequestLimits().most_sequences  # sequences of a request
_NOTHING = ScheduledBatch()


class SamplingCalls(Protocol):
    """Plans calls of graphs that draw tokens; those of a package are in engine.cuda."""

    def plan(self, draws: SamplingInputs, num_rows: int, num_top: int) -> GraphCall:
        """Return the call behind a decode call of so many rows with their likeliest tokens."""


# Makes them for a block and so many slots, with ids of captured graphs; None: none is captured.
MakeSamplingCalls = Callable[[StepBlock, int, Iterator[int] | None], SamplingCalls]


class ModelRunner(Protocol):
    """Runs the graphs of a model, step by step."""

    num_padding: int  # query rows computed for nobody, in all

    @property
    def is_on_device(self) -> bool:
        """Whether steps are computed by a device, while the host does other things."""

    def start(
        self,
        batch: ScheduledBatch,
        draws: SamplingInputs | None = None,
        whole_rows: Sequence[int] = (),
    ) -> Pending:
        """Begin a step, whose logits come in the order of ScheduledBatch; see SlotModelRunner.

        The step is done when this returns on the host, and the next one overwrites the arrays.
        """

    @property
    def row_lengths(self) -> RowLengths:
        """How many tokens each row holds."""

    def reset(self) -> None:
        """Forget all sequences, after a step that failed in the middle."""


class SlotModelRunner:
    """Runs a step on a SlotCache: a call per length of source, one per chunk, one for all decoding.

    The kernel takes several rows with one token each, or one row with several tokens. All calls of
    a step are planned before the first one runs, so that their inputs are brought together. Later
    calls overwrite the logits that are returned.
    """

    def __init__(
        self,
        contract: GenerationContract,
        decoder: Session,
        encoder: Session | None,
        draws: MakeSamplingCalls | None = None,
        *,
        num_slots: int,
        buckets: Sequence[int] = (),
        device: Device | None = None,
        num_tokens: int = _NUM_TOKENS,
        graph_ids: Iterator[int] | None = None,
        widest_group: int = _WIDEST,
    ) -> None:
        """`buckets` are the numbers of rows that a decode call may have; (): any number.

        A source has up to `widest_group` sequences. Every decode call with buckets has room for as
        many of each source, so that its shape does not depend on how many there are.

        A `device` without buckets has one, of `num_slots` rows. It takes memory for steps of
        `num_tokens` tokens: OutOfDeviceMemory if it is not there. A larger step takes more, and
        captured calls are captured again. `graph_ids` are shared by all runners on a session.
        """
        self._contract = contract
        self._decoder = decoder
        self._encoder = encoder
        self._make_draws = draws
        self._device = device
        self._num_tokens = num_tokens
        self._graph_ids = count() if graph_ids is None else graph_ids
        self._next_ids: Bound | None = None  # that the last step has chosen, in the first column
        self.num_slots = num_slots
        self.widest_group = min(widest_group, num_slots)
        self.buckets = tuple(buckets) or (() if device is None else (num_slots,))
        self.num_padding = 0
        _check_graphs(contract, decoder, encoder)
        allocate = HostCacheMemory if device is None else device.cache_memory
        overhang = 1 if self.buckets else 0
        self.cache = SlotCache(
            num_slots, contract.cache, contract.cross_cache, allocate, overhang=overhang
        )
        self._make_room()

    @classmethod
    def load(
        cls,
        contract: GenerationContract,
        decoder_path: str | os.PathLike[str],
        encoder_path: str | os.PathLike[str] | None,
        draws: MakeSamplingCalls | None = None,
        *,
        num_slots: int,
        num_threads: int = 0,
        buckets: Sequence[int] = (),
        device: Device | None = None,
    ) -> SlotModelRunner:
        """Load the graphs of a package; PackageError if they are not as the contract says."""
        sessions = load_sessions(
            contract, decoder_path, encoder_path, num_threads=num_threads, device=device
        )
        return cls(contract, *sessions, draws, num_slots=num_slots, buckets=buckets, device=device)

    def beside(self, *, num_slots: int) -> SlotModelRunner:
        """Return a runner on the same graphs with a cache of its own."""
        return SlotModelRunner(
            self._contract,
            self._decoder,
            self._encoder,
            self._make_draws,
            num_slots=num_slots,
            device=self._device,
            num_tokens=self._num_tokens,
            graph_ids=self._graph_ids,
            widest_group=self.widest_group,
        )

    @property
    def is_on_device(self) -> bool:
        """Whether steps are computed by a device, while the host does other things."""
        return self._device is not None

    @property
    def has_sampling_graphs(self) -> bool:
        """Whether tokens are drawn by graphs, for those who ask with a step."""
        return self._make_draws is not None

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens of a step on a device; 0 without one."""
        return self._num_tokens if self._device is not None else 0

    @property
    def captured(self) -> tuple[tuple[int, int], ...]:
        """The decode calls that are captured, each when it runs first: rows, likeliest tokens."""
        if self._device is None:
            return ()
        tops = dict.fromkeys(min(k, self._contract.vocab_size) for k in CAPTURED_TOPS)
        return tuple((rows, k) for rows in self.buckets for k in tops)

    @property
    def row_lengths(self) -> RowLengths:
        """How many tokens each row of the cache holds."""
        cache = self.cache
        return RowLengths(tuple(cache.lengths.tolist()), tuple(cache.source_lengths.tolist()))

    def reset(self) -> None:
        """Empty the cache; what it held is gone."""
        self.cache.forget()
        if self._device is not None:  # a step that failed may have left copies in the queue
            self._device.synchronize()

    def run(self, batch: ScheduledBatch, draws: SamplingInputs | None = None) -> StepLogits:
        """Run one step, see `start`."""
        return self.start(batch, draws)()

    def start(
        self,
        batch: ScheduledBatch,
        draws: SamplingInputs | None = None,
        whole_rows: Sequence[int] = (),
    ) -> Pending:
        """Begin a step; on a device it runs behind the one before, which may not be waited for yet.

        No more than one step may be under way before this one, or outputs are overwritten, see
        StepBlock; logits of all tokens are overwritten by the next step, but for those of
        `whole_rows`. A graph draws the next tokens of all rows that decode, if there are `draws`.
        """
        self.cache.apply(batch.row_ops)
        is_at_rest = not (batch.encodes or batch.chunks or batch.decode_ids)
        self.cache.release_pages(at_rest=is_at_rest)
        size = self._size_of(batch, is_drawn=draws is not None)
        if not self._block.holds(size):
            self._make_room(size)
        self._block.begin(size)
        calls = self._plan(batch, size)
        if draws is not None:
            assert self._draws is not None, "it was loaded without sampling graphs"
            calls.append(self._draws.plan(draws, size.num_rows, size.num_top))
        self._block.upload()
        if batch.future_tokens:
            assert self._device is not None and self._next_ids is not None, "a call was before"
            self._device.feed(self._decodes.input_ids, self._next_ids, batch.future_tokens)
        for call in calls:
            self._graph.total_seq[0] = call.total_seq
            call.run()
        if self._device is not None:
            self._next_ids = self._ids_of(size)
        return self._block.send(whole_rows)

    def fewer(self, lacking: int) -> str:
        """Say with how many sequences a call has room that lacked so many bytes of a device."""
        assert self._device is not None
        return self._device.fewer(self.num_slots, self._contract, lacking)

    def encode(self, row: int, *sources: Sequence[int]) -> None:
        """Encode sources: fill the cross keys and values of rows from `row` on."""
        encodes = tuple(Encode(row + i, tuple(source)) for i, source in enumerate(sources))
        self.run(_NOTHING._replace(encodes=encodes))

    def _plan(self, batch: ScheduledBatch, size: StepSize) -> list[GraphCall]:
        """Return the calls of a step in order."""
        calls: list[GraphCall] = []
        if batch.encodes:
            assert self._encodes is not None
            calls += self._encodes.plan(batch.encodes)
        B, k = size.num_decoding, size.num_top
        if batch.chunks:
            calls += self._chunks.plan(batch.chunks, k, B, batch.aligned)
        if B:
            aligned = [row for row in batch.aligned if row < B]
            sources = batch.decode_sources or range(B)
            call, num_padding = self._decodes.plan(
                batch.decode_ids, sources, size.num_rows, k, aligned
            )
            self.num_padding += num_padding
            calls.append(call)
        return calls

    def _ids_of(self, size: StepSize) -> Bound | None:
        """Return where a step writes the tokens that come next in the rows that decode."""
        if not size.num_rows:
            return None
        if size.is_drawn:
            return self._block.drawn_outputs(size.num_rows, size.num_top)[0]
        return self._block.decode_outputs(size.num_rows, size.num_top).top_ids

    def _size_of(self, batch: ScheduledBatch, *, is_drawn: bool) -> StepSize:
        num_decoding = len(batch.decode_ids)
        num_rows = self._decodes.num_rows(num_decoding, batch.decode_sources)
        num_top = min(self._num_top(batch.num_top), self._contract.vocab_size)
        size = StepSize(num_decoding, num_rows, num_top, len(batch.aligned), is_drawn)
        if not batch.encodes and not batch.chunks:
            return size
        num_read = sum(len(encode.source_ids) for encode in batch.encodes)
        num_read += sum(len(chunk.token_ids) for chunk in batch.chunks)
        return size._replace(
            num_chunk_logits=sum(chunk.num_logits for chunk in batch.chunks),
            num_tokens=num_read,
            num_reads=len(batch.encodes) + len(batch.chunks),
        )

    def _num_top(self, wanted: int) -> int:
        """Return how many of the largest logits a step asks for.

        Few numbers can be captured, and every number has memory of its own on a device.
        """
        if self._device is None:
            return wanted
        return next((k for k in CAPTURED_TOPS if k >= wanted), 1 << (wanted - 1).bit_length())

    def _make_room(self, size: StepSize | None = None) -> None:
        """Allocate what steps read and write; whatever was bound was bound to the old one."""
        self._block = block = self._make_block(size)
        self._graph = DecoderGraph(
            self._contract,
            self._decoder,
            self.cache,
            is_on_device=self._device is not None,
            graph_ids=self._graph_ids,
        )
        has_groups = self.buckets and self._encoder is not None
        group = padded(self.widest_group) if has_groups else 1
        self._decodes = DecodeCalls(self._graph, block, self.buckets, group=group)
        self._chunks = ChunkCalls(self._graph, block)
        graph_ids = None if self._device is None else self._graph_ids
        self._draws = (
            self._make_draws(block, self.num_slots, graph_ids)
            if self._make_draws is not None
            else None
        )
        most = 1 if len(self.buckets) == 1 else None  # every call has one shape, so that bits agree
        self._encodes = (
            EncodeCalls(self._encoder, self.cache, block, most_sources=most)
            if self._encoder
            else None
        )

    def _make_block(self, size: StepSize | None) -> StepBlock:
        contract, num_slots = self._contract, self.num_slots
        if self._device is None:
            return HostStepBlock(contract, num_slots, size)
        return self._device.step_block(contract, num_slots, num_tokens=self._num_tokens, size=size)


def _check_graphs(
    contract: GenerationContract,
    decoder: Session,
    encoder: Session | None,
) -> None:
    graphs = [(decoder, decoder_shape(contract))]
    if contract.cross_cache:
        if encoder is None:
            raise PackageError(
                f"{decoder.path.parent}: cross_cache is set, but there is no encoder"
            )
        graphs.append((encoder, encoder_shape(contract.cross_cache)))
    check_graphs(*graphs)
