"""Input and output buffers of a step, in memory of a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.cuda.lazy_rows import LazyRows
from engine.cuda.memory import DTYPE_BYTES, DeviceArray, DeviceMark, DeviceMemory, aligned
from engine.package.graph_io import ALIGNMENT, DRAWN, DTYPES, LOGITS, TOPS, Bound
from engine.package.manifest import GenerationContract
from engine.sampling.logits import Drawn, Floats, StepLogits
from engine.slots.step_block import (
    CallOutputs,
    Pending,
    PersistentInput,
    StepSize,
    numpy_dtypes,
)

_ROW_BYTES = 176  # persistent inputs, a row
_TOKEN_BYTES = 64  # inputs of a source or chunk, a token
_READ_BYTES = 4096  # inputs of a source or chunk beside its tokens

_Top = tuple[DeviceArray, DeviceArray, DeviceArray]  # ids, logits, log-probabilities
_Drawn = tuple[DeviceArray, DeviceArray]  # ids, log-probabilities


class DeviceStepBlock:
    """All inputs go to the device in one copy, all small outputs come from it in another one.

    Inputs are written to pinned memory of the host, at the same distances as on the device. The
    logits of all tokens stay on the device; rows of them are fetched when they are read. The memory
    that a decode call reads and writes never changes; see StepBlock.

    A step may begin while the one before is under way: its inputs are written when those of the
    other have gone, and each has a place of its own on the host for its outputs.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        contract: GenerationContract,
        num_slots: int,
        *,
        num_tokens: int,
        size: StepSize | None = None,
    ) -> None:
        """A step reads about `num_tokens`, or is of this `size`; all of them may want logits."""
        self._memory = memory
        self._vocab_size = contract.vocab_size
        self._longest = contract.cross_cache.max_len if contract.cross_cache else 0
        self._num_slots = num_slots
        num_reads = 2 * num_slots + num_tokens // 64
        usual = StepSize(0, 0, 0, 0, False, num_tokens, num_tokens + self._longest, num_reads)
        sizes = [usual] if size is None else [usual, size]
        self._num_chunk_rows = max(each.num_chunk_logits for each in sizes) + 1
        num_bytes = max(_input_bytes(each, num_slots) for each in sizes)
        self._written = memory.pinned(num_bytes)
        self._read = memory.zeros((num_bytes,), "int8")
        self._end = self._end_of_persistent = 0
        self._logits = memory.zeros((num_slots, contract.vocab_size), DTYPES[LOGITS])
        self._num_logit_bytes = self._logits[:1].num_bytes
        self._row_bytes = aligned(self._num_logit_bytes)
        self._chunk_logits = memory.zeros((self._num_chunk_rows * self._row_bytes,), "int8")
        self._calls: list[int] = []  # the first rows of the calls of chunks
        self._outputs: dict[int, _SmallOutputs] = {}
        self._fetched: Floats | None = None
        self._sent_rows: list[Floats | None] = [None, None]  # the last steps' that sent some
        self._dtypes = numpy_dtypes()
        self._uploaded = memory.mark()
        self._number = self._received = 0  # the last step that began, that was received

    def persistent_input(self, name: str, shape: tuple[int, ...]) -> PersistentInput:
        """See StepBlock."""
        found = self._place(shape, self._dtypes[name])
        self._end_of_persistent = self._end
        return found

    def holds(self, size: StepSize) -> bool:
        """See StepBlock."""
        has_rows = size.num_chunk_logits < self._num_chunk_rows
        return has_rows and _input_bytes(size, self._num_slots) <= len(self._written)

    def begin(self, size: StepSize) -> None:
        """See StepBlock."""
        if self._received < self._number:
            self._uploaded.wait()  # not for long: its turn comes with the step before it
        self._number += 1
        self._num_fetched = 0
        self._size = size
        self._end = self._end_of_persistent
        self._calls.clear()
        self._outputs_of(size.num_top).begin(size)

    def add(self, name: str, numbers: ArrayLike) -> Bound:
        """See StepBlock."""
        array = np.asarray(numbers, self._dtypes[name])
        place = self._place(array.shape, array.dtype)
        place.host[...] = array
        return place.bound

    def upload(self) -> None:
        """See StepBlock."""
        self._memory.upload(self._read[: self._end], self._written[: self._end])
        self._uploaded.put()

    def decode_outputs(self, num_rows: int, num_top: int) -> CallOutputs:
        """See StepBlock."""
        top = self._outputs_of(num_top).decode
        return CallOutputs(self._logits[:num_rows], *(array[:num_rows] for array in top))

    def drawn_outputs(self, num_rows: int, num_top: int) -> tuple[Bound, Bound]:
        """See StepBlock."""
        ids, logprobs = self._outputs_of(num_top).drawn
        return ids[:num_rows], logprobs[:num_rows]

    def chunk_outputs(self, first: int, last: int) -> CallOutputs:
        """See StepBlock."""
        self._calls.append(first)
        logits = self._logits_of_chunks(first, first, last)
        top = self._outputs_of(self._size.num_top).chunks
        return CallOutputs(logits, *(array[first:last] for array in top))

    def alignment(self, first: int, last: int) -> Bound:
        """See StepBlock."""
        return self._outputs_of(self._size.num_top).alignment[first:last]

    def send(self, whole_rows: Sequence[int] = ()) -> Pending:
        """See StepBlock."""
        known = self._send_rows(whole_rows) if whole_rows else {}
        sent = self._outputs_of(self._size.num_top).send()
        return partial(self._receive, self._number, sent, known)

    def _send_rows(self, rows: Sequence[int]) -> dict[int, Floats]:
        """Queue copies of whole rows; return where they will be."""
        self._sent_rows.reverse()
        pinned = self._sent_rows[0]
        if pinned is None:
            pinned = self._sent_rows[0] = self._pinned_rows()
        target = pinned[: len(rows)]
        self._download(target, rows)
        return dict(zip(rows, target, strict=True))

    def _pinned_rows(self) -> Floats:
        """Take memory of the host for as many rows of logits as there are slots."""
        pinned = self._memory.pinned(self._logits.num_bytes)
        return pinned.view(self._logits.dtype).reshape(self._logits.shape)

    def _receive(self, number: int, sent: _Sent, known: dict[int, Floats]) -> StepLogits:
        """Wait until all calls of a step have run; return what they have written."""
        sent.mark.wait()
        self._received = max(self._received, number)
        top_ids, top_logits, top_logprobs = sent.top()
        logits = LazyRows(len(top_ids), self._vocab_size, partial(self._fetch, number), known)
        return StepLogits(
            logits, top_ids, top_logits, top_logprobs, sent.aligned(), sent.drawn_rows()
        )

    def _place(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> PersistentInput:
        """Return the next free bytes as an array on both sides."""
        start, num_bytes = self._end, math.prod(shape) * dtype.itemsize
        assert start + num_bytes <= len(self._written), "see _input_bytes"
        self._end = start + aligned(num_bytes)
        host = self._written[start : start + num_bytes].view(dtype).reshape(shape)
        return PersistentInput(host, self._read.view(start, dtype.name, shape))

    def _outputs_of(self, k: int) -> _SmallOutputs:
        if k not in self._outputs:
            rows = self._num_slots, self._num_chunk_rows
            self._outputs[k] = _SmallOutputs(self._memory, k, rows, self._longest)
        return self._outputs[k]

    def _fetch(self, number: int, rows: Sequence[int]) -> Iterable[Floats]:
        """Copy logits of rows to the host: into pinned memory as far as there is some left."""
        if number != self._number:
            raise RuntimeError("logits are read of a step that the next one has overwritten")
        if self._fetched is None:
            self._fetched = self._pinned_rows()
        first, self._num_fetched = self._num_fetched, self._num_fetched + len(rows)
        inside = self._fetched[first : self._num_fetched]
        beyond = np.empty((len(rows) - len(inside), self._vocab_size), self._logits.dtype)
        self._download(inside, rows[: len(inside)])
        self._download(beyond, rows[len(inside) :])
        self._memory.runtime.synchronize()
        return [*inside, *beyond]

    def _download(self, target: Floats, rows: Sequence[int]) -> None:
        """Queue copies of logits: one for rows of a call that lie beside each other."""
        calls = {self._size.num_decoding + first for first in self._calls}
        start = 0
        for stop in range(1, len(rows) + 1):
            is_last = stop == len(rows)
            if is_last or rows[stop] != rows[stop - 1] + 1 or rows[stop] in calls:
                origin = self._logits_at(rows[start], rows[start] + stop - start)
                self._memory.download(target[start:stop], origin)
                start = stop

    def _logits_at(self, first: int, last: int) -> DeviceArray:
        """Return where logits of a step lie, of rows of one call."""
        num_decoding = self._size.num_decoding
        if first < num_decoding:
            return self._logits[first:last]
        first, last = first - num_decoding, last - num_decoding
        call = max(row for row in self._calls if row <= first)
        return self._logits_of_chunks(call, first, last)

    def _logits_of_chunks(self, call: int, first: int, last: int) -> DeviceArray:
        """Return where rows lie of the call that begins with row `call`.

        They are packed, as the graph writes them, and every call begins as an array of its own
        does: kernels are chosen by that, too.
        """
        start = call * self._row_bytes + (first - call) * self._num_logit_bytes
        return self._chunk_logits.view(start, self._logits.dtype, (last - first, self._vocab_size))


class _Sent(NamedTuple):
    """The outputs of a step, on their way to the host."""

    size: StepSize
    device: DeviceArray
    host: NDArray[np.uint8]  # laid out as on the device
    mark: DeviceMark  # behind the copy
    decode: _Top
    drawn: _Drawn
    chunks: _Top
    alignment: DeviceArray

    def top(self) -> Iterable[NDArray[Any]]:
        """Return the likeliest tokens: of the rows that decode, then of those of chunks."""
        return [self._joined(*arrays) for arrays in zip(self.decode, self.chunks, strict=True)]

    def aligned(self) -> Floats | None:
        """Return the attention to sources, if it is wanted."""
        return self._on_host(self.alignment) if self.size.num_aligned else None

    def drawn_rows(self) -> Drawn | None:
        """Return what was drawn for the rows that decode, if it was."""
        if not self.size.is_drawn:
            return None
        return Drawn(*(self._on_host(each)[: self.size.num_decoding, 0] for each in self.drawn))

    def _joined(self, decode: DeviceArray, chunks: DeviceArray) -> NDArray[Any]:
        of_decode = self._on_host(decode)[: self.size.num_decoding]
        of_chunks = self._on_host(chunks)[: self.size.num_chunk_logits]
        if not len(of_chunks):
            return of_decode
        return np.concatenate((of_decode, of_chunks)) if len(of_decode) else of_chunks

    def _on_host(self, array: DeviceArray) -> NDArray[Any]:
        start = array.address - self.device.address
        piece = self.host[start : start + array.num_bytes]
        return piece.view(array.dtype).reshape(array.shape)


class _SmallOutputs:
    """The k largest logits of all rows of a step, and the attention that is wanted.

    The outputs of the decode call come first, always at the same place. The others follow, packed.
    """

    def __init__(
        self, memory: DeviceMemory, k: int, num_rows: tuple[int, int], longest: int
    ) -> None:
        """`num_rows` are those of a decode call, and of the chunks of a step."""
        self._memory, self._k, self._longest = memory, k, longest
        row = sum(DTYPE_BYTES[DTYPES[name]] for name in TOPS) * k
        row += DTYPE_BYTES[DTYPES[ALIGNMENT]] * longest
        row_drawn = sum(DTYPE_BYTES[DTYPES[name]] for name in DRAWN)
        num_bytes = sum(num_rows) * row + num_rows[0] * row_drawn + 16 * aligned(1)
        self._device = memory.zeros((num_bytes,), "int8")
        self._hosts = [(memory.pinned(num_bytes), memory.mark()) for _ in range(2)]
        self._end = 0
        self.decode = self._top(num_rows[0])
        ids, logprobs = (self._array(DTYPES[name], (num_rows[0], 1)) for name in DRAWN)
        self.drawn: _Drawn = ids, logprobs
        self._behind = self._end

    def begin(self, size: StepSize) -> None:
        """Lay out what a step has beside a decode call."""
        self._size = size
        self._end = self._behind
        # One row more, for a chunk whose logits nobody wants.
        self.chunks = self._top(size.num_chunk_logits + 1)
        self.alignment = self._array(DTYPES[ALIGNMENT], (size.num_aligned, self._longest))

    def send(self) -> _Sent:
        """Queue the copy of what the step writes: to where that of the step before does not lie."""
        size = self._size
        self._hosts.reverse()
        host, mark = self._hosts[0]
        start = 0 if size.num_rows else self._behind
        stop = self._end if size.num_chunk_logits or size.num_aligned else self._behind
        if start < stop:
            piece = self._device.view(start, "int8", (stop - start,))
            self._memory.download(host[start:stop], piece)
        mark.put()
        written = self.decode, self.drawn, self.chunks, self.alignment
        return _Sent(size, self._device, host, mark, *written)

    def _top(self, num_rows: int) -> _Top:
        ids, logits, logprobs = (self._array(DTYPES[name], (num_rows, self._k)) for name in TOPS)
        return ids, logits, logprobs

    def _array(self, dtype: str, shape: tuple[int, ...]) -> DeviceArray:
        array = self._device.view(self._end, dtype, shape)
        self._end += aligned(array.num_bytes)
        return array


def _input_bytes(size: StepSize, num_slots: int) -> int:
    """Return room enough for the inputs of a step, of which all rows may share one source."""
    beam_rows = 2 * 2 * 8 * num_slots**2  # persistent ones, and those of a call of another shape
    persistent = _ROW_BYTES * num_slots + 2 * _READ_BYTES
    added = _TOKEN_BYTES * size.num_tokens + _READ_BYTES * (size.num_reads + 1)
    return aligned(persistent + beam_rows + added)
