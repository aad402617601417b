"""The viewer's filter: a condition of SQLite over one table, with a few functions.

    reward < 1 AND tool('get_weather') AND NOT failure = 'model_timeout'
    (turns > 3 OR tokens > 4000) AND row.difficulty = 'hard' AND words('paris rain*')

It comes from a URL. `check` refuses comments, names that there are not, ``||`` (which makes long texts), and
parentheses that would end the condition early. Then SQLite compiles it over an empty table: its authorizer
allows to read that table, and to call `FUNCTIONS`, and no second SELECT. `condition` gives the names their
columns. `Reading.sql` bounds the time.
"""

from __future__ import annotations

import difflib
import re
import sqlite3
from collections.abc import Callable, Collection, Mapping

import orjson

from gym_serve.types.errors import InvalidRequest

_DETAILS = ("id", "prompt")
COLUMNS = {
    **{name: name for name in ("reward", "turns", "input_tokens", "output_tokens", "seconds", "attempt")},
    **{name: name for name in ("behind", "task", "agent", "environment", "failure", "version")},
    **{name: name for name in ("last_version", "tools")},
    "n": "rollouts.n",
    "tokens": "(ifnull(input_tokens, 0) + ifnull(output_tokens, 0))",
    **{name: f"details.{name}" for name in _DETAILS},
}
"""What the names of the table are in SQL. There are ``fields.NAME`` and ``row.NAME`` too."""
_CALLS = {
    "tool": "(instr(tools, char(10) || {0} || char(10)) > 0)",
    "tag": "(rollouts.n IN (SELECT value FROM json_each({0})))",
    "words": "(rollouts.n IN (SELECT words.rowid FROM words WHERE words MATCH {0}))",
}
NAMES = (*COLUMNS, *_CALLS)
"""The names of a filter, without those of the verifier's fields and the row's keys."""
FUNCTIONS = frozenset(
    {
        *("abs", "coalesce", "glob", "ifnull", "instr", "length", "like", "lower", "max", "min", "nullif"),
        *("round", "substr", "trim", "upper"),
    }
)
"""The functions of SQLite that a filter may call: none of them reads a file, or makes a long text."""

_LONGEST = 4000  # characters
_TEXT = r"'(?:[^']|'')*'"
_TOKEN = re.compile(
    rf"""(?P<text>{_TEXT}) | (?P<open>\() | (?P<close>\)) | (?P<odd>--|/\*|['"`\[;?:@$|\0])
    | (?P<call>\b(?P<function>{"|".join(_CALLS)})\s*\(\s*(?P<argument>{_TEXT})\s*\))
    | (?P<own>\b(?P<of>[^\W\d]\w*)\s*\.\s*(?:"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>\w+)))
    | (?P<name>\b[^\W\d]\w*)""",
    re.VERBOSE | re.IGNORECASE,
)


