"""A small grammar of English whose words are often of several parts of speech.

Tags are those of Universal Dependencies. A sentence is a list of (word, tag).
"""

from __future__ import annotations

import random

TaggedSentence = list[tuple[str, str]]
TAGS = (
    "ADJ",
    "ADP",
    "ADV",
    "AUX",
    "CCONJ",
    "DET",
    "NOUN",
    "NUM",
    "PART",
    "PRON",
    "PROPN",
    "PUNCT",
    "VERB",
)


def write_sentence(rng: random.Random) -> TaggedSentence:
    """Return a sentence; one in five has two clauses."""
    sentence = _clause(rng)
    if rng.random() < 0.2:
        sentence += [(rng.choice(("and", "but", "or")), "CCONJ")] + _clause(rng)
    kind = rng.random()
    if kind < 0.15:
        sentence = _question(rng)
    elif kind < 0.25:
        sentence = _command(rng)
    end = "?" if 0 <= kind < 0.15 else rng.choice((".", ".", ".", "!"))
    if rng.random() < 0.75:
        sentence.append((end, "PUNCT"))
    return sentence


def _clause(rng: random.Random) -> TaggedSentence:
    plural = rng.random() < 0.35
    return _subject(rng, plural) + _predicate(rng, plural) + _adverbial(rng)


def _question(rng: random.Random) -> TaggedSentence:
    """Can the duck swim ?"""
    auxiliary = rng.choice(_MODALS + ("did",))
    sentence = [(auxiliary, "AUX")] + _subject(rng, rng.random() < 0.35)
    return sentence + _bare_verb_phrase(rng) + _adverbial(rng)


def _command(rng: random.Random) -> TaggedSentence:
    """Please do not book the can ."""
    sentence: TaggedSentence = []
    if rng.random() < 0.3:
        sentence += [("do", "AUX"), ("not", "PART")]
    return sentence + _bare_verb_phrase(rng) + _adverbial(rng)


def _subject(rng: random.Random, plural: bool) -> TaggedSentence:
    style = rng.random()
    if style < 0.45:
        return [(rng.choice(("we", "they", "you") if plural else _SINGULAR_PRONOUNS), "PRON")]
    if style < 0.55 and not plural:
        return [(rng.choice(_NAMES), "PROPN")]
    return _noun_phrase(rng, plural)


def _noun_phrase(rng: random.Random, plural: bool) -> TaggedSentence:
    determiner = rng.choice(_PLURAL_DETERMINERS if plural else _DETERMINERS)
    phrase = [(determiner, "DET")]
    if plural and rng.random() < 0.25:
        phrase.append((rng.choice(_NUMBERS), "NUM"))
    if rng.random() < 0.35:
        phrase.append((rng.choice(_ADJECTIVES), "ADJ"))
        if rng.random() < 0.15:
            phrase.append((rng.choice(_ADJECTIVES), "ADJ"))
    noun = rng.choice(_NOUNS)
    phrase.append((_plural(noun) if plural else noun, "NOUN"))
    if rng.random() < 0.1:
        phrase += [(rng.choice(_PREPOSITIONS), "ADP")] + _noun_phrase(rng, rng.random() < 0.3)
    return phrase


def _object(rng: random.Random) -> TaggedSentence:
    style = rng.random()
    if style < 0.16:
        return [(rng.choice(_OBJECT_PRONOUNS), "PRON")]
    if style < 0.22:
        return [(rng.choice(_NAMES), "PROPN")]
    return _noun_phrase(rng, rng.random() < 0.35)


def _predicate(rng: random.Random, plural: bool) -> TaggedSentence:
    style = rng.random()
    if style < 0.40:
        return _past_verb_phrase(rng)
    if style < 0.68:
        return [(rng.choice(_MODALS), "AUX")] + _maybe_not(rng) + _bare_verb_phrase(rng)
    if style < 0.76:
        return [("did", "AUX"), ("not", "PART")] + _bare_verb_phrase(rng)
    if style < 0.88:
        be = rng.choice(("are", "were") if plural else ("is", "was"))
        return [(be, "AUX")] + _maybe_not(rng) + _maybe_adverb(rng) + _complement(rng)
    wish = rng.choice(("wanted", "tried", "hoped", "loved", "began"))
    return [(wish, "VERB"), ("to", "PART")] + _bare_verb_phrase(rng)


def _complement(rng: random.Random) -> TaggedSentence:
    if rng.random() < 0.5:
        return [(rng.choice(_ADJECTIVES), "ADJ")]
    return [(rng.choice(_PREPOSITIONS), "ADP")] + _noun_phrase(rng, False)


