"""Checks what a caller asks and makes of it what the scheduler takes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.config import EngineConfig
from engine.errors import FieldViolation
from engine.package.manifest import GenerationContract
from engine.requests.checks import check_sampling_params, raise_if_any
from engine.requests.request import (
    Chat,
    Constraint,
    GenerationRequest,
    Reasoning,
    SamplingParams,
    ScoreRequest,
)
from engine.requests.text import MAX_INLINE_CHARS
from engine.requests.token_ids import check_token_ids
from engine.scheduling.sequence import TokenRequest
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import SourceAndTarget

if TYPE_CHECKING:
    from engine.text.constraint import ConstraintMatcher  # loads llguidance

_PROMPT = ("text", "tokens")  # fields of the protocol's input
_MARK_TOKENS = 16  # a mark and white space behind it have fewer
_TARGET = ("prefix_text", "prefix_tokens")

Ids = tuple[int, ...]
Prompt = str | Ids | Chat
Violations = list[FieldViolation]


class _Prompt(NamedTuple):
    """A prompt, and how it is made into tokens."""

    given: Prompt
    kept: int | None = None  # how many last tokens of a longer one
    is_part: bool = False  # no special tokens stand around a text


class _Limit(NamedTuple):
    """The bounds of given tokens."""

    most: int
    problem: str  # says why more are refused
    vocab_size: int
    kept: int | None = None  # how many last tokens of a longer prompt


class Constraints(Protocol):
    """Compiles what an output must match; `engine.text.constraint` in production."""

    def compile(
        self, constraint: Constraint, given_ids: Sequence[int] = ()
    ) -> ConstraintMatcher | None:
        """Return what follows a sequence behind the given beginning of its text; any thread asks.

        None: it is made in the process that makes the steps, from the request.
        Raises InvalidRequest for a constraint that is wrong or too large, or that no text matches
        which begins so; CapabilityNotSupported if the model's tokenizer cannot follow any.
        """


class RequestReader:
    """Knows what a model takes: nothing that would make a step fail gets past it."""

    def __init__(
        self,
        contract: GenerationContract,
        tokenizers: SourceAndTarget,
        constraints: Constraints,
        config: EngineConfig,
        chat: ChatTemplate | None = None,
    ) -> None:
        self._contract = contract
        self._chat = chat
        self._tokenizers = tokenizers
        self._constraints = constraints
        self._config = config
        self._keys = count()
        self._has_source = contract.cross_cache is not None
        self._max_target = contract.cache.max_len - 1  # room for one token of output
        if contract.cross_cache is not None:
            self._max_tokens = contract.cross_cache.max_len
            self._max_target -= 1  # the start token
        else:
            self._max_tokens = self._max_target

    async def read(self, request: GenerationRequest, arrival: float) -> TokenRequest:
        """Return the request in tokens; InvalidRequest names every wrong field at once."""
        params = request.params
        violations = check_sampling_params(
            params,
            limits=self._config.limits,
            vocab_size=self._contract.vocab_size,
            has_encoder=self._has_source,
        )
        violations += self._check_against_engine(params)
        prefix = request.target_prefix or None
        prompt = _Prompt(
            request.prompt, request.truncate_prompt_tokens, not request.add_special_tokens
        )
        ids, target_ids, found = await self._read_given(
            prompt, prefix, request.input_path, params.forced_begin
        )
        raise_if_any(violations + found)
        if params.max_new_tokens == 0:  # nothing of how tokens are chosen has a meaning
            params = _read_only(params)
        if prefix is not None and params.forced_begin:
            params = replace(params, forced_begin=())
        matcher = await self._compile(params.constraint, (*target_ids, *params.forced_begin))
        return TokenRequest(
            next(self._keys),
            request.request_id,
            ids,
            params,
            _seed_of(params),
            arrival,
            request.deadline,
            target_ids,
            request.priority,
            request.tenant,
            matcher=matcher,
            # The first of the decoder's given tokens has none before it that could predict it.
            score_from=None if params.prompt_logprobs is None else 1,
            deltas=request.deltas,
            reasoning=self._reasoning(request.prompt, ids),
        )

    async def read_scored(self, request: ScoreRequest, arrival: float) -> TokenRequest:
        """Return a target to be scored, behind its prompt; InvalidRequest as of `read`."""
        forced = request.forced_begin if isinstance(request.target, str) else ()
        ids, target_ids, violations = await self._read_given(
            _Prompt(request.prompt), request.target, request.input_path, forced
        )
        most = self._config.limits.max_logprobs
        if not 0 <= request.top_logprobs <= most:
            what = f"{request.top_logprobs} is outside 0 to {most}"
            violations.append(FieldViolation("top_logprobs", what))
        raise_if_any(violations)
        return TokenRequest(
            next(self._keys),
            request.request_id,
            ids,
            SamplingParams(max_new_tokens=0, prompt_logprobs=request.top_logprobs),
            0,  # nothing is drawn
            arrival,
            request.deadline,
            target_ids,
            request.priority,
            request.tenant,
            # The target's first place among the decoder's tokens.
            score_from=(1 if self._has_source else len(ids)) + len(forced),
        )

    async def _read_given(
        self, prompt: _Prompt, target: str | Ids | None, path: str, forced: Ids
    ) -> tuple[Ids, Ids, Violations]:
        """Return prompt and target, and what is wrong in them.

        A target that is text stands behind the forced tokens, unless it begins with them.
        """
        ids, violations = await self._read_prompt(prompt, path)
        target_ids: Ids = ()
        if target is not None:
            target_ids, found = await self._read_target(target, path, len(ids), forced)
            violations += found
        return ids, target_ids, violations

    def _reasoning(self, prompt: Prompt, ids: Ids) -> Reasoning | None:
        if self._chat is None or not isinstance(prompt, Chat):
            return None
        end = b"".join(map(self._tokenizers.target.token_bytes, ids[-_MARK_TOKENS:]))
        return self._chat.reasoning_behind(prompt, end.decode(errors="replace"))

    async def _compile(
        self, constraint: Constraint | None, given_ids: Ids
    ) -> ConstraintMatcher | None:
        if constraint is None:
            return None
        return await asyncio.to_thread(self._constraints.compile, constraint, given_ids)

    async def _read_prompt(self, prompt: _Prompt, path: str) -> tuple[Ids, Violations]:
        given, most = prompt.given, prompt.kept
        if most is not None and most < 1:
            what = f"{most} is below 1; leave it out for none"
            return (), [FieldViolation(f"{path}.truncate_prompt_tokens", what)]
        problem = f"more than {self._max_tokens}, the longest prompt of this model"
        limit = _Limit(self._max_tokens, problem, self._contract.prompt_vocab_size, most)
        if isinstance(given, Chat):
            return await self._read_chat(given, f"{path}.chat", limit)
        return await self._read_ids(given, path, _PROMPT, limit, is_part=prompt.is_part)

    async def _read_chat(self, chat: Chat, path: str, limit: _Limit) -> tuple[Ids, Violations]:
        if self._chat is None:
            what = "this model was exported without a chat template; give a text"
            return (), [FieldViolation(path, what)]
        if (problem := self._chat.problem_of(chat.variables)) is not None:
            return (), [FieldViolation(f"{path}.template_variables", problem)]
        if (problem := self._chat.problem_of_tools(chat)) is not None:
            return (), [FieldViolation(f"{path}.tools", problem)]
        try:
            text = await asyncio.to_thread(self._chat.render, chat)
            ids = await self._encode(text, is_part=True)  # the template has put all around it
        except ValueError as error:
            return (), [FieldViolation(path, str(error))]
        ids = _last(ids, limit)
        return ids, self._check_ids(ids, path, None, limit)

    async def _read_target(
        self, given: str | Ids, path: str, num_prompt: int, forced: Ids
    ) -> tuple[Ids, Violations]:
        most = self._max_target - (0 if self._has_source else num_prompt)
        problem = f"more than the {max(most, 0)} that fit behind the prompt"
        limit = _Limit(most, problem, self._contract.vocab_size)
        ids, violations = await self._read_ids(given, path, _TARGET, limit, is_part=True)
        if violations or not isinstance(given, str) or ids[: len(forced)] == forced:
            return ids, violations
        if self._tokenizers.target.is_special(ids[0]):  # another language, say
            return ids, violations
        ids = (*forced, *ids)
        return ids, self._check_ids(ids, f"{path}.{_TARGET[0]}", None, limit)

    async def _read_ids(
        self, given: str | Ids, path: str, names: tuple[str, str], limit: _Limit, *, is_part: bool
    ) -> tuple[Ids, Violations]:
        if not isinstance(given, str):
            path, given = f"{path}.{names[1]}", _last(given, limit)
            return given, self._check_ids(given, path, f"{path}.ids", limit)
        path = f"{path}.{names[0]}"
        try:
            ids = await self._encode(given, is_part)
        except UnicodeEncodeError as error:
            what = f"is not Unicode text: half a surrogate pair at character {error.start + 1}"
            return (), [FieldViolation(path, what)]
        first = next((i for i, x in enumerate(ids) if not self._tokenizers.target.is_special(x)), 0)
        ids = _last(ids, limit, first)
        return ids, self._check_ids(ids, path, None, limit)

    async def _encode(self, text: str, is_part: bool) -> Ids:
        text.encode()  # the tokenizer's own error for a lone surrogate says nothing of it
        if not text:
            return ()
        source, target = self._tokenizers
        encode = target.encode_part if is_part else source.encode
        if len(text) <= MAX_INLINE_CHARS:
            return tuple(encode(text))
        return tuple(await asyncio.to_thread(encode, text))

    def _check_ids(self, ids: Ids, path: str, ids_path: str | None, limit: _Limit) -> Violations:
        if not ids:
            return [FieldViolation(path, "is empty; give at least one token")]
        if len(ids) > limit.most:
            return [FieldViolation(path, f"{len(ids)} tokens are {limit.problem}; shorten it")]
        return check_token_ids(
            ids,
            limit.vocab_size,
            lambda i, _: path if ids_path is None else f"{ids_path}[{i}]",
        )

    def _check_against_engine(self, params: SamplingParams) -> Violations:
        found = []
        most = self._config.max_num_seqs
        if params.num_sequences > most:
            what = f"{params.num_sequences} is more than the {most} sequences that run at once"
            found.append(FieldViolation(_field_of_num_sequences(params), what))
        if params.alignment and self._has_source and not self._contract.alignment:
            what = "this package gives no attention; export the model again, or leave it out"
            found.append(FieldViolation("output.alignment", what))
        most = self._contract.cache.max_len - 1  # the prompt or start token takes one position
        if params.min_new_tokens > most:
            what = f"{params.min_new_tokens} is more than {most}, the longest output of this model"
            found.append(FieldViolation("stopping.min_new_tokens", what))
        if params.controls.encoder_no_repeat_ngram and self._contract.source_vocab_size:
            what = "the source has other tokens than the output of this model; leave it out"
            found.append(FieldViolation("decoding.controls.encoder_no_repeat_ngram", what))
        closing = {*params.stop_token_ids, *params.controls.banned_tokens}
        if not params.ignore_eos:
            closing |= {*self._contract.eos_token_ids}
        if params.min_new_tokens > 0 and len(closing) >= self._contract.vocab_size:
            what = "every token is banned or would end the sequence before min_new_tokens"
            found.append(FieldViolation("stopping.token_ids", what))
        return found


def _last(ids: Ids, limit: _Limit, num_first: int = 0) -> Ids:
    """Return the last tokens of those that are too many, behind the first ones of a text."""
    if limit.kept is None or len(ids) <= (count := min(limit.kept, limit.most)):
        return ids
    num_first = min(num_first, count - 1)
    return ids[:num_first] + ids[num_first - count :]


def _read_only(params: SamplingParams) -> SamplingParams:
    """Return what is left of the options where nothing is generated."""
    return SamplingParams(
        max_new_tokens=0,
        prompt_logprobs=params.prompt_logprobs,
        prompt_token_ids=params.prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
    )


def _seed_of(params: SamplingParams) -> int:
    """Return the seed of a request's draws: the one given, else a random one; 0 without draws."""
    if params.strategy != "sampling":
        return 0
    return secrets.randbits(64) if params.seed is None else params.seed


def _field_of_num_sequences(params: SamplingParams) -> str:
    if params.strategy == "beam":
        return "decoding.beam.width"
    if params.num_sequences > params.num_outputs:
        return "decoding.sampling.best_of"
    return "decoding.num_outputs"