class BadExpression(InvalidRequest):
    """A filter that cannot be understood. ``position``: where, in characters from 0; None if that is not
    known."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


def check(expression: str, own: Collection[str] | None) -> None:
    """See that an expression is one condition over the table. ``own``: the names ``fields.NAME`` and
    ``row.NAME`` that there are; None while that is not known. Raises BadExpression: it is not."""
    if len(expression) > _LONGEST:
        raise BadExpression(f"the filter must have at most {_LONGEST:,} characters", _LONGEST)
    opened: list[int] = []

    def checked(match: re.Match[str]) -> str:
        kind, at = _kind(match), match.start()
        if kind == "open":
            opened.append(at)
        elif kind == "close":
            if not opened:
                raise BadExpression("')' closes nothing", at)
            opened.pop()
        elif kind == "odd":
            problem = "this quote is not closed" if match[0] == "'" else f"{match[0]!r} is unexpected"
            hint = "; a text stands in single quotes" if match[0] == '"' else ""
            raise BadExpression(problem + hint, at)
        elif kind == "own":
            if own is not None and _own(match) not in own:
                raise BadExpression(unknown(_own(match), own), at)
            return "n"
        elif kind == "call":
            _argument(match)
            return "n"
        return match[0]

    if not expression.strip():
        return
    compiled = _TOKEN.sub(checked, expression)
    if opened:
        raise BadExpression("this parenthesis is not closed", opened[-1])
    _compile(compiled, expression)


def condition(expression: str, own: Mapping[str, str], tagged: Callable[[str], list[int]]) -> str:
    """The condition in SQL, of an expression that `check` has passed. ``own``: the columns of ``fields.NAME``
    and ``row.NAME``; another one is NULL."""

    def written(match: re.Match[str]) -> str:
        kind = _kind(match)
        if kind == "own":
            return own.get(_own(match), "NULL")
        if kind == "name":
            return COLUMNS.get(match[0].lower(), match[0])
        if kind != "call":
            return match[0]
        function, argument = match["function"].lower(), _argument(match)
        if function == "tag":
            argument = orjson.dumps(tagged(argument)).decode()
        return _CALLS[function].format("'" + argument.replace("'", "''") + "'")

    if not expression.strip():
        return "1"
    sql = f"({_TOKEN.sub(written, expression)})"
    if "details." in sql:  # a join is four times as fast as a look-up for each rollout
        return f"(rollouts.n IN (SELECT rollouts.n FROM rollouts JOIN details USING (n) WHERE {sql}))"
    return sql


def sort_key(name: str, own: Mapping[str, str]) -> str:
    """What to sort by, in SQL. Raises BadExpression: there is no such name."""
    if name in _DETAILS:
        return f"(SELECT details.{name} FROM details WHERE details.n = rollouts.n)"
    key = own.get(name, "NULL") if name.startswith(("fields.", "row.")) else COLUMNS.get(name)
    if key is None:
        raise BadExpression(unknown(name, own))
    return key


def written(name: str) -> str:
    """A name as a filter has it: what is no word stands in double quotes."""
    of, dot, own = name.partition(".")
    quoted = '"' + own.replace('"', '""') + '"'
    return name if not dot or re.fullmatch(r"\w+", own) else f"{of}.{quoted}"


def unknown(name: str, own: Collection[str] | None) -> str:
    """What to say of a name that there is not."""
    names = [*NAMES, *(own or ())]
    last = name.rpartition(".")[2].lower()
    same = [name_there for name_there in names if name_there.rpartition(".")[2].lower() == last]
    near = same or difflib.get_close_matches(name.lower(), names, 1)
    if near:
        return f"there is no {name[:60]!r}; did you mean {written(near[0])}?"
    hint = "" if "." in name else "a text stands in single quotes, and "
    return f"there is no {name[:60]!r}; {hint}names are {', '.join(map(written, names[:40]))}"


def _kind(match: re.Match[str]) -> str:
    """Which alternative of `_TOKEN` it is."""
    return next(kind for kind in ("text", "open", "close", "odd", "call", "own", "name") if match[kind])


def _own(match: re.Match[str]) -> str:
    name = match["plain"] or match["quoted"].replace('""', '"')
    return f"{match['of'].lower()}.{name}"


def _argument(match: re.Match[str]) -> str:
    """The text in the parentheses of a call; of `words`, as FTS5 wants it."""
    text = match["argument"][1:-1].replace("''", "'")
    if match["function"].lower() != "words":
        return text
    words = re.findall(r"([^\W_]+)(\*?)", text)
    if not words:
        raise BadExpression(f"{text[:60]!r} has no word to search for", match.start())
    return " AND ".join(f'"{word}"{star}' for word, star in words)


def _compile(sql: str, expression: str) -> None:
    selects = iter([sqlite3.SQLITE_OK])

    def authorize(action: int, name: str | None, function: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_SELECT:
            return next(selects, sqlite3.SQLITE_DENY)
        is_allowed = action == sqlite3.SQLITE_READ or (
            action == sqlite3.SQLITE_FUNCTION and function in FUNCTIONS
        )
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    database = sqlite3.connect(":memory:")
    try:
        database.execute(f"CREATE TABLE rollouts ({', '.join(COLUMNS)})")
        database.set_authorizer(authorize)
        database.execute(f"SELECT 1 FROM rollouts WHERE ({sql}\n)")
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise _refusal(str(error), expression) from None
    finally:
        database.close()


def _refusal(message: str, expression: str) -> BadExpression:
    """What SQLite says, with its place where it names one."""
    for pattern, explain in (
        ("no such column: (.*)", lambda name: unknown(name, None)),
        ("not authorized to use function: (.*)", _no_function),
        ("no such function: (.*)", _no_function),
        ('near "([^)]*)": syntax error', lambda name: f"{name!r} is unexpected"),
    ):
        if match := re.fullmatch(pattern, message):
            at = expression.find(match[1])
            return BadExpression(explain(match[1]), None if at < 0 else at)
    if message.startswith('near ")"'):  # the one that ends the condition
        return BadExpression("a part of the condition is missing")
    if "not authorized" in message:
        return BadExpression("a filter is one condition, without SELECT")
    return BadExpression(message)


def _no_function(name: str) -> str:
    if name.lower() in _CALLS:
        return f"{name} wants a text in single quotes, as in {name}('rain')"
    calls = ", ".join(f"{call}('...')" for call in _CALLS)
    return f"there is no function {name}; there are {calls}, {', '.join(sorted(FUNCTIONS))}"
