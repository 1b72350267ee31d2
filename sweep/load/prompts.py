"""The contents of requests: random and fresh for every seed, so that no cache of an earlier trial knows them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sweep.load.datasets import BLOCK_TOKENS, Content, estimate
from sweep.load.plan import Ask, Plan

# Frequent words, one token each in the usual vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning
reason research
"""
_GOLDEN = 0x9E3779B97F4A7C15

_Words: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered in a conversation. It is kept in memory only, until the next turn is sent."""

    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """content: token ids, text, or the messages of a chat. tokens: how many; an estimate unless they are exact."""

    content: Content
    tokens: int
    exact: bool


def words(count: int, seed: int) -> str:
    """Return random words of the kind that prompts of text are made of."""
    known = _WORDS.split()
    return " ".join(known[i] for i in np.random.default_rng(seed).integers(len(known), size=count))


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


class PromptSource:
    """Makes the prompt of any request that is planned; the same arguments make the same prompts, in any process.

    seed: of the contents, fresh in every trial and level. text: words in place of token ids, and messages for a chat.
    tokens_per_word: of this model, by which lengths in tokens become numbers of words; about 1 in usual vocabularies.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        vocab_size: int | None = None,
        *,
        text: bool = False,
        tokens_per_word: float = 1.0,
    ) -> None:
        self.plan = plan
        self._seed = seed
        self._tokens_per_word = tokens_per_word
        self._words = _WORDS.split() if text else None
        self._range = (0, len(_WORDS.split())) if text else id_range(vocab_size)
        self._prefixes: dict[int, list[int]] = {}

    def make(self, ask: Ask, *, warmup: bool, earlier: tuple[Prompt, Answer] | None = None) -> Prompt:
        """Return the prompt of a request; earlier: of a later turn, the prompt before it and what was answered."""
        recorded = self.plan.recorded(ask)
        if recorded is not None and recorded.content is not None:
            new = Prompt(recorded.content, recorded.tokens, recorded.exact)
        else:
            new = self._made(self._drawn(ask, warmup=warmup))
        if self.plan.load.endpoint == "chat" and isinstance(new.content, str):
            new = Prompt([{"role": "user", "content": new.content}], new.tokens, exact=False)
        return new if earlier is None else _joined(*earlier, new)

    def _made(self, drawn: list[int]) -> Prompt:
        if self._words is None:
            return Prompt(drawn, len(drawn), exact=True)
        return Prompt(" ".join(self._words[i] for i in drawn), round(len(drawn) * self._tokens_per_word), exact=False)

    def _drawn(self, ask: Ask, *, warmup: bool) -> list[int]:
        stream = f"{'warm-up' if warmup else 'window'}"
        own = ask.history_tokens + ask.new_tokens - ask.prefix_tokens
        row = self.plan.row(ask)
        if row is not None:
            blocks = self._blocks(row.blocks, own, stream)
            return blocks + self._draw(own - len(blocks), f"{stream}/{ask.conversation}")
        tail = self._draw(own, f"{stream}/{ask.conversation}/{ask.turn}")
        if ask.group is None:
            return tail
        if ask.group not in self._prefixes:
            self._prefixes[ask.group] = self._draw(ask.prefix_tokens, f"prefix/{ask.group}")
        return self._prefixes[ask.group] + tail

    def _draw(self, tokens: int, name: str) -> list[int]:
        """Draw that many ids, or the words that make about so many tokens."""
        count = tokens if self._words is None or not tokens else max(1, round(tokens / self._tokens_per_word))
        return self._in_range(_mixed(np.uint64(self._key(name)) + np.arange(count, dtype=np.uint64) * _golden()))

    def _blocks(self, blocks: tuple[int, ...], tokens: int, stream: str) -> list[int]:
        """Return the tokens of hashed blocks: equal ids have equal tokens, of one stream."""
        starts = _mixed(np.uint64(self._key(f"{stream}/blocks")) + np.array(blocks, dtype=np.uint64) * _golden())
        steps = np.arange(BLOCK_TOKENS, dtype=np.uint64) * _golden()
        return self._in_range(_mixed((starts[:, None] + steps).ravel()[:tokens]))

    def _key(self, name: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest(), "big")

    def _in_range(self, words: _Words) -> list[int]:
        low, end = self._range
        ids: list[int] = (words % np.uint64(end - low) + np.uint64(low)).tolist()
        return ids


def _golden() -> np.uint64:
    return np.uint64(_GOLDEN)


def _mixed(words: _Words) -> _Words:
    """Return pseudo-random words: the output function of SplitMix64 (Steele, Lea and Flood 2014) on a counter.

    It gives any part of a prompt without what stands before it, faster than a generator of its own for each.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _joined(before: Prompt, answer: Answer, new: Prompt) -> Prompt:
    """Return a conversation so far with the next turn: ids after ids, text after text, messages after messages."""
    tokens = before.tokens + (len(answer.ids) or estimate(answer.text)) + new.tokens
    old: Any = before.content
    if isinstance(old, str):
        return Prompt(f"{old}{answer.text} {new.content}", tokens, exact=False)
    if old and isinstance(old[0], dict):
        said = {"role": "assistant", "content": answer.text}
        return Prompt([*old, said, *new.content], tokens, exact=False)
    return Prompt([*old, *answer.ids, *new.content], tokens, before.exact and new.exact and bool(answer.ids))
