"""Pictures that are drawn here, each with a question about it: shapes, numbers of them, digits, plots of three bars.

A picture depends on nothing but the seed, its number and its side. All pictures of a set differ, so what is held out is
never trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from anabatic.core import extras

COLOURS = {
    "red": (214, 48, 44), "green": (44, 160, 60), "blue": (40, 84, 214), "yellow": (240, 200, 30),
    "purple": (140, 60, 180), "white": (245, 245, 245),
}  # fmt: skip
SHAPES = ("square", "circle", "triangle", "cross")
MAX_COUNT = 4
"""Shapes in a picture that is asked for their number, at most."""
_DARK = (30, 70)
"""Brightness of the background."""
_BAR_NAMES = ("left", "middle", "right")
_SEGMENTS = {
    "a": (0, 0, 1, 0), "b": (1, 0, 1, 1), "c": (1, 1, 1, 2), "d": (0, 2, 1, 2), "e": (0, 1, 0, 2), "f": (0, 0, 0, 1),
    "g": (0, 1, 1, 1),
}  # fmt: skip
"""Lines of a digit as of a clock's display, on a grid of two columns and three rows of points."""
_DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


@dataclass(frozen=True)
class DrawnPicture:
    """A picture with a question.

    Attributes:
        kind: of the question.
        image: Pillow's.
    """

    kind: str
    question: str
    answer: str
    image: Any


class _Canvas:
    """A dark picture and what is drawn into it, by lengths in parts of its side."""

    def __init__(self, side: int, random: Random) -> None:
        self._side, self.random = side, random
        background = tuple(random.randint(*_DARK) for _ in range(3))
        self.image = extras.import_optional("PIL.Image", "drawing pictures").new("RGB", (side, side), background)
        self._pen = extras.import_optional("PIL.ImageDraw", "drawing pictures").Draw(self.image)

    def draw_shape(self, shape: str, colour: str, x: float, y: float, size: float) -> None:
        """Draw a shape whose middle and half side are given."""
        left, top, right, bottom = (self._side * value for value in (x - size, y - size, x + size, y + size))
        third, fill = self._side * size / 3, COLOURS[colour]
        if shape == "square":
            self._pen.rectangle((left, top, right, bottom), fill=fill)
        elif shape == "circle":
            self._pen.ellipse((left, top, right, bottom), fill=fill)
        elif shape == "triangle":
            self._pen.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill=fill)
        else:
            self._pen.rectangle((left, top + 2 * third, right, bottom - 2 * third), fill=fill)
            self._pen.rectangle((left + 2 * third, top, right - 2 * third, bottom), fill=fill)

    def draw_line(self, points: tuple[float, ...], colour: str, width: float) -> None:
        """Draw a line from one point to another."""
        size = max(1, round(self._side * width))
        self._pen.line([self._side * value for value in points], fill=COLOURS[colour], width=size)

    def draw_bar(self, left: float, height: float, width: float, colour: str) -> None:
        """Draw a bar that stands on the axis of a plot."""
        box = (left, 0.9 - height, left + width, 0.9)
        self._pen.rectangle([self._side * value for value in box], fill=COLOURS[colour])

    def choose_places(self, count: int) -> list[tuple[float, float]]:
        """Return the middles of so many shapes, in different quarters of the picture, each near the middle of it."""
        quarters = self.random.sample([(0.26, 0.26), (0.74, 0.26), (0.26, 0.74), (0.74, 0.74)], count)
        return [(x + self.random.uniform(-0.06, 0.06), y + self.random.uniform(-0.06, 0.06)) for x, y in quarters]

    def draw_large_shape(self) -> tuple[str, str]:
        """Draw one large shape; return shape and colour."""
        shape, colour = self.random.choice(SHAPES), self.random.choice(list(COLOURS))
        x, y = self.random.uniform(0.4, 0.6), self.random.uniform(0.4, 0.6)
        self.draw_shape(shape, colour, x, y, self.random.uniform(0.24, 0.36))
        return shape, colour


def _ask_colour(canvas: _Canvas) -> tuple[str, str]:
    shape, colour = canvas.draw_large_shape()
    return f"Which colour has the {shape}?", colour


def _ask_shape(canvas: _Canvas) -> tuple[str, str]:
    shape, colour = canvas.draw_large_shape()
    return f"Which shape is {colour}?", shape


def _ask_count(canvas: _Canvas) -> tuple[str, str]:
    count = canvas.random.randint(1, MAX_COUNT)
    for x, y in canvas.choose_places(count):
        shape, colour = canvas.random.choice(SHAPES), canvas.random.choice(list(COLOURS))
        canvas.draw_shape(shape, colour, x, y, canvas.random.uniform(0.1, 0.17))
    return "How many shapes are there?", str(count)


def _ask_digit(canvas: _Canvas) -> tuple[str, str]:
    digit, colour = canvas.random.randrange(10), canvas.random.choice(list(COLOURS))
    left, top = canvas.random.uniform(0.25, 0.35), canvas.random.uniform(0.12, 0.22)
    wide, high = canvas.random.uniform(0.32, 0.38), canvas.random.uniform(0.3, 0.34)
    for name in _DIGITS[digit]:
        x1, y1, x2, y2 = _SEGMENTS[name]
        points = (left + wide * x1, top + high * y1, left + wide * x2, top + high * y2)
        canvas.draw_line(points, colour, 0.07)
    return "Which digit is it?", str(digit)


def _ask_bar(canvas: _Canvas) -> tuple[str, str]:
    heights = [canvas.random.uniform(0.1, 0.55) for _ in _BAR_NAMES]
    highest = canvas.random.randrange(3)
    heights[highest] = max(heights) + canvas.random.uniform(0.08, 0.2)
    canvas.draw_line((0.08, 0.92, 0.95, 0.92), "white", 0.03)
    for index, (height, colour) in enumerate(zip(heights, canvas.random.sample(list(COLOURS), 3), strict=True)):
        canvas.draw_bar(0.14 + 0.28 * index, height, 0.2, colour)
    return "Which bar is the highest?", _BAR_NAMES[highest]


KINDS = {"colour": _ask_colour, "shape": _ask_shape, "count": _ask_count, "digit": _ask_digit, "bars": _ask_bar}
"""Kind of question -> what draws a picture for it and returns question and answer."""


def draw_pictures(count: int, side: int, seed: int) -> Iterator[DrawnPicture]:
    """Yield so many pictures, the kinds in turn; no two are equal.

    Args:
        side: of a picture, in pixels.

    Raises:
        ConfigError: Pillow is not installed.
    """
    seen: set[bytes] = set()
    kinds = list(KINDS)
    number = 0
    while len(seen) < count:
        kind = kinds[len(seen) % len(kinds)]
        canvas = _Canvas(side, Random(f"{seed}:{number}"))
        question, answer = KINDS[kind](canvas)
        number += 1
        digest = hashlib.sha256(canvas.image.tobytes()).digest()
        if digest not in seen:
            seen.add(digest)
            yield DrawnPicture(kind, question, answer, canvas.image)
