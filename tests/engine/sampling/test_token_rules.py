"""Which tokens are ruled out or forced, against the processors of transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from engine.requests.events import FinishReason
from engine.requests.request import LogitControls, SamplingParams
from engine.sampling.stop_rule import StopRule
from engine.sampling.token_rules import TokenRules, token_rules

VOCAB, EOS = 6, 5
ROOM = 20

tokens_of = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


def rules_of(
    source: tuple[int, ...] = (), controls: LogitControls | None = None, **params
) -> TokenRules | None:
    asked = SamplingParams(controls=controls or LogitControls(), **params)
    return token_rules(asked, StopRule(asked, frozenset({EOS}), ROOM), source)


@settings(max_examples=200)
@given(
    prompt=tokens_of,
    generated=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    source=tokens_of,
    words=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=4), max_size=5),
    banned=st.sets(st.integers(0, EOS - 1), max_size=2),
    at_begin=st.sets(st.integers(0, EOS - 1), max_size=2),
    size=st.integers(1, 3),
    min_new_tokens=st.integers(0, 4),
)
def test_tokens_are_banned_where_transformers_bans_them(
    prompt, generated, source, words, banned, at_begin, size, min_new_tokens
):
    tokens = [*prompt, *generated]
    # transformers does not look at words that are as long as all that will have been written.
    words = [word for word in words if len(word) <= len(tokens)]
    theirs = LogitsProcessorList(
        [
            EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([source])),
            SuppressTokensLogitsProcessor(sorted(banned)),
            SuppressTokensAtBeginLogitsProcessor(sorted(at_begin), len(prompt)),
            MinNewTokensLengthLogitsProcessor(len(prompt), min_new_tokens, EOS),
        ]
    )
    if words:
        theirs.append(NoBadWordsLogitsProcessor(words))
    wanted = theirs(torch.tensor([tokens]), torch.zeros(1, VOCAB))[0]

    rules = rules_of(
        tuple(source),
        LogitControls(
            encoder_no_repeat_ngram=size,
            banned_tokens=tuple(banned),
            begin_banned_tokens=tuple(at_begin),
            banned_sequences=tuple(map(tuple, words)),
        ),
        min_new_tokens=min_new_tokens,
    )

    found = rules.banned(tokens, len(generated)) if rules else ()
    assert set(found) == set(wanted.isinf().nonzero()[:, 0].tolist())


def test_a_request_without_rules_has_none() -> None:
    assert rules_of((1, 2, 3), LogitControls(repetition_penalty=2.0, no_repeat_ngram=2)) is None
    assert rules_of(forced_end=0) is not None


def test_forced_tokens_come_first_and_at_the_limit() -> None:
    rules = rules_of(forced_begin=(4, 2), forced_end=EOS, max_new_tokens=5)

    assert rules is not None
    assert [rules.forced(n) for n in range(5)] == [4, 2, None, None, EOS]


def test_the_end_is_forced_where_the_context_is_full() -> None:
    rules = rules_of(forced_end=EOS)

    assert rules is not None
    assert [n for n in range(ROOM) if rules.forced(n) is not None] == [ROOM - 1]


def test_what_may_not_begin_may_not_come_behind_the_forced_beginning() -> None:
    rules = rules_of(controls=LogitControls(begin_banned_tokens=(1,)), forced_begin=(4, 2))

    assert rules is not None
    assert [rules.banned([0] * n, n) for n in range(4)] == [(), (), (1,), ()]


@pytest.mark.parametrize(
    ("max_new_tokens", "reason"), [(3, FinishReason.LENGTH), (None, FinishReason.CONTEXT_FULL)]
)
def test_an_end_that_was_forced_is_told_as_the_limit(max_new_tokens, reason) -> None:
    asked = SamplingParams(forced_end=EOS, max_new_tokens=max_new_tokens)
    rule = StopRule(asked, frozenset({EOS}), ROOM)

    assert rule.end_of(EOS, 2) is not None
    assert rule.end_of(EOS, 2).reason is FinishReason.EOS
    assert rule.end_of(EOS, max_new_tokens or ROOM).reason is reason
