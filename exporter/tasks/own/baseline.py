"""Baselines that learn nothing but counts: a model has to do better."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence


def commonest_label(labels: Sequence[str], held_out: Sequence[str]) -> float:
    """Return the share of held-out labels that the most frequent one gets right."""
    guess, _ = Counter(labels).most_common(1)[0]
    return sum(label == guess for label in held_out) / len(held_out)


class CommonestTag:
    """Gives every word the tag that it has most often, and unknown words the commonest tag."""

    def __init__(self, sentences: Sequence[Sequence[tuple[str, str]]]) -> None:
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for sentence in sentences:
            for word, tag in sentence:
                counts[word][tag] += 1
        total = sum(counts.values(), Counter[str]())
        self._default = total.most_common(1)[0][0]
        self._tags = {word: found.most_common(1)[0][0] for word, found in counts.items()}

    def accuracy(self, sentences: Sequence[Sequence[tuple[str, str]]]) -> float:
        """Return the share of words that get their tag."""
        pairs = [pair for sentence in sentences for pair in sentence]
        right = sum(self._tags.get(word, self._default) == tag for word, tag in pairs)
        return right / len(pairs)


class WordByWord:
    """Translates every word by the one that goes with it best, in the order of the source."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        together: defaultdict[str, Counter[str]] = defaultdict(Counter)
        sources, targets = Counter[str](), Counter[str]()
        for source, target in pairs:
            there, here = set(source.split()), set(target.split())
            sources.update(there)
            targets.update(here)
            for word in there:
                together[word].update(here)
        # Dice's coefficient: how often two words occur together, of how often either does.
        self._words = {
            word: max(found, key=lambda other: found[other] / (sources[word] + targets[other]))
            for word, found in together.items()
        }

    def translate(self, text: str) -> str:
        """Return a text with every known word translated."""
        return " ".join(self._words.get(word, word) for word in text.split())
