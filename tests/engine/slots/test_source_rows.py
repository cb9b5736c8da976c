"""The table of sources against a plain model, with the operations replayed on text rows."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.slots.batch import RowOp
from engine.slots.sources import Source, SourceTable

NUM_ROWS = 4


class SourceMachine(RuleBasedStateMachine):
    """Rows hold the source that they belong to, or nothing; a fresh one is encoded by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SourceTable(NUM_ROWS)
        self.rows: list[Source | None] = [None] * NUM_ROWS
        self.running: dict[int, Source] = {}
        self.ready: set[int] = set()
        self.cached: list[Source] = []  # the least recently used first

    @precondition(lambda self: len(self.running) < NUM_ROWS)
    @rule(tenant=st.sampled_from("ab"), word=st.integers(0, 3))
    def take(self, tenant: str, word: int) -> None:
        source = (tenant, (word, word))
        known = [*self.cached, *(s for row, s in self.running.items() if row in self.ready)]

        found = self.table.find(source)
        row = self.table.take(source, found)

        assert (found is not None) == (source in known)
        self._replay()
        assert row not in self.running
        if found is None:
            assert self.rows[row] is None, "a row to be encoded into is empty"
            self.rows[row] = source
        self.running[row] = source
        if source in self.cached:
            self.cached.remove(source)
            self.cached.append(source)
        if len(self.cached) + len(self.running) > NUM_ROWS:
            self.cached.pop(0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def mark_ready(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.running)))
        self.table.mark_ready(row)
        self.ready.add(row)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ends_well=st.booleans())
    def end(self, data: st.DataObject, ends_well: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.running)))
        self._replay()
        if ends_well:
            self.table.cache_source(row)
        else:
            self.table.release(row)
        emptied = [op for op in self._replay() if op.target == row and op.kind != "copy_source"]
        is_finite = row in self.ready
        assert {op.kind for op in emptied} <= {"cut_source" if is_finite else "clear_source"}
        source = self.running.pop(row)
        if ends_well and source in self.cached:
            self.cached.remove(source)
            self.cached.append(source)
        elif ends_well and row in self.ready:
            self.cached.append(source)
        self.ready.discard(row)

    @invariant()
    def rows_hold_what_runs_and_what_was_kept_and_nothing_else(self) -> None:
        self._replay()
        cached = self.table.cached
        assert list(cached.values()) == self.cached
        assert not set(cached) & set(self.running)
        wanted = [self.running.get(row, cached.get(row)) for row in range(NUM_ROWS)]
        assert self.rows == wanted

    def _replay(self) -> tuple[RowOp, ...]:
        ops = self.table.take_ops()
        for op in ops:
            assert isinstance(op, RowOp)
            if op.kind in ("cut_source", "clear_source"):
                self.rows[op.target] = None
            else:
                assert op.kind == "copy_source"
                assert self.rows[op.target] is None and self.rows[op.origin] is not None
                self.rows[op.target] = self.rows[op.origin]
        return ops


TestSources = SourceMachine.TestCase
TestSources.settings = settings(stateful_step_count=40)


def test_running_sources_have_the_lowest_rows_whatever_is_kept() -> None:
    table = SourceTable(4)
    for word in range(6):
        row = table.take(("", (word,)))
        table.mark_ready(row)
        assert row == 0
        table.cache_source(row)

    assert sorted(table.cached.values()) == [("", (word,)) for word in (2, 3, 4, 5)]
