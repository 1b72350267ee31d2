"""Why a vLLM server failed, read from its log and from how it ended.

A log is searched as a whole. A message that names the cause wins over a symptom, a symptom over a consequence, and the
first of several over the later ones: an engine that dies makes every process around it complain after it. What stands
before the line that says that the server is up did not stop it, and what a request met after it stopped nobody else.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sweep.failure import Failure, FailureKind, Phase, Treatment
from sweep.serve import message_numbers
from sweep.serve.advice import advice
from sweep.serve.failure_rules import RULES
from sweep.serve.log_lines import Found, Line, Reader, opened, strip
from sweep.serve.log_story import Step, Story
from sweep.serve.rule import CONSEQUENCE, SYMPTOM, Rule
from sweep.serve.vllm_flags import normalise

_MAX_EVIDENCE = 500
# A token of the hub is longer, but a terminal may have wrapped it.
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{13,}|\b(?:sk|nvapi)-[\w-]{20,}|\bgh[a-z]_\w{16,}|\bgithub_pat_\w+|Bearer \S+")
_NAME = (
    r"(?i:[\w-]{0,40}?(?:api[_-]?key|passw(?:or)?d|passphrase|secret|access[_-]?key"
    r"|(?:hf|hub|auth|access|bearer|security)[_-]token)\w{0,10})"
)
# The words before a secret, and the secret: in an address, behind its name, and in what argparse says of a flag.
_SECRETS = tuple(
    re.compile(rf"({before})(?:{secret})")
    for before, secret in (
        (r"://", r"[^/\s@'\"]{1,300}(?=@)"),
        (r"[?&](?i:x-amz-|[\w-]{0,40}?(?:sig|key|token|policy|credential))[\w-]{0,40}=", r"[^&\s'\"]+"),
        (r"(?i:authorization)['\"]?[:= ]{1,3}", r"(?:['\"][^'\"]*|(?:\w+ )?\S+)"),
        (rf"(?<![\w-])--{_NAME}: [^'\"]{{0,60}}", r"'[^']*'|\"[^\"]*\""),
        (rf"(?<![\w-])--{_NAME}[= ]{{1,3}}", r"[^\s-]\S*"),
        (rf"(?<![\w-])(?!--){_NAME}['\"]?(?:=| = |: ?)", r"\[[^\]]*\]?|'[^']*'?|\"[^\"]*\"?|[^\s,;&'\")}}]+"),
    )
)
# What a user asked is nobody else's business.
_ASKED = re.compile(
    r"((?:Received request|Generated response|Request) \S+(?: \([^)]*\))?:? (?:prompt|output|details)).*"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

# Records of these levels are no errors, whatever words stand in them ("If OOM'ed, check …").
_QUIET = frozenset({"DEBUG", "INFO", "WARNING"})
_PYDANTIC_NOISE = re.compile(r"\s*\[type=.*")
# The second of pydantic's two lines for a field; the first holds its name.
_OF_A_FIELD = re.compile(r"^(?:Input should |Extra inputs are not|Unexpected keyword argument|Field required)")
# A server that is up refuses requests in the same words as it refuses flags before, and it lives on.
_OF_A_REQUEST = frozenset(
    {
        *("invalid_argument", "unsupported_feature", "model_not_found", "trust_remote_code_needed"),
        *("auth_gated_model", "client_404_model_name", "client_401"),
    }
)
# A cause of these kinds says no more than one that is in doubt.
_VAGUE = frozenset({"other", "version_mismatch"})
# What a traceback quotes; what it raised stands further down.
_CODE = ('File "', "raise ")
_SHARE = frozenset({"gpu-memory-utilization", "kv-cache-memory-bytes"})
# A clean end leaves errors of its own behind.
_STOPPED = frozenset({None, 0, -2, -15, 130, 143})
# Minutes for which an engine may be blocked. Compiling takes less than the last; in between: the log tells of neither.
_BLOCKED_UNDER_LOAD = 2
_BLOCKED_SOMEWHERE = 4
_BLOCKED_AT_START = 10
# So much of lines with the same words in vain, and they are noise.
_NOISE_BYTES = 1 << 19
_MAX_CONCERNS = 10_000
# Of what torch says of a kernel that it tried out.
_CHOICE_LINES = 10


class Diagnosis(NamedTuple):
    """line: the number of the decisive line, from 1; None where no line decided."""

    failure: Failure
    line: int | None


@dataclass(frozen=True, slots=True)
class Match:
    """The decisive line, the rule that decided, and what was going on. doubtful: only if the server did not go on."""

    rule: Rule
    rank: int
    doubtful: bool
    evidence: str
    line: int
    bounds: dict[str, float]
    step: Step


def classify(
    log: Path | str,
    *,
    exit_code: int | None,
    phase: Phase | None,
    swept: Collection[str] = (),
    fixed: Collection[str] = (),
) -> Failure:
    """Return why the server failed; kind "healthy" when nothing speaks of a failure. Never raises.

    log: the path of a log, or its text. phase: None where only the log can tell. swept, fixed: names of flags; a fixed
    flag at fault stops the sweep.
    """
    return diagnose(log, exit_code=exit_code, phase=phase, swept=swept, fixed=fixed).failure


def diagnose(
    log: Path | str | BinaryIO,
    *,
    exit_code: int | None = None,
    phase: Phase | None = None,
    swept: Collection[str] = (),
    fixed: Collection[str] = (),
) -> Diagnosis:
    """Return what `classify` does, of an open stream too, and which line decided."""
    search = Search(opened(log), exit_code)
    match = search.run()
    told = search.story
    killed = _signal_of(exit_code) == "SIGKILL" and not told.kills_itself
    if match is None or (killed and match.rank >= CONSEQUENCE):
        return Diagnosis(_without_message(search, exit_code, phase), None)
    kind = match.rule.kind
    if kind == "oom_runtime":
        kind = told.of_memory(match.step, phase, match.bounds.get("allocation_bytes"))
    bounds = dict(match.bounds)
    if kind == "oom_kv_cache_none" and told.available_kv_gib is not None:
        bounds = message_numbers.named({"available_gib": told.available_kv_gib}) | bounds
    phase = phase or ("load" if match.step.ready else told.phase)
    failure = Failure(
        kind,
        _treatment(match, kind, phase, normalised(swept), normalised(fixed)),
        evidence=_clean(match.evidence),
        advice=advice(kind, match.rule.advice if kind == match.rule.kind else "", bounds),
        phase=phase,
        bounds=bounds or None,
        exit_code=exit_code,
    )
    return Diagnosis(failure, match.line)


def normalised(flags: Collection[str]) -> frozenset[str]:
    return frozenset(map(normalise, flags))


class Wanted(NamedTuple):
    """What lines are looked at for: rules and topics by the words that a line must hold; those words, as for a reader.

    concern: what has been looked up so far, by all the words of a line.
    """

    rules: dict[bytes, list[Rule]]
    topics: dict[bytes, list[str]]
    any_level: frozenset[bytes]
    loud: frozenset[bytes]
    concern: dict[tuple[bytes, ...], tuple[list[Rule], set[str]]]


class Search:
    """Goes through a log once, and keeps the first line of the best rank."""

    def __init__(self, blocks: Iterable[bytes], exit_code: int | None) -> None:
        self.story = Story()
        self.reader = Reader(blocks, any_level=())
        self._stopped = exit_code in _STOPPED
        self._best: Match | None = None
        self._earlier: Match | None = None  # of a server before the last one in this log
        self._known: dict[tuple[object, ...], Wanted] = {}  # by all that it depends on
        self._in_vain: Counter[tuple[bytes, ...]] = Counter()  # bytes of lines that decided nothing, by words
        self._look_for()

    @property
    def last(self) -> str:
        return strip(self.reader.last.decode(errors="replace")).text

    def _look_for(self) -> None:
        """Look for what the rules need that would win over the best so far, and for what tells the story."""
        best, story = self._best, self.story
        known = best and (best.rank, best.doubtful), story.served, story.blocked > 0
        if known not in self._known:
            self._known[known] = self._wanted()
        self._now = self._known[known]
        self.reader.any_level, self.reader.loud = self._now.any_level, self._now.loud

    def _wanted(self) -> Wanted:
        best = self._best
        rules: dict[bytes, list[Rule]] = {}
        for rule in RULES:
            for needle in rule.needles if best is None or _wins(rule, rule.rank, over=best) else ():
                rules.setdefault(needle, []).append(rule)
        doubtful = best is not None and best.doubtful
        topics = self.story.topics(during=best is None or doubtful or best.rank > SYMPTOM, doubtful=doubtful)
        anywhere = {needle for needle, its in rules.items() if any(rule.any_level for rule in its)}
        any_level = frozenset(anywhere | topics.keys())
        return Wanted(rules, topics, any_level, frozenset(rules.keys() - any_level), {})

    def run(self) -> Match | None:
        for found in self.reader:
            words = tuple(found.words)
            rules, topics = self._concerned(words)
            if self._in_vain[words] > _NOISE_BYTES:
                rules = []
                if not topics:
                    self.reader.noise.add(words)
            if (not topics or self.story.says_nothing_new(topics, found.words)) and not rules:
                continue
            line = found.line
            loud = line.level not in _QUIET
            if topics:
                self._tell(found, line, topics, loud=loud)
            if rules and not self._judge(found, line, rules, loud=loud):
                self._in_vain[words] += len(found.raw)
        return self._best if self._best is not None or self.story.ready else self._earlier

    def _concerned(self, words: tuple[bytes, ...]) -> tuple[list[Rule], set[str]]:
        """Return the rules, and the topics of the story, that lines with these words are of interest for."""
        rules, topics, *_, concern = self._now
        if words not in concern:
            if len(concern) > _MAX_CONCERNS:
                concern.clear()
            concern[words] = (
                [rule for word in words for rule in rules.get(word, ())],
                {topic for word in words for topic in topics.get(word, ())},
            )
        return concern[words]

    def _tell(self, found: Found, line: Line, topics: set[str], *, loud: bool) -> None:
        if self.story.is_over(line, topics):
            self._earlier = None if self._best is None or self._best.doubtful else self._best
            self._best, self.story = None, Story()
            self._in_vain.clear()
            self.reader.noise.clear()
            self._look_for()
        story, best = self.story, self._best
        known = story.served, story.blocked > 0
        went_on = story.see(line, topics, loud=loud)
        # What was doubtful did no harm, and when the server is up, nothing before did.
        if went_on and best is not None and (best.doubtful or (story.ready and not best.step.ready)):
            self._best = None
        if best is not None and "ignored" in topics and found.number - best.line < _CHOICE_LINES:
            self._best = None
        if self._best is not best or (story.served, story.blocked > 0) != known:
            self._look_for()

    def _judge(self, found: Found, line: Line, rules: list[Rule], *, loud: bool) -> bool:
        """Keep the line if it decides; returns whether it does."""
        above = strip(found.before.decode(errors="replace")).text
        if line.text.startswith(_CODE) or (line.indented and above.startswith('File "')):
            return False
        before = f"{above}: " if _OF_A_FIELD.match(line.text) else ""
        text = before + line.text
        matching = [rule for rule in rules if (loud or rule.any_level) and rule.pattern.search(text)]
        if not matching:
            return False
        rule = min(matching, key=lambda rule: (rule.rank, _ORDER[id(rule)]))
        request = self.story.ready and rule.kind in _OF_A_REQUEST
        rank = max(rule.rank, CONSEQUENCE) if request else rule.rank
        if self._best is not None and not _wins(rule, rank, over=self._best):
            return False
        if rank >= CONSEQUENCE and self.story.stopping and self._stopped:
            return False
        if rule.rank == CONSEQUENCE and rule.kind == "host_oom_killed" and self.story.kills_itself:
            return False
        whole = before + found.wrapped if rule.rank < CONSEQUENCE or rule.pattern.groups else text
        match = rule.pattern.search(whole)
        if match is not None and match.end() > len(text):
            text = whole[: match.end()]
        self._best = Match(
            rule, rank, rule.doubtful or request, text, found.number, _bounds(rule, match, whole), self.story.now()
        )
        self._look_for()
        return True


def _wins(rule: Rule, rank: int, *, over: Match) -> bool:
    """Return whether a later message decides: one of a better rank, or a certain one over one that is in doubt.

    A certain one names a cause, or says that memory ran out.
    """
    if not over.doubtful or rule.doubtful or rank > SYMPTOM:
        return rank < over.rank
    return rank < over.rank or "oom_" in rule.kind or (rank < SYMPTOM and rule.kind not in _VAGUE)


_ORDER = {id(rule): place for place, rule in enumerate(RULES)}


def _bounds(rule: Rule, match: re.Match[str] | None, text: str) -> dict[str, float]:
    bounds = message_numbers.named(match.groupdict()) if match else {}
    return message_numbers.of_torch(text) | bounds if rule.kind.startswith("oom_") else bounds


def _treatment(
    match: Match, kind: FailureKind, phase: Phase, swept: frozenset[str], fixed: frozenset[str]
) -> Treatment:
    """Return the rule's treatment, unless who set the flag at fault, or the numbers, say otherwise."""
    rule = match.rule
    if rule.treatment == "abort_sweep":
        if swept.intersection(rule.flags):
            return "prune"
        # What has worked until now is not broken for every trial.
        return "retry" if kind == "nccl_or_distributed" and phase == "load" else "abort_sweep"
    if kind in {"invalid_argument", "unsupported_feature"} and rule.treatment == "prune":
        message = _PYDANTIC_NOISE.sub("", match.evidence)
        named = {normalise(word) for word in re.findall(r"[A-Za-z][\w-]+", message)} | set(rule.flags)
        return "abort_sweep" if named & fixed and not named & swept else "prune"
    if (
        kind == "oom_free_memory_lt_requested"
        and "on startup" in match.evidence
        and match.bounds.get("free_bytes", 1.0) < match.bounds.get("total_bytes", 0.0) / 2
        and "on node" not in match.evidence
    ):
        return "retry"  # an empty card has nearly all of its memory free: something else holds this one
    if kind == "oom_free_memory_lt_requested" and _SHARE & fixed and not _SHARE & swept:
        return "abort_sweep"
    return rule.treatment


