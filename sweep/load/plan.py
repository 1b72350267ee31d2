"""Which requests a load is made of, without their contents: the same for every trial of a study."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, count, islice
from typing import Any

import numpy as np

from sweep.errors import ConfigError
from sweep.load.arrivals import ramp_s, unit_times
from sweep.load.datasets import Dataset, Row, Turn, read_prompts, read_trace
from sweep.load.lengths import Lengths, longest
from sweep.load.shapes import Kind
from sweep.load.workload import Level, LoadSection

_BLOCK = 1024  # conversations whose draws come from one generator
_DIGESTED = 4096
# What a random generator is for; each gets its own from the workload's seed.
_DRAWS, _ORDER, _ARRIVALS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as it is planned: lengths and kinship, no contents.

    new_tokens: of the prompt, beyond its history and with its shared prefix; an estimate where a file has text.
    history_tokens: of a trace, in leading blocks that earlier requests brought; else 0, since answers decide.
    think_s: the pause before it, once the turn before has ended. fields: further fields of the body.
    salt: "", or what keeps a row that is used again apart from its first use.
    """

    conversation: int
    turn: int
    kind: str | None
    new_tokens: int
    output_tokens: int
    natural: bool
    group: int | None
    prefix_tokens: int
    history_tokens: int
    think_s: float
    row: int | None
    adapter: str | None
    fields: Mapping[str, Any]
    salt: str


@dataclass(frozen=True, slots=True)
class _Draws:
    """Of one block of conversations. normals: conversation, turn, (prompt, answer); empty if all lengths are fixed."""

    kinds: list[float]
    groups: list[float]
    normals: list[list[list[float]]]


