"""Rules between flags, such as `max-num-batched-tokens >= max-num-seqs`.

A rule is a condition over flag names, numbers and quoted text. It becomes a Python syntax tree of which only a few
kinds of node are allowed; the tree is interpreted here and never evaluated as Python.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sweep.errors import ConfigError
from sweep.model import FlagValue
from sweep.section import did_you_mean

_MAX_LENGTH = 1000  # nobody writes a longer rule, and the nesting that the parser can take is limited
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    | (?P<text>'[^'\\\n]*'|"[^"\\\n]*")
    | (?P<name>[A-Za-z][A-Za-z0-9_]*(?:[-.][A-Za-z0-9][A-Za-z0-9_]*)*)
    | (?P<operator><=|>=|==|!=|[-+*/%<>()])
    )\s*""",
    re.VERBOSE,
)
_WORDS = {"and": "and", "or": "or", "not": "not", "true": "True", "false": "False", "True": "True", "False": "False"}
_ALLOWED = (
    "allowed are flag names, numbers, 'text', true, false, comparisons (< <= > >= == !=), and, or, not, + - * / %, and "
    "parentheses; a minus between two names needs spaces around it"
)

_ORDERINGS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    **_ORDERINGS,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}


class RuleError(ConfigError, ValueError):
    """A rule that cannot be read. A ValueError too, so that a section which holds rules reports it with its key."""


def flag_name(raw: object) -> str:
    """Spell a flag as vLLM does: dashes, no leading `--`; behind a dot stands a key of a JSON flag, left as it is."""
    if not isinstance(raw, str) or not re.fullmatch(r"(--)?[A-Za-z][A-Za-z0-9_-]*(\.[\w.-]+)?", raw):
        raise ValueError(f"{raw!r} is not the name of a flag")
    head, dot, tail = raw.removeprefix("--").partition(".")
    return head.replace("_", "-") + dot + tail


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that every configuration must meet."""

    text: str
    _order: tuple[str, ...] = field(repr=False, compare=False)
    _tree: ast.expr = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: object) -> Rule:
        """Read a rule, or raise RuleError."""
        if isinstance(text, Rule):
            return text
        if not isinstance(text, str) or len(text) > _MAX_LENGTH:
            raise RuleError(f"a rule is a text of at most {_MAX_LENGTH} characters, not {str(text)[:60]!r}")
        source, names = _translate(text)
        try:
            tree = ast.parse(source, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise RuleError(f"cannot read the rule {text!r}: {_ALLOWED}") from None
        _check(text, tree)
        if not names:
            raise RuleError(f"the rule {text!r} names no flag, so it decides nothing")
        if not isinstance(tree, ast.Compare | ast.BoolOp | ast.Name | ast.UnaryOp):
            raise RuleError(f"the rule {text!r} is not a condition: compare something, as in 'max-num-seqs <= 256'")
        return cls(text, tuple(names), tree)

    @property
    def names(self) -> frozenset[str]:
        """The flags that the rule speaks of."""
        return frozenset(self._order)

    def allows(self, flags: Mapping[str, FlagValue]) -> bool:
        """Whether these flags meet the rule; also true where it cannot be judged.

        That is so when a flag that it names is absent, and when a value does not fit ("auto" where a number is meant).
        """
        if not all(name in flags for name in self._order):
            return True
        try:
            return bool(_value(self._tree, [flags[name] for name in self._order]))
        except (TypeError, ArithmeticError):
            return True

    def check_names(self, known: Iterable[str]) -> None:
        """Refuse a rule that names a flag which is neither swept nor fixed: it would never apply."""
        known = tuple(known)
        for name in sorted(self.names.difference(known)):
            raise RuleError(
                f"the rule {self.text!r} names {name!r}, which is neither in search.params nor in serve.args"
                f"{did_you_mean(name, known)}"
            )

    def __str__(self) -> str:
        return self.text


def _translate(text: str) -> tuple[str, list[str]]:
    """Turn the rule's words into Python's: names become f0, f1, … in the order in which they first appear."""
    words: list[str] = []
    names: list[str] = []
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise RuleError(f"cannot read the rule {text!r} at {text[position : position + 10]!r}: {_ALLOWED}")
        word = token.group(token.lastgroup or 0)
        if token.lastgroup == "name" and word not in _WORDS:
            name = flag_name(word)
            if name not in names:
                names.append(name)
            word = f"f{names.index(name)}"
        words.append(_WORDS.get(word, word))
        position = token.end()
    return " ".join(words), names


def _check(text: str, node: ast.expr) -> None:
    """Refuse every kind of node that is not on the list, and an order between text and anything else."""
    match node:
        case ast.BoolOp(values=children):
            pass
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            children = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            children = [left, right]
            if any(_is_text(child) for child in children):
                raise RuleError(f"the rule {text!r} calculates with text: {_ALLOWED}")
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARISONS for op in ops):
            children = [left, *comparators]
            if any(type(op) in _ORDERINGS for op in ops) and any(_is_text(child) for child in children):
                raise RuleError(
                    f"the rule {text!r} compares text with < or >, which never holds: only == and != can be"
                )
        case ast.Name() | ast.Constant():
            children = []
        case _:
            raise RuleError(f"cannot read the rule {text!r}: {_ALLOWED}")
    for child in children:
        _check(text, child)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _operand(node: ast.expr, values: Sequence[FlagValue]) -> int | float:
    """Compute a term of a sum or product. Python would format or repeat text and lists there."""
    value = _value(node, values)
    if not isinstance(value, int | float):
        raise TypeError(value)
    return value


def _value(node: ast.expr, values: Sequence[FlagValue]) -> Any:
    """Compute a checked tree; the flag f<i> has values[i]."""
    result: Any
    match node:
        case ast.Constant(value=value):
            result = value
        case ast.Name(id=name):
            result = values[int(name[1:])]
        case ast.UnaryOp(op=unary, operand=operand):
            result = _UNARY[type(unary)](_value(operand, values))
        case ast.BinOp(left=left, op=arithmetic, right=right):
            result = _ARITHMETIC[type(arithmetic)](_operand(left, values), _operand(right, values))
        case ast.BoolOp(op=ast.And(), values=parts):
            result = all(_value(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            result = any(_value(part, values) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            terms = [_value(term, values) for term in (left, *comparators)]
            result = all(_COMPARISONS[type(op)](a, b) for op, (a, b) in zip(ops, pairwise(terms), strict=True))
        case _:
            raise AssertionError(ast.dump(node))  # _check lets no other node through
    return result
