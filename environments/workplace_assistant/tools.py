"""The office's tools. Most read or change a record; a helper below makes each kind of them.

The office: tables of e-mail, calendar, projects, customers and visits, one copy per session.

Nothing depends on the clock or on chance: it is always `NOW`, and a new record gets the next free id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date, datetime
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter, ValidationError

from gym_serve.servers import tool
from gym_serve.types.errors import ToolFailed

Record = dict[str, str]
Table = dict[str, Record]
_Content = frozenset[tuple[str, str]]

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
        self.sent: list[Record] = []  # e-mails that have left, whatever becomes of the outbox

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
    in any order, and so have e-mails that were sent. Letter case and white space around values do not matter.
    """
    return [name for name in TABLES if _content(name, first) != _content(name, second)]


def _content(name: str, office: Office) -> tuple[dict[str, _Content], Counter[_Content], Counter[_Content]]:
    old = _morning()[name]
    table = office.tables[name]
    kept = {key: _folded(record) for key, record in table.items() if key in old}
    new = [record for key, record in table.items() if key not in old]
    return kept, Counter(map(_folded, new)), Counter(map(_folded, office.sent if name == "emails" else []))


def _folded(record: Record) -> _Content:
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


Status = Literal["Lead", "Qualified", "Proposal", "Won", "Lost"]
Product = Literal["Desks", "Lighting", "Software", "Training"]
Note = Annotated[str, StringConstraints(strip_whitespace=True, max_length=2000)]
TaskList = Literal["Backlog", "In Progress", "In Review", "Completed"]
Board = Literal["Website", "Mobile App", "Research", "Operations"]
Source = Literal["search", "direct", "referral", "social"]
Value = Literal["total_visits", "engaged_users", "average_session_duration", "visits_by_source"]

Arguments = dict[str, tuple[Any, ...]]
"""Of each argument its type, its meaning for the model, and a default if it may be left out."""
Act = Callable[..., Any]


class OfficeTools:
    """The tools of all departments."""


def _add(name: str, does: str, arguments: Arguments, act: Act, returns: Any = dict[str, str]) -> None:
    """Make ``act(office, **arguments)`` a tool."""

    async def method(self: OfficeTools, *, session: Office, **values: Any) -> Any:
        return act(session, **values)

    parameters = [Parameter("self", Parameter.POSITIONAL_ONLY)]
    for key, (_, _, *default) in {**arguments, "session": (Office, "")}.items():
        parameters.append(Parameter(key, Parameter.KEYWORD_ONLY, default=(*default, Parameter.empty)[0]))
    method.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    hints = {key: argument[0] for key, argument in arguments.items()}
    method.__annotations__ = {**hints, "session": Office, "return": returns}
    method.__doc__ = "\n".join([does, "", "Args:", *(f"    {key}: {a[1]}" for key, a in arguments.items())])
    setattr(OfficeTools, name, tool(method))


def _optional(**arguments: tuple[Any, str]) -> Arguments:
    return {key: (type_ | None, meaning, None) for key, (type_, meaning) in arguments.items()}


def _days(prefix: str, what: str = "day") -> Arguments:
    first, last = f"First {what}, YYYY-MM-DD.", f"Last {what}, YYYY-MM-DD."
    return _optional(**{f"{prefix}_min": (date, first), f"{prefix}_max": (date, last)})


def _id(noun: str) -> Arguments:
    _, name = noun.split()
    return {f"{name.replace('-', '')}_id": (Id, f"Id of the {name}.")}


def _get(table: str, noun: str, fields: Any, about: str = "The field.") -> tuple[str, Arguments, Act]:
    def act(office: Office, field: str, **key: str) -> Record:
        return {field: office.record(table, *key.values())[field]}

    return f"Get one field of {noun}.", _id(noun) | {"field": (fields, about)}, act


def _search(
    table: str,
    words: tuple[str, ...],
    first: tuple[str, ...],
    days: tuple[str, Arguments],
    newest: bool = False,
) -> Act:
    """Records with all words of ``query``, of some days, and with equal fields; ordered by ``first``."""
    day, (day_min, day_max) = days

    def act(office: Office, query: str, **conditions: Any) -> list[Record]:
        limits = conditions.pop(day_min), conditions.pop(day_max)
        records = records_of(office.tables[table], query, words, **conditions)
        records = [record for record in records if within(record[day], *limits)]
        records.sort(key=lambda record: [record[field] for field in first], reverse=newest)
        return records[:MAX_RESULTS]

    return act


def _create(table: str, key: str, status: str = "created", **fixed: str) -> Act:
    def act(office: Office, **fields: Any) -> Record:
        return {"status": status, key: office.add(table, **{k: _text(v) for k, v in fields.items()}, **fixed)}

    return act


