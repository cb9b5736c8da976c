"""A decoder called as the engine calls it on a device, without the engine: fixed rows, no requests.

Rows 0 to B-1 decode together; of an encoder-decoder each has the source in the row of its number,
where there is room for as many more as a request may have sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engine.config import RequestLimits
from engine.cuda.device import CudaDevice
from engine.cuda.memory import DeviceArray, aligned
from engine.cuda.session import DISABLED_OPTIMIZERS, CudaSession, cuda_options
from engine.package.graph_io import (
    BEAM_ROWS,
    CROSS,
    INPUT_IDS,
    LOGIT_IDX,
    LOGITS,
    NUM_TOP,
    PAST,
    POSITION_IDS,
    READ_ON_HOST,
    ROW_QUERIES,
    SEQLENS_K,
    SOURCE_LENGTHS,
    TOP_IDS,
    TOPS,
    GraphValue,
    decoder_shape,
    layer_names,
)
from engine.package.manifest import GenerationContract
from engine.session import NOT_CAPTURED, Binding, Session
from engine.slots.calls.decoder_graph import DecoderGraph
from engine.slots.calls.source_index import padded
from engine.slots.rows import SlotCache

_WIDEST = RequestLimits().most_sequences  # per request

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def create_variant(
    path: Path, device: CudaDevice, options: Mapping[str, str], entries: Mapping[str, str]
) -> Session:
    """Load a graph with other options of the provider, or entries of the session, than ours."""
    session_options = ort.SessionOptions()
    session_options.log_severity_level = 3  # errors
    session_options.use_deterministic_compute = True
    session_options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for name, value in entries.items():
        session_options.add_session_config_entry(name, value)
    session = ort.InferenceSession(
        str(path),
        session_options,
        [("CUDAExecutionProvider", {**cuda_options(device.runtime), **options})],
        disabled_optimizers=DISABLED_OPTIMIZERS,
    )
    return CudaSession(session, path, device.runtime)


def zeros_of(value: GraphValue, sizes: Mapping[str, int]) -> NDArray[Any]:
    """Return zeros as an input of a graph is described, with these open sizes."""
    shape = [size if isinstance(size, int) else sizes[str(size)] for size in value.shape]
    return np.zeros(shape, value.dtype)


@dataclass(frozen=True)
class Call:
    """A shape of call with its memory: rows from `first` on, tokens a row, likeliest tokens."""

    binding: Binding
    inputs: Mapping[str, NDArray[Any]]  # views of `host`
    host: NDArray[np.uint8]  # pinned: all inputs that are brought up
    device: DeviceArray  # the same on the device


class DeviceDecoder:
    """The graph, a cache of so many rows, and one block for the outputs of a call.

    Every shape of call has a block of its own for its inputs, some of which are written only once.
    """

    def __init__(
        self,
        session: Session,
        contract: GenerationContract,
        device: CudaDevice,
        num_rows: int,
    ) -> None:
        self.contract, self._device = contract, device
        self._shape = decoder_shape(contract)
        memory = device.memory
        self._cache = SlotCache(num_rows, contract.cache, contract.cross_cache, device.cache_memory)
        self._graph = DecoderGraph(
            contract, session, self._cache, is_on_device=True, graph_ids=count()
        )
        self._graph.total_seq[0] = self.capacity
        logits = self._shape.outputs[LOGITS]
        self._logits = memory.zeros((num_rows, contract.vocab_size), logits.dtype)
        self._top = memory.zeros((num_rows * 128 * 16,), "int8")
        self._read = memory.pinned(self._logits.num_bytes)
        self._calls: dict[tuple[int, int, int, int], Call] = {}

    @property
    def lengths(self) -> NDArray[np.int32]:
        """How many positions of each row are written; to be set to 0 before a row begins anew."""
        return self._cache.lengths

    @property
    def capacity(self) -> int:
        """How many positions a row has."""
        return self.contract.cache.max_len

    def run(
        self,
        first: int,
        ids: Ints,  # [B, S]
        positions: Ints,  # [B, S]
        *,
        num_top: int = 1,
        graph_id: int = NOT_CAPTURED,
    ) -> Call:
        """Queue a call on rows from `first` on: inputs up, the graph; nothing is read."""
        num_rows, num_tokens = ids.shape
        call = self._call(first, num_rows, num_tokens, num_top)
        call.inputs[INPUT_IDS][:] = ids
        call.inputs[POSITION_IDS][:] = positions
        call.inputs[SEQLENS_K][:] = positions[:, -1]
        self._device.memory.upload(call.device, call.host)
        call.binding.run(graph_id)
        return call

    def logits(self, num_rows: int) -> Floats:
        """Wait for the stream and return the logits of the last call, [num_rows, V]."""
        part = self._logits[:num_rows]
        host = self._read[: part.num_bytes].view(part.dtype).reshape(part.shape)
        self._device.memory.download(host, part)
        self._device.runtime.synchronize()
        found: Floats = host.copy()
        return found

    def read_ids(self, num_rows: int, num_top: int = 1) -> Ints:
        """Wait for the stream and return the likeliest tokens of the last call."""
        part = self._top.view(0, self._shape.outputs[TOP_IDS].dtype, (num_rows, num_top))
        host = self._read[: part.num_bytes].view(part.dtype).reshape(part.shape)
        self._device.memory.download(host, part)
        self._device.runtime.synchronize()
        found: Ints = host
        return found

    def prefill(self, row: int, ids: Sequence[int], chunk: int = 128) -> Floats:
        """Compute a prompt in one row from its beginning; return the logits behind it, [V]."""
        for start in range(0, len(ids), chunk):
            part = np.array([ids[start : start + chunk]])
            self.run(row, part, np.arange(start, start + part.shape[1])[None])
            self._device.runtime.synchronize()  # the next one's inputs are written over these
        self.lengths[row] = len(ids)
        found: Floats = self.logits(1)[0]
        return found

    def decode(self, tokens: Sequence[int], bucket: int, graph_id: int = NOT_CAPTURED) -> Floats:
        """Append a token to each of the first rows, in a call of `bucket` rows; return [N, V].

        The other rows write behind their own content.
        """
        count = len(tokens)
        ids = np.zeros((bucket, 1), np.int64)
        ids[:count, 0] = tokens
        positions = np.minimum(self.lengths[:bucket], self.capacity - 1)[:, None]
        self.run(0, ids, positions, graph_id=graph_id)
        self.lengths[:count] += 1
        found: Floats = self.logits(bucket)[:count]
        return found

    def fill(self, rng: np.random.Generator) -> None:
        """Put random numbers into all rows: time may depend on whether there are only zeros."""
        caches = (self._cache.rows, self._cache.sources)
        shapes = (self.contract.cache, self.contract.cross_cache)
        for cache, shape in zip(caches, shapes, strict=True):
            if cache is None or shape is None:
                continue
            size = (shape.num_layers, 2, shape.num_kv_heads, shape.max_len, shape.head_dim)
            cache.write(0, rng.standard_normal(size, np.float32))
            for row in range(1, len(self.lengths)):
                cache.copy(0, row, 0, shape.max_len)
        self._device.runtime.synchronize()

    def _call(self, first: int, num_rows: int, num_tokens: int, num_top: int) -> Call:
        key = (first, num_rows, num_tokens, num_top)
        if key not in self._calls:
            self._calls[key] = self._bind(*key)
        return self._calls[key]

    def _bind(self, first: int, num_rows: int, num_tokens: int, num_top: int) -> Call:
        binding = self._graph.bind(first, first + num_rows)
        arrays = self._layout(num_rows, num_tokens)
        num_bytes = sum(aligned(max(1, array.nbytes)) for array in arrays.values())
        memory, inputs, at = self._device.memory, {}, 0
        host, device = memory.pinned(num_bytes), memory.zeros((num_bytes,), "int8")
        for name, array in arrays.items():
            view = host[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            view[...] = array
            inputs[name] = view
            binding.input(name, device.view(at, str(array.dtype), array.shape))
            at += aligned(max(1, array.nbytes))
        binding.input(NUM_TOP, self._graph.num_top(num_top))
        self._graph.bind_sources(binding, first, first + num_rows)
        self._bind_outputs(binding, num_rows, num_top)
        return Call(binding, inputs, host, device)

    def _layout(self, num_rows: int, num_tokens: int) -> dict[str, NDArray[Any]]:
        """Return the inputs beside keys and values that are brought up, as they stand at first."""
        sizes = {"batch": num_rows, "tokens": num_tokens, "num_logits": num_rows}
        group = padded(min(_WIDEST, len(self.lengths))) if num_tokens == 1 else 1
        sizes |= {"sources": num_rows, "beams": group, "num_alignments": 0}
        num_layers = len(self._cache.layers)
        others = {*READ_ON_HOST, *layer_names(PAST, num_layers), *layer_names(CROSS, num_layers)}
        arrays = {
            name: zeros_of(value, sizes)
            for name, value in self._shape.inputs.items()
            if name not in others
        }
        arrays[LOGIT_IDX][:] = np.arange(num_rows) * num_tokens + num_tokens - 1
        if self.contract.cross_cache is not None:
            arrays[SOURCE_LENGTHS][:] = self.contract.cross_cache.max_len // 2
            arrays[BEAM_ROWS][:, 0] = np.arange(num_rows)
            queries = group * np.arange(num_rows * num_tokens)
            arrays[ROW_QUERIES][:] = queries.reshape(num_rows, num_tokens)
        return arrays

    def _bind_outputs(self, binding: Binding, num_rows: int, num_top: int) -> None:
        binding.output(LOGITS, self._logits[:num_rows])
        at = 0
        for name in TOPS:
            array = self._top.view(at, self._shape.outputs[name].dtype, (num_rows, num_top))
            binding.output(name, array)
            at += array.num_bytes
