"""The scheduler alone: no model, every token is given by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import pytest

from engine.config import EngineConfig
from engine.errors import (
    EngineFailure,
    ExpiredInDecode,
    ExpiredInQueue,
    QueueFull,
    TokenBudgetFull,
)
from engine.package.manifest import GenerationContract
from engine.requests.events import FinishReason
from engine.requests.load import WastedWork
from engine.requests.request import Deltas, SamplingParams
from engine.sampling.draws import Sampled
from engine.sampling.plain import PlainChoices
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.output import (
    AdmittedOutput,
    CutOutput,
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    TokensOutput,
)
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import TokenRequest
from engine.scheduling.step import Step, StepResult
from engine.slots.cache import SlotKVCache
from tests.engine.blocks import BlockKVCache

EOS = 257
A, B, C = 65, 66, 67


def slots(config: EngineConfig, contract: GenerationContract) -> KVCache:
    return SlotKVCache(config, contract)


def blocks(config: EngineConfig, contract: GenerationContract) -> KVCache:
    return BlockKVCache(num_blocks=200)


@pytest.fixture(params=[slots, blocks])
def make_scheduler(make_contract, byte_tokenizer, clock, request) -> Callable[..., Scheduler]:
    """Make a scheduler on either cache: every test here is one of both."""

    def make(config: EngineConfig | None = None, **shape: int) -> Scheduler:
        config, contract = config or EngineConfig(max_num_seqs=4), make_contract(**shape)
        cache = request.param(config, contract)
        return Scheduler(config, contract, cache, tokenizer=byte_tokenizer, clock=clock)

    return make


def small_config(**options: int) -> EngineConfig:
    """Two slots, chunks of four, ten tokens a step."""
    settings = {"max_num_seqs": 2, "prefill_chunk_size": 4, "max_num_batched_tokens": 10}
    return EngineConfig(**(settings | options))


def request(key: int, length: int = 3, *, deadline: float | None = None, **params) -> TokenRequest:
    return TokenRequest(
        key, f"request-{key}", tuple(range(length)), SamplingParams(**params), 7, 100.0, deadline
    )


class Ran:
    """The contents of a step, as the tests compare them."""

    def __init__(self, step: Step) -> None:
        self.draws, self.slot_mapping = step.draws, step.slot_mapping
        self.num_drawn = len(step.plain) + len(step.draws)
        self.encodes = [request.asked.prompt_ids for request in step.parts.encoding]
        self.chunks, self.decode_ids = step.parts.chunks, step.parts.decode_ids
        self.is_empty = not (self.encodes or self.chunks or self.decode_ids)


def result_of(scheduled: Step, *tokens: int | None) -> StepResult:
    """Return these tokens: for the plain draws, then for the others, the last for all further."""
    num_plain, num_others = len(scheduled.plain), len(scheduled.draws)
    count = num_plain + num_others
    given = [*tokens, *[tokens[-1] if tokens else A] * count][:count]
    sampled = [None if token is None else Sampled(token, -0.5) for token in given]
    plain = sampled[:num_plain]
    failed = [i for i, token in enumerate(plain) if token is None]
    ids = [0 if token is None else token.token_id for token in plain]
    choices = PlainChoices(ids, [-0.5] * num_plain, failed)
    scores = ((),) * len(scheduled.scores)
    return StepResult(choices, tuple(sampled[num_plain:]), scores)


def step(scheduler: Scheduler, *tokens: int | None) -> tuple[Ran, list[EngineOutput]]:
    """Run a step whose draws give these tokens, the last of them for all further draws."""
    scheduled = scheduler.schedule()
    outputs = scheduler.update(scheduled, result_of(scheduled, *tokens))
    assert scheduler.problems() == []
    return Ran(scheduled), outputs


def run_until_idle(scheduler: Scheduler) -> list[EngineOutput]:
    outputs = []
    while scheduler.has_work:
        outputs += step(scheduler)[1]
    return outputs


def tokens_of(outputs: Sequence[EngineOutput], key: int) -> list[int]:
    told = [o.token_ids for o in outputs if isinstance(o, TokensOutput) and o.key == key]
    return list(chain.from_iterable(told))


def ends(outputs: Sequence[EngineOutput]) -> dict[int, FinishReason | type]:
    """Return how requests and sequences ended."""
    found: dict[int, FinishReason | type] = {}
    for output in outputs:
        if isinstance(output, TokensOutput) and output.finish_reason is not None:
            found[output.key] = output.finish_reason
        if isinstance(output, FailedOutput):
            found[output.key] = type(output.error)
    return found


# Joining and leaving


def test_a_request_joins_while_others_decode_and_leaves_while_they_go_on(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1))
    step(scheduler, A)
    scheduler.add(request(2))

    both, _ = step(scheduler, A, B)
    _, outputs = step(scheduler, EOS, B)
    alone, _ = step(scheduler, B)

    assert (both.decode_ids, len(both.chunks)) == ((A,), 1)
    assert ends(outputs) == {1: FinishReason.EOS}
    assert alone.decode_ids == (B,)


def test_a_waiting_request_joins_in_the_step_after_a_slot_is_free(make_scheduler) -> None:
    scheduler = make_scheduler(small_config())
    for key in (1, 2, 3):
        scheduler.add(request(key))
    step(scheduler, A)
    waiting = scheduler.load().waiting

    _, outputs = step(scheduler, EOS, A)
    batch, _ = step(scheduler, A)

    assert waiting == 1
    assert AdmittedOutput(3) in outputs
    assert [len(chunk.token_ids) for chunk in batch.chunks] == [3]


def test_requests_are_admitted_in_order_of_arrival_even_if_a_later_one_would_fit(
    make_scheduler,
) -> None:
    scheduler = make_scheduler(small_config())
    scheduler.add(request(1))
    scheduler.add(request(2, strategy="sampling", num_outputs=2))
    scheduler.add(request(3))

    _, outputs = step(scheduler)

    assert [o.key for o in outputs if isinstance(o, AdmittedOutput)] == [1]


# Prefill


def test_a_prompt_is_cut_at_multiples_of_the_chunk_size(make_scheduler) -> None:
    scheduler = make_scheduler(small_config())
    scheduler.add(request(1, length=15))

    sizes = []
    for _ in range(3):
        batch, _ = step(scheduler)
        sizes.append([len(chunk.token_ids) for chunk in batch.chunks])

    assert sizes == [[4, 4], [4, 3], []]


def test_decoding_comes_first_and_chunks_share_what_is_left_of_the_budget(make_scheduler) -> None:
    scheduler = make_scheduler(small_config(max_num_batched_tokens=8, max_num_seqs=3))
    scheduler.add(request(1, length=2))
    step(scheduler)
    scheduler.add(request(2, length=8))
    scheduler.add(request(3, length=2))

    first, _ = step(scheduler)
    second, _ = step(scheduler)

    assert (len(first.decode_ids), [len(c.token_ids) for c in first.chunks]) == (1, [4])
    assert (len(second.decode_ids), [len(c.token_ids) for c in second.chunks]) == (1, [4, 2])


def test_a_step_scores_no_more_positions_than_a_chunk_has_and_others_go_on(make_scheduler) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=4, max_num_batched_tokens=16))
    for key in (1, 2, 3):
        scheduler.add(replace(request(key, length=4, prompt_logprobs=0), score_from=1))
    scheduler.add(request(4, length=4))

    steps = []
    while scheduler.has_work and len(steps) < 3:
        scheduled = scheduler.schedule()
        steps.append([chunk.num_logits for chunk in scheduled.parts.chunks])
        scheduler.update(scheduled, result_of(scheduled, A))

    assert steps == [[4, 1], [4], [4]]  # the row of logits of a position has a whole vocabulary


def test_only_the_last_chunk_of_a_prompt_gives_a_token(make_scheduler) -> None:
    scheduler = make_scheduler(small_config())
    scheduler.add(request(1, length=12))

    first, outputs = step(scheduler)
    second, _ = step(scheduler)

    assert (first.num_drawn, tokens_of(outputs, 1)) == (0, [])
    assert second.num_drawn == 1


@pytest.mark.parametrize("length", [1, 5, 9])
def test_a_single_token_is_always_computed_with_the_decoding_rows(
    make_scheduler, length: int
) -> None:
    """A chunk of one token would give other bits than the decode call."""
    scheduler = make_scheduler(small_config())
    scheduler.add(request(1, length=length))

    batches = []
    while not (batches and batches[-1].num_drawn):
        batches.append(step(scheduler)[0])

    assert batches[-1].decode_ids == (length - 1,)
    assert all(len(chunk.token_ids) == 4 for batch in batches for chunk in batch.chunks)


def test_cuts_of_a_prompt_do_not_depend_on_the_load(make_scheduler) -> None:
    def chunks_of_last(num_others: int) -> list[tuple[int, ...]]:
        config = EngineConfig(max_num_seqs=6, prefill_chunk_size=4, max_num_batched_tokens=11)
        scheduler = make_scheduler(config)
        for key in range(num_others):
            scheduler.add(request(key, length=5 + key))
        scheduler.add(
            TokenRequest(99, "last", tuple(range(200, 213)), SamplingParams(), 0, 100.0, None)
        )
        found = []
        for _ in range(12):
            batch, _ = step(scheduler)
            found += [c.token_ids for c in batch.chunks if c.token_ids[0] >= 200]
            found += [(token,) for token in batch.decode_ids if token >= 200]
        return found

    assert chunks_of_last(5) == chunks_of_last(2) == chunks_of_last(0)


# Encoder-decoder


def test_a_source_is_encoded_and_its_start_token_decoded_in_the_same_step(
    make_scheduler,
) -> None:
    scheduler = make_scheduler(max_source_len=30)
    scheduler.add(request(1, length=20))

    batch, outputs = step(scheduler, A)

    assert [len(ids) for ids in batch.encodes] == [20]
    assert batch.decode_ids == (256,)
    assert tokens_of(outputs, 1) == [A]


def test_sources_count_their_tokens_and_one_over_the_whole_budget_still_runs(
    make_scheduler,
) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=3), max_source_len=30)
    for key, length in ((1, 6), (2, 6), (3, 30)):
        scheduler.add(request(key, length=length))

    encoded = [[len(ids) for ids in step(scheduler)[0].encodes] for _ in range(3)]

    assert encoded == [[6], [6], [30]]


# Groups


def test_a_group_shares_its_prompt_and_forks_with_the_first_token(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, strategy="sampling", num_outputs=3))

    first, outputs = step(scheduler, A, B, C)
    second, _ = step(scheduler, A)

    assert len(first.chunks) == 1
    assert [(d.logits_row, d.sequence_index, d.position) for d in first.draws] == [
        (0, 0, 3),
        (0, 1, 3),
        (0, 2, 3),
    ]
    assert second.decode_ids == (A, B, C)
    assert tokens_of(outputs, 1) == [A, B, C]


def test_a_group_waits_for_a_slot_for_each_sequence(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1))
    scheduler.add(request(2, strategy="sampling", num_outputs=4))

    step(scheduler, A)
    before = scheduler.load()
    _, outputs = step(scheduler, EOS)

    assert (before.running, before.waiting) == (1, 1)
    assert AdmittedOutput(2) in outputs
    assert scheduler.load().running == 4


def test_a_leader_that_ends_with_its_first_token_leaves_its_prompt_to_the_others(
    make_scheduler,
) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, strategy="sampling", num_outputs=2))

    step(scheduler, EOS, B)
    batch, _ = step(scheduler)

    assert batch.decode_ids == (B,)


# Ends


def test_max_new_tokens_ends_with_length(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, max_new_tokens=3))

    outputs = run_until_idle(scheduler)

    assert tokens_of(outputs, 1) == [A, A, A]
    assert ends(outputs) == {1: FinishReason.LENGTH}


def test_a_full_context_ends_that_sequence_only(make_scheduler) -> None:
    scheduler = make_scheduler(max_len=10)
    scheduler.add(request(1, length=7))
    scheduler.add(request(2, length=3))

    outputs = [output for _ in range(4) for output in step(scheduler)[1]]

    assert ends(outputs) == {1: FinishReason.CONTEXT_FULL}
    assert len(tokens_of(outputs, 1)) == 3
    assert len(tokens_of(outputs, 2)) == 4


def test_an_encoder_decoder_counts_its_start_token_into_the_context(make_scheduler) -> None:
    scheduler = make_scheduler(max_len=5, max_source_len=30)
    scheduler.add(request(1, length=20))

    outputs = run_until_idle(scheduler)

    assert len(tokens_of(outputs, 1)) == 4
    assert ends(outputs) == {1: FinishReason.CONTEXT_FULL}


def test_a_stop_token_ends_with_stop_and_is_named(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, stop_token_ids=(B, C)))

    _, outputs = step(scheduler, C)

    assert TokensOutput(1, 0, [C], -0.5, FinishReason.STOP, C, [], []) in outputs


def test_tokens_are_told_together_and_the_rest_at_the_end(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(replace(request(1, max_new_tokens=7), deltas=Deltas(3)))
    scheduler.add(replace(request(2, max_new_tokens=2), deltas=Deltas(3)))
    scheduler.add(replace(request(3, max_new_tokens=4), deltas=None))

    outputs = [o for o in run_until_idle(scheduler) if isinstance(o, TokensOutput)]

    told = {
        key: [(len(o.token_ids), o.sum_logprob) for o in outputs if o.key == key]
        for key in (1, 2, 3)
    }
    assert told == {1: [(3, -1.5), (3, -3.0), (1, -3.5)], 2: [(2, -1.0)], 3: [(4, -2.0)]}


@pytest.mark.parametrize("deltas", [None, Deltas(3), Deltas(1, min_seconds=9.0)])
@pytest.mark.parametrize("strategy", [{}, {"strategy": "sampling", "logprobs": 0}])
def test_a_stop_string_ends_its_sequence_with_the_step_that_completes_it(
    make_scheduler, deltas, strategy
) -> None:
    scheduler = make_scheduler()
    asked = request(1, stop_strings=("AB",), num_outputs=2 if strategy else 1, **strategy)
    scheduler.add(replace(asked, deltas=deltas))
    others = [C, C] if strategy else []

    found = [step(scheduler, token, *others)[1] for token in (A, A, B)]

    told = [o for outputs in found for o in outputs if isinstance(o, TokensOutput) and o.index == 0]
    assert [token for output in told for token in output.token_ids] == [A, A, B]
    assert (told[-1].finish_reason, told[-1].matched_stop) == (FinishReason.STOP, "AB")
    assert told[-1] in found[-1]
    assert len(step(scheduler)[0].decode_ids) == len(others) // 2


def told_by_step(
    scheduler: Scheduler, clock, seconds: float, num_steps: int
) -> list[dict[int, int]]:
    """Return how many tokens every request was told of in each step."""
    found = []
    for _ in range(num_steps):
        clock.now += seconds
        outputs = [o for o in step(scheduler)[1] if isinstance(o, TokensOutput)]
        found.append({o.key: len(o.token_ids) for o in outputs})
    return found


def test_behind_the_first_token_a_stream_is_told_when_its_pause_is_over(
    make_scheduler, clock
) -> None:
    scheduler = make_scheduler()
    one = request(1, max_new_tokens=9)
    scheduler.add(replace(one, deltas=Deltas(1, min_seconds=0.75)))

    told = told_by_step(scheduler, clock, 0.25, 9)

    assert told == [{1: 1}, {1: 1}, {}, {}, {1: 3}, {}, {}, {1: 3}, {1: 1}]


def test_with_many_streams_each_is_told_less_often(make_scheduler, clock) -> None:
    scheduler = make_scheduler()
    for key in (1, 2):
        deltas = Deltas(1, min_seconds=0.25, min_seconds_each=0.25)
        scheduler.add(replace(request(key, max_new_tokens=9), deltas=deltas))

    told = told_by_step(scheduler, clock, 0.25, 8)[2:]

    assert told == [{}, {}, {1: 3, 2: 3}, {}, {}, {1: 3, 2: 3}]


def test_more_streams_than_a_group_are_told_one_group_after_the_other(
    make_scheduler, clock
) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=64, max_num_batched_tokens=1000))
    for key in range(64):
        deltas = Deltas(1, min_seconds=1.0)
        scheduler.add(replace(request(key, 1, max_new_tokens=20), deltas=deltas))

    told = told_by_step(scheduler, clock, 0.25, 11)[3:]

    assert [len(one) for one in told] == [0, 32] * 4
    assert all(set(told[i]) | set(told[i + 2]) == set(range(64)) for i in (1, 3, 5))
    assert set(told[3].values()) == {4}


def test_a_pause_waits_for_enough_tokens_and_holds_up_no_slow_model(make_scheduler, clock) -> None:
    scheduler = make_scheduler()
    scheduler.add(replace(request(1, max_new_tokens=6), deltas=Deltas(2, min_seconds=0.25)))
    scheduler.add(replace(request(2, max_new_tokens=6), deltas=Deltas(1, min_seconds=0.25)))

    told = told_by_step(scheduler, clock, 1.0, 6)

    assert [one.get(1) for one in told] == [None, 2, None, 2, None, 2]
    assert [one.get(2) for one in told] == [1] * 6


@pytest.mark.parametrize("allow_partial", [True, False])
@pytest.mark.parametrize("end", ["deadline", "drain", "failure"])
def test_tokens_that_were_not_told_come_before_an_end_from_outside(
    make_scheduler, clock, end: str, allow_partial: bool
) -> None:
    scheduler = make_scheduler()
    one = request(1, deadline=200.0, max_new_tokens=9, allow_partial=allow_partial)
    scheduler.add(replace(one, deltas=Deltas(5)))
    step(scheduler, A)
    step(scheduler, B)

    if end == "deadline":
        clock.now = 300.0
        _, outputs = step(scheduler)
    else:
        outputs = (scheduler.drain if end == "drain" else scheduler.fail_all)(EngineFailure)

    assert outputs[0] == TokensOutput(1, 0, [A, B], -1.0, None, None, [], [])
    assert len(outputs) > 1 and not [o for o in outputs[1:] if isinstance(o, TokensOutput)]


def test_end_of_sequence_may_be_ignored(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, ignore_eos=True, max_new_tokens=2))

    step(scheduler, EOS)
    _, outputs = step(scheduler, EOS)

    assert ends(outputs) == {1: FinishReason.LENGTH}


def test_ends_are_banned_below_min_new_tokens(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, min_new_tokens=2, stop_token_ids=(B,)))

    banned = [set(step(scheduler, A)[0].draws[0].banned) for _ in range(3)]

    assert banned == [{B, EOS}, {B, EOS}, set()]


# Refusal, abort, deadline, failure


def test_a_full_queue_refuses_with_the_time_at_which_a_place_will_be_free(
    make_scheduler, clock
) -> None:
    scheduler = make_scheduler(small_config(max_queue_size=1))
    for key in range(10):  # two requests a second go through
        clock.now += 0.5
        scheduler.add(request(key))
        step(scheduler, EOS)
    for key in (11, 12, 13):
        scheduler.add(request(key))

    waits = []
    for key in (14, 15):
        with pytest.raises(QueueFull, match="1 requests are waiting, at most 1 may") as refusal:
            scheduler.add(request(key))
        waits.append(refusal.value.retry_after)

    assert waits[0] == pytest.approx(0.5, rel=0.3)
    assert waits[1] == pytest.approx(2 * waits[0])
    assert scheduler.load().waiting == 1


def test_too_many_waiting_tokens_are_refused_but_a_single_large_request_is_not(
    make_scheduler,
) -> None:
    scheduler = make_scheduler(small_config(max_waiting_tokens=10))
    scheduler.add(request(1))
    scheduler.add(request(2))
    scheduler.add(request(3, length=20, max_new_tokens=5))

    with pytest.raises(TokenBudgetFull, match="may come to 25 tokens, with the 8 of this one"):
        scheduler.add(request(4, length=1, max_new_tokens=7))


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({"length": 5, "max_new_tokens": 7}, 12),
        ({"length": 5}, 64),
        ({"length": 60, "max_new_tokens": 7}, 64),
        ({"length": 5, "max_new_tokens": 7, "strategy": "sampling", "num_outputs": 3}, 26),
    ],
)
def test_a_waiting_request_counts_its_prompt_and_all_that_it_may_generate(
    make_scheduler, options: dict, cost: int
) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=3))
    scheduler.add(request(1, strategy="sampling", num_outputs=3))

    scheduler.add(request(2, **options))

    assert scheduler.load().waiting_tokens == cost


def test_a_source_counts_besides_the_context_of_the_decoder(make_scheduler) -> None:
    scheduler = make_scheduler(small_config(), max_source_len=30)
    for key in (1, 2):
        scheduler.add(request(key))

    scheduler.add(request(3, length=20))

    assert scheduler.load().waiting_tokens == 20 + 64


def admitted_in(outputs: Sequence[EngineOutput]) -> list[int]:
    return [output.key for output in outputs if isinstance(output, AdmittedOutput)]


def queued(key: int, *, priority: int = 0, tenant: str = "", **options) -> TokenRequest:
    return replace(request(key, **options), priority=priority, tenant=tenant)


def test_a_lower_priority_value_is_admitted_first(make_scheduler) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=1))
    scheduler.add(request(1, max_new_tokens=1))
    for key, priority in ((2, 1), (3, 0), (4, -1)):
        scheduler.add(queued(key, priority=priority, max_new_tokens=1))

    assert admitted_in(run_until_idle(scheduler)) == [1, 4, 3, 2]


def test_a_tenant_with_a_long_queue_does_not_hold_up_another(make_scheduler) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=1))
    for key in range(5):
        scheduler.add(queued(key, tenant="busy", max_new_tokens=4))
    scheduler.add(queued(9, tenant="quiet", max_new_tokens=4))

    assert admitted_in(run_until_idle(scheduler)) == [0, 9, 1, 2, 3, 4]


def test_tokens_that_a_request_did_not_use_do_not_count_against_its_tenant(make_scheduler) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=1))
    for key in (1, 2, 3):
        scheduler.add(queued(key, tenant="brief", max_new_tokens=60))
    for key in (11, 12):
        scheduler.add(queued(key, tenant="long", ignore_eos=True, max_new_tokens=20))

    outputs = []
    while scheduler.has_work:
        outputs += step(scheduler, EOS)[1]

    assert admitted_in(outputs) == [1, 11, 2, 3, 12]


def test_four_tenants_of_very_unequal_demand_get_equal_shares_of_the_tokens(make_scheduler) -> None:
    """One sends 27 times as many requests as another, of a 27th of the length; all ask for more."""
    scheduler = make_scheduler(EngineConfig(max_num_seqs=4, max_queue_size=4000), max_len=256)
    tenants = {0: (16, 81), 1: (48, 27), 2: (144, 9), 3: (432, 3)}  # requests, tokens that are made
    for tenant, (count, length) in tenants.items():
        for n in range(count):
            options = {"length": 1, "max_new_tokens": 2 * length}
            asked = queued(4 * n + tenant, tenant=f"{tenant}", **options)
            scheduler.add(replace(asked, seed=tenant))  # tells the draws whose they are
    made: dict[int, int] = {}

    for _ in range(600):
        scheduled = scheduler.schedule()
        places = [(one.request.asked.seed, len(one.tokens)) for one in scheduled.plain]
        places += [(draw.seed, draw.position) for draw in scheduled.draws]
        drawn = [EOS if place >= tenants[seed][1] else A for seed, place in places]
        for output in scheduler.update(scheduled, result_of(scheduled, *drawn)):
            if isinstance(output, TokensOutput):
                made[output.key % 4] = made.get(output.key % 4, 0) + 1

    shares = list(made.values())
    assert sum(shares) ** 2 / (4 * sum(share**2 for share in shares)) >= 0.95


def test_a_group_is_admitted_though_single_requests_of_others_keep_coming(make_scheduler) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=2))
    for key in (1, 2):
        scheduler.add(queued(key, tenant=f"first {key}", max_new_tokens=key))
    scheduler.add(queued(3, tenant="group", strategy="sampling", num_outputs=2, max_new_tokens=9))
    outputs = []
    for key in range(10, 16):
        scheduler.add(queued(key, tenant=f"newcomer {key}", max_new_tokens=1))
        outputs += step(scheduler)[1]

    assert admitted_in(outputs) == [1, 2, 3]


def test_free_slots_do_not_count_as_queue(make_scheduler) -> None:
    scheduler = make_scheduler(small_config(max_queue_size=1))

    for key in (1, 2, 3):
        scheduler.add(request(key))

    assert (scheduler.load().running, scheduler.load().waiting) == (2, 1)


def test_an_aborted_request_is_gone_from_the_next_step(make_scheduler) -> None:
    scheduler = make_scheduler(small_config())
    for key in (1, 2, 3):
        scheduler.add(request(key, max_new_tokens=2))
    step(scheduler, A, B)

    scheduler.abort(1)
    scheduler.abort(3)
    batch, _ = step(scheduler, B)
    scheduler.abort(2)
    batch_after, outputs = step(scheduler)

    assert batch.decode_ids == (B,)
    assert batch_after.is_empty
    assert outputs == []
    assert not scheduler.has_work


def test_a_request_aborted_in_the_middle_of_its_prompt_frees_its_room(make_scheduler) -> None:
    scheduler = make_scheduler(small_config())
    scheduler.add(request(1, length=20))
    step(scheduler)

    scheduler.abort(1)
    batch, _ = step(scheduler)

    assert batch.is_empty
    assert (scheduler.load().running, scheduler.load().cache_used) == (0, 0)


def test_deadlines_are_kept_in_the_queue_and_in_the_batch(make_scheduler, clock) -> None:
    scheduler = make_scheduler(small_config())
    scheduler.add(request(1, deadline=105.0))
    scheduler.add(request(2))
    scheduler.add(request(3, deadline=103.0))
    scheduler.add(request(4, deadline=200.0))

    _, early = step(scheduler)
    clock.now = 104.0
    _, middle = step(scheduler)
    clock.now = 105.0
    _, late = step(scheduler)

    assert ends(early) == {}
    assert ends(middle) == {3: ExpiredInQueue}
    assert ends(late) == {1: ExpiredInDecode}
    assert AdmittedOutput(4) in late
    message = next(str(o.error) for o in late if isinstance(o, FailedOutput))
    assert message == "request-1: its deadline passed after 5.000 s, with 2 tokens generated"


def test_a_request_that_allows_it_ends_at_its_deadline_with_what_it_has(
    make_scheduler, clock
) -> None:
    scheduler = make_scheduler()
    options = {"strategy": "sampling", "num_outputs": 3, "allow_partial": True}
    scheduler.add(request(1, deadline=105.0, **options))
    step(scheduler, A, EOS, B)
    step(scheduler, C)

    clock.now = 105.0
    batch, outputs = step(scheduler)

    reason = FinishReason.DEADLINE
    assert outputs[:2] == [CutOutput(1, 0, reason), CutOutput(1, 2, reason)]
    assert isinstance(outputs[2], FinishedOutput) and len(outputs) == 3
    assert batch.is_empty and not scheduler.has_work


def test_a_request_that_waits_fails_at_its_deadline_whatever_it_allows(
    make_scheduler, clock
) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=1))
    scheduler.add(request(1))
    scheduler.add(request(2, deadline=105.0, allow_partial=True))

    clock.now = 105.0
    _, outputs = step(scheduler)

    assert ends(outputs) == {2: ExpiredInQueue}


def test_a_deadline_in_the_middle_of_a_prompt_ends_without_a_token(make_scheduler, clock) -> None:
    scheduler = make_scheduler(small_config())
    scheduler.add(request(1, length=20, deadline=105.0, allow_partial=True))
    step(scheduler)

    clock.now = 105.0
    _, outputs = step(scheduler)

    assert outputs[0] == CutOutput(1, 0, FinishReason.DEADLINE)
    assert scheduler.load().running == 0


def test_logits_that_are_not_finite_fail_their_request_only(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1))
    scheduler.add(request(2, strategy="sampling", num_outputs=2))

    _, outputs = step(scheduler, A, None, None)
    batch, _ = step(scheduler)

    assert ends(outputs) == {2: EngineFailure}
    assert len([o for o in outputs if isinstance(o, FailedOutput)]) == 1
    assert batch.decode_ids == (A,)
    assert scheduler.load().running == 1


def test_failing_all_tells_every_request_and_leaves_an_empty_scheduler(make_scheduler) -> None:
    scheduler = make_scheduler(small_config())
    for key in (1, 2, 3):
        scheduler.add(request(key))
    scheduler.schedule()

    outputs = scheduler.fail_all(lambda request_id: EngineFailure(f"{request_id} failed"))
    scheduler.add(request(4))

    failed = [(o.key, str(o.error)) for o in outputs if isinstance(o, FailedOutput)]
    assert failed == [(key, f"request-{key} failed") for key in (1, 2, 3)]
    assert [chunk.sequence.request.key for chunk in step(scheduler)[0].chunks] == [4]


# Accounting


def test_timing_tells_queue_prefill_and_decode_and_the_batch(make_scheduler, clock) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=1, max_num_batched_tokens=5))
    scheduler.add(request(1, max_new_tokens=1))
    scheduler.add(request(2, length=7, max_new_tokens=3))

    outputs = []
    for _ in range(6):
        clock.now += 1.0
        outputs += step(scheduler)[1]

    timing = next(o.timing for o in outputs if isinstance(o, FinishedOutput) and o.key == 2)
    assert (timing.queue, timing.prefill, timing.decode) == (1.0, 2.0, 2.0)
    assert timing.time_to_first_token == 3.0
    assert (timing.steps, timing.mean_batch_size) == (4, 1.0)


def test_mean_batch_size_counts_those_that_shared_the_steps(make_scheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, max_new_tokens=4))
    scheduler.add(request(2, max_new_tokens=2))

    outputs = run_until_idle(scheduler)

    timings = {o.key: o.timing for o in outputs if isinstance(o, FinishedOutput)}
    assert timings[1].mean_batch_size == 1.5
    assert timings[2].mean_batch_size == 2.0


def test_load_counts_sequences_requests_tokens_and_room(make_scheduler, clock) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, strategy="sampling", num_outputs=3))
    scheduler.add(request(2, strategy="sampling", num_outputs=2, length=5, max_new_tokens=2))

    load = scheduler.load()
    clock.now += 1
    step(scheduler)
    busy = scheduler.load()

    assert (load.running, load.waiting, load.waiting_tokens) == (3, 1, 9)
    assert 0 < busy.cache_used < 1
    assert busy.tokens_per_second > 0


def test_tokens_of_cancelled_expired_and_failed_requests_are_counted_as_wasted(
    make_scheduler, clock
) -> None:
    scheduler = make_scheduler(EngineConfig(max_num_seqs=5))
    scheduler.add(request(1, length=4))
    scheduler.add(request(2, length=5, deadline=105.0))
    scheduler.add(request(3, length=6))
    scheduler.add(request(4, length=7, max_new_tokens=2))
    scheduler.add(request(5, length=8, deadline=105.0, allow_partial=True))
    step(scheduler)
    step(scheduler)

    scheduler.abort(1)
    clock.now = 105.0
    step(scheduler, None)

    assert scheduler.load().wasted == WastedWork(
        cancelled_tokens=4 + 1, expired_tokens=5 + 1, failed_tokens=6 + 2
    )


def test_a_source_counts_among_the_tokens_that_were_wasted(make_scheduler) -> None:
    scheduler = make_scheduler(max_source_len=30)
    scheduler.add(request(1, length=20))
    step(scheduler)
    step(scheduler)

    scheduler.abort(1)

    assert scheduler.load().wasted == WastedWork(cancelled_tokens=20 + 1 + 1)


def test_a_failed_step_wastes_what_all_its_requests_had_computed(make_scheduler) -> None:
    scheduler = make_scheduler(small_config(max_num_seqs=2))
    for key in (1, 2, 3):
        scheduler.add(request(key, length=4))
    step(scheduler)
    failed = scheduler.schedule()

    scheduler.fail_all(EngineFailure)
    scheduler.update(failed, result_of(failed, None)._replace(num_padding=7))

    assert scheduler.load().wasted == WastedWork(failed_tokens=2 * 5, padding_tokens=7)
