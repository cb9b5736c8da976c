"""A certificate tries enough, for models of every size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from engine.package.manifest import CacheShape, EncodingContract, GenerationContract, Proof
from exporter.graphs.contracts import generation_contract
from exporter.models import TransformerConfig, build_model
from exporter.models.config import PositionConfig
from exporter.prover.cases import (
    LEVELS,
    affordable_sizes,
    affordable_steps,
    counted_length,
    first_lengths,
    prefill_chunk,
)
from exporter.prover.eager import num_parameters
from exporter.prover.generation_cases import affordable_cases, make_cases
from exporter.prover.item_cases import random_groups
from exporter.prover.plays.beams import layouts
from exporter.prover.plays.program import Program, Scope, generation_program
from exporter.samples import Tokens, TokenSampler

SHAPE = CacheShape(num_layers=1, num_kv_heads=1, max_len=1024, head_dim=8)


def contract(*, has_source: bool) -> GenerationContract:
    return GenerationContract(
        vocab_size=50,
        num_heads=SHAPE.num_kv_heads,
        cache=SHAPE,
        cross_cache=SHAPE if has_source else None,
        decoder_start_token_id=1 if has_source else None,
        eos_token_ids=(),
    )


@pytest.mark.parametrize(("num_parameters", "expected"), [(10**6, 8), (10**8, 4), (10**10, 1)])
def test_a_large_model_is_tried_with_fewer_prompts(num_parameters: int, expected: int) -> None:
    cases = affordable_cases(contract(has_source=False), num_parameters)

    assert cases.per_length == expected


def test_a_large_model_has_fewer_steps_rather_than_fewer_cases() -> None:
    level = LEVELS["standard"]

    found = [affordable_steps(level, 10**n, num_cases=60) for n in (6, 8, 9)]

    assert found == [32, 8, 4]


def test_the_shape_of_gpt2_is_tried_with_four_prompts_of_every_length() -> None:
    config = TransformerConfig(
        architecture="decoder",
        d_model=768,
        num_heads=12,
        d_ff=3072,
        num_decoder_layers=12,
        vocab_size=50257,
        max_target_len=1024,
        positions=PositionConfig(kind="learned"),
    )
    shape = generation_contract(config)
    assert shape is not None
    with torch.device("meta"):
        model = build_model(config)

    cases = affordable_cases(shape, num_parameters(model))

    found = Counter(len(case.prompt) for case in cases.all)
    assert cases.per_length == 4
    assert len(found) == 15 and set(found.values()) == {4}


@pytest.mark.parametrize(
    ("arithmetic", "expected"),
    [
        (1e6, list(range(32, 1, -1))),  # a small vision model
        (5.7e6 * 196, list(range(32, 1, -1))),  # ViT tiny
        (86e6 * 196, [32, 31, 15]),  # ViT base
        (1e10, [32, 31, 23, 15, 7]),
    ],
)
def test_of_a_large_vision_model_batches_of_fewer_sizes_are_tried(
    arithmetic: float, expected: list[int]
) -> None:
    assert affordable_sizes(32, arithmetic) == expected


@pytest.mark.parametrize(
    ("lengths", "expected"), [([1, 2, 3, 4, 9], 4), ([1, 2, 7, 512], 7), ([1, 2, 3], 3), ([1], 1)]
)
def test_groups_of_every_size_are_short_and_not_too_short(
    lengths: list[int], expected: int
) -> None:
    assert counted_length(lengths) == expected


def test_every_second_case_wants_the_logits_of_its_prompt_as_far_as_memory_allows() -> None:
    cases = make_cases(contract(has_source=False), [], 2, 32)

    assert [case.num_prompt_logits for case in cases[:6]] == [1, 1, 1, 2, 1, 3]
    large = contract(has_source=False).model_copy(update={"vocab_size": 2**16})
    assert max(case.num_prompt_logits for case in make_cases(large, [], 2, 32)) == 32


@pytest.mark.parametrize("per_length", [8, 1])
@pytest.mark.parametrize("has_source", [False, True])
def test_every_edge_is_tried_with_any_number_of_prompts(per_length: int, has_source: bool) -> None:
    cases = make_cases(contract(has_source=has_source), [], per_length, 32)

    chunk = prefill_chunk(1024)
    edges = {1, 2, 3, chunk - 1, chunk, chunk + 1, 1023, 1024}
    assert edges <= {len(case.prompt) for case in cases}
    if has_source:
        assert edges <= {len(case.source) for case in cases}
    assert len(cases) == 15 * per_length
    assert max(case.num_tokens for case in cases) == 32


def program(proof: Proof, samples: list[Tokens] | None = None) -> Program:
    scope = Scope(proof, few=proof == "quick")
    return generation_program(contract(has_source=True), 10**6, samples or [], (), scope)


def test_a_quick_proof_holds_every_kind_of_play_at_few_lengths() -> None:
    quick, standard = program("quick"), program("standard")

    assert {play.what for play in quick.plays} == {play.what for play in standard.plays} - {
        "all prompts"
    }
    chunk = prefill_chunk(1024)
    assert first_lengths(1024) == [1, 2, 16, chunk, chunk + 1, 1024]
    assert quick.covered["source_lengths"] == first_lengths(1024)
    assert quick.covered["batch_sizes"] == standard.covered["batch_sizes"]
    assert quick.covered["top_k"] == standard.covered["top_k"]
    assert quick.covered["row_counts"] == [1, 2, 3, 4, 8, 16, 17, 32]
    assert quick.covered["steps"] == 8
    assert quick.work < standard.work / 8


def test_a_standard_proof_tries_lengths_at_all_edges_and_every_number_of_rows() -> None:
    found = program("standard").covered

    assert found["prompts_per_length"] == 8 and found["steps"] == 32
    assert isinstance(found["source_lengths"], list) and len(found["source_lengths"]) == 15
    assert {1, 2, 3, 127, 128, 129, 1023, 1024} <= set(found["source_lengths"])
    assert found["row_counts"] == list(range(1, 33))
    assert isinstance(found["beam_groups"], list) and max(found["beam_groups"]) == 16


def test_a_full_proof_tries_every_length_besides() -> None:
    standard, full = program("standard"), program("full")

    assert full.covered["source_lengths"] == list(range(1, 1025))
    assert full.num_cases == standard.num_cases + 1024 - 15
    rest = {name: value for name, value in standard.covered.items() if "lengths" not in name}
    assert all(full.covered[name] == value for name, value in rest.items() if "group" not in name)


@pytest.mark.parametrize(
    ("proof", "lengths", "per_length"),
    [("quick", [1, 2, 16, 25, 26, 100], 2), ("standard", None, 8), ("full", range(1, 101), 1)],
)
def test_texts_have_lengths_by_the_level_too(
    proof: Proof, lengths: list[int] | None, per_length: int
) -> None:
    encoding = EncodingContract(vocab_size=50, max_len=100, pad_token_id=0, embedding_dim=None)

    groups = random_groups(encoding, proof)

    found = [group[0].length for group in groups]
    assert found == list(lengths) if lengths else len(found) == 15 and {24, 26, 99} < set(found)
    assert min(map(len, groups)) == per_length
    assert max(map(len, groups)) == (2 if proof == "quick" else 8)


def test_the_shortest_prompts_and_those_at_edges_come_first_and_samples_are_among_them() -> None:
    cases = affordable_cases(contract(has_source=False), 10**6, [(7, 8, 9, 10, 11)])

    assert {case.length for case in cases.first} == {1, 2, 128, 129, 1024}
    assert len(cases.first) == 10
    assert (7, 8, 9, 10, 11) in [case.prompt for case in cases.all]


def test_the_ends_of_a_vocabulary_are_tried_first_and_no_token_twice_before_all_were() -> None:
    sampler = TokenSampler(np.random.default_rng(0), 100)

    dealt = [token for length in (1, 2, 30, 67) for token in sampler.sample(length)]

    assert dealt[:2] == [0, 99]
    assert sorted(dealt) == list(range(100))
    assert sorted(sampler.sample(100)) == list(range(100))


def test_a_vocabulary_of_one_token_is_dealt_again_and_again() -> None:
    assert TokenSampler(np.random.default_rng(0), 1).sample(3) == (0, 0, 0)


def test_sources_are_drawn_from_their_own_vocabulary() -> None:
    own = contract(has_source=True).model_copy(update={"source_vocab_size": 500})

    cases = make_cases(own, [], 1, 32)

    assert cases[0].source == (0,)
    assert 499 in cases[1].source
    assert 400 < max(max(case.source) for case in cases) < 500
    assert max(max(case.prompt) for case in cases) < 50


def padded(width: int) -> int:
    """Return the rows of queries that a source's sequences are computed in."""
    return 1 << (width - 1).bit_length()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 9, 12, 15, 16, 26, 27, 32, 42, 256])
def test_groups_of_every_width_are_tried_that_rows_have_room_for_and_no_wider_ones(
    num_rows: int,
) -> None:
    tried = layouts(num_rows)

    widths = {width for layout in tried for _, width in layout}
    possible = range(1, min(num_rows, 16) + 1)
    assert set(map(padded, widths)) == set(map(padded, possible))
    assert max(widths) == max(possible)
    assert max(sum(width for _, width in layout) for layout in tried) == num_rows
