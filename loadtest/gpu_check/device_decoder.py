"""A decoder called as the engine calls it on a device, without the engine: fixed rows, no requests.

Rows 0 to B-1 decode together; of an encoder-decoder each has the source in the row of its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engine.device.device import CudaDevice
from engine.device.memory import DeviceArray, aligned
from engine.package.manifest import CacheShape, GenerationContract
from engine.session import NOT_CAPTURED, Binding, Session
from engine.slots.memory import DeviceCacheMemory

_BLOCK_BYTES = 2**20  # of the inputs of a call, at most
_DEFAULTS = {  # of the provider, as the engine has them
    "use_tf32": "0",
    "sdpa_kernel": "1",
    "arena_extend_strategy": "kSameAsRequested",
    "enable_cuda_graph": "1",
}

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
    provider = {**_DEFAULTS, "user_compute_stream": str(device.runtime.stream), **options}
    return Session(
        ort.InferenceSession(str(path), session_options, [("CUDAExecutionProvider", provider)]),
        path,
        device=device,
    )


@dataclass(frozen=True)
class Call:
    """A shape of call with its memory: rows from `first` on, tokens a row, likeliest tokens."""

    binding: Binding
    inputs: Mapping[str, NDArray[Any]]  # views of pinned memory; the device has a twin
    num_bytes: int  # of all inputs


class DeviceDecoder:
    """The graph, a cache of so many rows, and one block each for inputs and outputs of a call."""

    def __init__(
        self,
        session: Session,
        contract: GenerationContract,
        device: CudaDevice,
        num_rows: int,
    ) -> None:
        self.contract, self.num_rows, self._device = contract, num_rows, device
        self._session = session
        memory = device.memory
        self.lengths = np.zeros(num_rows, np.int64)
        self.rows = DeviceCacheMemory(memory, num_rows, contract.cache)
        self.sources: DeviceCacheMemory | None = None
        if contract.cross_cache:
            self.sources = DeviceCacheMemory(memory, num_rows, contract.cross_cache)
        self._host = memory.pinned(_BLOCK_BYTES)
        self._inputs = memory.zeros((_BLOCK_BYTES,), "int8")
        self._logits = memory.zeros((num_rows, contract.vocab_size), "float32")
        self._top = memory.zeros((num_rows * 128 * 16,), "int8")
        self._read = memory.pinned(self._logits.num_bytes)
        self._keep: list[NDArray[Any]] = []
        self._calls: dict[tuple[int, int, int, int], Call] = {}

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
        call.inputs["input_ids"][:] = ids
        call.inputs["position_ids"][:] = positions
        call.inputs["seqlens_k"][:] = positions[:, -1]
        runtime = self._device.runtime
        runtime.upload(self._inputs.address, self._host.ctypes.data, call.num_bytes)
        call.binding.run(graph_id)
        return call

    def logits(self, num_rows: int) -> Floats:
        """Wait for the stream and return the logits of the last call, [num_rows, V]."""
        part = self._logits[:num_rows]
        host = self._read[: part.num_bytes].view(np.float32).reshape(part.shape)
        self._device.memory.download(host, part)
        self._device.runtime.synchronize()
        found: Floats = host.copy()
        return found

    def read_ids(self, num_rows: int, num_top: int = 1) -> Ints:
        """Wait for the stream and return the likeliest tokens of the last call."""
        part = self._top.view(0, "int64", (num_rows, num_top))
        host = self._read[: part.num_bytes].view(np.int64).reshape(part.shape)
        self._device.memory.download(host, part)
        self._device.runtime.synchronize()
        found: Ints = host
        return found

    def prefill(self, row: int, ids: Sequence[int], chunk: int = 128) -> Floats:
        """Compute a prompt in one row from its beginning; return the logits behind it, [V]."""
        for start in range(0, len(ids), chunk):
            part = np.array([ids[start : start + chunk]])
            self.run(row, part, np.arange(start, start + part.shape[1])[None])
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
        for cache, shape in self._caches():
            size = (shape.num_layers, 2, shape.num_kv_heads, shape.max_len, shape.head_dim)
            cache.write(0, rng.standard_normal(size, np.float32))
            for row in range(1, self.num_rows):
                cache.copy(0, row, 0, shape.max_len)
        self._device.runtime.synchronize()

    def _caches(self) -> Iterator[tuple[DeviceCacheMemory, CacheShape]]:
        yield self.rows, self.contract.cache
        if self.sources is not None and self.contract.cross_cache is not None:
            yield self.sources, self.contract.cross_cache

    def _call(self, first: int, num_rows: int, num_tokens: int, num_top: int) -> Call:
        key = (first, num_rows, num_tokens, num_top)
        if key not in self._calls:
            self._calls[key] = self._bind(*key)
        return self._calls[key]

    def _bind(self, first: int, num_rows: int, num_tokens: int, num_top: int) -> Call:
        binding, inputs, at = self._session.bind(), {}, 0
        for name, array in self._layout(num_rows, num_tokens).items():
            view = self._host[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            view[...] = array
            inputs[name] = view
            if name in self._session.inputs:
                binding.input(name, self._inputs.view(at, str(array.dtype), array.shape))
            at += aligned(max(1, array.nbytes))
        self._bind_host(binding, num_top)
        self._bind_rows(binding, first, num_rows)
        self._bind_outputs(binding, num_rows, num_top)
        return Call(binding, inputs, at)

    def _layout(self, num_rows: int, num_tokens: int) -> dict[str, NDArray[Any]]:
        size = (num_rows, num_tokens)
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros(size, np.int64),
            "position_ids": np.zeros(size, np.int64),
            "logit_idx": np.arange(num_rows) * num_tokens + num_tokens - 1,
            "seqlens_k": np.zeros(num_rows, np.int32),
        }
        if self.contract.cross_cache is not None:
            arrays["source_lengths"] = np.full(num_rows, self.contract.cross_cache.max_len // 2)
            arrays["beam_rows"] = np.arange(num_rows)[:, None]
            arrays["row_queries"] = np.arange(num_rows * num_tokens).reshape(size)
            arrays["alignment_idx"] = arrays["alignment_sources"] = np.zeros(0, np.int64)
        return arrays

    def _bind_host(self, binding: Binding, num_top: int) -> None:
        top, total = np.array([num_top], np.int64), np.array([self.capacity], np.int32)
        self._keep += [top, total]
        for name, array in (("num_top", top), ("total_seq", total)):
            if name in self._session.inputs:
                binding.input(name, array)

    def _bind_rows(self, binding: Binding, first: int, num_rows: int) -> None:
        for name, array in _named(self.rows, first, first + num_rows):
            binding.input(f"past_key_values.{name}", array)
            binding.output(f"present.{name}", array)
        if self.sources is not None:
            for name, array in _named(self.sources, first, first + num_rows):
                binding.input(f"cross_key_values.{name}", array)

    def _bind_outputs(self, binding: Binding, num_rows: int, num_top: int) -> None:
        binding.output("logits", self._logits[:num_rows])
        size, numbers = (num_rows, num_top), num_rows * num_top
        binding.output("top_ids", self._top.view(0, "int64", size))
        binding.output("top_logits", self._top.view(8 * numbers, "float32", size))
        binding.output("top_logprobs", self._top.view(12 * numbers, "float32", size))


def _named(cache: DeviceCacheMemory, first: int, last: int) -> Iterator[tuple[str, DeviceArray]]:
    """Yield some rows of every layer, and what the graph calls them behind its prefix."""
    for i, layer in enumerate(cache.layers):
        for part, array in (("key", layer.key), ("value", layer.value)):
            assert isinstance(array, DeviceArray)
            yield f"{i}.{part}", array[first:last]