def _update(
    table: str, noun: str, types: Arguments, new: Any = Line, about: str = "Its new value."
) -> tuple[str, Arguments, Act]:
    def act(office: Office, field: str, new_value: str, **key: str) -> Record:
        record = office.record(table, *key.values())
        record[field] = _text(read(types[field][0], field, new_value))
        return {"status": "updated"}

    fields: Any = Literal[tuple(types)]
    arguments = _id(noun) | {"field": (fields, "The field."), "new_value": (new, about)}
    return f"Change one field of {noun}.", arguments, act


def _delete(table: str, noun: str) -> tuple[str, Arguments, Act]:
    def act(office: Office, **key: str) -> Record:
        office.delete(table, *key.values())
        return {"status": "deleted"}

    return f"Delete {noun}.", _id(noun), act


def _text(value: Any) -> str:
    """A value as the tables have it: ``2026-03-12``, ``2026-03-12 09:00``, ``30``."""
    return shown(value) if isinstance(value, datetime) else str(value)


_CUSTOMER: Arguments = {
    "customer_name": (Line, "Name of the customer."),
    "customer_email": (Address, "Address of the customer."),
    "assigned_to_email": (Address, "Address of the colleague who looks after them."),
    "status": (Status, "Status of the deal."),
    "product_interest": (Product, "Product that they want."),
}
_CRM = "customer_relationship_manager_"
_add(
    f"{_CRM}search_customers",
    "Search the customers. Answers at most 20, by name.",
    {
        "query": (Query, "Words that all occur in the name, address or notes.", ""),
        **_optional(**{key: _CUSTOMER[key] for key in ("assigned_to_email", "status", "product_interest")}),
        **_days("last_contact", "day of the last contact"),
    },
    _search(
        "customers",
        ("customer_name", "customer_email", "notes"),
        ("customer_name",),
        ("last_contact", _days("last_contact")),
    ),
    list[Record],
)
_add(
    f"{_CRM}add_customer",
    "Add a customer. The last contact is today.",
    {**_CUSTOMER, "notes": (Note, "Notes.", "")},
    _create("customers", "customer_id", "added", last_contact=NOW.date().isoformat()),
)
_CUSTOMER |= {"last_contact": (date, ""), "notes": (Note, "")}
_add(f"{_CRM}update_customer", *_update("customers", "a customer", _CUSTOMER, Note))
_add(f"{_CRM}delete_customer", *_delete("customers", "a customer"))

_TASK: Arguments = {
    "task_name": (Line, "Name of the task."),
    "assigned_to_email": (Address, "Address of whoever does it."),
    "list_name": (TaskList, "List of the board."),
    "due_date": (date, "Due date, YYYY-MM-DD."),
    "board": (Board, "Board."),
}
_PM = "project_management_"
_add(f"{_PM}get_task_information_by_id", *_get("tasks", "a task", Literal[tuple(_TASK)]))
_add(
    f"{_PM}search_tasks",
    "Search the tasks. Answers at most 20, by due date.",
    {
        "query": (Query, "Words that all occur in the name.", ""),
        **_optional(**{key: _TASK[key] for key in ("assigned_to_email", "list_name", "board")}),
        **_days("due", "due date"),
    },
    _search("tasks", ("task_name",), ("due_date", "id"), ("due_date", _days("due"))),
    list[Record],
)
_add(f"{_PM}create_task", "Create a task.", _TASK, _create("tasks", "task_id"))
_add(f"{_PM}update_task", *_update("tasks", "a task", _TASK))
_add(f"{_PM}delete_task", *_delete("tasks", "a task"))


def _visits(office: Office, time_min: date | None, time_max: date | None) -> list[Record]:
    return [visit for visit in office.tables["visits"].values() if within(visit["day"], time_min, time_max)]


def _mean_duration(office: Office, **days: date | None) -> float:
    seconds = [int(visit["seconds"]) for visit in _visits(office, **days)]
    return round(fmean(seconds), 1) if seconds else 0.0


