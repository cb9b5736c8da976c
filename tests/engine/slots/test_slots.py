"""The slot table against a plain list of sequences, with the operations replayed on text rows."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.requests.request import SamplingParams
from engine.sampling.stop_rule import StopRule
from engine.scheduling.sequence import Request, Sequence, TokenRequest
from engine.slots.batch import RowOp
from engine.slots.table import CachedPrefix, SlotTable

NUM_SLOTS = 5
RULE = StopRule(SamplingParams(), frozenset(), 1)
REQUEST = Request(TokenRequest(0, "r", (), SamplingParams(), 0, 0.0), RULE)


class SlotMachine(RuleBasedStateMachine):
    """Rows hold the tokens of the sequence they belong to, or what one has left, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(NUM_SLOTS)
        self.rows: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
        self.filling: list[Sequence] = []
        self.decoding: set[Sequence] = set()
        self.cached: list[tuple[str, list[int]]] = []  # the least recently used first
        self.count = 0

    @property
    def live(self) -> list[Sequence]:
        return [*self.filling, *sorted(self.decoding, key=lambda sequence: sequence.index)]

    @precondition(lambda self: len(self.live) < NUM_SLOTS)
    @rule(beginning=st.integers(0, 2))
    def take(self, beginning: int) -> None:
        sequence = self._new(beginning)
        self.table.take(sequence)
        self._make_room()
        self._replay()
        assert self.rows[self.table.row_of(sequence)] == []
        self.rows[self.table.row_of(sequence)] = list(sequence.tokens)
        self.filling.append(sequence)

    @precondition(lambda self: 0 < len(self.live) < NUM_SLOTS)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        source, target = data.draw(st.sampled_from(self.live)), self._new(0)
        target.tokens = list(source.tokens)
        self.table.copy(source, target)
        self._make_room()
        self.filling.append(target)

    @precondition(lambda self: len(self.live) < NUM_SLOTS and (self.live or self.cached))
    @rule(data=st.data())
    def take_prefix(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([*self.live, *self.table.cached]))
        length = data.draw(st.integers(1, len(holder.tokens)))
        sequence = self._new(0)
        sequence.tokens = [*holder.tokens[:length], 100 + self.count]
        expected = holder.tokens[:length]
        if isinstance(holder, CachedPrefix):
            self.cached.remove((holder.tenant, holder.tokens))
            self.cached.append((holder.tenant, holder.tokens))

        self.table.take_prefix(sequence, holder, length)

        self._make_room()
        self._replay()
        assert self.rows[self.table.row_of(sequence)] == expected
        self.rows[self.table.row_of(sequence)] = list(sequence.tokens)
        self.filling.append(sequence)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.filling))
        self.table.decode([*self.decoding, sequence])
        self.filling.remove(sequence)
        self.decoding.add(sequence)

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.decoding, key=lambda one: one.index)))
        self.decoding.remove(sequence)
        self.table.decode(self.decoding)
        self.filling.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self._replay()
        row, is_finite = self.table.row_of(sequence), data.draw(st.booleans())
        self.table.release(sequence, is_finite=is_finite)
        assert self._replay()[-1] == RowOp("cut" if is_finite else "clear", row, row)
        self._forget(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tenant=st.sampled_from("ab"))
    def keep(self, data: st.DataObject, tenant: str) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(0, len(sequence.tokens)))
        tokens = sequence.tokens[:length]
        own = [cached for cached in self.cached if cached[0] == tenant]
        known = next((cached for cached in own if cached[1][:length] == tokens), None)
        self.table.cache_prefix(sequence, length, tenant)
        self._forget(sequence)
        if length > 0 and known is not None:
            self.cached.remove(known)
            self.cached.append(known)
        elif length > 0:
            shorter = [cached for cached in own if tokens[: len(cached[1])] == cached[1]]
            self.cached = [one for one in self.cached if one not in shorter] + [(tenant, tokens)]

    @rule()
    def step(self) -> None:
        assert self.table.decode(self.decoding) == self.table.decoding
        rows = [self.table.row_of(sequence) for sequence in self.table.decoding]
        assert rows == list(range(len(self.decoding))), "decoding rows come first"
        self._replay()
        owners = [*self.live, *self.table.cached]
        assert all(self.rows[self._row(owner)] == owner.tokens for owner in owners)
        assert sum(row == [] for row in self.rows) == NUM_SLOTS - len(owners)

    @invariant()
    def those_decode_that_were_let(self) -> None:
        assert set(self.table.decoding) == self.decoding

    @invariant()
    def no_two_share_a_row(self) -> None:
        rows = [self._row(owner) for owner in (*self.live, *self.table.cached)]
        assert len(set(rows)) == len(rows)

    @invariant()
    def the_least_recently_used_beginnings_are_given_away_first(self) -> None:
        assert [(cached.tenant, cached.tokens) for cached in self.table.cached] == self.cached

    def _row(self, owner: Sequence | CachedPrefix) -> int | None:
        return owner.row if isinstance(owner, CachedPrefix) else self.table.row_of(owner)

    def _new(self, beginning: int) -> Sequence:
        self.count += 1
        return Sequence(REQUEST, self.count, [beginning, 10 + beginning, 100 + self.count])

    def _make_room(self) -> None:
        """Forget what had to go for one row more; the new sequence is not counted yet."""
        if len(self.live) + 1 + len(self.cached) > NUM_SLOTS:
            self.cached.pop(0)

    def _forget(self, sequence: Sequence) -> None:
        assert self.table.row_of(sequence) is None
        self.decoding.discard(sequence)
        if sequence in self.filling:
            self.filling.remove(sequence)

    def _replay(self) -> tuple[RowOp, ...]:
        ops = self.table.take_ops()
        for kind, source, target, start, stop in ops:
            if kind == "swap":
                self.rows[source], self.rows[target] = self.rows[target], self.rows[source]
            elif kind in ("cut", "clear"):
                self.rows[target] = self.rows[target][:start]
            else:
                assert self.rows[target] == [], "the target of a move or copy is empty"
                self.rows[target] = self.rows[source][:stop]
                if kind == "move":
                    self.rows[source] = []
        return ops


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(stateful_step_count=40)


def test_who_pauses_in_every_second_step_lets_one_row_be_exchanged_for_one_that_joins() -> None:
    table = SlotTable(8)
    pausing, others = (
        [Sequence(REQUEST, i, [1]) for i in indices] for indices in ((0, 1, 2), (3, 4))
    )
    for sequence in (*pausing, *others):
        table.take(sequence)
    for _ in range(2):
        table.decode([*pausing, *others])
        table.decode(others)
    table.take_ops()

    others.append(joining := Sequence(REQUEST, 5, [1]))
    table.take(joining)
    for _ in range(2):
        table.decode([*pausing, *others])
        assert table.decode(others)[-1] is joining

    assert [op.kind for op in table.take_ops()] == ["swap"]
