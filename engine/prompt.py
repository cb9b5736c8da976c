"""Checks a generation request and turns its prompt into token ids."""

from __future__ import annotations

import asyncio

from engine.config import EngineConfig
from engine.errors import FieldViolation
from engine.package import GenerationContract
from engine.request import GenerationRequest, SamplingParams, raise_if_any
from engine.request_checks import check_sampling_params
from engine.tokenizer import Tokenizer

_MAX_INLINE_CHARS = 4096  # longer texts are tokenized off the event loop
_MAX_NAMED_IDS = 8  # wrong token ids named in one answer


class PromptReader:
    """Knows what a model takes: nothing that would make a step fail gets past it."""

    def __init__(
        self, contract: GenerationContract, tokenizer: Tokenizer, config: EngineConfig
    ) -> None:
        self._contract = contract
        self._tokenizer = tokenizer
        self._config = config
        if contract.cross_cache is not None:
            self._max_tokens = contract.cross_cache.max_len
        else:
            self._max_tokens = contract.cache.max_len - 1  # room for one token of output

    async def read(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the prompt's token ids; InvalidRequest names every wrong field at once."""
        violations = check_sampling_params(
            request.params,
            limits=self._config.limits,
            vocab_size=self._contract.vocab_size,
            has_encoder=self._contract.cross_cache is not None,
        )
        violations += self._check_against_engine(request.params)
        ids, found = await self._read_prompt(request)
        raise_if_any(violations + found)
        return ids

    async def _read_prompt(
        self, request: GenerationRequest
    ) -> tuple[tuple[int, ...], list[FieldViolation]]:
        if not isinstance(request.prompt, str):
            path = f"{request.input_path}.tokens"
            return request.prompt, self._check_ids(request.prompt, path, f"{path}.ids")
        path = f"{request.input_path}.text"
        try:
            ids = await self._encode(request.prompt)
        except UnicodeEncodeError as error:
            what = f"is no Unicode text: half a surrogate pair at character {error.start + 1}"
            return (), [FieldViolation(path, what)]
        return ids, self._check_ids(ids, path, None)

    async def _encode(self, text: str) -> tuple[int, ...]:
        text.encode()  # the tokenizer's own error for a lone surrogate says nothing of it
        if not text:
            return ()
        if len(text) <= _MAX_INLINE_CHARS:
            return tuple(self._tokenizer.encode(text))
        return tuple(await asyncio.to_thread(self._tokenizer.encode, text))

    def _check_ids(
        self, ids: tuple[int, ...], path: str, ids_path: str | None
    ) -> list[FieldViolation]:
        if not ids:
            return [FieldViolation(path, "is empty; give at least one token of prompt")]
        if len(ids) > self._max_tokens:
            limit = f"more than {self._max_tokens}, the longest prompt of this model"
            return [FieldViolation(path, f"{len(ids)} tokens are {limit}; shorten it")]
        last = self._contract.vocab_size - 1
        wrong = [i for i, token_id in enumerate(ids) if not 0 <= token_id <= last]
        return [
            FieldViolation(
                path if ids_path is None else f"{ids_path}[{i}]",
                f"token id {ids[i]} is outside the vocabulary, 0 to {last}",
            )
            for i in wrong[:_MAX_NAMED_IDS]
        ]

    def _check_against_engine(self, params: SamplingParams) -> list[FieldViolation]:
        found = []
        num_slots = self._config.max_num_seqs
        if num_slots < params.num_outputs <= self._config.limits.max_num_outputs:
            what = f"{params.num_outputs} is more than the {num_slots} sequences that run at once"
            found.append(FieldViolation("decoding.num_outputs", what))
        closing = {*params.stop_token_ids, *params.controls.banned_tokens}
        if not params.ignore_eos:
            closing |= {*self._contract.eos_token_ids}
        if params.min_new_tokens > 0 and len(closing) >= self._contract.vocab_size:
            what = "every token is banned or would end the sequence before min_new_tokens"
            found.append(FieldViolation("stopping.token_ids", what))
        return found
