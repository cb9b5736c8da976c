"""A beam search in the cache: who goes on in its place, who is forked, who is dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.requests.request import SamplingParams
from engine.sampling.beam_search import BeamStep
from engine.sampling.stop_rule import StopRule
from engine.scheduling.beams import continue_beams
from engine.scheduling.sequence import Request, Sequence, TokenRequest
from tests.engine.blocks import BlockKVCache

WIDTH = 16


class Content(BlockKVCache):
    """Knows what every sequence has computed, and how often it was asked to fork."""

    def __init__(self, beams: list[Sequence]) -> None:
        self.of: dict[Sequence, str] = {beam: f"of {i}" for i, beam in enumerate(beams)}
        self.num_forks = 0

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.of[child] = self.of[parent]
        self.num_forks += 1

    def drop(self, sequence: Sequence) -> None:
        del self.of[sequence]


def search(num_beams: int) -> Request:
    source = TokenRequest(0, "r", (), SamplingParams(), 0, 0.0)
    request = Request(source, StopRule(SamplingParams(), frozenset(), 1))
    request.sequences = [Sequence(request, i, []) for i in range(WIDTH)]
    request.beams = request.sequences[:num_beams]
    return request


@given(st.data())
def test_hypotheses_go_on_from_their_parents_with_the_fewest_forks(data: st.DataObject) -> None:
    num_old = data.draw(st.integers(1, WIDTH))
    parents = data.draw(st.lists(st.integers(0, num_old - 1), max_size=WIDTH))
    request = search(num_old)
    cache = Content(request.beams)
    step = BeamStep(tuple(parents), tuple(range(len(parents))), num_finished=0)

    ended = continue_beams(cache, request, step)

    assert [cache.of[beam] for beam in request.beams] == [f"of {parent}" for parent in parents]
    assert cache.num_forks == len(parents) - len(set(parents))
    assert set(cache.of) == set(request.beams) and not set(ended) & set(request.beams)
