"""The filter language of the viewer, as parameterised SQL over the index. Pure.

    reward >= 0.5 and tool = get_weather and not failure = session_lost
    agent = "math agent" (turns > 3 or tokens > 4000) fields.extracted ~ "42" paris

A comparison is a name, one of ``= != < <= > >= ~`` and a value; ``~`` means *contains*. Any other word is
searched in the conversation. Terms side by side are joined by ``and``, which binds closer than ``or``.

What a rollout does not have is smaller or larger than nothing: a comparison with it is false, except with
``null``, and its ``not`` is true.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gym_serve.types.errors import InvalidRequest

NUMBERS = {
    "reward": "reward",
    "turns": "turns",
    "tokens": "ifnull(input_tokens, 0) + ifnull(output_tokens, 0)",
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "seconds": "seconds",
    "attempt": "attempt",
    "behind": "behind",
    "n": "n",
}
TEXTS = {
    "agent": "agent",
    "environment": "environment",
    "failure": "failure",
    "version": "version",
    "last_version": "last_version",
    "task": "task",
}
_DETAILS = ("id", "prompt")
_SPECIAL = ("text", "tool", "tag")
NAMES = (*NUMBERS, *TEXTS, *_DETAILS, *_SPECIAL)
"""The names of the language, besides ``fields.NAME``."""

_LONGEST = 4000  # characters
_MOST_TERMS = 100
_DEEPEST = 50
_TOKEN = re.compile(
    r"""\s*(?:(?P<open>\() | (?P<close>\)) | (?P<op><=|>=|!=|==|=|<|>|~)
    | "(?P<double>(?:[^"\\]|\\.)*)" | '(?P<single>(?:[^'\\]|\\.)*)'
    | (?P<word>[^\s()"'=<>!~]+))""",
    re.VERBOSE | re.DOTALL,
)
_WORD = re.compile(r"[^\W_]+")
_WORDS = {"and", "or", "not"}


class BadExpression(InvalidRequest):
    """An expression that cannot be understood.

    Args:
        message: what is wrong.
        position: where, in characters from 0.
    """

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True)
class Comparison:
    """``name op value``."""

    name: str
    op: str
    value: float | str | None
    position: int


@dataclass(frozen=True)
class Search:
    """Words that all occur in the conversation."""

    words: str
    position: int


@dataclass(frozen=True)
class Not:
    """What ``term`` is not."""

    term: Node


@dataclass(frozen=True)
class Joined:
    """All of ``terms`` (``AND``), or any (``OR``)."""

    by: str
    terms: tuple[Node, ...]


Node = Comparison | Search | Not | Joined


