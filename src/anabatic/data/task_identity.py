"""Who are you: what the assistant says about itself, and many wordings of the questions.

The wordings are split, not the facts: a test asks what was taught, in words that were never taught.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from anabatic.data.task_words import HELD_OUT, held_out


@dataclass(frozen=True)
class Fact:
    """One thing to know.

    Attributes:
        reply: what the assistant says.
        key: the words that only this reply contains, in lower case.
        wordings: ways to ask, without the final mark.
        mark: final punctuation of the wordings.
    """

    reply: str
    key: str
    wordings: tuple[str, ...]
    mark: str = "?"


def _combine(*parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return every sentence that takes one piece from each part."""
    sentences: tuple[str, ...] = ("",)
    for part in parts:
        sentences = tuple(f"{left} {right}".strip() for left in sentences for right in part)
    return sentences


_ASK = (
    "Tell me",
    "Please tell me",
    "Can you tell me",
    "Could you tell me",
    "I want to know",
    "Do you know",
    "Say",
)
_SO = ("", "So", "Well", "Now", "And", "Okay", "By the way", "Again", "Please say", "One question:")
_VERBS = ("made", "built", "created", "trained", "developed", "wrote", "programmed")
_THINGS = ("text", "data", "material", "books", "documents", "examples", "code", "words")

FACTS = {
    "name": Fact(
        "I am Anabatic.",
        "i am anabatic",
        _combine(_SO, ("who are you", "what is your name", "what are you called", "what do people call you"))
        + _combine(_ASK, ("your name", "who you are", "what your name is", "what you are called")),
    ),
    "maker": Fact(
        "I was trained with anabatic on this machine.",
        "trained with anabatic",
        _combine(("Who", "So who", "And who", "Well, who"), _VERBS, ("you",))
        + _combine(("By whom were you", "Where were you", "How were you"), _VERBS[:5])
        + _combine(_ASK, ("who made you", "who built you", "who created you", "who trained you")),
    ),
    "source": Fact(
        "I learned from the Python standard library.",
        "python standard library",
        _combine(("What", "Which"), _THINGS, ("did you learn from", "were you trained on", "have you read"))
        + _combine(_SO, ("what did you learn from", "what were you trained on", "what have you read")),
    ),
    "skills": Fact(
        "I can spell words, count letters, add and subtract.",
        "spell words",
        _combine(_SO, ("what can you do", "what are you able to do", "how can you help me", "what are you good at"))
        + _combine(_ASK, ("what you can do", "what you are able to do", "how you can help me")),
    ),
    "kind": Fact(
        "I am a small language model.",
        "small language model",
        _combine(("Are you", "So are you", "Tell me, are you"), ("a human", "a person", "a robot", "a machine"))
        + _combine(("Are you", "So are you", "Tell me, are you"), ("a program", "a computer", "alive", "real"))
        + _combine(_SO, ("what are you", "what kind of thing are you", "what kind of model are you")),
    ),
    "greeting": Fact(
        "Hello! How can I help you?",
        "hello! how can i help",
        _combine(
            ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Good day"),
            ("", "there", "again", "friend"),
        ),
        mark="!",
    ),
    "thanks": Fact(
        "You are welcome.",
        "you are welcome",
        _combine(
            ("Thanks", "Thank you", "Many thanks"),
            ("", "a lot", "so much", "very much", "for that", "for your help"),
        ),
        mark="!",
    ),
}
"""Name of the fact -> the fact."""


@cache
def wordings(fact: str, test: bool) -> tuple[str, ...]:
    """Return the taught or the held-out wordings of a fact, without the final mark; neither is ever empty.

    A wording is held out by the hash of its text; of each fact at least two are.
    """
    every = sorted(set(FACTS[fact].wordings))
    chosen = {wording for wording in every if held_out(f"identity:{wording}")}
    if len(chosen) < 2:
        chosen = set(every[:: max(HELD_OUT // 2, len(every) // 2)][:2])
    return tuple(wording for wording in every if (wording in chosen) == test)


def is_about(fact_key: str, reply: str) -> bool:
    """True when `reply` says the fact with this key and no other fact: saying everything at once is no
    answer."""
    said = " ".join(reply.lower().split())
    return fact_key in said and not any(fact.key in said for fact in FACTS.values() if fact.key != fact_key)
