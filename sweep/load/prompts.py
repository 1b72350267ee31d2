"""Prompts of an exact length, fresh for every seed, so that no cache of an earlier trial knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sweep.load.workload import PromptShape

# Frequent words, one token each in the usual vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning
reason research
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, or text where ids are not possible; `tokens` is then the number of words, an estimate."""

    content: list[int] | str
    tokens: int
    group: int | None  # which shared prefix it begins with


def id_range(vocab_size: int | None) -> tuple[int, int]:
    """Return the first id and the end of a range of ordinary tokens.

    Special tokens stand at the beginning or at the end of a vocabulary. Where its size is not known, the range fits
    the smallest vocabulary in wide use, that of 32,000 tokens.
    """
    if vocab_size is None:
        return 1000, 30_000
    if vocab_size <= 4000:
        return vocab_size // 4, max(vocab_size - vocab_size // 8, vocab_size // 4 + 1)
    return 1000, min(vocab_size - 1000, 30_000)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Makes the n-th prompt of a run; the same arguments make the same prompts.

    seed: of the contents, fresh in every trial. workload_seed: of the choice of groups, shared by all trials.
    """

    shape: PromptShape
    seed: int
    workload_seed: int
    vocab_size: int | None = None
    text: bool = False
    _prefixes: dict[int, list[int]] = field(default_factory=dict)

    def make(self, n: int) -> Prompt:
        shape = self.shape
        group = None
        ids: list[int] = []
        if shape.shared_prefix:
            group = int(np.random.default_rng([self.workload_seed, n]).integers(shape.groups))
            if group not in self._prefixes:
                self._prefixes[group] = self._draw(shape.shared_prefix, 0, group)
            ids = self._prefixes[group]
        ids = ids + self._draw(shape.tokens - shape.shared_prefix, 1, n)
        if not self.text:
            return Prompt(ids, shape.tokens, group)
        words = _WORDS.split()
        return Prompt(" ".join(words[i] for i in ids), shape.tokens, group)

    def _draw(self, count: int, kind: int, index: int) -> list[int]:
        low, high = (0, len(_WORDS.split())) if self.text else id_range(self.vocab_size)
        drawn: list[int] = np.random.default_rng([self.seed, kind, index]).integers(low, high, size=count).tolist()
        return drawn