def _without_message(search: Search, exit_code: int | None, phase: Phase | None) -> Failure:
    """Judge by how the process ended, when its log names no cause."""
    story = search.story
    phase = phase or story.phase
    name = _signal_of(exit_code)
    last = _clean(search.last) or "the log is empty"
    kind, treatment, words = _by_ending(story, name, exit_code, phase)
    if kind == "healthy":
        return Failure(
            kind, treatment, evidence=last, advice=words or advice(kind, "", {}), phase=phase, exit_code=exit_code
        )
    seen = f"the server ended by {name or f'exit code {exit_code}'}; last line: {last}" if exit_code else last
    return Failure(
        kind, treatment, evidence=seen, advice=words or advice(kind, "", {}), phase=phase, exit_code=exit_code
    )


def _by_ending(
    story: Story, name: str | None, exit_code: int | None, phase: Phase
) -> tuple[FailureKind, Treatment, str]:
    if name == "SIGKILL" and not story.kills_itself:
        return "host_oom_killed", "prune", ""
    if name in {"SIGTERM", "SIGINT", "SIGHUP"}:
        return "other", "retry", "Somebody stopped the server from outside."
    if name in _SIGNALS:
        return _SIGNALS[name]
    if exit_code:
        return _CODES.get(exit_code, ("other", "fail_trial", "The log does not say why: look at its last lines."))
    enough = _BLOCKED_AT_START if story.tells_of_a_start else _BLOCKED_SOMEWHERE
    if "load" in {phase, story.phase}:
        enough = _BLOCKED_UNDER_LOAD
    hung = story.blocked >= enough
    if (story.waits or hung) and not story.stopping:
        return "hang_timeout", "retry", "The engine does not answer; if that stays so, end the server."
    return "healthy", "ignore", ""


