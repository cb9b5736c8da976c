"""Plain decoding loops over a whole eager model, without a cache: the engine is held to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.package.manifest import Precision
from engine.requests.events import FinishReason
from engine.requests.request import SamplingParams
from exporter.models import TransformerConfig
from tests.parity.near import DECIDED, MAX_RATIO

TOLERANCE = 1e-4  # for a log-probability, if graphs are in float32


class Eager:
    """A copy of a model in float64, asked about whole sequences."""

    def __init__(self, model: nn.Module, precision: Precision = "fp32") -> None:
        """`precision` is that of the graphs which are held to it."""
        config = model.config
        assert isinstance(config, TransformerConfig)
        self.config = config
        self.has_source = config.architecture == "encoder-decoder"
        self._model = copy.deepcopy(model).double()
        self._half = copy.deepcopy(model).half() if precision == "fp16" else None

    def given(self, prompt: tuple[int, ...], prefix: tuple[int, ...] = ()) -> list[int]:
        """Return the decoder's tokens before the first generated one."""
        start = [self.config.bos_token_id] if self.has_source else [*prompt]
        return [*start, *prefix]

    @torch.inference_mode()
    def logits(self, prompt: tuple[int, ...], rows: list[list[int]]) -> Tensor:
        """Return the logits behind every position of rows of one length, [B, T, V]."""
        return self._logits(self._model, prompt, rows)

    def logprobs(self, prompt: tuple[int, ...], rows: list[list[int]]) -> Tensor:
        """Return their log-probabilities."""
        return torch.log_softmax(self.logits(prompt, rows), -1)

    def allowed(self, prompt: tuple[int, ...], row: list[int]) -> list[float]:
        """Return how far a log-probability of each position may be from the one here.

        It is three times as far in float16 as the eager model is off in that type: at the
        position's worst token, or on the average of the row, whose roundings may have missed one.
        """
        if self._half is None:
            return [TOLERANCE] * len(row)
        worst = self._half_errors(prompt, row)
        return (MAX_RATIO * worst.clamp(min=float(worst.mean()))).tolist()

    def undecided(self, prompt: tuple[int, ...], row: list[int]) -> float:
        """Return the lead of the best logit behind a row that the type of the graphs may turn."""
        if self._half is None:
            return 0.0
        worst = self._half_errors(prompt, row)
        return DECIDED * max(float(worst[-1]), float(worst.mean()))

    @torch.inference_mode()
    def _half_errors(self, prompt: tuple[int, ...], row: list[int]) -> Tensor:
        assert self._half is not None
        off = self._logits(self._half, prompt, [row])[0].double() - self.logits(prompt, [row])[0]
        return off.abs().amax(-1)  # (T,)

    def _logits(self, model: nn.Module, prompt: tuple[int, ...], rows: list[list[int]]) -> Tensor:
        tokens = torch.tensor(rows)
        if not self.has_source:
            return model(tokens)
        return model(torch.tensor([prompt]).expand(len(rows), -1), tokens)


class Found(NamedTuple):
    """A sequence that a beam search ended."""

    score: float
    tokens: tuple[int, ...]  # generated
    sum_logprob: float
    reason: FinishReason


class _Path(NamedTuple):
    tokens: tuple[int, ...]
    total: float


def beam_search(
    eager: Eager, prompt: tuple[int, ...], params: SamplingParams, prefix: tuple[int, ...] = ()
) -> list[Found]:
    """Return the best `num_outputs` sequences; the search goes on until no more can run."""
    given, width = eager.given(prompt, prefix), params.beam_width
    room = eager.config.max_target_len - len(given)
    most = min(room, params.max_new_tokens or room)
    ends = set() if params.ignore_eos else {eager.config.eos_token_id}
    paths, ended = [_Path((), 0.0)], []
    for length in range(1, most + 1):
        behind = eager.logprobs(prompt, [given + list(path.tokens) for path in paths])[:, -1]
        if length <= params.min_new_tokens:
            behind[:, [*ends, *params.stop_token_ids]] = -torch.inf
        totals = torch.tensor([[path.total] for path in paths]) + behind
        candidates = totals.flatten().sort(descending=True, stable=True).indices.tolist()
        running = []
        for rank, candidate in enumerate(candidates):
            beam, token = divmod(candidate, behind.shape[1])
            path = _Path((*paths[beam].tokens, token), float(totals[beam, token]))
            reason = _reason(token, ends, params, length, most)
            if reason is None:
                running.append(path)
            elif rank < width:
                penalty = ((5 + length) / 6) ** params.length_penalty
                ended.append(Found(path.total / penalty, path.tokens, path.total, reason))
            if len(running) == width or (rank >= width and length == most):
                break
        paths = running
    return sorted(ended, key=lambda found: -found.score)[: params.num_outputs]


def greedy_search(
    eager: Eager,
    prompt: tuple[int, ...],
    params: SamplingParams,
    prefix: tuple[int, ...] = (),
    adjust: Callable[[Tensor, list[int], int], Tensor] | None = None,
    followed: tuple[int, ...] = (),
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Return the generated tokens; `adjust(logits, tokens, num_given)` changes logits.

    The token of `followed` is taken where the type of the graphs may turn the choice.
    """
    given = eager.given(prompt, prefix)
    tokens = list(given)
    room = eager.config.max_target_len - len(given)
    most = min(room, params.max_new_tokens or room)
    ends = set() if params.ignore_eos else {eager.config.eos_token_id}
    reason = None
    for length in range(1, most + 1):
        behind = eager.logits(prompt, [tokens])[0, -1].clone()
        if adjust is not None:
            behind = adjust(behind, tokens, len(given))
        if length <= params.min_new_tokens:
            behind[[*ends, *params.stop_token_ids]] = -torch.inf
        best = int(behind.argmax())
        if length <= len(followed):
            other = followed[length - 1]
            if behind[best] - behind[other] <= eager.undecided(prompt, tokens):
                best = other
        tokens.append(best)
        reason = _reason(tokens[-1], ends, params, length, most)
        if reason is not None:
            break
    return tuple(tokens[len(given) :]), reason


def _reason(
    token: int, ends: set[int | None], params: SamplingParams, length: int, most: int
) -> FinishReason | None:
    if token in ends:
        return FinishReason.EOS
    if token in params.stop_token_ids:
        return FinishReason.STOP
    if length < most:
        return None
    return FinishReason.LENGTH if most == params.max_new_tokens else FinishReason.CONTEXT_FULL
