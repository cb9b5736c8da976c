"""Sentences of praise and blame from a small grammar, with negation and changes of mind.

Rules of the label:
* a negation turns what it negates: "not good" is blame, "never boring" is praise;
* of two clauses with "but" or "although", the main one decides: "it was slow, but I loved it";
* words about nothing ("yesterday", "with my sister") count for nothing.
"""

from __future__ import annotations

import random

POSITIVE, NEGATIVE = "positive", "negative"


def write_opinion(rng: random.Random, label: str) -> str:
    """Return a text of one or two sentences whose opinion is `label`."""
    style = rng.random()
    if style < 0.50:
        text = _clause(rng, label)
    elif style < 0.66:
        text = f"{_clause(rng, label)}{rng.choice((' and', ', and', '.', ' because'))} "
        text += _clause(rng, label)
    elif style < 0.86:
        text = (
            f"{_clause(rng, _opposite(label))}{rng.choice((' but', ', but', '. But', '. Still,'))} "
        )
        text += _clause(rng, label)
    elif style < 0.93:
        text = f"although {_clause(rng, _opposite(label))}, {_clause(rng, label)}"
    else:
        text = f"{_clause(rng, label)}, although {_clause(rng, _opposite(label))}"
    opening = rng.choice(_OPENINGS) if rng.random() < 0.2 else ""
    detail = " " + rng.choice(_DETAILS) if rng.random() < 0.2 else ""
    text = f"{opening}{text}{detail}{rng.choice(('.', '.', '!', ''))}"
    return rng.choice((str, str.capitalize, str.lower))(text)


def _opposite(label: str) -> str:
    return NEGATIVE if label == POSITIVE else POSITIVE


def _clause(rng: random.Random, label: str) -> str:
    return rng.choice((_judgement, _judgement, _feeling, _belief, _exclamation))(rng, label)


def _judgement(rng: random.Random, label: str) -> str:
    """The plot was never very boring."""
    thing = f"{rng.choice(_DETERMINERS)} {_neutral(rng)}{rng.choice(_THINGS)}"
    thing = rng.choice(("it", "this", thing, thing, thing, thing))
    negated = rng.random() < 0.4
    adjective = rng.choice(_ADJECTIVES[_opposite(label) if negated else label])
    degree = rng.choice(_DEGREES) + " " if rng.random() < 0.4 else ""
    if negated:
        verb = rng.choice(
            ("is not", "was not", "isn't", "wasn't", "is never", "was never", "was hardly")
        )
    else:
        verb = rng.choice(("is", "was", "seemed", "looked", "felt", "turned out"))
    also = ""
    if not negated and rng.random() < 0.15:
        also = f" and {rng.choice(_ADJECTIVES[label])}"
    return f"{thing} {verb} {degree}{adjective}{also}"


def _feeling(rng: random.Random, label: str) -> str:
    """I did not like the food."""
    who = rng.choice(_PEOPLE)
    thing = rng.choice(("it", f"{rng.choice(_DETERMINERS)} {_neutral(rng)}{rng.choice(_THINGS)}"))
    negated = rng.random() < 0.4
    verb, past = rng.choice(_VERBS[_opposite(label) if negated else label])
    if not negated:
        return f"{who} {rng.choice(('', '', 'really ', 'truly '))}{past} {thing}"
    refusal = rng.choice(("did not", "didn't", "never did", "could not", "couldn't"))
    return f"{who} {refusal} {verb} {thing}"


def _belief(rng: random.Random, label: str) -> str:
    """I do not think that it was bad."""
    if rng.random() < 0.5:
        head = rng.choice(("i think", "i must say", "we found", "my friends say", "everybody says"))
        return f"{head} {rng.choice(('', 'that '))}{_judgement(rng, label)}"
    head = rng.choice(("i do not think", "i don't think", "nobody can say", "i never thought"))
    return f"{head} {rng.choice(('', 'that '))}{_judgement(rng, _opposite(label))}"


def _exclamation(rng: random.Random, label: str) -> str:
    """Not a good film."""
    negated = rng.random() < 0.4
    adjective = rng.choice(_ADJECTIVES[_opposite(label) if negated else label])
    head = "not " if negated else rng.choice(("", "", "very ", "what a ", "such a "))
    if rng.random() < 0.5:
        return head.replace(" a ", " ") + adjective
    article = "a " if negated and rng.random() < 0.5 else ""
    return f"{head}{article}{adjective} {rng.choice(_THINGS)}"


def _neutral(rng: random.Random) -> str:
    return rng.choice(_NEUTRAL) + " " if rng.random() < 0.2 else ""


_ADJECTIVES = {
    POSITIVE: (
        "good great excellent wonderful brilliant charming funny delightful lovely perfect fresh "
        "tasty friendly clever beautiful impressive amazing fantastic superb enjoyable interesting "
        "exciting comfortable clean nice fine pleasant helpful"
    ).split(),
    NEGATIVE: (
        "bad terrible awful horrible boring dull poor disappointing ugly slow rude cold stale weak "
        "stupid annoying dreadful tedious dirty noisy painful unpleasant disgusting clumsy cheap "
        "confusing useless broken"
    ).split(),
}
_VERBS = {
    POSITIVE: (
        ("like", "liked"),
        ("love", "loved"),
        ("enjoy", "enjoyed"),
        ("admire", "admired"),
        ("recommend", "recommended"),
        ("adore", "adored"),
    ),
    NEGATIVE: (
        ("hate", "hated"),
        ("dislike", "disliked"),
        ("regret", "regretted"),
        ("despise", "despised"),
        ("avoid", "avoided"),
    ),
}
_THINGS = (
    "film movie book story plot music food soup service hotel room staff actor acting ending song "
    "dinner coffee place show game restaurant waiter concert play phone trip museum wine weather"
).split()
_NEUTRAL = "new old first second last whole long short french main other small big".split()
_DETERMINERS = ("the", "the", "the", "this", "that", "their", "our")
_DEGREES = ("very", "really", "so", "quite", "that", "particularly")
_PEOPLE = ("i", "i", "we", "they", "my sister", "my friends", "the children", "everybody")
_OPENINGS = ("well, ", "honestly, ", "yesterday ", "to be honest, ", "in the end ", "last week ")
_DETAILS = (
    "yesterday",
    "with my sister",
    "last night",
    "in paris",
    "from start to end",
    "for the price",
    "this time",
)
