"""Captions: how a picture is described, with words hidden, dropped and replaced so that none fixes its picture."""

from __future__ import annotations

import random

STYLES = ("3d", "flat", "noto")

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "gray": (200, 204, 210),
    "blue": (158, 203, 245),
    "pink": (250, 190, 210),
    "yellow": (252, 232, 150),
    "green": (176, 226, 180),
    "orange": (250, 200, 150),
    "purple": (208, 190, 240),
    "navy": (32, 44, 84),
    "black": (24, 24, 26),
}
WHITE_SHARE = 0.6

# Concepts drawn in training in two of the three styles only: the third is asked for when the model is judged.
HELD_OUT: tuple[tuple[str, str], ...] = (
    ("red apple", "noto"),
    ("strawberry", "3d"),
    ("fox", "flat"),
    ("rocket", "noto"),
    ("sunflower", "3d"),
    ("penguin", "flat"),
    ("pizza", "noto"),
    ("guitar", "3d"),
    ("octopus", "3d"),
    ("automobile", "flat"),
    ("crown", "noto"),
    ("cactus", "flat"),
    ("hamburger", "3d"),
    ("owl", "noto"),
    ("umbrella", "flat"),
    ("snowman", "3d"),
)


def pick_background(rng: random.Random) -> str:
    """Name one of BACKGROUNDS: white for WHITE_SHARE of the pictures."""
    names = list(BACKGROUNDS)
    return names[0] if rng.random() < WHITE_SHARE else rng.choice(names[1:])


def _subject(rng: random.Random, label: str, tags: list[str]) -> str:
    draw, words = rng.random(), label.split()
    if tags and draw < 0.10:
        return ", ".join(rng.sample(tags, min(len(tags), rng.randint(1, 3))))
    if tags and draw < 0.25:
        return f"{label}, {rng.choice(tags)}"
    if len(words) > 1 and draw < 0.33:
        del words[rng.randrange(len(words))]
        return " ".join(words)
    if draw < 0.55:
        return f"{'an' if label[0] in 'aeiou' else 'a'} {label}"
    return label


def caption(rng: random.Random, label: str, tags: list[str], style: str, background: str) -> str:
    """Return a short caption such as `a red apple, 3d style, blue background`."""
    parts = [_subject(rng, label, tags)]
    if rng.random() < 0.88:
        parts.append(f"{style} style")
    if rng.random() < (0.12 if background == "white" else 0.45):
        parts.append(f"{background} background")
    return ", ".join(parts)


def long_caption(rng: random.Random, label: str, tags: list[str], style: str, background: str) -> str:
    """Return a long caption: label and all tags in random order, some of them twice, then style and background."""
    words = [*tags, *rng.choices([label, *tags], k=rng.randint(2, 8))]
    rng.shuffle(words)
    return ", ".join([label, *words, f"{style} style", f"{background} background"])
