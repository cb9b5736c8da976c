"""Checks a generation request and turns its prompt into token ids."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import FieldViolation
from engine.package.manifest import GenerationContract
from engine.requests.checks import check_sampling_params, raise_if_any
from engine.requests.request import GenerationRequest, SamplingParams, ScoreRequest
from engine.requests.text import GenerationTokenizer

_MAX_INLINE_CHARS = 4096  # longer texts are tokenized off the event loop
_MAX_NAMED_IDS = 8  # wrong token ids named in one answer
_SOURCE = ("text", "tokens")  # fields of the protocol's input
_TARGET = ("prefix_text", "prefix_tokens")


@dataclass(frozen=True)
class Prompt:
    """A request's tokens as the scheduler takes them."""

    ids: tuple[int, ...]  # encoder-decoder: the source
    target_ids: tuple[int, ...] = ()  # given tokens behind the prompt, or the start token


class PromptReader:
    """Knows what a model takes: nothing that would make a step fail gets past it."""

    def __init__(
        self, contract: GenerationContract, tokenizer: GenerationTokenizer, config: EngineConfig
    ) -> None:
        self._contract = contract
        self._tokenizer = tokenizer
        self._config = config
        self._has_source = contract.cross_cache is not None
        self._max_target = contract.cache.max_len - 1  # room for one token of output
        if contract.cross_cache is not None:
            self._max_tokens = contract.cross_cache.max_len
            self._max_target -= 1  # the start token
        else:
            self._max_tokens = self._max_target

    async def read(self, request: GenerationRequest) -> Prompt:
        """Return the prompt's token ids; InvalidRequest names every wrong field at once."""
        violations = check_sampling_params(
            request.params,
            limits=self._config.limits,
            vocab_size=self._contract.vocab_size,
            has_encoder=self._contract.cross_cache is not None,
        )
        violations += self._check_against_engine(request.params)
        ids, found = await self._read_source(request.prompt, request.input_path)
        violations += found
        target_ids: tuple[int, ...] = ()
        if request.target_prefix:
            target_ids, found = await self._read_target(
                request.target_prefix, request.input_path, len(ids)
            )
            violations += found
        raise_if_any(violations)
        return Prompt(ids, target_ids)

    async def read_scored(self, request: ScoreRequest) -> Prompt:
        """Return source and target of a score; InvalidRequest names every wrong field at once."""
        path = request.input_path
        ids, violations = await self._read_source(request.source, path)
        target_ids, found = await self._read_target(request.target, path, len(ids))
        violations += found
        most = self._config.limits.max_logprobs
        if not 0 <= request.top_logprobs <= most:
            what = f"{request.top_logprobs} is outside 0 to {most}"
            violations.append(FieldViolation("top_logprobs", what))
        raise_if_any(violations)
        return Prompt(ids, target_ids)

    def first_target(self, prompt: Prompt) -> int:
        """Return where the target begins among the decoder's tokens."""
        return 1 if self._has_source else len(prompt.ids)

    async def _read_source(
        self, given: str | tuple[int, ...], path: str
    ) -> tuple[tuple[int, ...], list[FieldViolation]]:
        limit = f"more than {self._max_tokens}, the longest prompt of this model"
        return await self._read_ids(given, path, _SOURCE, (self._max_tokens, limit))

    async def _read_target(
        self, given: str | tuple[int, ...], path: str, num_prompt: int
    ) -> tuple[tuple[int, ...], list[FieldViolation]]:
        most = self._max_target - (0 if self._has_source else num_prompt)
        limit = f"more than the {max(most, 0)} that fit behind the prompt"
        return await self._read_ids(given, path, _TARGET, (most, limit))

    async def _read_ids(
        self,
        given: str | tuple[int, ...],
        path: str,
        names: tuple[str, str],
        limit: tuple[int, str],  # the most tokens, and what is wrong with more
    ) -> tuple[tuple[int, ...], list[FieldViolation]]:
        if not isinstance(given, str):
            path = f"{path}.{names[1]}"
            return given, self._check_ids(given, path, f"{path}.ids", limit)
        path = f"{path}.{names[0]}"
        is_part = names == _TARGET
        try:
            ids = await self._encode(given, is_part)
        except UnicodeEncodeError as error:
            what = f"is no Unicode text: half a surrogate pair at character {error.start + 1}"
            return (), [FieldViolation(path, what)]
        return ids, self._check_ids(ids, path, None, limit)

    async def _encode(self, text: str, is_part: bool) -> tuple[int, ...]:
        text.encode()  # the tokenizer's own error for a lone surrogate says nothing of it
        if not text:
            return ()
        encode = self._tokenizer.encode_part if is_part else self._tokenizer.encode
        if len(text) <= _MAX_INLINE_CHARS:
            return tuple(encode(text))
        return tuple(await asyncio.to_thread(encode, text))

    def _check_ids(
        self, ids: tuple[int, ...], path: str, ids_path: str | None, limit: tuple[int, str]
    ) -> list[FieldViolation]:
        if not ids:
            return [FieldViolation(path, "is empty; give at least one token")]
        if len(ids) > limit[0]:
            return [FieldViolation(path, f"{len(ids)} tokens are {limit[1]}; shorten it")]
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
        if params.num_sequences > num_slots:
            what = f"{params.num_sequences} is more than the {num_slots} sequences that run at once"
            found.append(FieldViolation(_field_of_num_sequences(params), what))
        if params.alignment and self._has_source and not self._contract.alignment:
            what = "this package gives no attention; export the model again, or leave it out"
            found.append(FieldViolation("output.alignment", what))
        most = self._contract.cache.max_len - 1  # the prompt or start token takes one position
        if params.min_new_tokens > most:
            what = f"{params.min_new_tokens} is more than {most}, the longest output of this model"
            found.append(FieldViolation("stopping.min_new_tokens", what))
        closing = {*params.stop_token_ids, *params.controls.banned_tokens}
        if not params.ignore_eos:
            closing |= {*self._contract.eos_token_ids}
        if params.min_new_tokens > 0 and len(closing) >= self._contract.vocab_size:
            what = "every token is banned or would end the sequence before min_new_tokens"
            found.append(FieldViolation("stopping.token_ids", what))
        return found


def _field_of_num_sequences(params: SamplingParams) -> str:
    if params.strategy == "beam":
        return "decoding.beam.width"
    if params.num_sequences > params.num_outputs:
        return "decoding.sampling.best_of"
    return "decoding.num_outputs"
