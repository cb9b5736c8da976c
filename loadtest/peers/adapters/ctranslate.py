"""CTranslate2: generation and translation on token strings."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ctranslate2

from loadtest.peers.worker import LoadOptions, Prompts


class CTranslate2Adapter:
    """A Generator (GPT-2) or Translator (Marian)."""

    def __init__(self, options: LoadOptions) -> None:
        self.versions = {"ctranslate2": version("ctranslate2")}
        directory = Path(options.directory)
        self._tokens: list[str] = json.loads((directory / "tokens.json").read_text())
        self._num_beams = options.num_beams
        self._inter_threads = options.setting.get("inter_threads", 1)
        path = directory / "ctranslate2"
        is_translator = "TransformerSpec" in _spec(path)
        kind = ctranslate2.Translator if is_translator else ctranslate2.Generator
        self._model: Any = kind(
            str(path),
            device="cpu",
            compute_type=options.weights,
            inter_threads=self._inter_threads,
            intra_threads=options.setting.get("intra_threads") or options.num_threads,
        )
        self._generate = self._translate if is_translator else self._continue

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Run the prompts as one batch, or one for each of the parallel translators."""
        texts = [[self._tokens[token] for token in prompt] for prompt in prompts]
        batch = -(-len(texts) // self._inter_threads)
        return self._generate(texts, num_new_tokens, batch)

    def _continue(self, texts: list[list[str]], num_new: int, batch: int) -> list[list[int]]:
        results = self._model.generate_batch(
            texts,
            max_batch_size=batch,
            beam_size=self._num_beams,
            sampling_topk=1,
            min_length=num_new,
            max_length=num_new,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]

    def _translate(self, texts: list[list[str]], num_new: int, batch: int) -> list[list[int]]:
        results = self._model.translate_batch(
            texts,
            max_batch_size=batch,
            beam_size=self._num_beams,
            min_decoding_length=num_new,
            max_decoding_length=num_new,
        )
        ids = {token: i for i, token in enumerate(self._tokens)}
        return [[ids[token] for token in result.hypotheses[0]] for result in results]


def _spec(path: Path) -> str:
    """Return the name of the model's kind, which its file begins with."""
    return path.joinpath("model.bin").open("rb").read(64).decode("latin-1")


def load(options: LoadOptions) -> CTranslate2Adapter:
    """Load the converted model, quantized if the weights say so."""
    return CTranslate2Adapter(options)