class Plan:
    """The requests of a load and their times, drawn from the workload's seed: two streams, each numbered from 0.

    The warm-up's stream is apart from the window's, so that the same requests are counted however long a warm-up takes.
    Files are read here; ConfigError names what is wrong with them.
    """

    def __init__(self, load: LoadSection, seed: int) -> None:
        self.load = load
        self.seed = seed
        self.kinds: dict[str | None, Kind] = {kind.name: kind for kind in load.kinds}
        self._ends = list(accumulate(kind.share for kind in load.kinds))
        self._datasets: dict[str | None, Dataset] = {}
        if load.trace is not None:
            self._datasets[None] = read_trace(load.trace)
        else:
            self._read_prompts()
        self._orders = {name: self._order(len(data.rows)) for name, data in self._datasets.items()}
        self._check_contents()
        self._cache: dict[bool, tuple[int, _Draws]] = {}

    def _read_prompts(self) -> None:
        read: dict[tuple[Any, ...], Dataset] = {}
        for kind in self.kinds.values():
            if kind.prompt is None or kind.prompt.file is None:
                continue
            needs_answers = kind.output is None or kind.output.tokens is None
            key = (kind.prompt.file, kind.prompt.format, kind.turns, needs_answers)
            if key not in read:
                read[key] = read_prompts(
                    kind.prompt.file, kind.prompt.format, turns=kind.turns, needs_answers=needs_answers
                )
            self._datasets[kind.name] = read[key]

    def _order(self, rows: int) -> list[int]:
        if self.load.trace is not None:
            return list(range(rows))
        order: list[int] = np.random.default_rng([self.seed, _ORDER]).permutation(rows).tolist()
        return order

    def _check_contents(self) -> None:
        chat = self.load.endpoint == "chat"
        for data in self._datasets.values():
            for turn in chain.from_iterable(row.turns for row in data.rows):
                if isinstance(turn.content, list) and isinstance(turn.content[0], dict) != chat:
                    has, fit = ("token ids", "completions") if chat else ("messages", "chat")
                    raise ConfigError(f"{data.path}: its prompts are {has}; set load.endpoint: {fit}")

    @property
    def files(self) -> dict[str, str]:
        """Path -> sha256 of the bytes, of every file that the load is made from."""
        return {data.path: data.sha256 for data in self._datasets.values()}

    @property
    def synthetic(self) -> bool:
        """Whether contents are made up, of random tokens, for some requests at least."""
        recorded = [data.rows[0].turns[0].content is not None for data in self._datasets.values()]
        return len(recorded) < len(self.kinds) or not all(recorded)

    def notes(self) -> list[str]:
        """Say what was left out of the files."""
        skipped = {data.path: (data.skipped, len(data.rows)) for data in self._datasets.values() if data.skipped}
        return [
            f"{path}: {left:,} conversations are left out (they do not begin with the user, or have no answer to take a"
            f" length from); {kept:,} are used."
            for path, (left, kept) in skipped.items()
        ]

    def too_long(self, limit_tokens: int) -> list[str]:
        """Return the places of the rows that are sure to be longer than a limit.

        Of text the tokens are only estimated; it has one at least.
        """
        places = (
            f"{data.path}{row.place}"
            for name, data in self._datasets.items()
            for row in data.rows
            if any(
                (turn.tokens if turn.exact else 1) + self._answer_tokens(turn, name) > limit_tokens
                for turn in row.turns
            )
        )
        return list(dict.fromkeys(places))

    def _answer_tokens(self, turn: Turn, name: str | None) -> int:
        output = self.kinds[name].output
        return longest(output.tokens) if output and output.tokens else turn.answer_tokens or 1

    def recorded(self, ask: Ask) -> Turn | None:
        """Return what the file has for a request, or None where nothing is recorded."""
        row = self.row(ask)
        return row.turns[ask.turn] if row else None

    def row(self, ask: Ask) -> Row | None:
        return None if ask.row is None else self._datasets[ask.kind].rows[ask.row]

    @property
    def length(self) -> int | None:
        """How many requests a trace has before it begins again; None where there is no trace."""
        return None if self.load.trace is None else len(self._datasets[None].rows)

    def conversation(self, n: int, *, warmup: bool) -> tuple[Ask, ...]:
        """Return the requests of a stream's n-th conversation, whichever were asked for before."""
        if self.load.trace is not None:
            return self._traced(n, warmup=warmup)
        draws = self._draws(n // _BLOCK, warmup=warmup)
        index = n % _BLOCK
        kinds = tuple(self.kinds.values())
        kind = kinds[min(bisect.bisect(self._ends, draws.kinds[index]), len(kinds) - 1)]
        turns: list[Ask] = []
        data = self._datasets.get(kind.name)
        row, salt = self._pick(n, kind.name, warmup=warmup) if data else (None, "")
        count = len(data.rows[row].turns) if data and row is not None else kind.turns
        for turn in range(count):
            normals = draws.normals[index][turn] if draws.normals else (0.0, 0.0)
            recorded = data.rows[row].turns[turn] if data and row is not None else None
            group, prefix = self._group(kind, n, draws.groups[index]) if turn == 0 else (None, 0)
            turns.append(
                Ask(
                    conversation=n,
                    turn=turn,
                    kind=kind.name,
                    new_tokens=recorded.tokens if recorded else _new_tokens(kind, turn, normals[0]),
                    output_tokens=_output_tokens(kind, recorded, normals[1]),
                    natural=_natural(kind),
                    group=group,
                    prefix_tokens=prefix,
                    history_tokens=0,
                    think_s=kind.think_s if turn else 0.0,
                    row=row,
                    adapter=_adapter(kind, n),
                    fields=kind.request,
                    salt=salt,
                )
            )
        return tuple(turns)

    def _traced(self, n: int, *, warmup: bool) -> tuple[Ask, ...]:
        kind = self.kinds[None]
        rows = self._datasets[None].rows
        index, salt = self._pick(n, None, warmup=warmup)
        row = rows[index]
        turn = row.turns[0]
        ask = Ask(
            conversation=n,
            turn=0,
            kind=None,
            new_tokens=turn.tokens - row.history_tokens,
            output_tokens=turn.answer_tokens or 1,
            natural=_natural(kind),
            group=None,
            prefix_tokens=0,
            history_tokens=row.history_tokens,
            think_s=0.0,
            row=index,
            adapter=_adapter(kind, n),
            fields=kind.request,
            salt=salt,
        )
        return (ask,)

    def _pick(self, n: int, name: str | None, *, warmup: bool) -> tuple[int, str]:
        """Return the row of a conversation, and the salt that keeps its cycles and its streams apart."""
        order = self._orders[name]
        cycle, index = divmod(n, len(order))
        if warmup:
            # From the other end of the order, but for a trace, in which later rows go on from earlier ones.
            index = index if self.load.trace is not None else -1 - index
            return order[index], f"w{cycle}"
        return order[index], str(cycle) if cycle else ""

    def _group(self, kind: Kind, n: int, draw: float) -> tuple[int | None, int]:
        if kind.prompt is None or not kind.prompt.shared_prefix:
            return None, 0
        # What one adapter has computed is of no use to another, so each has groups of its own.
        adapters = max(len(kind.adapters), 1)
        return kind.groups_from + int(draw * kind.prompt.groups) * adapters + n % adapters, kind.prompt.shared_prefix

    def _draws(self, block: int, *, warmup: bool) -> _Draws:
        known = self._cache.get(warmup)
        if known is None or known[0] != block:
            known = (block, self._draw(block, warmup=warmup))
            self._cache[warmup] = known
        return known[1]

    def _draw(self, block: int, *, warmup: bool) -> _Draws:
        rng = np.random.default_rng([self.seed, _DRAWS, int(warmup), block])
        kinds, groups = rng.random((2, _BLOCK)).tolist()
        if not any(_varies(kind) for kind in self.kinds.values()):
            return _Draws(kinds, groups, [])
        turns = max(kind.turns for kind in self.kinds.values())
        return _Draws(kinds, groups, rng.standard_normal((_BLOCK, turns, 2)).tolist())

    def offsets_s(self, level: Level, *, warmup: bool) -> Iterator[float]:
        """Yield when each conversation of a stream begins, from the stream's start, for ever.

        A rate counts requests: where conversations have several turns, fewer conversations begin. After its last row a
        trace begins again, one mean gap later.
        """
        load = self.load
        if level.trace:
            times = [row.at_s or 0.0 for row in self._datasets[None].rows]
            if not warmup:
                again_s = times[-1] * (1 + 1 / max(len(times) - 1, 1)) or 1.0
                return ((n * again_s + at_s) / load.trace_speed for n in count() for at_s in times)
            rate = len(times) * load.trace_speed / max(times[-1], 1.0)
            return (unit / rate for unit in unit_times("poisson", 1.0, [self.seed, _ARRIVALS, 1]))
        units = unit_times(load.arrivals or "poisson", load.burstiness or 1.0, [self.seed, _ARRIVALS, int(warmup)])
        per_request = 1 / self.mean_turns
        first_rps = (level.rate_rps or 1.0) * per_request
        if level.to_rps is None or load.seconds is None or warmup:
            return (unit / first_rps for unit in units)
        return ramp_s(units, first_rps, level.to_rps * per_request, load.seconds)

    @property
    def mean_turns(self) -> float:
        """How many requests a conversation has on average."""

        def turns(kind: Kind) -> float:
            data = self._datasets.get(kind.name)
            return data.mean_turns if data else kind.turns

        return sum(kind.share * turns(kind) for kind in self.kinds.values())

    def sha256(self) -> str:
        """Return the digest of the first thousands of requests and times, as drawn, and of the files' bytes.

        It is the same wherever the same load is planned, and another one where a file or what draws has changed.
        """
        digest = hashlib.sha256(json.dumps([self._settings(), self.seed], sort_keys=True).encode())
        for warmup in (False, True):
            asks = chain.from_iterable(self.conversation(n, warmup=warmup) for n in count())
            lines = [[getattr(ask, name) for name in _DIGESTED_FIELDS] for ask in islice(asks, _DIGESTED)]
            digest.update(json.dumps(lines).encode())
        for level in self.load.levels():
            if level.concurrency is None:
                times = [round(1e6 * at_s) for at_s in islice(self.offsets_s(level, warmup=False), _DIGESTED)]
                digest.update(json.dumps(times).encode())
        return digest.hexdigest()

    def _settings(self) -> dict[str, Any]:
        """Return what the load is, without where its files lie and how it is sent."""
        apart = {"processes", "request_timeout_s", "stall_timeout_s"}
        settings = self.load.model_dump(mode="json", exclude=apart)
        digests = self.files
        if settings["trace"] is not None:
            settings["trace"] = digests[settings["trace"]]
        for holder in (settings, *settings["mix"]):
            shape = holder["prompt"]
            if shape and shape["file"] is not None:
                # A file that every class replaces by its own prompts is never read.
                shape["file"] = digests.get(shape["file"])
        return settings


_DIGESTED_FIELDS = tuple(name for name in Ask.__slots__ if name != "fields")


def _varies(kind: Kind) -> bool:
    lengths = (kind.prompt and kind.prompt.tokens, kind.output and kind.output.tokens)
    return any(isinstance(length, Lengths) for length in lengths)


def _new_tokens(kind: Kind, turn: int, normal: float) -> int:
    assert kind.prompt is not None
    assert kind.prompt.tokens is not None
    drawn = kind.prompt.tokens if isinstance(kind.prompt.tokens, int) else kind.prompt.tokens.at(normal)
    whole = max(drawn, kind.prompt.shared_prefix + 1)
    return whole - kind.prompt.shared_prefix if turn else whole  # the prefix comes once


def _output_tokens(kind: Kind, recorded: Turn | None, normal: float) -> int:
    length = kind.output.tokens if kind.output else None
    if length is None:
        assert recorded is not None
        assert recorded.answer_tokens is not None
        return recorded.answer_tokens
    return length if isinstance(length, int) else length.at(normal)


def _natural(kind: Kind) -> bool:
    return kind.output is not None and kind.output.natural


def _adapter(kind: Kind, n: int) -> str | None:
    return kind.adapters[n % len(kind.adapters)] if kind.adapters else None
