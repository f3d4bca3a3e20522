"""Which rewrite spoiled the picture: switch them off one by one, then on one by one, and look.

Only called when stock draws the same picture well, so that something fused must be to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Guilt:
    """What the search found.

    Attributes:
        rewrites: the rewrites to blame; empty when none could be singled out.
        sentence: the finding in one sentence.
        prompt, seed: the picture that was searched with.
        step: zero-based step in which NaN or infinity appeared, or None (decoding, or a red gate).
        tried: rewrite -> whether the picture is good without it.
    """

    rewrites: tuple[str, ...]
    sentence: str
    prompt: str
    seed: int
    step: int | None
    tried: tuple[tuple[str, bool], ...]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "rewrites": list(self.rewrites), "tried": dict(self.tried)}


def find_guilty(
    rewrites: Sequence[str],
    good_without: Callable[[tuple[str, ...]], bool],
    *,
    prompt: str,
    seed: int,
    step: int | None,
    symptom: str,
) -> Guilt:
    """Single out the rewrites to blame.

    Args:
        rewrites: names of those that are in force.
        good_without: draws the picture with these rewrites switched off and says whether it is good.
        prompt, seed: the picture, for the record.
        step: where the symptom appeared.
        symptom: what is wrong, to begin the sentence with.
    """
    tried = {name: good_without((name,)) for name in rewrites}
    cured = tuple(name for name, good in tried.items() if good)
    guilty: tuple[str, ...] = ()
    if len(cured) == 1:
        guilty = cured
        sentence = f"{symptom}: caused by rewrite {cured[0]} (gone when it is switched off)"
    elif len(cured) > 1:
        # Any one of several cures it: they spoil it together, or it is so close to the gate that chance decides.
        guilty = cured if len(cured) <= len(tried) // 2 else ()
        sentence = f"{symptom}: gone when any one of {', '.join(cured)} is switched off"
    else:
        everything = tuple(rewrites)
        if not good_without(everything):
            sentence = f"{symptom}: stays with every rewrite switched off"
        else:
            guilty = tuple(
                name for name in rewrites if not good_without(tuple(other for other in everything if other != name))
            )
            sentence = (
                f"{symptom}: caused by each of {', '.join(guilty)} alone"
                if guilty
                else f"{symptom}: no single rewrite causes it; gone only with several switched off"
            )
    return Guilt(guilty, sentence, prompt, seed, step, tuple(tried.items()))
