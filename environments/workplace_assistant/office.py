"""The office: tables of e-mail, calendar, projects, customers and visits, one copy per session.

Nothing depends on the clock or on chance: it is always `NOW`, and a new record gets the next free id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter, ValidationError

from gym_serve.types.errors import ToolFailed

Record = dict[str, str]
Table = dict[str, Record]

NOW = datetime(2026, 3, 12, 9, 0)  # the office's time, a Thursday

TABLES = ("directory", "emails", "events", "tasks", "customers", "visits", "plots")
"""Names of the tables; each record has an ``id``."""

_DATA = Path(__file__).with_name("data") / "office.jsonl"
_MAX_RECORDS = 5_000  # of a table: a policy that creates records for ever meets a limit


class Office:
    """The tables of one session, as they were in the morning of `NOW`: by name, records by id."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {
            name: {key: dict(record) for key, record in table.items()} for name, table in _morning().items()
        }

    def record(self, table: str, record_id: str) -> Record:
        record = self.tables[table].get(record_id)
        if record is None:
            raise ToolFailed(f"there is no record {record_id[:50]!r} among the {table}")
        return record

    def add(self, table: str, **fields: str) -> str:
        records = self.tables[table]
        if len(records) >= _MAX_RECORDS:
            raise ToolFailed(f"the office holds at most {_MAX_RECORDS} {table}")
        # After all ids of the morning, deleted ones included.
        record_id = f"{1 + max(map(int, {*records, *_morning()[table]}), default=0):05d}"
        records[record_id] = {"id": record_id, **fields}
        return record_id

    def delete(self, table: str, record_id: str) -> None:
        self.record(table, record_id)
        del self.tables[table][record_id]


def records_of(
    table: Table, words: str = "", fields: tuple[str, ...] = (), **equal: str | None
) -> list[Record]:
    """The records of a table that have all ``words`` in their ``fields``, and fields equal to those given
    (but for letter case; None is no condition).
    """
    wanted = words.casefold().split()
    records = []
    for record in table.values():
        text = " ".join(record[field] for field in fields).casefold()
        if all(word in text for word in wanted) and all(
            value is None or record[field].casefold() == value.casefold() for field, value in equal.items()
        ):
            records.append(record)
    return records


def within(day: str, first: date | None, last: date | None) -> bool:
    """Whether a moment ``YYYY-MM-DD...`` is on a day between two, both included."""
    return (first is None or day[:10] >= first.isoformat()) and (last is None or day[:10] <= last.isoformat())


def differing_tables(first: Office, second: Office) -> list[str]:
    """The tables in which two offices differ. Old records are compared by id; new ones have the same content,
    in any order. Letter case and white space around values do not matter.
    """
    return [name for name in TABLES if _content(name, first) != _content(name, second)]


def _content(
    name: str, office: Office
) -> tuple[dict[str, frozenset[tuple[str, str]]], Counter[frozenset[tuple[str, str]]]]:
    old = _morning()[name]
    table = office.tables[name]
    kept = {key: _folded(record) for key, record in table.items() if key in old}
    return kept, Counter(_folded(record) for key, record in table.items() if key not in old)


def _folded(record: Record) -> frozenset[tuple[str, str]]:
    return frozenset((field, value.strip().casefold()) for field, value in record.items() if field != "id")


@cache
def _morning() -> Mapping[str, Table]:
    tables: dict[str, Table] = {name: {} for name in TABLES}
    for line in _DATA.read_text("utf-8").splitlines():
        record = json.loads(line)
        tables[record.pop("table")][record["id"]] = record
    return tables


MAX_RESULTS = 20  # records that a search answers at most

_MOMENT = "%Y-%m-%d %H:%M"

Id = Annotated[str, StringConstraints(max_length=20)]
Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=5000)]
Query = Annotated[str, StringConstraints(max_length=200)]
Address = Annotated[
    str,
    StringConstraints(
        strip_whitespace=True, to_lower=True, max_length=100, pattern=r"^[^@\s]+@[^@\s]+\.[^@\s]+$"
    ),
]
Minutes = Annotated[int, Field(ge=5, le=480)]
Moment = Annotated[datetime, AfterValidator(lambda moment: moment.replace(tzinfo=None))]


def shown(moment: datetime) -> str:
    """A moment as the tables write it: ``2026-03-12 09:00``."""
    return moment.strftime(_MOMENT)


def read(type_: Any, field: str, value: str) -> Any:
    """``value`` converted to the type of a field. Raises ToolFailed: it does not fit."""
    try:
        return TypeAdapter(type_).validate_python(value)
    except ValidationError as error:
        raise ToolFailed(f"{value[:100]!r} is not a valid {field}: {error.errors()[0]['msg']}") from None