_CODES: dict[int, tuple[FailureKind, Treatment, str]] = {
    126: ("other", "abort_sweep", "The program may not be run: look at its permissions."),
    127: ("version_mismatch", "abort_sweep", "There is no such program: correct serve.command, or install vLLM there."),
}
_SIGNALS: dict[str | None, tuple[FailureKind, Treatment, str]] = {
    "SIGILL": (
        "version_mismatch",
        "abort_sweep",
        "This build uses instructions that the processor does not have: install a build for this CPU.",
    ),
    "SIGBUS": (
        "other",
        "fail_trial",
        "Most likely /dev/shm is full: give it more room (in Docker: --ipc=host, or a larger --shm-size).",
    ),
    "SIGSEGV": ("other", "fail_trial", "Native code crashed. If it does so again with these flags, leave them out."),
    "SIGABRT": ("other", "fail_trial", "Native code gave up; the lines before it, or dmesg, may say why."),
}


def _signal_of(exit_code: int | None) -> str | None:
    """Return the signal's name: -9 as Python says it, 137 as a shell says it."""
    if exit_code is None:
        return None
    number = -exit_code if exit_code < 0 else exit_code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else None


def _clean(text: str) -> str:
    """Return the text in one line, not too long, without secrets and without what users asked."""
    text = _ASKED.sub(r"\1 …", _CONTROL.sub(" ", _PYDANTIC_NOISE.sub("", text)))
    text = _TOKEN.sub("***", text)
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return text if len(text) <= _MAX_EVIDENCE else text[: _MAX_EVIDENCE - 1] + "…"
