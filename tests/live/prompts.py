"""Prompts drawn from a seed: prose of very different lengths, code, other scripts."""

from __future__ import annotations

import random

_STARTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Die Würde des Menschen ist",
    "1, 1, 2, 3, 5, 8,",
    "Q: Why is the sky blue?\nA:",
    "東京は日本の",
    "To make bread you need flour, water and",
    "SELECT name, age FROM people WHERE",
    "In 1969 the first people",
)
_WORDS = ("light", "over", "water", "and", "every", "node", "remembers", "a part", "of what", "was said")


def draw(seed: int, count: int) -> list[str]:
    """`count` prompts of 1 to about 300 tokens."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        filler = " ".join(chance.choices(_WORDS, k=chance.choice((0, 0, 5, 40, 250))))
        made.append(f"{filler}{'. ' if filler else ''}{chance.choice(_STARTS)}")
    return made
