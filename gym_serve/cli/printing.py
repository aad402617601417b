"""Output of the commands: tables and JSON on stdout, problems and progress on stderr.

Text of data sets and models is printed literally, never as markup, and without control characters: all that
the commands print passes `echo`, `new_console` or `print_json`. If stdout is no terminal, tables are as wide
as they need to be.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from textwrap import wrap
from typing import Any, TextIO

import orjson
import typer
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table

from gym_serve.cluster.starting import START_LOG
from gym_serve.rollouts.rows import Problems
from gym_serve.types.exact import exact_bytes

_PIPED_WIDTH = 200
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 50


class Unprintable(Exception):
    """Standard output takes nothing, e.g. because its disk is full."""


_reports: list[TextIO] = []
"""Standard output, while a command runs; what took its place comes after it."""


@contextmanager
def stdout_for_reports() -> Iterator[None]:
    """What others print meanwhile, e.g. an author's tool, goes to stderr: programs read the reports. A
    terminal shows both alike, so there nothing changes."""
    stdout: Any = sys.stdout  # None if closed
    with ExitStack() as stack:
        _reports.append(stdout)
        if stdout is not None and not stdout.isatty():
            sys.stdout = sys.stderr
            if stdout is sys.__stdout__ and sys.stderr is not None:
                _reports[0] = stack.enter_context(_apart_from_children(_reports[0]))
        try:
            yield
        finally:
            sys.stdout = stdout
            _reports.clear()


@contextmanager
def _apart_from_children(stdout: TextIO) -> Iterator[TextIO]:
    """Standard output by another descriptor: its own is stderr's, for child processes."""
    apart = os.fdopen(os.dup(1), "w", encoding=stdout.encoding, errors=stdout.errors)
    os.dup2(2, 1)
    try:
        yield apart
        with _written():
            apart.flush()
    finally:
        os.dup2(apart.fileno(), 1)
        with suppress(OSError):  # told where it was written
            apart.close()


def reports() -> TextIO:
    """Standard output, for what a command reports."""
    return _reports[-1] if _reports else sys.stdout


def ask(prompt: str) -> str:
    """A line that a person types. A terminal has its prompt from `input`, for the keys that edit a line."""
    if reports() is sys.stdout:
        return input(prompt)
    echo(prompt, nl=False)
    return input()


def give_up_reports() -> None:
    """What is left in the buffer of standard output has no reader."""
    _reports.append(open(os.devnull, "w"))  # noqa: SIM115 - for the rest of the process


@contextmanager
def _written(*, err: bool = False) -> Iterator[None]:
    """stderr may be gone, with its terminal or reader: what it shows is beside the work, which goes on.

    Raises:
        BrokenPipeError: nobody reads stdout any more, as in ``| head``; the command ends.
        Unprintable: stdout takes nothing.
    """
    try:
        yield
    except OSError as error:
        if err:
            return
        if isinstance(error, BrokenPipeError):
            raise
        raise Unprintable(f"cannot write to standard output: {error.strerror or error}") from None


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text to stdout, or to stderr (``err``), with a newline (``nl``)."""
    with _written(err=err):
        typer.echo(plain(text), None if err else reports(), nl=nl, err=err)


class _PlainConsole(Console):
    def _check_buffer(self) -> None:
        with _written(err=self.stderr):
            super()._check_buffer()

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for `_written`, where Rich would exit

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, unless it has no rows."""
    table = table_of(columns, rows)
    if table.row_count:
        new_console().print(table)


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table. Long cells are folded, never cut off."""
    table = Table(*map(plain, columns), box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for cells in rows:
        table.add_row(*map(plain, cells))  # here too, as it changes their width
    return table


def new_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console for stdout, or ``stderr``; a ``quiet`` one prints nothing.

    Its width is the variable ``COLUMNS``, else the terminal's, else that of tables in a pipe.
    """
    file = None if stderr else reports()
    console = _PlainConsole(file=file, markup=False, highlight=False, stderr=stderr, quiet=quiet)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    with _written():
        typer.echo(_json(value, orjson.OPT_INDENT_2), reports())


def print_json_stream(head: Mapping[str, Any], name: str, items: Iterable[Any]) -> None:
    """Print the object ``head`` with one more key, whose list is streamed. ``head``: the other keys, at least
    one."""

    def write(text: str) -> None:
        with _written():
            reports().write(text)

    write(_json(head, orjson.OPT_INDENT_2)[:-2])
    write(f',\n  "{name}": [')
    for position, item in enumerate(items):
        write((",\n    " if position else "\n    ") + _json(item))
    write("\n  ]\n}\n")
    with _written():
        reports().flush()


def print_problems(problems: Problems) -> None:
    """Print the problems of files to stderr."""
    kept = problems.kept
    for problem in kept[:_SHOWN]:
        echo(problem, err=True)
    if (more := len(kept) - _SHOWN) > 0:
        echo(f"and {more:,} other problems", err=True)


def set_verbosity(verbose: int = 0, *, quiet: bool = False) -> None:
    """Say how much of the log appears on stderr: warnings by default."""
    level = logging.ERROR if quiet else {0: logging.NOTSET, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.getLogger("gym_serve").setLevel(level)
    if verbose:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[_Printer()])


def is_quiet() -> bool:
    """Whether the command shows no progress (``--quiet``)."""
    return not logging.getLogger("gym_serve").isEnabledFor(logging.WARNING)


def print_start() -> None:
    """Print the phases of a graph's start to stderr, from now on; not with ``--quiet``."""
    if is_quiet():
        return
    logger = logging.getLogger(START_LOG)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [_Printer()]


class _Printer(logging.Handler):
    """Writes to what is stderr at that moment: while a progress bar is shown, above it."""

    def emit(self, record: logging.LogRecord) -> None:
        # `typer.echo` would find the terminal behind the bar.
        with _written(err=True):
            print(plain(self.format(record)), file=sys.stderr)


def packed(parts: Iterable[str], width: int) -> list[str]:
    """Parts in lines of at most ``width`` characters, two spaces between them; a longer part has several."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines += wrap(part, width, break_on_hyphens=False)
    return lines


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but newline and tab, and those of Unicode that reverse what follows (bidirectional)."""


def plain(text: str) -> str:
    """Text without the control characters that could rewrite what stands on a terminal."""
    return _CONTROL.sub("\ufffd", text)


def shortened(text: str, length: int = 60) -> str:
    """The beginning of a text, as one line of printable characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * length]).split())
    return line if len(line) <= length else f"{line[: length - 3]}..."


def sparkline(counts: Sequence[int]) -> str:
    """A histogram in one line; an empty bin is a space."""
    most = max(counts, default=0)
    return "".join(_BARS[(count * len(_BARS) - 1) // most] if count else " " for count in counts)


def bar(count: int, most: int, width: int = 40) -> str:
    """A bar proportional to ``count``; empty only for 0."""
    return "█" * max(round(width * count / most), 1) if count else ""


def _json(value: Any, option: int = 0) -> str:
    """JSON in which control characters are escaped, those too that JSON allows."""
    text = exact_bytes(value, option, _plain).decode()
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _plain(value: Any) -> Any:
    if isinstance(value, Iterator | set | frozenset):
        return list(value)
    return str(value)
