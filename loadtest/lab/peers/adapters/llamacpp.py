"""llama.cpp through the C functions of llama-cpp-python: several sequences in one batch."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from loadtest.lab.peers.worker import LoadOptions, Prompts

_F32 = 0  # ggml_type: the cache in float32, as the other engines have it


class LlamaCppAdapter:
    """A context with one sequence id for each prompt."""

    def __init__(self, options: LoadOptions) -> None:
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}
        llama_cpp.llama_backend_init()
        path = Path(options.directory) / f"{options.weights}.gguf"
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = bool(options.setting.get("repacked", 1))
        self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = options.max_tokens * options.max_concurrency
        settings.n_batch = settings.n_ctx
        settings.n_seq_max = options.max_concurrency
        settings.n_threads = settings.n_threads_batch = options.num_threads
        settings.kv_unified = False
        if options.weights == "f32":
            settings.type_k = settings.type_v = _F32
        self._context: Any = llama_cpp.llama_init_from_model(self._model, settings)
        self._batch: Any = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Decode all prompts as one batch, then one token of each at a time."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        inputs = [list(prompt) for prompt in prompts]
        position = 0
        for _ in range(num_new_tokens):
            rows = self._decode(inputs, position)
            position += len(inputs[0])
            inputs = [[int(self._logits(row).argmax())] for row in rows]
            for output, token in zip(outputs, inputs, strict=True):
                output += token
        return outputs

    def _decode(self, inputs: list[list[int]], position: int) -> list[int]:
        """Run tokens of every sequence; return where the last one of each is in the batch."""
        batch, count, last = self._batch, 0, []
        for sequence, tokens in enumerate(inputs):
            for offset, token in enumerate(tokens):
                batch.token[count] = token
                batch.pos[count] = position + offset
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence
                batch.logits[count] = offset == len(tokens) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return last

    def _logits(self, row: int) -> np.ndarray[Any, Any]:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(logits, shape=(self._vocab_size,))


load = LlamaCppAdapter