_add(
    "analytics_get_visitor_information_by_id",
    "Get all visits of a visitor.",
    _id("a visitor"),
    lambda office, visitor_id: records_of(office.tables["visits"], visitor_id=visitor_id),
    list[Record],
)
_add(
    "analytics_total_visits_count",
    "Count the visits.",
    _days("time"),
    lambda office, **days: len(_visits(office, **days)),
    int,
)
_add(
    "analytics_engaged_users_count",
    "Count the visits in which the visitor did something.",
    _days("time"),
    lambda office, **days: sum(visit["engaged"] == "yes" for visit in _visits(office, **days)),
    int,
)
_add(
    "analytics_traffic_source_count",
    "Count the visits that came from a source.",
    {"traffic_source": (Source, "The source."), **_days("time")},
    lambda office, traffic_source, **days: sum(
        visit["source"] == traffic_source for visit in _visits(office, **days)
    ),
    int,
)
_add(
    "analytics_get_average_session_duration",
    "Mean duration of the visits in seconds; 0 if there are none.",
    _days("time"),
    _mean_duration,
    float,
)
_add(
    "analytics_create_plot",
    "Plot a value over time.",
    {
        "time_min": (date, "First day, YYYY-MM-DD."),
        "time_max": (date, "Last day, YYYY-MM-DD."),
        "value_to_plot": (Value, "The value."),
        "plot_type": (Literal["bar", "line", "scatter", "histogram"], "Kind of plot."),
    },
    _create("plots", "plot_id"),
)

_EVENT: Arguments = {
    "event_name": (Line, "Name of the event."),
    "participant_email": (Address, "Address of the participant."),
    "event_start": (Moment, "Start, YYYY-MM-DD HH:MM."),
    "duration": (Minutes, "Duration in minutes."),
}
_add(
    "calendar_get_event_information_by_id",
    *_get("events", "an event", Literal[tuple(_EVENT)], "The field; `duration` is in minutes."),
)
_add(
    "calendar_search_events",
    "Search the calendar. Answers at most 20 events, the earliest first.",
    {"query": (Query, "Words that all occur in the name or the participant's address.", ""), **_days("date")},
    _search("events", ("event_name", "participant_email"), ("event_start",), ("event_start", _days("date"))),
    list[Record],
)
_add("calendar_create_event", "Put an event into the calendar.", _EVENT, _create("events", "event_id"))
_NEW_VALUE = "Its new value; a start is YYYY-MM-DD HH:MM, a duration in minutes."
_add("calendar_update_event", *_update("events", "an event", _EVENT, about=_NEW_VALUE))
_add("calendar_delete_event", *_delete("events", "an event"))


def _send(office: Office, recipient: str, subject: str, body: str) -> Record:
    if not records_of(office.tables["directory"], email=recipient) and not records_of(
        office.tables["customers"], customer_email=recipient
    ):
        raise ToolFailed(f"there is no address {recipient}; look it up in the directory")
    fields = {"folder": "outbox", "contact": recipient, "subject": subject, "body": body}
    email_id = office.add("emails", **fields, sent=shown(NOW))
    office.sent.append(fields)
    return {"status": "sent", "email_id": email_id}


def _reply(office: Office, email_id: str, body: str) -> Record:
    email = office.record("emails", email_id)
    return _send(office, email["contact"], email["subject"], body)


def _forward(office: Office, email_id: str, recipient: str) -> Record:
    email = office.record("emails", email_id)
    return _send(office, recipient, f"FW: {email['subject']}"[:200], email["body"])


_RECIPIENT = (Address, "Address of the recipient.")
_add(
    "company_directory_find_email_address",
    "Find the e-mail addresses of colleagues by name.",
    {"name": (Query, "First name, last name, or a part of one.")},
    lambda office, name: [
        record["email"] for record in records_of(office.tables["directory"], name, ("name", "email"))
    ][:MAX_RESULTS],
    list[str],
)
_add(
    "email_get_email_information_by_id",
    *_get(
        "emails",
        "an e-mail",
        Literal["folder", "contact", "subject", "sent", "body"],
        "The field; `contact` is the sender (inbox) or the recipient (outbox).",
    ),
)
_add(
    "email_search_emails",
    "Search the mailbox. Answers at most 20 e-mails, the newest first.",
    {
        "query": (Query, "Words that all occur in the subject, body or contact.", ""),
        **_days("date"),
        **_optional(folder=(Literal["inbox", "outbox"], "Received (inbox) or sent (outbox) only.")),
    },
    _search("emails", ("subject", "body", "contact"), ("sent",), ("sent", _days("date")), newest=True),
    list[Record],
)
_add(
    "email_send_email",
    "Send an e-mail.",
    {"recipient": _RECIPIENT, "subject": (Line, "Subject."), "body": (Text, "Text.")},
    _send,
)
_add(
    "email_reply_email",
    "Reply to an e-mail: to its contact, with its subject.",
    {"email_id": (Id, "Id of the e-mail to reply to."), "body": (Text, "Text of the reply.")},
    _reply,
)
_add(
    "email_forward_email",
    "Forward an e-mail.",
    {"email_id": (Id, "Id of the e-mail to forward."), "recipient": _RECIPIENT},
    _forward,
)
_add("email_delete_email", *_delete("emails", "an e-mail"))
