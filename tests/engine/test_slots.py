"""The slot table against a plain list of sequences, with the operations replayed on text rows."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.request import SamplingParams
from engine.sequence import Request, Sequence, TokenRequest
from engine.slots import SlotTable

NUM_SLOTS = 5
REQUEST = Request(TokenRequest(0, "r", (), SamplingParams(), 0, 0.0), ())


class SlotMachine(RuleBasedStateMachine):
    """Rows hold the index of the sequence they belong to, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(NUM_SLOTS)
        self.rows: list[str] = [""] * NUM_SLOTS
        self.filling: list[Sequence] = []
        self.decoding: set[Sequence] = set()
        self.content: dict[Sequence, str] = {}
        self.count = 0

    @property
    def live(self) -> list[Sequence]:
        return [*self.filling, *sorted(self.decoding, key=lambda sequence: sequence.index)]

    @precondition(lambda self: len(self.live) < NUM_SLOTS)
    @rule()
    def take(self) -> None:
        sequence = self._new()
        self.table.take(sequence)
        self._replay()
        self.rows[sequence.row] = self.content[sequence] = f"content {sequence.index}"
        self.filling.append(sequence)

    @precondition(lambda self: 0 < len(self.live) < NUM_SLOTS)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        source, target = data.draw(st.sampled_from(self.live)), self._new()
        self.table.copy(source, target)
        self.content[target] = self.content[source]
        self.filling.append(target)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.filling))
        self.table.promote(sequence)
        self.filling.remove(sequence)
        self.decoding.add(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.table.release(sequence)
        assert sequence.row is None
        del self.content[sequence]
        self.decoding.discard(sequence)
        if sequence in self.filling:
            self.filling.remove(sequence)

    @rule()
    def step(self) -> None:
        self._replay()
        assert all(self.rows[s.row] == content for s, content in self.content.items())
        assert sum(row == "" for row in self.rows) == NUM_SLOTS - len(self.live)

    @invariant()
    def decoding_rows_come_first(self) -> None:
        rows = [sequence.row for sequence in self.table.decoding]
        assert rows == list(range(len(self.decoding)))
        assert set(self.table.decoding) == self.decoding

    @invariant()
    def no_two_share_a_row(self) -> None:
        rows = [sequence.row for sequence in self.live]
        assert len(set(rows)) == len(rows)

    def _new(self) -> Sequence:
        self.count += 1
        return Sequence(REQUEST, self.count, [])

    def _replay(self) -> None:
        for kind, source, target, _ in self.table.take_ops():
            if kind == "swap":
                self.rows[source], self.rows[target] = self.rows[target], self.rows[source]
            elif kind == "clear":
                self.rows[target] = ""
            else:
                assert self.rows[target] == "", "the target of a move or copy is empty"
                self.rows[target] = self.rows[source]
                if kind == "move":
                    self.rows[source] = ""


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