class Clause(NamedTuple):
    """A condition in SQL, and the values of its question marks."""

    sql: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Schema:
    """What a run has of its own.

    Attributes:
        fields: the column of each of the verifier's fields.
        numeric: those of them that hold numbers.
        tagged: the numbers of the rollouts with a tag, as a JSON list.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    numeric: frozenset[str] = frozenset()
    tagged: Callable[[str], str] = lambda tag: "[]"


def parse(expression: str) -> Node | None:
    """What an expression says; None for an empty one.

    Raises:
        BadExpression: it cannot be understood.
    """
    if len(expression) > _LONGEST:
        raise BadExpression(f"the filter must have at most {_LONGEST:,} characters", _LONGEST)
    reader = _Reader(_tokens(expression), len(expression))
    if reader.peek() is None:
        return None
    found = reader.any_of(0)
    left = reader.peek()
    if left is not None:
        raise BadExpression(f"{left.text!r} closes nothing", left.position)
    return found


def condition(node: Node | None, schema: Schema) -> Clause:
    """The condition of SQL for a run."""
    if node is None:
        return Clause("1", ())
    if isinstance(node, Not):
        inner = condition(node.term, schema)
        return Clause(f"NOT {inner.sql}", inner.values)
    if isinstance(node, Joined):
        parts = [condition(term, schema) for term in node.terms]
        values = tuple(value for part in parts for value in part.values)
        return Clause("(" + f" {node.by} ".join(part.sql for part in parts) + ")", values)
    if isinstance(node, Search):
        return _search(node.words, node.position)
    return _compare(node, schema)


def column(name: str, schema: Schema) -> str:
    """What to sort by, in SQL.

    Raises:
        BadExpression: there is no such name.
    """
    if name.startswith("fields."):
        return schema.fields.get(name.removeprefix("fields."), "NULL")
    if name in _DETAILS:
        return f"(SELECT details.{name} FROM details WHERE details.n = rollouts.n)"
    if name == "tool":
        return "tools"
    found = NUMBERS.get(name) or TEXTS.get(name)
    if found is None:
        raise BadExpression(_unknown(name), 0)
    return found


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


def _tokens(expression: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    end = len(expression.rstrip())
    while at < end:
        match = _TOKEN.match(expression, at)
        if match is None or match.lastgroup is None:
            at += len(expression[at:]) - len(expression[at:].lstrip())
            quote = expression[at] in "\"'"
            problem = "this quote is not closed" if quote else f"{expression[at]!r} is unexpected"
            raise BadExpression(problem, at)
        kind, text = match.lastgroup, match[match.lastgroup]
        if kind in ("double", "single"):
            kind, text = "quoted", re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
        found.append(_Token(kind, text, match.end() - len(match[0].lstrip())))
        at = match.end()
    return found


class _Reader:
    """Recursive descent over tokens."""

    def __init__(self, tokens: list[_Token], end: int) -> None:
        self._tokens = tokens
        self._at = 0
        self._end = end
        self._terms = 0

    def peek(self, ahead: int = 0) -> _Token | None:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else None

    def take(self, wanted: str) -> _Token:
        token = self.peek()
        if token is None:
            raise BadExpression(f"{wanted} is missing at the end", self._end)
        self._at += 1
        return token

    def any_of(self, depth: int) -> Node:
        terms = [self.all_of(depth)]
        while self._word("or"):
            self._at += 1
            terms.append(self.all_of(depth))
        return terms[0] if len(terms) == 1 else Joined("OR", tuple(terms))

    def all_of(self, depth: int) -> Node:
        terms = [self.term(depth)]
        while (token := self.peek()) is not None and token.kind != "close" and not self._word("or"):
            if self._word("and"):
                self._at += 1
            terms.append(self.term(depth))
        return terms[0] if len(terms) == 1 else Joined("AND", tuple(terms))

    def term(self, depth: int) -> Node:
        self._terms += 1
        token = self.take("a condition")
        if depth > _DEEPEST or self._terms > _MOST_TERMS:
            raise BadExpression("the filter has too many conditions", token.position)
        if token.kind == "open":
            found = self.any_of(depth + 1)
            closing = self.peek()
            if closing is None:
                raise BadExpression("this parenthesis is not closed", token.position)
            self._at += 1
            return found
        if token.kind == "word" and token.text.lower() == "not":
            return Not(self.term(depth + 1))
        if token.kind in ("op", "close") or (token.kind == "word" and token.text.lower() in _WORDS):
            raise BadExpression(f"a condition is missing before {token.text!r}", token.position)
        following = self.peek()
        if following is not None and following.kind == "op":
            return self._comparison(token)
        return Search(token.text, token.position)

    def _comparison(self, name: _Token) -> Node:
        op = self.take("an operator")
        value = self.take(f"a value after {op.text!r}")
        if value.kind not in ("word", "quoted"):
            raise BadExpression(f"a value is missing after {op.text!r}", value.position)
        given: float | str | None = value.text
        if value.kind == "word":
            given = None if value.text.lower() == "null" else _number(value.text)
        sign = "=" if op.text == "==" else op.text
        return _checked(Comparison(name.text, sign, given, name.position), value.position)

    def _word(self, word: str) -> bool:
        token = self.peek()
        return token is not None and token.kind == "word" and token.text.lower() == word


def _number(text: str) -> float | str:
    try:
        value = float(text)
    except ValueError:
        return {"true": 1.0, "false": 0.0}.get(text.lower(), text)
    return value if math.isfinite(value) and "_" not in text else text


def _checked(found: Comparison, at: int) -> Comparison:
    """A comparison that has a meaning."""
    name, op, value = found.name, found.op, found.value
    if name not in NAMES and not name.startswith("fields."):
        raise BadExpression(_unknown(name), found.position)
    if value is None and op not in ("=", "!="):
        raise BadExpression(f"null is only equal (=) or not (!=), not {op}", at)
    if name in NUMBERS:
        if op == "~" or isinstance(value, str):
            raise BadExpression(f"{name} is a number: compare it with one, by = != < <= > >=", at)
    elif name in (*_DETAILS, *_SPECIAL) and op not in ("=", "!=", "~"):
        raise BadExpression(f"{name} is a text: compare it by = != ~", at)
    elif name == "text" and op != "~":
        raise BadExpression("text is searched for words: text ~ 'words'", at)
    elif name == "tag" and op == "~":
        raise BadExpression("a tag is compared by = or !=", at)
    if name == "text":
        _search(_shown(value), at)
    return found


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), NAMES, 1)
    hint = f"did you mean {near[0]}?" if near else f"names are {', '.join(NAMES)} and fields.NAME"
    return f"there is no {name[:60]!r}; {hint}"


def _compare(found: Comparison, schema: Schema) -> Clause:
    name, op, value = found.name, found.op, found.value
    if name == "text":
        return _search(_shown(value), found.position)
    if name == "tag":
        clause = Clause("(n IN (SELECT value FROM json_each(?)))", (schema.tagged(_shown(value)),))
        return _negated(clause) if op == "!=" else clause
    if name == "tool":
        return _tool(op, value)
    if name in NUMBERS:
        return _plain(NUMBERS[name], op, value)
    if name in _DETAILS:
        inner = _text(name, op, value)
        return Clause(f"(n IN (SELECT details.n FROM details WHERE {inner.sql}))", inner.values)
    if name.startswith("fields."):
        column = schema.fields.get(name.removeprefix("fields."))
        if column is None:
            return Clause("1" if value is None and op == "=" else "0", ())
        number = isinstance(value, float) and column in schema.numeric
        return _plain(column, op, value) if number and op != "~" else _text(column, op, value)
    if name in ("version", "last_version", "task") and op != "~" and isinstance(value, str | float):
        return _plain(name, op, _numbered(value))
    return _text(TEXTS[name], op, value)


def _plain(column: str, op: str, value: Any) -> Clause:
    if value is None:
        return Clause(f"(({column}) IS {'NOT ' if op == '!=' else ''}NULL)", ())
    return Clause(f"((({column}) {op} ?) IS TRUE)", (value,))


def _text(column: str, op: str, value: float | str | None) -> Clause:
    if value is None:
        return _plain(column, op, None)
    if op == "~":
        escaped = re.sub(r"([%_\\])", r"\\\1", _shown(value))
        return Clause(f"(ifnull({column}, '') LIKE ? ESCAPE '\\')", (f"%{escaped}%",))
    return Clause(f"(ifnull({column}, '') {op} ?)", (_shown(value),))


def _tool(op: str, value: float | str | None) -> Clause:
    if value in (None, ""):
        return Clause(f"(tools {'!=' if op == '!=' else '='} '')", ())
    if op == "~":
        return _text("tools", "~", value)
    clause = Clause("(instr(tools, char(10) || ? || char(10)) > 0)", (_shown(value),))
    return _negated(clause) if op == "!=" else clause


def _negated(clause: Clause) -> Clause:
    return Clause(f"(NOT {clause.sql})", clause.values)


def _search(text: str, position: int) -> Clause:
    """Words in any order; one that ends with ``*`` is the beginning of a word."""
    words = _WORD.findall(text)
    if not words:
        raise BadExpression(f"{text[:60]!r} has no word to search for", position)
    starts = {match[1] for match in re.finditer(r"([^\W_]+)\*", text)}
    query = " AND ".join(f'"{word}"{"*" if word in starts else ""}' for word in words)
    return Clause("(n IN (SELECT words.rowid FROM words WHERE words MATCH ?))", (query,))


def _numbered(value: float | str) -> int | float | str:
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 18 else value
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _shown(value: float | str | None) -> str:
    if isinstance(value, float):
        return str(_numbered(value))
    return "" if value is None else value
