"""Decides, before every step, which sequences run and how many of their tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.admission import CompletionEstimates, least_new_tokens, max_cost
from engine.batch import Candidate, Draw, Encode, PrefillChunk, Sampled, ScheduledBatch
from engine.config import EngineConfig
from engine.errors import (
    CannotMeet,
    DeadlineExpired,
    EngineFailure,
    ExpiredInDecode,
    ExpiredInQueue,
    FieldViolation,
    InvalidRequest,
    QueueFull,
    TokenBudgetFull,
    TokenweirError,
)
from engine.metrics import DecayingRate
from engine.output import (
    AdmittedOutput,
    CutOutput,
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    TokenOutput,
)
from engine.package import GenerationContract
from engine.request import FinishReason, LoadSnapshot, WastedWork
from engine.sequence import Request, Sequence, TokenRequest
from engine.slots import SlotTable
from engine.waiting_queue import WaitingQueue

_RETRY_AFTER = (0.1, 30.0)  # seconds, least and most
_UNKNOWN_RETRY_AFTER = 1.0  # before anything was admitted


class Scheduler:
    """Owns the requests: those that wait, and those that have slots.

    A step takes the next token of every decoding sequence first, then sources and prompt chunks in
    order of arrival, no more than keeps those from waiting long. A prompt is cut at multiples of
    the chunk size from its start whatever else runs, and a single token is always computed together
    with the decoding ones: so the numbers that a request gets do not depend on the load.
    """

    def __init__(
        self,
        config: EngineConfig,
        contract: GenerationContract,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._contract = contract
        self._eos_ids = frozenset(contract.eos_token_ids)
        self._clock = clock
        self._tokens_rate = DecayingRate()
        self._admission_rate = DecayingRate(window=30.0)
        self._admitted_tokens_rate = DecayingRate(window=30.0)
        self._estimates = CompletionEstimates(config.max_num_seqs, config.prefill_chunk_size)
        self._step = 0
        self._wasted = WastedWork()
        self._step_started = 0.0
        self._step_size = (0, 0)  # decoding sequences, source and prompt tokens
        self._clear()

    def _clear(self) -> None:
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}
        self._prefilling: dict[int, Request] = {}  # those of the running ones, by arrival
        self._next_deadline = math.inf  # none of the requests has an earlier one
        self._slots = SlotTable(self._config.max_num_seqs)
        self._num_free_slots = self._config.max_num_seqs
        self._drawing: list[Sequence] = []  # of the step in flight, one a draw
        self._outputs: list[EngineOutput] = []
        self._refused = 0  # requests, and their tokens, since there was room
        self._refused_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting or self._outputs or self._slots.has_ops)

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is."""
        num_slots = self._config.max_num_seqs
        used = num_slots - self._num_free_slots
        return LoadSnapshot(
            running=used,
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            cache_used=used / num_slots,
            tokens_per_second=self._tokens_rate.at(self._clock()),
            wasted=self._wasted,
        )

    def tokens_per_second(self) -> float:
        """Return the rate of generated tokens as of now; any thread may ask."""
        return self._tokens_rate.at(self._clock())

    def add(self, source: TokenRequest) -> None:
        """Queue a request, or admit it at once; raise QueueFull, TokenBudgetFull or CannotMeet."""
        request = self._make_request(source)
        if self._waiting or len(request.sequences) > self._num_free_slots:
            self._refuse_if_full(request)
        if source.deadline is not None:
            self._refuse_if_too_late(request, source.deadline)
        self._waiting.add(request)
        if source.deadline is not None:
            self._next_deadline = min(self._next_deadline, source.deadline)
        self._admit()

    def abort(self, key: int) -> None:
        """Forget a request, without an output; nothing happens if it has ended already."""
        request = self._running.get(key)
        if request is not None:
            self._wasted += WastedWork(cancelled_tokens=request.num_computed)
            self._release(request)
        else:
            self._waiting.remove(key)
        self._admit()

    def finish_sequence(self, key: int, index: int) -> None:
        """End one sequence from outside (a stop string); the others of its request go on."""
        request = self._running.get(key)
        if request is None or request.sequences[index].is_finished:
            return
        self._finish(request.sequences[index])
        self._admit()

    def schedule(self) -> ScheduledBatch:
        """Return the next step, counting its tokens as computed."""
        self._step += 1
        self._step_started = self._clock()
        self._expire(self._step_started)
        self._admit()
        plan = self._plan_prefill()
        decoding = self._slots.decoding
        for sequence in decoding:
            sequence.num_computed += 1
            sequence.request.num_computed += 1
        self._step_size = (len(decoding), plan.num_tokens)
        self._count_step(decoding, plan)
        return ScheduledBatch(
            row_ops=self._slots.take_ops(),
            encodes=tuple(Encode(_row(s), s.request.source.prompt_ids) for s in plan.encoded),
            chunks=tuple(PrefillChunk(_row(s), ids, ends) for s, ids, ends in plan.chunks),
            decode_ids=tuple(sequence.tokens[-1] for sequence in decoding),
            draws=self._draws([*decoding, *(s for s, _, ends in plan.chunks if ends)]),
        )

    def update(
        self, sampled: Iterable[Sampled | tuple[Candidate, ...] | None]
    ) -> list[EngineOutput]:
        """Take in the tokens drawn for the last step; None fails the draw's request."""
        now = self._clock()
        num_decoding, num_read = self._step_size
        self._estimates.took_step(
            now - self._step_started, now, num_decoding=num_decoding, num_read=num_read
        )
        drawing, self._drawing = self._drawing, []
        for sequence, token in zip(drawing, sampled, strict=True):
            if sequence.is_finished:  # a sibling's draw has failed the request
                continue
            if token is None:
                self._fail(sequence.request, _no_token(sequence))
            else:
                assert isinstance(token, Sampled)  # candidates come of a BeamDraw only
                self._append(sequence, token, now)
        self._tokens_rate.add(len(drawing), now)
        self._admit()
        return self.take_outputs()

    def count_padding(self, num_tokens: int) -> None:
        """Take in how many tokens the last step computed for nobody."""
        self._wasted += WastedWork(padding_tokens=num_tokens)

    def take_outputs(self) -> list[EngineOutput]:
        """Hand over what there is to tell since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail_all(self, describe: Callable[[str], TokenweirError]) -> list[EngineOutput]:
        """Forget every request; return a failure for each, described by its request id."""
        num_computed = sum(request.num_computed for request in self._running.values())
        self._wasted += WastedWork(failed_tokens=num_computed)
        outputs = self._outputs + [
            FailedOutput(request.key, describe(request.source.request_id))
            for request in (*self._running.values(), *self._waiting)
        ]
        self._clear()
        return outputs

    def _plan_prefill(self) -> _PrefillPlan:
        """Give out the step's budget for sources and prompts, in order of arrival.

        The first piece always runs: a source longer than the budget would else wait for ever. So
        does a single token behind it: it is one row more of the decode call.
        """
        plan = _PrefillPlan()
        left = self._prefill_budget()
        for request in list(self._prefilling.values()):
            while (size := self._next_piece(request)) > 0:
                if size > max(1, left) and not plan.is_empty:
                    return plan
                left -= size
                plan.is_empty = False
                self._plan_piece(request, size, plan)
        return plan

    def _prefill_budget(self) -> int:
        """Return how many source and prompt tokens the step may take.

        While sequences decode, one chunk: their next tokens wait for the whole step, and so at most
        for one decode step and one chunk. But if more requests wait for their first token than
        sequences for their next one, all that those leave of the step: after a burst of arrivals,
        filling the batch soon gives more tokens than it delays.
        """
        num_decoding, config = self._slots.num_decoding, self._config
        left = config.max_num_batched_tokens - num_decoding
        if 0 < num_decoding >= len(self._prefilling):
            return min(left, config.prefill_chunk_size)
        return left

    def _next_piece(self, request: Request) -> int:
        """Return how many tokens the request computes next; 0 if it waits for its next draw."""
        if request.key not in self._prefilling:
            return 0
        if request.needs_encoding:
            return len(request.source.prompt_ids)
        return min(request.leader.num_left, self._config.prefill_chunk_size)

    def _plan_piece(self, request: Request, size: int, plan: _PrefillPlan) -> None:
        leader = request.leader
        if request.needs_encoding:
            request.needs_encoding = False
            request.num_computed += size
            plan.num_tokens += size
            plan.encoded.append(leader)
            return
        if leader.num_left == 1:
            self._slots.promote(leader)
            del self._prefilling[request.key]
            return
        ids = tuple(leader.tokens[leader.num_computed : leader.num_computed + size])
        leader.num_computed += size
        request.num_computed += size
        plan.num_tokens += size
        plan.chunks.append((leader, ids, leader.num_left == 0))
        if leader.num_left == 0:
            del self._prefilling[request.key]

    def _count_step(self, decoding: list[Sequence], plan: _PrefillPlan) -> None:
        in_prefill = [*plan.encoded, *(sequence for sequence, _, _ in plan.chunks)]
        members = dict.fromkeys([*decoding, *in_prefill])
        for sequence in members:
            sequence.request.took_part(self._step, len(members))

    def _draws(self, sequences: Iterable[Sequence]) -> tuple[Draw, ...]:
        """Return the draws from the logits rows of these sequences, in that order."""
        draws = []
        for row, computed in enumerate(sequences):
            request = computed.request
            source, params = request.source, request.source.params
            # The first tokens of a group are all drawn behind the prompt that its leader computed.
            group = request.sequences if request.first_token is None else [computed]
            for sequence in group:
                is_short = sequence.num_generated < params.min_new_tokens
                banned = request.never_before if is_short else ()
                position = len(sequence.tokens)
                draws.append(
                    Draw(
                        row,
                        params,
                        source.seed,
                        sequence.index,
                        position,
                        banned,
                        sequence.tokens,
                        sequence.num_prompt,
                        sequence.matcher,
                    )
                )
                self._drawing.append(sequence)
        return tuple(draws)

    def _append(self, sequence: Sequence, token: Sampled, now: float) -> None:
        request = sequence.request
        if request.first_token is None:
            request.first_token = now
            for other in request.sequences[1:]:
                self._slots.copy(sequence, other)
                other.num_computed = sequence.num_computed
        request.last_token = now
        sequence.tokens.append(token.token_id)
        sequence.num_generated += 1
        if sequence.matcher is not None:
            sequence.matcher.advance(token.token_id)
        reason, stop = self._finish_reason(sequence)
        self._outputs.append(
            TokenOutput(request.key, sequence.index, token.token_id, token.logprob, reason, stop)
        )
        if reason is not None:
            self._finish(sequence)
        elif _row(sequence) >= self._slots.num_decoding:
            self._slots.promote(sequence)

    def _finish_reason(self, sequence: Sequence) -> tuple[FinishReason | None, int | None]:
        params, token_id = sequence.request.source.params, sequence.tokens[-1]
        if token_id in self._eos_ids and not params.ignore_eos:
            return FinishReason.EOS, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
        if sequence.num_generated == params.max_new_tokens:
            return FinishReason.LENGTH, None
        if len(sequence.tokens) >= self._contract.cache.max_len:
            return FinishReason.CONTEXT_FULL, None
        return None, None

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence, and its request if it was the last."""
        self._end(sequence)
        request = sequence.request
        if request.is_finished:
            self._leave(request)
            self._outputs.append(FinishedOutput(request.key, request.timing()))

    def _fail(self, request: Request, error: TokenweirError) -> None:
        """End a request with an error, wherever it is."""
        if self._waiting.remove(request.key) is None:
            is_late, count = isinstance(error, DeadlineExpired), request.num_computed
            self._wasted += (
                WastedWork(expired_tokens=count) if is_late else WastedWork(failed_tokens=count)
            )
            self._release(request)
        self._outputs.append(FailedOutput(request.key, error))

    def _release(self, request: Request) -> None:
        self._leave(request)
        self._prefilling.pop(request.key, None)
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._end(sequence)

    def _leave(self, request: Request) -> None:
        del self._running[request.key]
        self._waiting.settle(request, request.num_computed)

    def _end(self, sequence: Sequence) -> None:
        sequence.is_finished = True
        self._num_free_slots += 1
        if sequence.row is not None:
            self._slots.release(sequence)

    def _make_request(self, source: TokenRequest) -> Request:
        params = source.params
        never_before = set(params.stop_token_ids)
        if not params.ignore_eos:
            never_before |= self._eos_ids
        start = self._contract.decoder_start_token_id
        tokens = source.prompt_ids if start is None else (start,)
        request = Request(source, tuple(never_before), needs_encoding=start is not None)
        request.sequences = [
            Sequence(request, i, list(tokens), len(tokens)) for i in range(params.num_sequences)
        ]
        if source.matcher is not None:
            for sequence in request.sequences:
                sequence.matcher = source.matcher.fork()
        request.max_cost = max_cost(request, self._contract)
        return request

    def _admit(self) -> None:
        """Give slots to the requests that are next, all of a group's at once."""
        num_admitted, now = 0, self._clock()
        while (request := self._waiting.head()) is not None:
            if len(request.sequences) > self._num_free_slots:
                break
            self._waiting.pop()
            num_admitted += len(request.sequences)
            self._admission_rate.add(1, now)
            self._admitted_tokens_rate.add(request.max_cost, now)
            self._refused = max(0, self._refused - 1)
            self._refused_tokens = max(0, self._refused_tokens - request.max_cost)
            self._num_free_slots -= len(request.sequences)
            self._slots.take(request.leader)
            request.admitted = request.last_token = now
            self._running[request.key] = self._prefilling[request.key] = request
            self._outputs.append(AdmittedOutput(request.key))
        self._estimates.queue_changed(
            now, num_admitted=num_admitted, is_waiting=len(self._waiting) > 0
        )

    def _expire(self, now: float) -> None:
        if now < self._next_deadline:
            return
        self._next_deadline = math.inf
        for request in [*self._running.values(), *self._waiting]:
            deadline = request.source.deadline
            if deadline is not None and deadline <= now:
                self._expire_request(request, now)
            elif deadline is not None:
                self._next_deadline = min(self._next_deadline, deadline)

    def _expire_request(self, request: Request, now: float) -> None:
        is_running = request.key in self._running
        if not (is_running and request.source.params.allow_partial):
            self._fail(request, self._expired(request, now))
            return
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._outputs.append(CutOutput(request.key, sequence.index, FinishReason.DEADLINE))
        self._release(request)
        self._outputs.append(FinishedOutput(request.key, request.timing()))

    def _expired(self, request: Request, now: float) -> TokenweirError:
        source = request.source
        after = f"{source.request_id}: its deadline passed after {now - source.arrival:.3f} s"
        if source.key in self._waiting:
            return ExpiredInQueue(
                f"{after} in the queue, with {len(self._running)} requests running"
            )
        made = sum(sequence.num_generated for sequence in request.sequences)
        return ExpiredInDecode(f"{after}, with {made} tokens generated")

    def _refuse_if_too_late(self, request: Request, deadline: float) -> None:
        source, time_left = request.source, deadline - self._clock()
        num_before = self._waiting.num_sequences_before(request)
        refusal = self._estimates.refusal(
            time_left=time_left,
            num_read=len(source.prompt_ids),
            num_new=least_new_tokens(request, self._contract),
            num_slots_to_free=max(0, num_before + len(request.sequences) - self._num_free_slots),
        )
        if refusal is None:
            return
        needs = f"{source.request_id}: it needs at least {refusal.own_time:.3f} s"
        if refusal.retry_after is None:
            raise CannotMeet(
                f"{needs} even with nothing waiting, and its deadline is in {time_left:.3f} s; "
                "allow more time, or ask for fewer tokens",
                None,
            )
        raise CannotMeet(
            f"{needs} and would wait about {refusal.queue_wait:.3f} s behind {num_before} "
            f"sequences, but its deadline is in {time_left:.3f} s; retry in "
            f"{refusal.retry_after:.1f} s, or allow more time",
            refusal.retry_after,
        )

    def _refuse_if_full(self, request: Request) -> None:
        source, config, num_tokens = request.source, self._config, request.max_cost
        if len(self._waiting) >= config.max_queue_size:
            self._refused += 1
            wait = _bounded(self._refused, self._admission_rate.at(self._clock()))
            raise QueueFull(
                f"{source.request_id}: {len(self._waiting)} requests are waiting, at most "
                f"{config.max_queue_size} may; retry in {wait:.1f} s",
                wait,
            )
        excess = self._waiting.num_tokens + num_tokens - config.max_waiting_tokens
        if self._waiting and excess > 0:  # one alone may be larger than the limit
            needed = excess + self._refused_tokens
            self._refused_tokens += num_tokens
            wait = _bounded(needed, self._admitted_tokens_rate.at(self._clock()))
            raise TokenBudgetFull(
                f"{source.request_id}: the waiting requests may come to "
                f"{self._waiting.num_tokens} tokens, with the {num_tokens} of this one more than "
                f"{config.max_waiting_tokens}; retry in {wait:.1f} s, or ask for fewer tokens "
                "(stopping.max_new_tokens)",
                wait,
            )


@dataclass(slots=True)
class _PrefillPlan:
    """Rows are read from it only when it is complete: giving it a piece may still move rows."""

    encoded: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, tuple[int, ...], bool]] = field(default_factory=list)
    is_empty: bool = True
    num_tokens: int = 0  # without single ones, which are decoded


def _no_token(sequence: Sequence) -> TokenweirError:
    """Return why no token can be chosen."""
    constraint, matcher = sequence.request.source.params.constraint, sequence.matcher
    if constraint is not None and matcher is not None and matcher.error is not None:
        path = f"decoding.constraint.{constraint.kind}"
        why = f"too complex to follow behind token {len(sequence.tokens)}: {matcher.error}"
        return InvalidRequest([FieldViolation(path, why)])
    return EngineFailure(
        f"{sequence.request.source.request_id}: the model's logits are not finite behind token "
        f"{len(sequence.tokens)}; the weights or the input drive it out of range"
    )


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None
    return sequence.row


def _bounded(count: float, rate: float) -> float:
    """Return the seconds until `count` more have been admitted, each refused one in its turn."""
    if rate == 0:
        return _UNKNOWN_RETRY_AFTER
    return min(max(count / rate, _RETRY_AFTER[0]), _RETRY_AFTER[1])
