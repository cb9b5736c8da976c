"""Says which tokens may not come at a place of a sequence, and which one must."""

from __future__ import annotations

from collections.abc import Sequence

from engine.requests.request import LogitControls, SamplingParams
from engine.sampling.stop_rule import StopRule

_Continuations = dict[int, dict[tuple[int, ...], tuple[int, ...]]]


class TokenRules:
    """A request's rules for single tokens and for runs of them; logits do not matter here."""

    def __init__(
        self, params: SamplingParams, stop_rule: StopRule, prompt_ids: Sequence[int]
    ) -> None:
        """`prompt_ids` are what the encoder reads, or the prompt of a model without one."""
        controls = params.controls
        self._begin, self._end = params.forced_begin, params.forced_end
        self._last = stop_rule.max_new_tokens - 1
        self._min_new_tokens = params.min_new_tokens
        self._banned = controls.banned_tokens
        self._banned_while_short = (*controls.banned_tokens, *stop_rule.token_ids)
        self._banned_at_begin = controls.begin_banned_tokens
        self._banned_behind = _continuations(controls, prompt_ids)

    @property
    def is_empty(self) -> bool:
        """Whether every token may come anywhere."""
        bans = (self._banned, self._banned_at_begin, self._banned_behind)
        return not (any(bans) or self._min_new_tokens or self._begin) and self._end is None

    def forced(self, num_generated: int) -> int | None:
        """Return the token that must come behind so many generated ones; None: any may."""
        if num_generated < len(self._begin):
            return self._begin[num_generated]
        return self._end if num_generated == self._last else None

    def banned(self, tokens: Sequence[int], num_generated: int) -> tuple[int, ...]:
        """Return the tokens that may not come behind `tokens`, of which so many were generated."""
        is_short = num_generated < self._min_new_tokens
        banned = self._banned_while_short if is_short else self._banned
        if num_generated == len(self._begin):
            banned += self._banned_at_begin
        for size, continuations in self._banned_behind.items():
            banned += continuations.get(tuple(tokens[len(tokens) - size :]), ())
        return banned


def token_rules(
    params: SamplingParams, stop_rule: StopRule, prompt_ids: Sequence[int]
) -> TokenRules | None:
    """Return the rules of a request; None if it has none, so that they cost nothing."""
    rules = TokenRules(params, stop_rule, prompt_ids)
    return None if rules.is_empty else rules


def _continuations(controls: LogitControls, prompt_ids: Sequence[int]) -> _Continuations:
    """Return the tokens that may not follow a run of tokens, by the length of the run."""
    found: _Continuations = {}
    size = controls.encoder_no_repeat_ngram
    num_ngrams = len(prompt_ids) - size + 1 if size else 0
    ngrams = {tuple(prompt_ids[i : i + size]): None for i in range(num_ngrams)}
    for *run, last in (*controls.banned_sequences, *ngrams):
        behind = found.setdefault(len(run), {})
        behind[tuple(run)] = (*behind.get(tuple(run), ()), last)
    return found
