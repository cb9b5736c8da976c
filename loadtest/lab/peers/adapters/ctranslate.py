"""CTranslate2: generation and translation on token strings."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ctranslate2

from loadtest.lab.peers.worker import LoadOptions, Prompts


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
        return self._generate(prompts, num_new_tokens, -(-len(prompts) // self._inter_threads))

    def stream(
        self, prompts: Prompts, num_new_tokens: int, tell: Callable[[int, int], None]
    ) -> None:
        """Run the prompts as one batch, and tell of each token as it comes: whose, which."""

        def step(result: Any) -> bool:
            tell(result.batch_id, result.token_id)
            return False  # go on

        self._generate(prompts, num_new_tokens, len(prompts), callback=step)

    def _continue(
        self, prompts: Prompts, num_new: int, batch: int, **options: Any
    ) -> list[list[int]]:
        results = self._model.generate_batch(
            self._texts(prompts),
            max_batch_size=batch,
            beam_size=self._num_beams,
            sampling_topk=1,
            min_length=num_new,
            max_length=num_new,
            include_prompt_in_result=False,
            **options,
        )
        return [result.sequences_ids[0] for result in results]

    def _translate(
        self, prompts: Prompts, num_new: int, batch: int, **options: Any
    ) -> list[list[int]]:
        results = self._model.translate_batch(
            self._texts(prompts),
            max_batch_size=batch,
            beam_size=self._num_beams,
            min_decoding_length=num_new,
            max_decoding_length=num_new,
            **options,
        )
        ids = {token: i for i, token in enumerate(self._tokens)}
        return [[ids[token] for token in result.hypotheses[0]] for result in results]

    def _texts(self, prompts: Prompts) -> list[list[str]]:
        return [[self._tokens[token] for token in prompt] for prompt in prompts]


def _spec(path: Path) -> str:
    """Return the name of the model's kind, which its file begins with."""
    return path.joinpath("model.bin").open("rb").read(64).decode("latin-1")


load = CTranslate2Adapter
