"""A work that changes the requests of another one."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.work.ask import Ask, Work


@dataclass(frozen=True)
class Derived:
    """A work that follows another one, but for an `ask` of its own."""

    work: Work

    @property
    def title(self) -> str:
        return self.work.title

    @property
    def num_different(self) -> int | None:
        return self.work.num_different

    @property
    def times(self) -> tuple[float, ...]:
        return self.work.times

    def next_turn(self, ask: Ask, answer: str) -> Ask | None:
        """Return what the other work asks behind an answer."""
        return self.work.next_turn(ask, answer)
