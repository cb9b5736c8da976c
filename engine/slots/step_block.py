"""Input and output buffers of a step, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.package.graph_io import ALIGNMENT, DRAWN, DTYPES, LOGITS, TOPS, Bound
from engine.package.manifest import GenerationContract
from engine.sampling.logits import Drawn, StepLogits
from engine.slots.host_pages import zeros

Pending = Callable[[], StepLogits]  # what a step gives; whoever calls it waits for it

_Top = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # ids, logits, log-probabilities


class StepSize(NamedTuple):
    """How large a step is."""

    num_decoding: int  # rows that decode
    num_rows: int  # the decode call's, padding included; 0: there is no call
    num_top: int
    num_aligned: int
    is_drawn: bool = False  # the next tokens of rows that decode
    num_chunk_logits: int = 0  # rows of logits that chunks want
    num_tokens: int = 0  # in sources and chunks
    num_reads: int = 0  # sources and chunks


class PersistentInput(NamedTuple):
    """An input that lies at one place in all steps."""

    host: NDArray[Any]  # is written
    bound: Bound  # is read by graphs


class CallOutputs(NamedTuple):
    """The memory that a call writes to."""

    logits: Bound  # [n, vocab_size]
    top_ids: Bound  # [n, k]
    top_logits: Bound
    top_logprobs: Bound


class StepBlock(Protocol):
    """The memory that the calls of a step read and write.

    Rows of a decode call come first, those of chunks behind them. The next step overwrites the
    outputs, see `send`.
    """

    def persistent_input(self, name: str, shape: tuple[int, ...]) -> PersistentInput:
        """Return room for an input of all steps; to be asked for before the first step."""

    def holds(self, size: StepSize) -> bool:
        """Say whether a step fits; else one of its size is to be made."""

    def begin(self, size: StepSize) -> None:
        """Begin a step, behind one that may not have been waited for."""

    def add(self, name: str, numbers: ArrayLike) -> Bound:
        """Take in the numbers of an input of one call of the step; return what to bind to it."""

    def upload(self) -> None:
        """Bring all inputs to where the graphs read them."""

    def decode_outputs(self, num_rows: int, num_top: int) -> CallOutputs:
        """Return where a decode call writes: the same in all steps."""

    def drawn_outputs(self, num_rows: int, num_top: int) -> tuple[Bound, Bound]:
        """Return where ids and log-probabilities of drawn tokens are written, each [num_rows, 1].

        It is the same in all steps whose decode calls give as many of the likeliest tokens.
        """

    def chunk_outputs(self, first: int, last: int) -> CallOutputs:
        """Return where a chunk writes, whose logits are these of all chunks' ones."""

    def alignment(self, first: int, last: int) -> Bound:
        """Return where these rows of the step's attention to sources are written."""

    def send(self, whole_rows: Sequence[int] = ()) -> Pending:
        """Let what the calls write come to the host: rows that decode, then those of chunks.

        The second step behind this one overwrites it on a device, but for logits of all tokens:
        these are read before the next one begins, or are of the `whole_rows`, in rising order, no
        more than there are slots.
        """


class HostStepBlock:
    """Graphs read and write the arrays themselves, and nothing is copied; see StepBlock."""

    def __init__(
        self, contract: GenerationContract, num_slots: int, size: StepSize | None = None
    ) -> None:
        """`size` is that of a step with more logits than there are slots."""
        self._vocab_size = contract.vocab_size
        self._least = num_slots + 1  # one more, for a chunk whose logits nobody wants
        self._num_rows = max(self._least, _num_rows(size) if size else 0)
        self._logits = zeros((self._num_rows, contract.vocab_size), DTYPES[LOGITS])
        longest = contract.cross_cache.max_len if contract.cross_cache else 0
        self._alignment = np.zeros((self._num_rows, longest), DTYPES[ALIGNMENT])
        self._dtypes = numpy_dtypes()
        self._tops: dict[int, _Top] = {}
        drawn = (np.zeros((num_slots, 1), self._dtypes[name]) for name in DRAWN)
        self._drawn_ids, self._drawn_logprobs = drawn

    def persistent_input(self, name: str, shape: tuple[int, ...]) -> PersistentInput:
        """See StepBlock."""
        array = np.zeros(shape, self._dtypes[name])
        return PersistentInput(array, array)

    def holds(self, size: StepSize) -> bool:
        """See StepBlock; room for a step that wanted much is given back by the next one."""
        wanted = max(self._least, _num_rows(size))
        return wanted <= self._num_rows and not wanted == self._least < self._num_rows

    def begin(self, size: StepSize) -> None:
        """See StepBlock."""
        self._size = size

    def add(self, name: str, numbers: ArrayLike) -> Bound:
        """See StepBlock."""
        return np.asarray(numbers, self._dtypes[name])

    def upload(self) -> None:
        """See StepBlock."""

    def decode_outputs(self, num_rows: int, num_top: int) -> CallOutputs:
        """See StepBlock."""
        return self._outputs(0, num_rows, num_top)

    def drawn_outputs(self, num_rows: int, num_top: int) -> tuple[Bound, Bound]:
        """See StepBlock."""
        return self._drawn_ids[:num_rows], self._drawn_logprobs[:num_rows]

    def chunk_outputs(self, first: int, last: int) -> CallOutputs:
        """See StepBlock."""
        behind = self._size.num_rows
        return self._outputs(behind + first, behind + last, self._size.num_top)

    def alignment(self, first: int, last: int) -> Bound:
        """See StepBlock."""
        return self._alignment[first:last]

    def send(self, whole_rows: Sequence[int] = ()) -> Pending:
        """See StepBlock: it is there."""
        return self._result

    def _result(self) -> StepLogits:
        size = self._size
        top_ids, top_logits, top_logprobs = self._top_of(size.num_top)
        rows = self._rows_of(size)
        return StepLogits(
            self._logits[rows],
            top_ids[rows],
            top_logits[rows],
            top_logprobs[rows],
            self._alignment[: size.num_aligned] if size.num_aligned else None,
            self._drawn(size.num_decoding) if size.is_drawn else None,
        )

    def _drawn(self, num_rows: int) -> Drawn:
        return Drawn(self._drawn_ids[:num_rows, 0], self._drawn_logprobs[:num_rows, 0])

    def _rows_of(self, size: StepSize) -> slice | NDArray[np.intp]:
        """Return the rows of a step, without those that are padded."""
        if size.num_rows == size.num_decoding or not size.num_chunk_logits:
            return slice(size.num_decoding + size.num_chunk_logits)
        behind = np.arange(size.num_rows, size.num_rows + size.num_chunk_logits)
        return np.concatenate((np.arange(size.num_decoding), behind))

    def _outputs(self, first: int, last: int, num_top: int) -> CallOutputs:
        top = (array[first:last] for array in self._top_of(num_top))
        return CallOutputs(self._logits[first:last], *top)

    def _top_of(self, k: int) -> _Top:
        """Return the arrays of the k best."""
        if k not in self._tops:
            shape = (self._num_rows, k)
            ids, logits, logprobs = (np.zeros(shape, self._dtypes[name]) for name in TOPS)
            self._tops[k] = ids, logits, logprobs
        return self._tops[k]


def numpy_dtypes() -> dict[str, np.dtype[Any]]:
    """Return the types of inputs and outputs by name, looked up once and not in every step."""
    return {name: np.dtype(dtype) for name, dtype in DTYPES.items()}


def _num_rows(size: StepSize) -> int:
    return size.num_rows + size.num_chunk_logits + 1
