"""How generated tokens attend to their source, for the requests that ask for it."""

from __future__ import annotations

from collections.abc import Iterable

from engine.sampling.beam_search import Hypothesis
from engine.sampling.logits import Floats
from engine.scheduling.sequence import Request, Sequence

Attention = tuple[float, ...]  # to each token of the source


class StepAttention:
    """The attention of one step, behind which its tokens were drawn."""

    def __init__(self, aligned: Iterable[Sequence] = (), alignment: Floats | None = None) -> None:
        """`alignment` is that of StepResult, a row for each of `aligned`."""
        self._of: dict[Sequence, Attention] = {}
        if alignment is not None:
            for sequence, row in zip(aligned, alignment, strict=True):
                source_ids = sequence.request.asked.prompt_ids
                self._of[sequence] = tuple(row[: len(source_ids)].tolist())

    def of(self, sequence: Sequence) -> Attention:
        """Return the attention of a sequence's new token; () if it is not wanted."""
        if not self._of:
            return ()
        # First tokens are drawn behind what the leader computed.
        of_leader = self._of.get(sequence.request.leader, ())
        return self._of.get(sequence, of_leader)

    def keep_beams(self, request: Request) -> None:
        """Keep that of the beams that a search continues, until it shows which one is returned."""
        if request.is_aligned:
            request.beam_attention.append([self.of(beam) for beam in request.beams])


def alignment_of(request: Request, hypothesis: Hypothesis) -> tuple[Attention, ...]:
    """Return the attention of a hypothesis's tokens, each that of the beam that it continued."""
    if not request.is_aligned:
        return ()
    steps = request.beam_attention[: len(hypothesis.beams)]
    return tuple(step[beam] for step, beam in zip(steps, hypothesis.beams, strict=True))
