"""Decides, before every step, which sequences run and how many of their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain

from engine.config import EngineConfig
from engine.errors import (
    DeadlineExpired,
    EngineFailure,
    FieldViolation,
    InvalidRequest,
    TokenweirError,
)
from engine.metrics import DecayingRate
from engine.package.manifest import GenerationContract
from engine.requests.events import FinishReason, PositionLogprobs
from engine.requests.load import LoadSnapshot, WastedWork
from engine.sampling.beam_search import BeamSearch
from engine.sampling.draws import Candidate, Sampled
from engine.sampling.logits import Floats
from engine.sampling.sampler import num_top
from engine.scheduling.attention import StepAttention, alignment_of
from engine.scheduling.beams import place_beams
from engine.scheduling.deadlines import Deadlines, expired_in_decode, expired_in_queue
from engine.scheduling.estimates import CompletionEstimates, cannot_meet, least_new_tokens, max_cost
from engine.scheduling.output import (
    AdmittedOutput,
    CutOutput,
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    HypothesisOutput,
    ScoresOutput,
    TokenOutput,
)
from engine.scheduling.prefill import PrefillQueue
from engine.scheduling.queue_limits import QueueLimits
from engine.scheduling.sequence import Request, Sequence, TokenRequest, row_of
from engine.scheduling.step import Chunk, PrefillPlan, plan_draws
from engine.scheduling.waiting_queue import WaitingQueue
from engine.slots.batch import Encode, ScheduledBatch
from engine.slots.prefixes import RowReuse
from engine.slots.sources import SourceTable
from engine.slots.table import SlotTable


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
        self._queue_limits = QueueLimits(config)
        self._estimates = CompletionEstimates(config.max_num_seqs, config.prefill_chunk_size)
        self._step = 0
        self._wasted = WastedWork()
        self._step_started = 0.0
        self._step_size = (0, 0)  # decoding sequences, source and prompt tokens
        self._clear()

    def _clear(self) -> None:
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}
        self._deadlines = Deadlines()
        self._slots = SlotTable(self._config.max_num_seqs)
        self._sources = SourceTable(self._config.max_num_seqs)
        self._prefill = PrefillQueue(self._config, self._slots)
        self._reuse = RowReuse(self._config, self._contract, self._slots, self._sources)
        self._num_free_slots = self._config.max_num_seqs
        self._drawing: list[Sequence | Request] = []  # of the step in flight, one a draw
        self._scoring: list[Chunk] = []  # one a score draw
        self._aligned: tuple[Sequence, ...] = ()  # those whose attention is wanted
        self._attention = StepAttention()  # of the step that is taken in
        self._outputs: list[EngineOutput] = []
        self._queue_limits.forget()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        has_ops = self._slots.has_ops or self._sources.has_ops
        return bool(self._running or self._waiting or self._outputs or has_ops)

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
            self._queue_limits.check(self._waiting, request, self._clock())
        if source.deadline is not None:
            self._refuse_if_too_late(request, source.deadline)
        self._waiting.add(request)
        self._deadlines.add(source.deadline)
        self._admit()

    def abort(self, key: int) -> None:
        """Forget a request, without an output; nothing happens if it has ended already."""
        request = self._running.get(key)
        if request is not None:
            self._wasted += WastedWork(cancelled_tokens=request.num_computed)
            request.ends_normally = False
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
        plan = self._prefill.plan_step()
        decoding = self._slots.decoding
        for sequence in decoding:
            sequence.num_computed += 1
            sequence.request.num_computed += 1
        self._step_size = (len(decoding), plan.num_tokens)
        self._count_step(decoding, plan)
        drawn = plan_draws(decoding, plan.chunks)
        self._drawing, self._scoring = drawn.drawing, drawn.scoring
        self._aligned = tuple(drawn.aligned)
        return ScheduledBatch(
            row_ops=(*self._slots.take_ops(), *self._sources.take_ops()),
            encodes=tuple(Encode(r.source_row, r.source.prompt_ids) for r in plan.encoded),
            chunks=tuple(chunk.at_row() for chunk in plan.chunks),
            decode_ids=tuple(sequence.tokens[-1] for sequence in decoding),
            draws=drawn.draws,
            decode_sources=self._sources_of(decoding),
            scores=drawn.scores,
            num_top=drawn.num_top,
            aligned=tuple(drawn.aligned.values()),
        )

    def update(
        self,
        sampled: Iterable[Sampled | tuple[Candidate, ...] | None],
        scored: Iterable[tuple[PositionLogprobs, ...] | None] = (),
        alignment: Floats | None = None,
    ) -> list[EngineOutput]:
        """Take in what was drawn and scored in the last step; None fails the draw's request.

        `alignment` is that of StepLogits.
        """
        now = self._clock()
        num_decoding, num_read = self._step_size
        self._estimates.took_step(
            now - self._step_started, now, num_decoding=num_decoding, num_read=num_read
        )
        self._take_scores(scored, now)
        aligned, self._aligned = self._aligned, ()
        self._attention = StepAttention(aligned, alignment)
        drawing, self._drawing = self._drawing, []
        num_tokens = 0
        for drawn, token in zip(drawing, sampled, strict=True):
            request = drawn if isinstance(drawn, Request) else drawn.request
            if request.key not in self._running:  # another of its draws has failed it
                continue
            if token is None:
                self._fail(request, _no_token(request))
            elif isinstance(drawn, Request):
                assert not isinstance(token, Sampled)
                num_tokens += self._advance_search(drawn, token, now)
            else:
                assert isinstance(token, Sampled)
                num_tokens += 1
                self._append(drawn, token, now)
        self._attention = StepAttention()  # else it would keep sequences that have ended
        self._tokens_rate.add(num_tokens, now)
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

    def drain(self, describe: Callable[[str], TokenweirError]) -> list[EngineOutput]:
        """End every request: with what there is where that is allowed, else as `fail_all` does."""
        for request in list(self._running.values()):
            if request.source.params.allow_partial:
                self._cut(request, FinishReason.DRAINED)
        return self.fail_all(describe)

    def _count_step(self, decoding: list[Sequence], plan: PrefillPlan) -> None:
        in_prefill = [request.leader for request in plan.encoded]
        in_prefill += [chunk.sequence for chunk in plan.chunks]
        members = dict.fromkeys([*decoding, *in_prefill])
        for sequence in members:
            sequence.request.took_part(self._step, len(members))

    def _sources_of(self, decoding: list[Sequence]) -> tuple[int, ...]:
        if self._contract.cross_cache is None:
            return ()
        return tuple(sequence.request.source_row for sequence in decoding)

    def _take_scores(
        self, scored: Iterable[tuple[PositionLogprobs, ...] | None], now: float
    ) -> None:
        scoring, self._scoring = self._scoring, []
        for chunk, positions in zip(scoring, scored, strict=True):
            request = chunk.sequence.request
            if request.key not in self._running:  # another of its chunks has failed it
                continue
            if positions is None:
                self._fail(request, _no_token(request))
                continue
            self._outputs.append(ScoresOutput(request.key, positions))
            if chunk.ends_target:
                self._begin_decoding(request, now)
                request.last_token = now
                self._finish(request.leader)

    def _begin_decoding(self, request: Request, now: float) -> None:
        """Note the first token, which shows that what it was computed from is finite."""
        request.first_token = now
        if self._contract.cross_cache is not None:
            self._sources.mark_ready(request.source_row)

    def _append(self, sequence: Sequence, token: Sampled, now: float) -> None:
        request = sequence.request
        if request.first_token is None:
            self._begin_decoding(request, now)
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
            TokenOutput(
                request.key,
                sequence.index,
                token.token_id,
                token.logprob,
                reason,
                stop,
                token.position,
                self._attention.of(sequence),
            )
        )
        if reason is not None:
            self._finish(sequence)
        elif row_of(sequence) >= self._slots.num_decoding:
            self._slots.promote(sequence)

    def _advance_search(
        self, request: Request, candidates: tuple[Candidate, ...], now: float
    ) -> int:
        """Take the next tokens of a beam search in; return how many were computed."""
        assert request.search is not None
        if request.first_token is None:
            self._begin_decoding(request, now)
        request.last_token = now
        self._attention.keep_beams(request)
        step = request.search.advance(candidates)
        if request.search.is_done:
            self._finish_search(request, request.search)
        else:
            place_beams(self._slots, request, step)
        return len(step.parents) + step.num_finished

    def _finish_search(self, request: Request, search: BeamSearch) -> None:
        returned = search.hypotheses()
        if not returned:
            self._fail(request, EngineFailure(_nothing_allowed(request)))
            return
        self._outputs += [
            HypothesisOutput(request.key, i, hypothesis, alignment_of(request, hypothesis))
            for i, hypothesis in enumerate(returned)
        ]
        request.ends_normally = True
        self._release(request)
        self._tell_finished(request, search.num_discarded)

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
        request = sequence.request
        request.ends_normally = True
        self._end(sequence)
        if request.is_finished:
            self._leave(request)
            self._tell_finished(request)

    def _tell_finished(self, request: Request, num_discarded: int = 0) -> None:
        self._outputs.append(
            FinishedOutput(request.key, request.timing(), num_discarded, request.num_cached)
        )

    def _fail(self, request: Request, error: TokenweirError) -> None:
        """End a request with an error, wherever it is."""
        if self._waiting.remove(request.key) is None:
            is_late, count = isinstance(error, DeadlineExpired), request.num_computed
            self._wasted += (
                WastedWork(expired_tokens=count) if is_late else WastedWork(failed_tokens=count)
            )
            request.ends_normally = False
            self._release(request)
        self._outputs.append(FailedOutput(request.key, error))

    def _release(self, request: Request) -> None:
        self._leave(request)
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._end(sequence)

    def _leave(self, request: Request) -> None:
        del self._running[request.key]
        self._prefill.remove(request)
        self._waiting.settle(request, request.num_computed)
        self._reuse.release_source(request)

    def _end(self, sequence: Sequence) -> None:
        sequence.is_finished = True
        self._num_free_slots += 1
        self._reuse.release_row(sequence)

    def _make_request(self, source: TokenRequest) -> Request:
        params = source.params
        never_before = set(params.stop_token_ids)
        if not params.ignore_eos:
            never_before |= self._eos_ids
        start = self._contract.decoder_start_token_id
        given = source.prompt_ids if start is None else (start,)
        tokens = (*given, *source.target_ids)
        request = Request(
            source,
            tuple(never_before),
            needs_encoding=start is not None,
            num_top=max(num_top(params), params.prompt_logprobs or 0),
        )
        request.sequences = [
            Sequence(request, i, list(tokens), len(tokens)) for i in range(params.num_sequences)
        ]
        if source.matcher is not None:
            for sequence in request.sequences:
                sequence.matcher = source.matcher.fork()
        request.max_cost = max_cost(request, self._contract)
        if params.strategy == "beam":
            room = self._contract.cache.max_len - len(tokens)
            request.beams = [request.leader]
            request.search = BeamSearch(
                params,
                eos_ids=self._eos_ids,
                max_new_tokens=min(room, params.max_new_tokens or room),
                text=source.text,
            )
            request.num_top = max(request.num_top, request.search.num_candidates)
        return request

    def _admit(self) -> None:
        """Give slots to the requests that are next, all of a group's at once."""
        num_admitted, now = 0, self._clock()
        while (request := self._waiting.head()) is not None:
            if len(request.sequences) > self._num_free_slots:
                break
            self._waiting.pop()
            num_admitted += len(request.sequences)
            self._queue_limits.admitted(request, now)
            self._num_free_slots -= len(request.sequences)
            self._reuse.place(request, self._running.values())
            request.admitted = request.last_token = now
            self._running[request.key] = request
            self._prefill.add(request)
            self._outputs.append(AdmittedOutput(request.key))
        self._estimates.queue_changed(
            now, num_admitted=num_admitted, is_waiting=len(self._waiting) > 0
        )

    def _expire(self, now: float) -> None:
        for request in self._deadlines.expired(chain(self._running.values(), self._waiting), now):
            self._expire_request(request, now)

    def _expire_request(self, request: Request, now: float) -> None:
        if request.key in self._waiting:
            self._fail(request, expired_in_queue(request, now, num_running=len(self._running)))
            return
        if not request.source.params.allow_partial:
            self._fail(request, expired_in_decode(request, now))
            return
        self._cut(request, FinishReason.DEADLINE)

    def _cut(self, request: Request, reason: FinishReason) -> None:
        """End a request that runs with what there is."""
        if request.search is not None:
            request.search.close(reason)
            self._finish_search(request, request.search)
            return
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._outputs.append(CutOutput(request.key, sequence.index, reason))
        request.ends_normally = True
        self._release(request)
        self._tell_finished(request)

    def _refuse_if_too_late(self, request: Request, deadline: float) -> None:
        source, time_left = request.source, deadline - self._clock()
        num_before = self._waiting.num_sequences_before(request)
        num_cached = self._reuse.num_cached(request, self._running.values())
        refusal = self._estimates.refusal(
            time_left=time_left,
            num_read=len(source.prompt_ids) - num_cached,
            num_new=least_new_tokens(request, self._contract),
            num_slots_to_free=max(0, num_before + len(request.sequences) - self._num_free_slots),
        )
        if refusal is not None:
            raise cannot_meet(source, refusal, time_left=time_left, num_before=num_before)


def _no_token(request: Request) -> TokenweirError:
    """Return why no token can be chosen."""
    constraint = request.source.params.constraint
    length = max(len(sequence.tokens) for sequence in request.sequences)
    for sequence in request.sequences:
        if constraint is not None and sequence.matcher is not None and sequence.matcher.error:
            path = f"decoding.constraint.{constraint.kind}"
            why = f"too complex to follow behind token {length}: {sequence.matcher.error}"
            return InvalidRequest([FieldViolation(path, why)])
    return EngineFailure(
        f"{request.source.request_id}: the model's logits are not finite behind token {length}; "
        "the weights or the input drive it out of range"
    )


def _nothing_allowed(request: Request) -> str:
    return (
        f"{request.source.request_id}: beam search found no sequence that the request's constraint "
        "and bans allow; loosen them"
    )
