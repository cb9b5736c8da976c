"""onnxruntime-genai on a model that its own builder wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime_genai as og

from loadtest.lab.peers.worker import LoadOptions, Prompts
from loadtest.origin import versions_of


class GenaiAdapter:
    """A Generator for each batch, as its documentation shows it."""

    def __init__(self, options: LoadOptions) -> None:
        self.versions = versions_of("onnxruntime-genai", "onnxruntime-genai-cuda")
        path = Path(options.directory) / f"genai-{options.weights}"
        config = og.Config(str(path))
        session = {"intra_op_num_threads": options.num_threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = og.Model(config)

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Run the prompts as one batch."""
        num_prompt = len(prompts[0])
        params = og.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=len(prompts),
            do_sample=False,
            min_length=num_prompt + num_new_tokens,
            max_length=num_prompt + num_new_tokens,
            past_present_share_buffer=True,
        )
        generator = og.Generator(self._model, params)
        generator.append_tokens(np.asarray(prompts, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [
            [int(token) for token in generator.get_sequence(row)[num_prompt:]]
            for row in range(len(prompts))
        ]


load = GenaiAdapter
