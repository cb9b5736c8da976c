"""Decides, before every step, which sequences run and how many of their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain

from engine.config import EngineConfig
from engine.errors import DeadlineExpired, TokenweirError
from engine.metrics import DecayingRate
from engine.package.manifest import GenerationContract
from engine.requests.events import FinishReason
from engine.requests.load import LoadSnapshot, WastedWork
from engine.sampling.beam_search import BeamSearch
from engine.sampling.draws import Candidate, Sampled
from engine.sampling.plain import PlainChoices
from engine.scheduling.arrival import make_request
from engine.scheduling.attention import StepAttention, alignment_of
from engine.scheduling.beams import continue_beams
from engine.scheduling.deadlines import Deadlines, expired
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.delta_pacing import DeltaPacing
from engine.scheduling.estimates import CompletionEstimates, cannot_meet, least_new_tokens
from engine.scheduling.failures import no_room, no_token, nothing_allowed
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.output import (
    AdmittedOutput,
    CutOutput,
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    HypothesisOutput,
    ScoresOutput,
)
from engine.scheduling.prefill import PrefillPlan, PrefillQueue
from engine.scheduling.queue_limits import QueueLimits
from engine.scheduling.sequence import Request, Sequence, TokenRequest
from engine.scheduling.step import Parts, Step, StepResult, plan_draws
from engine.scheduling.waiting_queue import WaitingQueue
from engine.text.tokenizer import Tokenizer


class Scheduler:
    """Owns the requests: the waiting and the running ones.

    A step takes the next token of every decoding sequence first, then sources and prompt chunks in
    order of arrival, no more than keeps those from waiting long. A prompt is cut at multiples of
    the chunk size from its start whatever else runs, and a single token is always computed together
    with the decoding ones: so the numbers that a request gets do not depend on the load.

    If the cache has no room for the next token of a sequence, the youngest request of the lowest
    priority waits again. Its output so far stands, and all its tokens are computed again, in
    chunks; draws depend on positions only, and so go on as they would have.
    """

    def __init__(
        self,
        config: EngineConfig,
        contract: GenerationContract,
        cache: KVCache,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tokenizer` makes the text in which stop strings are found."""
        self._config = config
        self._contract = contract
        self._cache = cache
        self._tokenizer = tokenizer
        self._clock = clock
        self._tokens_rate = DecayingRate()
        self._queue_limits = QueueLimits(config)
        self._estimates = CompletionEstimates(config.max_num_seqs, config.prefill_chunk_size)
        self._pacing = DeltaPacing()
        self._num_scheduled = 0  # steps
        self._num_taken_in = 0  # steps
        self._last_taken_in = 0.0  # when, on the clock
        self._wasted = WastedWork()
        self._clear()

    def _clear(self) -> None:
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}
        self._num_sequences = 0  # sequences of running requests that have not ended
        self._decoding: dict[Sequence, None] = {}  # those that compute one token a step
        self._group: DecodeGroup | None = None  # all of them in order; None: they have changed
        self._groups: dict[bool, DecodeGroup] = {}  # the last of all of them, and of some
        self._prefill = PrefillQueue(self._config, self._cache)
        self._deadlines = Deadlines()
        self._outputs: list[EngineOutput] = []
        self._num_taken_in = self._num_scheduled  # nothing of before will come
        self._queue_limits.forget()
        self._cache.clear()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.has_requests or self._cache.has_changes

    @property
    def has_requests(self) -> bool:
        """Whether a step would do anything for somebody, and not only put memory in order."""
        return bool(self._running or self._waiting or self._outputs)

    @property
    def _num_free(self) -> int:
        """How many more sequences may run."""
        return self._config.max_num_seqs - self._num_sequences

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is as of now; any thread may ask."""
        return LoadSnapshot(
            running=self._num_sequences,
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            cache_used=self._cache.used,
            tokens_per_second=self._tokens_rate.at(self._clock()),
            wasted=self._wasted,
        )

    def add(self, asked: TokenRequest) -> None:
        """Queue a request, or admit it at once; raise QueueFull, TokenBudgetFull or CannotMeet."""
        request = make_request(asked, self._contract, self._tokenizer)
        if request.needs_no_step:
            self._answer_at_once(request)
            return
        if self._waiting or request.num_unfinished > self._num_free:
            self._queue_limits.check(self._waiting, request, self._clock())
        if asked.deadline is not None:
            self._refuse_if_too_late(request, asked.deadline)
        self._waiting.add(request)
        self._pacing.ask(asked.deltas)
        self._deadlines.add(asked.deadline)
        self._admit()

    def abort(self, key: int) -> None:
        """Forget a request, without an output; nothing happens if it has ended already."""
        request = self._running.get(key) or self._waiting.get(key)
        if request is not None:
            self._wasted += WastedWork(cancelled_tokens=request.num_computed)
            self._remove(request, sound=False)
        self._admit()

    def schedule(self) -> Step:
        """Return the next step, counting its tokens as computed.

        Steps are to be taken in by `update` in their order; until then others may be scheduled,
        with what does not depend on their result.
        """
        return self._schedule(is_ahead=False)

    def schedule_ahead(self) -> Step | None:
        """Return the step behind the one under way, which computes the plain draws of that.

        Sequences whose draws are others wait until that one is taken in. None: there is nothing to
        compute before.
        """
        return self._schedule(is_ahead=True) if self._may_run_ahead() else None

    def _schedule(self, *, is_ahead: bool) -> Step:
        self._num_scheduled += 1
        started = self._clock()
        self._expire(started)
        self._admit()
        ready = self._ready_to_decode(is_ahead)
        plan = self._prefill.plan_step(len(ready))
        if plan.starting:
            self._decoding |= dict.fromkeys(plan.starting)
            ready = [*ready, *plan.starting]
            self._forget_groups()
        if plan.lacks_room and plan.is_empty and not ready:
            self._make_one_wait()  # nothing else would ever give its room back
        group, future_tokens = self._grouped(ready, is_ahead)
        return self._make_step(started, group, future_tokens, plan)

    def update(self, step: Step, result: StepResult) -> list[EngineOutput]:
        """Take in the result of a step; return its outputs and all others that are pending."""
        now = self._clock()
        self._num_taken_in = step.number
        began, self._last_taken_in = max(step.started, self._last_taken_in), now
        self._estimates.took_step(
            now - began,
            now,
            num_decoding=len(step.parts.decoding),
            num_read=step.num_read,
        )
        if result.num_padding:
            self._wasted += WastedWork(padding_tokens=result.num_padding)
        self._take_scores(step, result, now)
        self._tokens_rate.add(self._take_choices(step, result, now), now)
        self._emit(self._pacing.due(step.parts.decoding, now))
        self._admit()
        return self.take_outputs()

    def take_outputs(self) -> list[EngineOutput]:
        """Hand over the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail_all(self, describe: Callable[[str], TokenweirError]) -> list[EngineOutput]:
        """Forget every request; return a failure for each, described by its request id."""
        for request in self._all():
            self._outputs += request.emit()
            request.end()
        num_computed = sum(request.num_computed for request in self._running.values())
        self._wasted += WastedWork(failed_tokens=num_computed)
        outputs = self._outputs + [
            FailedOutput(request.key, describe(request.asked.request_id)) for request in self._all()
        ]
        self._clear()
        return outputs

    def drain(self, describe: Callable[[str], TokenweirError]) -> list[EngineOutput]:
        """End every request: with what there is where that is allowed, else as `fail_all` does."""
        for request in list(self._all()):
            if request.may_be_cut:
                self._cut(request, FinishReason.DRAINED)
        return self.fail_all(describe)

    def problems(self) -> list[str]:
        """Return what does not fit together among the requests and their room: nothing ever."""
        found = self._cache.problems(self._running.values())
        count = sum(request.num_unfinished for request in self._running.values())
        if count != self._num_sequences:
            found.append(f"{count} sequences run, and {self._num_sequences} are counted")
        found += [
            f"{sequence.request.asked.request_id}: sequence {sequence.index} decodes, but ended"
            for sequence in self._decoding
            if sequence.is_finished or sequence.request.key not in self._running
        ]
        return found

    def snapshot(self) -> object | None:
        """Return what memory holds, see KVCache; None while it is still to be changed."""
        return None if self._cache.has_changes else self._cache.snapshot()

    def _all(self) -> Iterator[Request]:
        return chain(self._running.values(), self._waiting)

    # Admission and preemption

    def _admit(self) -> None:
        """Give room to the requests that are next, to all sequences of a group at once."""
        num_admitted, now = 0, self._clock()
        while (request := self._waiting.head()) is not None:
            if request.num_unfinished > self._num_free:
                break
            num_cached = self._cache.admit(request)
            if num_cached is not None:
                num_admitted += request.num_unfinished
                self._begin(self._waiting.pop(), num_cached, now)
            elif self._running:
                break
            else:
                self._fail(request, no_room(request))
        self._estimates.queue_changed(
            now, num_admitted=num_admitted, is_waiting=len(self._waiting) > 0
        )

    def _begin(self, request: Request, num_cached: int, now: float) -> None:
        self._num_sequences += request.num_unfinished
        self._running[request.key] = request
        self._prefill.add(request)
        if request.needs_encoding:
            request.needs_encoding = num_cached == 0
        else:
            request.reading[0].num_computed = num_cached
        if request.admitted is None:
            request.admitted = request.last_token = now
            request.num_cached = num_cached
            self._queue_limits.admitted(request, now)
            self._outputs.append(AdmittedOutput(request.key))

    def _ready_to_decode(self, is_ahead: bool) -> list[Sequence]:
        """Return the sequences that compute their next token now, each with room for it."""
        if self._group is not None and self._is_all_ready(self._group, is_ahead):
            return list(self._group.sequences)
        decoding, grow = self._decoding, self._cache.grow
        ready, num_decoding = [], len(decoding)
        for sequence in tuple(decoding):
            if _is_ready(sequence, is_ahead) and sequence in decoding:
                if grow(sequence, 1) or self._make_room(sequence):
                    ready.append(sequence)
        if len(decoding) < num_decoding:  # some had to make room for others
            ready = [sequence for sequence in ready if sequence in decoding]
        return ready

    def _is_all_ready(self, group: DecodeGroup, is_ahead: bool) -> bool:
        """Say whether all may decode that did so in the last step that was scheduled."""
        if is_ahead:
            return group.num_steps_left > 0 and not group.others
        return self._num_scheduled == self._num_taken_in + 1  # nothing is being drawn

    def _may_run_ahead(self) -> bool:
        """Say whether some may decode before what is under way is taken in."""
        if self._group is not None and self._is_all_ready(self._group, is_ahead=True):
            return True
        return any(_is_ready(one, is_ahead=True) for one in self._decoding)

    def _grouped(
        self, ready: list[Sequence], is_ahead: bool
    ) -> tuple[DecodeGroup, tuple[int, ...]]:
        """Return these sequences in the order in which they decode, and their future tokens."""
        group = self._group
        if group is not None and len(ready) == len(group.sequences):
            return group, tuple(range(len(ready))) if is_ahead else ()
        arranged = tuple(self._cache.arrange(ready))
        future_tokens: tuple[int, ...] = ()
        if is_ahead:
            future_tokens = tuple([x.plain_index if x.num_drawing else -1 for x in arranged])
        is_whole = len(arranged) == len(self._decoding)
        group = self._groups.get(is_whole)
        if group is None or group.sequences != arranged:
            group = self._groups[is_whole] = DecodeGroup(arranged, self._contract.vocab_size)
        group.number_sequences()
        self._group = group if is_whole and self._cache.has_room_for_all else None
        return group, future_tokens

    def _forget_groups(self) -> None:
        """Forget the groups that decode together: their sequences or draws have changed."""
        self._group = None
        self._groups.clear()

    def _make_room(self, sequence: Sequence) -> bool:
        """Make room for the next token of a sequence; False: it has to wait itself."""
        while self._make_one_wait() and sequence in self._decoding:
            if self._cache.grow(sequence, 1):
                return True
        return False

    def _make_one_wait(self) -> bool:
        """Let the youngest request of the lowest priority wait again; False: there is none.

        A request in a step under way cannot be chosen. A request that is alone fails.
        """
        requests = [r for r in self._running.values() if r.last_step <= self._num_taken_in]
        if not requests:
            return False
        request = max(requests, key=lambda request: (request.asked.priority, request.key))
        if len(self._running) == 1:
            self._fail(request, no_room(request))
        else:
            self._preempt(request)
        return True

    def _preempt(self, request: Request) -> None:
        self._wasted += WastedWork(preempted_tokens=request.num_computed)
        self._leave_batch(request, sound=True)
        request.start_again(needs_encoding=self._contract.cross_cache is not None)
        self._waiting.put_back(request)

    def _make_step(
        self, started: float, group: DecodeGroup, future_tokens: tuple[int, ...], plan: PrefillPlan
    ) -> Step:
        group.num_steps_left -= 1
        for sequence in group.sequences:
            sequence.num_computed += 1
            sequence.request.num_computed += 1
        self._count_step(group.sequences, plan)
        drawn = plan_draws(group, plan.chunks)
        parts = Parts(
            tuple(plan.encoding),
            tuple(plan.chunks),
            group.sequences,
            tuple([sequence.tokens[-1] for sequence in group.sequences]),
            drawn.num_top,
            tuple(drawn.aligned.values()),
            future_tokens,
        )
        return Step(
            number=self._num_scheduled,
            started=started,
            num_read=plan.num_read,
            parts=parts,
            slot_mapping=self._cache.slot_mapping(parts),
            sampling_batch=group.sampling_batch(),
            plain=group.plain,
            begins=group.begins,
            draws=tuple(drawn.draws),
            drawing=tuple(drawn.drawing),
            scores=tuple(drawn.scores),
            scoring=tuple(drawn.scoring),
            aligned=tuple(drawn.aligned),
        )

    def _count_step(self, decoding: tuple[Sequence, ...], plan: PrefillPlan) -> None:
        reading = [request.leader for request in plan.encoding]
        reading += [chunk.sequence for chunk in plan.chunks]
        members = dict.fromkeys([*decoding, *reading]) if reading else decoding
        number, size = self._num_scheduled, len(members)
        for sequence in members:
            sequence.request.took_part(number, size)

    # Results of a step

    def _take_scores(self, step: Step, result: StepResult, now: float) -> None:
        for chunk, positions in zip(step.scoring, result.scores, strict=True):
            request = chunk.sequence.request
            if request.key not in self._running:  # it has ended meanwhile
                continue
            if positions is None:
                self._fail(request, no_token(request))
                continue
            self._outputs.append(ScoresOutput(request.key, positions))
            assert request.score_from is not None
            request.score_from += len(positions)
            if chunk.ends_target:
                self._first_token(request, now)
                request.last_token = now
                self._cut(request, FinishReason.LENGTH)

    def _take_choices(self, step: Step, result: StepResult, now: float) -> int:
        """Take in what was drawn; return how many tokens that is."""
        attention = StepAttention(step.aligned, result.alignment)
        num_tokens = self._take_plain(step, result.plain, now)
        for drawn, choice in zip(step.drawing, result.choices, strict=True):
            request = drawn.request if isinstance(drawn, Sequence) else drawn
            if request.key not in self._running or drawn.is_finished:  # it has ended meanwhile
                continue
            if choice is None:
                self._fail(request, no_token(request))
            elif isinstance(drawn, Sequence):
                assert isinstance(choice, Sampled)
                num_tokens += 1
                self._append(drawn, choice, attention, now)
            else:
                assert not isinstance(choice, Sampled)
                num_tokens += self._advance_search(drawn, choice, attention, now)
        return num_tokens

    def _take_plain(self, step: Step, choices: PlainChoices, now: float) -> int:
        """Take in what was drawn for plain sequences.

        Little is done for each: this is what a token costs.
        """
        for i in choices.failed:
            if not step.plain[i].is_finished:
                self._fail(step.plain[i].request, no_token(step.plain[i].request))
        num_tokens = 0
        for sequence, token_id, logprob in zip(
            step.plain, choices.token_ids, choices.logprobs, strict=True
        ):
            if sequence.is_finished:  # it has ended meanwhile
                continue
            num_tokens += 1
            request = sequence.request
            if request.first_token is None:
                self._first_token(request, now)
            request.last_token = now
            sequence.tokens.append(token_id)
            sequence.num_generated += 1
            sequence.sum_logprob += logprob
            if (
                sequence.num_generated >= sequence.check_at
                or token_id in request.stop_rule.token_ids
            ):
                self._end_or_emit(sequence, token_id)
        return num_tokens

    def _first_token(self, request: Request, now: float) -> None:
        """Note the first token, which shows that what it was computed from is finite."""
        request.first_token = now
        self._forget_groups()  # it may draw plainly from now on
        self._cache.share(request)

    def _append(
        self, sequence: Sequence, token: Sampled, attention: StepAttention, now: float
    ) -> None:
        request = sequence.request
        if request.first_token is None:
            self._first_token(request, now)
            for other in request.sequences[1:]:
                self._cache.fork(sequence, other)
                other.num_computed = sequence.num_computed
        request.last_token = now
        sequence.take(token.token_id)
        sequence.sum_logprob += token.logprob
        if token.position is not None:
            sequence.positions.append(token.position)
        if found := attention.of(sequence):
            sequence.attention.append(found)
        if sequence not in self._decoding:
            self._decoding[sequence] = None
            self._forget_groups()
        self._end_or_emit(sequence, token.token_id)

    def _end_or_emit(self, sequence: Sequence, token_id: int) -> None:
        """End a sequence if it ends with this token, and emit its tokens if they are enough."""
        end = sequence.request.stop_rule.end_of(token_id, sequence.num_generated, sequence.text)
        if end is not None or sequence.num_generated >= sequence.emit_at:
            self._outputs.append(sequence.emit(end))
        if end is not None:
            self._finish(sequence)

    def _emit(self, sequences: tuple[Sequence, ...]) -> None:
        """Emit the tokens of those whose delta is due, if they are enough."""
        for sequence in sequences:
            request = sequence.request
            if request.is_paced and not sequence.is_finished and request.search is None:
                if sequence.num_pending >= request.tokens_at_once:
                    self._outputs.append(sequence.emit())

    def _advance_search(
        self,
        request: Request,
        candidates: tuple[Candidate, ...],
        attention: StepAttention,
        now: float,
    ) -> int:
        """Take the next tokens of a beam search in; return how many were computed."""
        assert request.search is not None
        if request.first_token is None:
            self._first_token(request, now)
        request.last_token = now
        attention.keep_beams(request)
        step = request.search.advance(candidates)
        if request.search.is_done:
            self._finish_search(request, request.search)
        else:
            for sequence in continue_beams(self._cache, request, step):
                self._decoding.pop(sequence, None)
            self._decoding |= dict.fromkeys(request.beams)
            self._group = None  # forks have rows of their own
        return len(step.parents) + step.num_finished

    # How requests end

    def _answer_at_once(self, request: Request) -> None:
        request.admitted = request.last_token = self._clock()
        self._outputs += [
            AdmittedOutput(request.key),
            CutOutput(request.key, request.leader.index, FinishReason.LENGTH),
            FinishedOutput(request.key, request.timing()),
        ]

    def _finish_search(self, request: Request, search: BeamSearch) -> None:
        returned = search.hypotheses()
        if not returned:
            self._fail(request, nothing_allowed(request))
            return
        self._outputs += [
            HypothesisOutput(request.key, i, hypothesis, alignment_of(request, hypothesis))
            for i, hypothesis in enumerate(returned)
        ]
        self._complete(request, search.num_discarded)

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence, and its request if it was the last."""
        request = sequence.request
        sequence.is_finished = True
        if request.key in self._running:
            self._give_back(sequence, sound=True)
        if request.is_finished:
            self._complete(request)

    def _cut(self, request: Request, reason: FinishReason) -> None:
        """End a request with what there is."""
        if request.search is not None:
            request.search.close(reason)
            self._finish_search(request, request.search)
            return
        self._outputs += request.emit()
        self._outputs += [
            CutOutput(request.key, sequence.index, reason)
            for sequence in request.sequences
            if not sequence.is_finished
        ]
        self._complete(request)

    def _complete(self, request: Request, num_discarded: int = 0) -> None:
        """End a request as it should."""
        self._remove(request, sound=True)
        self._outputs.append(
            FinishedOutput(request.key, request.timing(), num_discarded, request.num_cached)
        )

    def _fail(self, request: Request, error: TokenweirError) -> None:
        """End a request with an error."""
        is_late, count = isinstance(error, DeadlineExpired), request.num_computed
        self._wasted += (
            WastedWork(expired_tokens=count) if is_late else WastedWork(failed_tokens=count)
        )
        self._outputs += request.emit()
        self._remove(request, sound=False)
        self._outputs.append(FailedOutput(request.key, error))

    def _remove(self, request: Request, *, sound: bool) -> None:
        """Take an ended request away, wherever it is."""
        if self._waiting.remove(request.key) is None:
            self._leave_batch(request, sound=sound)
            self._waiting.charge(request, request.num_computed)
        request.end()

    def _leave_batch(self, request: Request, *, sound: bool) -> None:
        """Take a request out of the batch: the one way, whether it has ended or waits again."""
        del self._running[request.key]
        self._prefill.remove(request)
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._give_back(sequence, sound=sound)

    def _give_back(self, sequence: Sequence, *, sound: bool) -> None:
        """Give the place and the room of a sequence back."""
        self._num_sequences -= 1
        if sequence in self._decoding:
            del self._decoding[sequence]
            self._forget_groups()
        self._cache.release(sequence, sound=sound)

    def _expire(self, now: float) -> None:
        for request in self._deadlines.expired(self._all(), now):
            if not request.may_be_cut:
                self._fail(request, expired(request, now, num_running=len(self._running)))
            else:
                self._cut(request, FinishReason.DEADLINE)

    def _refuse_if_too_late(self, request: Request, deadline: float) -> None:
        asked, time_left = request.asked, deadline - self._clock()
        num_before = self._waiting.num_sequences_before(request)
        num_cached = self._cache.num_cached(request)
        refusal = self._estimates.refusal(
            time_left=time_left,
            num_read=len(asked.prompt_ids) - num_cached,
            num_new=least_new_tokens(request),
            num_to_end=max(0, num_before + request.num_unfinished - self._num_free),
        )
        if refusal is not None:
            raise cannot_meet(asked, refusal, time_left=time_left, num_before=num_before)


def _is_ready(sequence: Sequence, is_ahead: bool) -> bool:
    """Say whether a decoding sequence may compute its next token, known or a future one."""
    if sequence.num_drawing == 0:
        return True
    may_follow = is_ahead and sequence.num_drawing == 1 and sequence.request.draws_plainly
    return may_follow and sequence.num_steps_left > 0