def _past_verb_phrase(rng: random.Random) -> TaggedSentence:
    adverb = _maybe_adverb(rng)
    if rng.random() < 0.25:
        return adverb + [(rng.choice(_PAST_INTRANSITIVE), "VERB")]
    return adverb + [(rng.choice(_PAST_TRANSITIVE), "VERB")] + _object(rng)


def _bare_verb_phrase(rng: random.Random) -> TaggedSentence:
    adverb = _maybe_adverb(rng)
    if rng.random() < 0.3:
        return adverb + [(rng.choice(_INTRANSITIVE), "VERB")]
    return adverb + [(rng.choice(_TRANSITIVE), "VERB")] + _object(rng)


def _adverbial(rng: random.Random) -> TaggedSentence:
    style = rng.random()
    if style < 0.22:
        phrase = [(rng.choice(_PREPOSITIONS), "ADP")]
        return phrase + _noun_phrase(rng, rng.random() < 0.25)
    if style < 0.36:
        return [(rng.choice(_LATE_ADVERBS), "ADV")]
    if style < 0.42:
        return [("like", "ADP")] + _noun_phrase(rng, False)
    return []


def _maybe_not(rng: random.Random) -> TaggedSentence:
    return [("not", "PART")] if rng.random() < 0.25 else []


def _maybe_adverb(rng: random.Random) -> TaggedSentence:
    return [(rng.choice(_EARLY_ADVERBS), "ADV")] if rng.random() < 0.12 else []


def _plural(noun: str) -> str:
    if noun in _SAME_PLURAL:
        return noun
    if noun.endswith(("s", "sh", "ch", "x")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeou":
        return noun[:-1] + "ies"
    return noun + "s"


_SINGULAR_PRONOUNS = ("i", "i", "he", "she", "it", "you")
_OBJECT_PRONOUNS = ("me", "him", "her", "it", "us", "them", "you", "that", "this")
_NAMES = "mary john anna peter berlin london rose mark bill will may paris".split()
_DETERMINERS = "a a the the the my your his her our their this that every no".split()
_PLURAL_DETERMINERS = "the the my your his her our their these those some no all".split()
_NUMBERS = "two three four five six seven ten 2 3 12".split()
_MODALS = ("can", "can", "will", "will", "must", "may", "might", "should", "could", "would")

# Many of these nouns are also in the lists of verbs and adjectives below.
_NOUNS = (
    "saw can will run walk light watch play book fish fly duck bear plant water park train ring "
    "rose left right back hand head face cook paint dance drink sleep dream love hope work cold "
    "man woman child boy girl dog cat bird horse house garden tree river street table chair bread "
    "letter friend teacher doctor king queen city road car ship stone cup door window bank match "
    "box spring fall swim call cut show name mark bill orange record address visit star cover"
).split()
_SAME_PLURAL = {"fish"}
_TRANSITIVE = (
    "see saw can run walk light watch play book fish fly duck bear plant water park train ring "
    "hand head face cook paint dance drink love cut show name mark bill record address visit "
    "cover find take make like want know help hear eat buy sell carry read write catch call "
    "warm open close clean dry cool empty back box right"
).split()
_INTRANSITIVE = (
    "run walk play fish fly duck swim dance drink sleep dream hope work fall spring sing go come "
    "wait laugh cry stay speak train cook ring park star match"
).split()
_PAST_TRANSITIVE = (
    "saw watched played booked found left took made liked wanted knew helped heard ate bought sold "
    "carried cut read put hit wrote caught called painted planted watered trained parked loved "
    "showed named marked recorded covered opened closed cleaned lit bore rang flew walked held felt"
).split()
_PAST_INTRANSITIVE = (
    "ran walked played swam danced drank slept dreamed worked fell rose sang went came waited "
    "laughed cried stayed spoke flew rang left won lost"
).split()
_ADJECTIVES = (
    "light left right back flat fast hard cold close open warm clean dry cool empty orange big "
    "small old young new good bad happy sad red green blue long short strong weak early late kind"
).split()
_EARLY_ADVERBS = "often never always really quickly slowly also still just".split()
_LATE_ADVERBS = (
    (
        "fast hard early late back today yesterday here there again often quickly slowly well home "
        "right now"
    )
    .replace("right now", "now")
    .split()
)
_PREPOSITIONS = "in on at by near with from to under over behind like for of".split()
