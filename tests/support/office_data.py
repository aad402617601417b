"""How the data of workplace_assistant was made: ``python tests/support/office_data.py`` writes it again.

It writes ``data/office.jsonl``, ``data/tasks.jsonl`` and ``data/example.jsonl``, the same ones every time. A
record is only asked for in words that fit no other one, and by a rule that leaves no choice ("the last
e-mail"), so each task has exactly one right end state.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from gym_serve.environments.workplace_assistant import WorkplaceAssistant
from gym_serve.environments.workplace_assistant.office import ME, NOW, Office, Record

__all__ = ["TEMPLATES", "Desk", "Task", "Template", "call", "office_records", "rows"]

Call = dict[str, str]


@dataclass(frozen=True)
class Task:
    """A task with its solution.

    Attributes:
        prompt: what the user asks for.
        solution: the calls that change the office; none if nothing is to be changed.
    """

    prompt: str
    solution: list[Call]


@dataclass
class Desk:
    """Where a template draws its task from.

    Attributes:
        rng: what it draws with.
        office: the office in the morning.
    """

    rng: random.Random
    office: Office = field(default_factory=Office)

    def people(self, count: int) -> list[Record]:
        """Different colleagues."""
        directory = self.office.tables["directory"].values()
        return self.rng.sample([person for person in directory if person["email"] != ME], count)

    def records(self, table: str, keep: Callable[[Record], bool] = lambda record: True) -> list[Record]:
        """The records of a table that a condition holds for."""
        return [record for record in self.office.tables[table].values() if keep(record)]

    def name_of(self, email: str) -> str:
        """Name of the colleague with an address."""
        (person,) = self.records("directory", lambda person: person["email"] == email)
        return person["name"]

    def day(self, ahead: int) -> datetime:
        """Midnight of a day from now on that is no Saturday or Sunday."""
        day = (NOW + timedelta(days=ahead)).replace(hour=0, minute=0)
        return day + timedelta(days=8 - day.isoweekday()) if day.isoweekday() > 5 else day

    def spoken(self, moment: datetime | str) -> str:
        """A day as people say it: ``Friday, 13 March 2026``."""
        if isinstance(moment, str):
            moment = datetime.fromisoformat(moment)
        return f"{moment:%A}, {moment.day} {moment:%B %Y}"


Template = Callable[[Desk], Task | None]
"""Draws a task; None where this draw makes none."""


def call(name: str, **arguments: str | int) -> Call:
    """A call as a solution holds it."""
    return {"name": name, "arguments": json.dumps(arguments)}


_PEOPLE = (
    "Ada Quist", "Bruno Falk", "Carla Menez", "Dario Oduya", "Elin Storm", "Farid Naim", "Greta Holm",
    "Hugo Lindt", "Imani Reyes", "Jonas Vere", "Kira Doyle", "Lars Okafor",
)  # fmt: skip
_FIRMS = (
    "Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Ginkgo", "Hazel", "Ivy", "Juniper", "Larch", "Maple",
    "Olive", "Poplar", "Rowan", "Spruce", "Teak", "Willow", "Yew", "Zelkova",
)  # fmt: skip
_KINDS = ("Bank", "Clinic", "Hotel", "Library", "Press")
_SUBJECTS = (
    "Quarterly figures", "Office move", "Venue for the retreat", "Invoice question", "Hiring plan",
    "Security training", "Press inquiry", "Printer contract", "Parking permits", "Travel budget",
)  # fmt: skip
_BODIES = (
    "Could you take a look when you have a minute?",
    "I attached the latest version. Comments are welcome until Friday.",
    "Short update: we are on track, but two points are still open.",
    "Please let me know whether this works for you.",
)
_MEETINGS = (
    "Budget review", "Design critique", "Sales forecast", "Onboarding", "Roadmap session", "Retro",
    "Vendor call", "Data workshop", "Policy briefing", "Sprint planning",
)  # fmt: skip
_VERBS = ("Draft", "Fix", "Review", "Publish", "Test", "Archive")
_THINGS = (
    "landing page",
    "login flow",
    "price list",
    "survey",
    "backup plan",
    "style guide",
    "release notes",
)
_NOTES = ("", "Asked for a demo.", "Prefers to be called.", "Contract ends in summer.")


def office_records() -> Iterator[Record]:
    """All records, each with its ``table`` and ``id``."""
    rng = random.Random(20260312)
    people = [{"name": name, "email": f"{name.replace(' ', '.').lower()}@heron.example"} for name in _PEOPLE]
    addresses = [person["email"] for person in people]
    yield from _numbered("directory", [{"name": "Jo Marsh", "email": ME}, *people])
    yield from _numbered("emails", _emails(rng, addresses))
    yield from _numbered("events", _events(rng, addresses))
    yield from _numbered("tasks", _tasks(rng, addresses))
    yield from _numbered("customers", _customers(rng, addresses))
    yield from _numbered("visits", _visits(rng))


def _numbered(table: str, records: list[dict[str, Any]]) -> Iterator[Record]:
    for number, record in enumerate(records, 1):
        yield {"table": table, "id": f"{number:05d}", **{key: str(value) for key, value in record.items()}}


def _emails(rng: random.Random, addresses: list[str]) -> list[dict[str, Any]]:
    emails = []
    for index in range(90):
        sent = NOW - timedelta(hours=5 * index + rng.randrange(1, 5), minutes=rng.randrange(60))
        emails.append(
            {
                "folder": "outbox" if index % 5 == 4 else "inbox",
                "contact": rng.choice(addresses),
                "subject": rng.choice(_SUBJECTS),
                "sent": sent.strftime("%Y-%m-%d %H:%M"),
                "body": rng.choice(_BODIES),
            }
        )
    return emails


def _events(rng: random.Random, addresses: list[str]) -> list[dict[str, Any]]:
    events = []
    for index in range(60):
        day = _working_day(NOW + timedelta(days=index // 2 - 8))
        start = day.replace(hour=9 + 3 * (index % 2) + rng.randrange(3), minute=rng.choice((0, 30)))
        events.append(
            {
                "event_name": rng.choice(_MEETINGS),
                "participant_email": rng.choice(addresses),
                "event_start": start.strftime("%Y-%m-%d %H:%M"),
                "duration": rng.choice((30, 45, 60)),
            }
        )
    return events


def _tasks(rng: random.Random, addresses: list[str]) -> list[dict[str, Any]]:
    names = [f"{verb} {thing}" for verb in _VERBS for thing in _THINGS]
    rng.shuffle(names)
    return [
        {
            "task_name": name,
            "assigned_to_email": rng.choice(addresses),
            "list_name": rng.choice(("Backlog", "In Progress", "In Review", "Completed")),
            "due_date": (NOW + timedelta(days=rng.randrange(-14, 28))).date().isoformat(),
            "board": rng.choice(("Website", "Mobile App", "Research", "Operations")),
        }
        for name in names
    ]


def _customers(rng: random.Random, addresses: list[str]) -> list[dict[str, Any]]:
    names = [f"{firm} {kind}" for firm in _FIRMS for kind in rng.sample(_KINDS, 3)]
    return [
        {
            "customer_name": name,
            "customer_email": f"contact@{name.replace(' ', '-').lower()}.example",
            "assigned_to_email": rng.choice(addresses),
            "status": rng.choice(("Lead", "Qualified", "Proposal", "Won", "Lost")),
            "product_interest": rng.choice(("Desks", "Lighting", "Software", "Training")),
            "last_contact": (NOW - timedelta(days=rng.randrange(1, 200))).date().isoformat(),
            "notes": rng.choice(_NOTES),
        }
        for name in names
    ]


def _visits(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "visitor_id": f"V{rng.randrange(1, 80):03d}",
            "day": (NOW - timedelta(days=rng.randrange(1, 40))).date().isoformat(),
            "source": rng.choice(("search", "direct", "referral", "social")),
            "engaged": rng.choice(("yes", "no")),
            "seconds": rng.randrange(5, 900),
        }
        for _ in range(240)
    ]


def _working_day(day: datetime) -> datetime:
    return day + timedelta(days=8 - day.isoweekday()) if day.isoweekday() > 5 else day


_TODAY = NOW.date().isoformat()
_MEETING = "calendar_create_event"
_MAIL = "email_send_email"
_CUSTOMER = "customer_relationship_manager_update_customer"
_TASK = "project_management_update_task"


def send_email(desk: Desk) -> Task | None:
    (person,) = desk.people(1)
    subject = desk.rng.choice(("Lunch", "Key card", "Fire drill", "New laptop", "Door code"))
    body = desk.rng.choice(("It is at noon today.", "Please come by my desk.", "It is ready for you."))
    prompt = f"Send {person['name']} an email with the subject '{subject}' and the text '{body}'"
    return Task(prompt, [call(_MAIL, recipient=person["email"], subject=subject, body=body)])


def reply_to_last_email(desk: Desk) -> Task | None:
    (person,) = desk.people(1)
    mails = desk.records("emails", lambda m: m["contact"] == person["email"] and m["folder"] == "inbox")
    if not mails:
        return None
    last = max(mails, key=lambda mail: mail["sent"])
    body = desk.rng.choice(
        ("Thanks, that works for me.", "I will look at it tomorrow.", "Let us talk on Monday.")
    )
    prompt = f"Reply to the last email that {person['name']} sent me with '{body}'"
    return Task(prompt, [call("email_reply_email", email_id=last["id"], body=body)])


def forward_email(desk: Desk) -> Task | None:
    person, other = desk.people(2)
    mails = desk.records("emails", lambda m: m["contact"] == person["email"] and m["folder"] == "inbox")
    if not mails:
        return None
    mail = desk.rng.choice(mails)
    last = max((m for m in mails if m["subject"] == mail["subject"]), key=lambda m: m["sent"])
    prompt = f"Forward {person['name']}'s last email about '{mail['subject']}' to {other['name']}."
    return Task(prompt, [call("email_forward_email", email_id=last["id"], recipient=other["email"])])


def delete_emails(desk: Desk) -> Task | None:
    (person,) = desk.people(1)
    mails = desk.records("emails", lambda m: m["contact"] == person["email"] and m["folder"] == "inbox")
    if not 2 <= len(mails) <= 12:
        return None
    prompt = f"Delete all emails that I have received from {person['name']}."
    return Task(prompt, [call("email_delete_email", email_id=mail["id"]) for mail in mails])


def create_meeting(desk: Desk) -> Task | None:
    (person,) = desk.people(1)
    day = desk.day(desk.rng.randrange(1, 14))
    start = day.replace(hour=desk.rng.randrange(9, 17), minute=desk.rng.choice((0, 30)))
    name = desk.rng.choice(("Coffee chat", "Contract talk", "Handover", "Demo rehearsal"))
    duration = desk.rng.choice((20, 30, 45))
    prompt = (
        f"Put a {duration}-minute meeting called '{name}' with {person['name']} into my calendar "
        f"on {desk.spoken(day)} at {start:%H:%M}."
    )
    arguments = {"participant_email": person["email"], "event_start": f"{start:%Y-%m-%d %H:%M}"}
    return Task(prompt, [call(_MEETING, event_name=name, **arguments, duration=duration)])


def move_meeting(desk: Desk) -> Task | None:
    event = desk.rng.choice(desk.records("events", lambda e: e["event_start"] > _TODAY + " 24"))
    day = event["event_start"][:10]
    name = event["event_name"]
    if len(desk.records("events", lambda e: e["event_start"][:10] == day and e["event_name"] == name)) > 1:
        return None
    hour = desk.rng.choice(("08:00", "17:00", "18:30"))
    prompt = f"Move the event '{name}' on {desk.spoken(day)} to {hour} on the same day."
    arguments = {"event_id": event["id"], "field": "event_start", "new_value": f"{day} {hour}"}
    return Task(prompt, [call("calendar_update_event", **arguments)])


def rename_next_meeting(desk: Desk) -> Task | None:
    (person,) = desk.people(1)
    coming = desk.records(
        "events",
        lambda e: e["participant_email"] == person["email"] and e["event_start"] > f"{NOW:%Y-%m-%d %H:%M}",
    )
    if not coming:
        return None
    event = min(coming, key=lambda e: e["event_start"])
    if sum(e["event_start"] == event["event_start"] for e in coming) > 1:
        return None
    name = desk.rng.choice(("Strategy talk", "Mid-year review", "Catch-up"))
    prompt = f"Rename my next meeting with {person['name']} to '{name}'."
    arguments = {"event_id": event["id"], "field": "event_name", "new_value": name}
    return Task(prompt, [call("calendar_update_event", **arguments)])


def cancel_meetings(desk: Desk) -> Task | None:
    day = desk.day(desk.rng.randrange(1, 18))
    events = desk.records("events", lambda e: e["event_start"][:10] == f"{day:%Y-%m-%d}")
    if not events:
        return None
    prompt = f"I am ill. Delete all of my events on {desk.spoken(day)}."
    return Task(prompt, [call("calendar_delete_event", event_id=event["id"]) for event in events])


def create_task(desk: Desk) -> Task | None:
    (person,) = desk.people(1)
    name = desk.rng.choice(("Update FAQ", "Order badges", "Translate manual", "Plan workshop"))
    board = desk.rng.choice(("Website", "Mobile App", "Research", "Operations"))
    due = desk.day(desk.rng.randrange(2, 20))
    prompt = (
        f"Create the task '{name}' for {person['name']} in the backlog of the board '{board}'. "
        f"It is due on {desk.spoken(due)}."
    )
    arguments = {"assigned_to_email": person["email"], "list_name": "Backlog", "board": board}
    solution = call("project_management_create_task", task_name=name, due_date=f"{due:%Y-%m-%d}", **arguments)
    return Task(prompt, [solution])


def complete_task(desk: Desk) -> Task | None:
    task = desk.rng.choice(desk.records("tasks", lambda t: t["list_name"] != "Completed"))
    prompt = f"The task '{task['task_name']}' is done. Move it to 'Completed'."
    return Task(prompt, [call(_TASK, task_id=task["id"], field="list_name", new_value="Completed")])


def take_over_tasks(desk: Desk) -> Task | None:
    person, other = desk.people(2)
    tasks = desk.records(
        "tasks", lambda t: t["assigned_to_email"] == person["email"] and t["list_name"] != "Completed"
    )
    if not tasks:
        return None
    prompt = (
        f"{person['name']} is on leave. Give all tasks of theirs that are not completed to {other['name']}."
    )
    new = {"field": "assigned_to_email", "new_value": other["email"]}
    return Task(prompt, [call(_TASK, task_id=task["id"], **new) for task in tasks])


def tidy_overdue_tasks(desk: Desk) -> Task | None:
    board = desk.rng.choice(("Website", "Mobile App", "Research", "Operations"))
    stage = desk.rng.choice(("In Progress", "In Review"))
    tasks = desk.records(
        "tasks", lambda t: t["board"] == board and t["list_name"] == stage and t["due_date"] < _TODAY
    )
    prompt = (
        f"Move every task of the board '{board}' that is '{stage}' and was due before today to the backlog. "
        "If there is none, do nothing."
    )
    new = {"field": "list_name", "new_value": "Backlog"}
    return Task(prompt, [call(_TASK, task_id=task["id"], **new) for task in tasks])


def add_customer(desk: Desk) -> Task | None:
    (person,) = desk.people(1)
    name = (
        desk.rng.choice(("Heather", "Fern", "Moss", "Clover", "Thistle"))
        + " "
        + desk.rng.choice(("Inn", "Labs"))
    )
    product = desk.rng.choice(("Desks", "Lighting", "Software", "Training"))
    address = f"hello@{name.replace(' ', '-').lower()}.example"
    prompt = (
        f"Add {name} ({address}) as a new lead, interested in {product.lower()}. "
        f"{person['name']} looks after them."
    )
    arguments = {"customer_name": name, "customer_email": address, "assigned_to_email": person["email"]}
    solution = call(
        "customer_relationship_manager_add_customer", **arguments, status="Lead", product_interest=product
    )
    return Task(prompt, [solution])


def set_customer_status(desk: Desk) -> Task | None:
    customer = desk.rng.choice(desk.records("customers"))
    status = desk.rng.choice([s for s in ("Qualified", "Proposal", "Won", "Lost") if s != customer["status"]])
    prompt = f"Set the status of {customer['customer_name']} to '{status}'."
    return Task(prompt, [call(_CUSTOMER, customer_id=customer["id"], field="status", new_value=status)])


def reassign_leads(desk: Desk) -> Task | None:
    person, other = desk.people(2)
    product = desk.rng.choice(("Desks", "Lighting", "Software", "Training"))
    customers = desk.records(
        "customers", lambda c: c["assigned_to_email"] == person["email"] and c["product_interest"] == product
    )
    if not customers:
        return None
    prompt = (
        f"Hand all customers of {person['name']} who are interested in {product.lower()} "
        f"over to {other['name']}."
    )
    new = {"field": "assigned_to_email", "new_value": other["email"]}
    return Task(prompt, [call(_CUSTOMER, customer_id=customer["id"], **new) for customer in customers])


def delete_lost_customers(desk: Desk) -> Task | None:
    (person,) = desk.people(1)
    customers = desk.records(
        "customers", lambda c: c["assigned_to_email"] == person["email"] and c["status"] == "Lost"
    )
    if not customers:
        return None
    prompt = f"Delete all customers of {person['name']} that we have lost."
    name = "customer_relationship_manager_delete_customer"
    return Task(prompt, [call(name, customer_id=customer["id"]) for customer in customers])


def create_plot(desk: Desk) -> Task | None:
    first, last = sorted(desk.rng.sample(range(1, 10), 2))
    kind = desk.rng.choice(("bar", "line", "scatter"))
    value = desk.rng.choice(("total_visits", "engaged_users", "average_session_duration"))
    prompt = f"Make a {kind} plot of the {value.replace('_', ' ')} from {first} to {last} March 2026."
    arguments = {"time_min": f"2026-03-{first:02d}", "time_max": f"2026-03-{last:02d}"}
    return Task(prompt, [call("analytics_create_plot", **arguments, value_to_plot=value, plot_type=kind)])


def report_visits(desk: Desk) -> Task | None:
    (person,) = desk.people(1)
    day = f"2026-03-{desk.rng.randrange(2, 12):02d}"
    visits = len(desk.records("visits", lambda visit: visit["day"] == day))
    limit = max(1, visits + desk.rng.choice((-2, -1, 1, 2)))
    prompt = (
        f"If our website had more than {limit} visits on {desk.spoken(day)}, send {person['name']} an email "
        f"with the subject 'Visits' and the text 'Above {limit}'; otherwise the same with 'Below'. "
        f"Exactly {limit} counts as below"
    )
    body = f"Above {limit}" if visits > limit else "Below"
    return Task(prompt + ".", [call(_MAIL, recipient=person["email"], subject="Visits", body=body)])


def meet_account_manager(desk: Desk) -> Task | None:
    customer = desk.rng.choice(desk.records("customers"))
    day = desk.day(desk.rng.randrange(1, 10))
    prompt = (
        f"Schedule a 30-minute meeting called '{customer['customer_name']} review' with the colleague who "
        f"looks after {customer['customer_name']}, on {desk.spoken(day)} at 16:00."
    )
    arguments = {"participant_email": customer["assigned_to_email"], "event_start": f"{day:%Y-%m-%d} 16:00"}
    name = f"{customer['customer_name']} review"
    return Task(prompt, [call(_MEETING, event_name=name, **arguments, duration=30)])


def remind_of_task(desk: Desk) -> Task | None:
    task = desk.rng.choice(desk.records("tasks", lambda t: t["list_name"] != "Completed"))
    prompt = (
        f"Whoever has the task '{task['task_name']}' should hear from me: send them an email with the "
        f"subject '{task['task_name']}' and the text 'How far are you?'. Then move the task to 'In Review'"
    )
    mail = call(
        _MAIL, recipient=task["assigned_to_email"], subject=task["task_name"], body="How far are you?"
    )
    move = call(_TASK, task_id=task["id"], field="list_name", new_value="In Review")
    return Task(prompt + ".", [mail, move])


TEMPLATES: dict[str, tuple[Template, ...]] = {
    "email": (send_email, reply_to_last_email, forward_email, delete_emails),
    "calendar": (create_meeting, move_meeting, rename_next_meeting, cancel_meetings),
    "project_management": (create_task, complete_task, take_over_tasks, tidy_overdue_tasks),
    "customer_relationship_manager": (
        add_customer,
        set_customer_status,
        reassign_leads,
        delete_lost_customers,
    ),
    "analytics": (create_plot, report_visits),
    "multi_domain": (meet_account_manager, remind_of_task),
}
"""By category of the task."""


_DATA = Path(__file__).parents[2] / "environments" / "workplace_assistant" / "data"
_PER_TEMPLATE = 6
_INSTRUCTIONS = (
    f"You are Jo Marsh's office assistant. It is {NOW:%A}, {NOW.day} {NOW:%B %Y}, {NOW:%H:%M}. Do what Jo "
    "asks for with the tools, and nothing else. Search before you change anything; do not ask back."
)
_PREFIXES = {
    "email": ("email",),
    "calendar": ("calendar",),
    "project_management": ("project_management",),
    "customer_relationship_manager": ("customer_relationship_manager",),
    "analytics": ("analytics", "email"),
    "multi_domain": ("email", "calendar", "project_management", "customer_relationship_manager"),
}


def rows() -> Iterator[dict[str, Any]]:
    """The tasks as rows, each template's `_PER_TEMPLATE` times, all of them different."""
    number = 0
    for category, templates in TEMPLATES.items():
        for template in templates:
            rng = random.Random(f"{template.__name__} 1")
            drawn: dict[str, Task] = {}
            while len(drawn) < _PER_TEMPLATE:
                task = template(Desk(rng))
                if task is not None:
                    drawn.setdefault(task.prompt, task)
            for task in drawn.values():
                yield _row(number, category, task)
                number += 1


def _row(number: int, category: str, task: Task) -> dict[str, Any]:
    prefixes = ("company_directory", *_PREFIXES[category])
    tools = [spec.openai() for name, spec in WorkplaceAssistant.tools.items() if name.startswith(prefixes)]
    return {
        "id": number,
        "responses_create_params": {
            "input": [
                {"role": "system", "content": _INSTRUCTIONS},
                {"role": "user", "content": task.prompt},
            ],
            "tools": tools,
        },
        "ground_truth": task.solution,
        "category": f"workplace_assistant_{category}",
        "agent_ref": {"type": "responses_api_agents", "name": "workplace_assistant_agent"},
    }


def _write(name: str, lines: Iterable[Any]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (_DATA / name).write_text(text, "utf-8")


if __name__ == "__main__":
    _write("office.jsonl", office_records())
    tasks = list(rows())
    _write("tasks.jsonl", tasks)
    _write("example.jsonl", tasks[::20])
