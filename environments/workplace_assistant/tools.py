"""The office's tools, one class for each department; `WorkplaceAssistant` has all of them."""

from __future__ import annotations

from datetime import date
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from gym_serve.environments.workplace_assistant.office import (
    MAX_RESULTS,
    NOW,
    Address,
    Id,
    Line,
    Minutes,
    Moment,
    Office,
    Query,
    Record,
    Text,
    read,
    records_of,
    shown,
    within,
)
from gym_serve.servers import tool
from gym_serve.types.errors import ToolFailed

_EventField = Literal["event_name", "participant_email", "event_start", "duration"]
_EVENT_TYPES: dict[str, Any] = {
    "event_name": Line,
    "participant_email": Address,
    "event_start": Moment,
    "duration": Minutes,
}


class CalendarTools:
    """Calendar."""

    @tool
    async def calendar_get_event_information_by_id(
        self, event_id: Id, field: _EventField, session: Office
    ) -> dict[str, str]:
        """Get one field of an event.

        Args:
            event_id: Id of the event.
            field: The field; `duration` is in minutes.
        """
        return {field: session.record("events", event_id)[field]}

    @tool
    async def calendar_search_events(
        self,
        session: Office,
        query: Query = "",
        date_min: date | None = None,
        date_max: date | None = None,
    ) -> list[Record]:
        """Search the calendar. Answers at most 20 events, the earliest first.

        Args:
            query: Words that all occur in the name or the participant's address.
            date_min: First day, YYYY-MM-DD.
            date_max: Last day, YYYY-MM-DD.
        """
        found = records_of(session.tables["events"], query, ("event_name", "participant_email"))
        found = [event for event in found if within(event["event_start"], date_min, date_max)]
        return sorted(found, key=lambda event: event["event_start"])[:MAX_RESULTS]

    @tool
    async def calendar_create_event(
        self,
        event_name: Line,
        participant_email: Address,
        event_start: Moment,
        duration: Minutes,
        session: Office,
    ) -> dict[str, str]:
        """Put an event into the calendar.

        Args:
            event_name: Name of the event.
            participant_email: Address of the participant.
            event_start: Start, YYYY-MM-DD HH:MM.
            duration: Duration in minutes.
        """
        fields = {"event_name": event_name, "participant_email": participant_email}
        event_id = session.add("events", **fields, event_start=shown(event_start), duration=str(duration))
        return {"status": "created", "event_id": event_id}

    @tool
    async def calendar_update_event(
        self, event_id: Id, field: _EventField, new_value: Line, session: Office
    ) -> dict[str, str]:
        """Change one field of an event.

        Args:
            event_id: Id of the event.
            field: The field.
            new_value: Its new value; a start is YYYY-MM-DD HH:MM, a duration in minutes.
        """
        event = session.record("events", event_id)
        value = read(_EVENT_TYPES[field], field, new_value)
        event[field] = shown(value) if field == "event_start" else str(value)
        return {"status": "updated"}

    @tool
    async def calendar_delete_event(self, event_id: Id, session: Office) -> dict[str, str]:
        """Delete an event.

        Args:
            event_id: Id of the event.
        """
        session.delete("events", event_id)
        return {"status": "deleted"}


class EmailTools:
    """Directory and mailbox."""

    @tool
    async def company_directory_find_email_address(self, name: Query, session: Office) -> list[str]:
        """Find the e-mail addresses of colleagues by name.

        Args:
            name: First name, last name, or a part of one.
        """
        found = records_of(session.tables["directory"], name, ("name", "email"))
        return [record["email"] for record in found][:MAX_RESULTS]

    @tool
    async def email_get_email_information_by_id(
        self,
        email_id: Id,
        field: Literal["folder", "contact", "subject", "sent", "body"],
        session: Office,
    ) -> dict[str, str]:
        """Get one field of an e-mail.

        Args:
            email_id: Id of the e-mail.
            field: The field; `contact` is the sender (inbox) or the recipient (outbox).
        """
        return {field: session.record("emails", email_id)[field]}

    @tool
    async def email_search_emails(
        self,
        session: Office,
        query: Query = "",
        date_min: date | None = None,
        date_max: date | None = None,
        folder: Literal["inbox", "outbox"] | None = None,
    ) -> list[Record]:
        """Search the mailbox. Answers at most 20 e-mails, the newest first.

        Args:
            query: Words that all occur in the subject, body or contact.
            date_min: First day, YYYY-MM-DD.
            date_max: Last day, YYYY-MM-DD.
            folder: Received (inbox) or sent (outbox) only.
        """
        found = records_of(session.tables["emails"], query, ("subject", "body", "contact"), folder=folder)
        found = [email for email in found if within(email["sent"], date_min, date_max)]
        return sorted(found, key=lambda email: email["sent"], reverse=True)[:MAX_RESULTS]

    @tool
    async def email_send_email(
        self, recipient: Address, subject: Line, body: Text, session: Office
    ) -> dict[str, str]:
        """Send an e-mail.

        Args:
            recipient: Address of the recipient.
            subject: Subject.
            body: Text.
        """
        return _sent(session, recipient, subject, body)

    @tool
    async def email_reply_email(self, email_id: Id, body: Text, session: Office) -> dict[str, str]:
        """Reply to an e-mail: to its contact, with its subject.

        Args:
            email_id: Id of the e-mail to reply to.
            body: Text of the reply.
        """
        email = session.record("emails", email_id)
        return _sent(session, email["contact"], email["subject"], body)

    @tool
    async def email_forward_email(self, email_id: Id, recipient: Address, session: Office) -> dict[str, str]:
        """Forward an e-mail.

        Args:
            email_id: Id of the e-mail to forward.
            recipient: Address of the recipient.
        """
        email = session.record("emails", email_id)
        return _sent(session, recipient, f"FW: {email['subject']}"[:200], email["body"])

    @tool
    async def email_delete_email(self, email_id: Id, session: Office) -> dict[str, str]:
        """Delete an e-mail.

        Args:
            email_id: Id of the e-mail.
        """
        session.delete("emails", email_id)
        return {"status": "deleted"}


def _sent(office: Office, recipient: str, subject: str, body: str) -> dict[str, str]:
    if not records_of(office.tables["directory"], email=recipient) and not records_of(
        office.tables["customers"], customer_email=recipient
    ):
        raise ToolFailed(f"there is no address {recipient}; look it up in the directory")
    fields = {"folder": "outbox", "contact": recipient, "subject": subject, "body": body}
    return {"status": "sent", "email_id": office.add("emails", **fields, sent=shown(NOW))}


Status = Literal["Lead", "Qualified", "Proposal", "Won", "Lost"]
Product = Literal["Desks", "Lighting", "Software", "Training"]
Note = Annotated[str, StringConstraints(strip_whitespace=True, max_length=2000)]
_CustomerField = Literal[
    "customer_name",
    "customer_email",
    "assigned_to_email",
    "status",
    "product_interest",
    "last_contact",
    "notes",
]
_CUSTOMER_TYPES: dict[str, Any] = {
    "customer_name": Line,
    "customer_email": Address,
    "assigned_to_email": Address,
    "status": Status,
    "product_interest": Product,
    "last_contact": date,
    "notes": Note,
}


class CustomerTools:
    """Customers."""

    @tool
    async def customer_relationship_manager_search_customers(
        self,
        *,
        session: Office,
        query: Query = "",
        assigned_to_email: Address | None = None,
        status: Status | None = None,
        product_interest: Product | None = None,
        last_contact_min: date | None = None,
        last_contact_max: date | None = None,
    ) -> list[Record]:
        """Search the customers. Answers at most 20, by name.

        Args:
            query: Words that all occur in the name, address or notes.
            assigned_to_email: Address of the colleague who looks after them.
            status: Status of the deal.
            product_interest: Product that they want.
            last_contact_min: First day of the last contact, YYYY-MM-DD.
            last_contact_max: Last day of the last contact, YYYY-MM-DD.
        """
        found = records_of(
            session.tables["customers"],
            query,
            ("customer_name", "customer_email", "notes"),
            assigned_to_email=assigned_to_email,
            status=status,
            product_interest=product_interest,
        )
        found = [c for c in found if within(c["last_contact"], last_contact_min, last_contact_max)]
        return sorted(found, key=lambda customer: customer["customer_name"])[:MAX_RESULTS]

    @tool
    async def customer_relationship_manager_add_customer(
        self,
        *,
        customer_name: Line,
        customer_email: Address,
        assigned_to_email: Address,
        status: Status,
        product_interest: Product,
        session: Office,
        notes: Note = "",
    ) -> dict[str, str]:
        """Add a customer. The last contact is today.

        Args:
            customer_name: Name of the customer.
            customer_email: Address of the customer.
            assigned_to_email: Address of the colleague who looks after them.
            status: Status of the deal.
            product_interest: Product that they want.
            notes: Notes.
        """
        customer_id = session.add(
            "customers",
            customer_name=customer_name,
            customer_email=customer_email,
            assigned_to_email=assigned_to_email,
            status=status,
            product_interest=product_interest,
            last_contact=NOW.date().isoformat(),
            notes=notes,
        )
        return {"status": "added", "customer_id": customer_id}

    @tool
    async def customer_relationship_manager_update_customer(
        self, customer_id: Id, field: _CustomerField, new_value: Note, session: Office
    ) -> dict[str, str]:
        """Change one field of a customer.

        Args:
            customer_id: Id of the customer.
            field: The field.
            new_value: Its new value.
        """
        customer = session.record("customers", customer_id)
        customer[field] = str(read(_CUSTOMER_TYPES[field], field, new_value))
        return {"status": "updated"}

    @tool
    async def customer_relationship_manager_delete_customer(
        self, customer_id: Id, session: Office
    ) -> dict[str, str]:
        """Delete a customer.

        Args:
            customer_id: Id of the customer.
        """
        session.delete("customers", customer_id)
        return {"status": "deleted"}


TaskList = Literal["Backlog", "In Progress", "In Review", "Completed"]
Board = Literal["Website", "Mobile App", "Research", "Operations"]
_TaskField = Literal["task_name", "assigned_to_email", "list_name", "due_date", "board"]
_TASK_TYPES: dict[str, Any] = {
    "task_name": Line,
    "assigned_to_email": Address,
    "list_name": TaskList,
    "due_date": date,
    "board": Board,
}


class ProjectTools:
    """Project boards."""

    @tool
    async def project_management_get_task_information_by_id(
        self, task_id: Id, field: _TaskField, session: Office
    ) -> dict[str, str]:
        """Get one field of a task.

        Args:
            task_id: Id of the task.
            field: The field.
        """
        return {field: session.record("tasks", task_id)[field]}

    @tool
    async def project_management_search_tasks(
        self,
        *,
        session: Office,
        query: Query = "",
        assigned_to_email: Address | None = None,
        list_name: TaskList | None = None,
        board: Board | None = None,
        due_min: date | None = None,
        due_max: date | None = None,
    ) -> list[Record]:
        """Search the tasks. Answers at most 20, by due date.

        Args:
            query: Words that all occur in the name.
            assigned_to_email: Address of whoever does it.
            list_name: List of the board.
            board: Board.
            due_min: First due date, YYYY-MM-DD.
            due_max: Last due date, YYYY-MM-DD.
        """
        found = records_of(
            session.tables["tasks"],
            query,
            ("task_name",),
            assigned_to_email=assigned_to_email,
            list_name=list_name,
            board=board,
        )
        found = [task for task in found if within(task["due_date"], due_min, due_max)]
        return sorted(found, key=lambda task: (task["due_date"], task["id"]))[:MAX_RESULTS]

    @tool
    async def project_management_create_task(
        self,
        *,
        task_name: Line,
        assigned_to_email: Address,
        list_name: TaskList,
        due_date: date,
        board: Board,
        session: Office,
    ) -> dict[str, str]:
        """Create a task.

        Args:
            task_name: Name of the task.
            assigned_to_email: Address of whoever does it.
            list_name: List of the board.
            due_date: Due date, YYYY-MM-DD.
            board: Board.
        """
        task_id = session.add(
            "tasks",
            task_name=task_name,
            assigned_to_email=assigned_to_email,
            list_name=list_name,
            due_date=due_date.isoformat(),
            board=board,
        )
        return {"status": "created", "task_id": task_id}

    @tool
    async def project_management_update_task(
        self, task_id: Id, field: _TaskField, new_value: Line, session: Office
    ) -> dict[str, str]:
        """Change one field of a task.

        Args:
            task_id: Id of the task.
            field: The field.
            new_value: Its new value.
        """
        task = session.record("tasks", task_id)
        task[field] = str(read(_TASK_TYPES[field], field, new_value))
        return {"status": "updated"}

    @tool
    async def project_management_delete_task(self, task_id: Id, session: Office) -> dict[str, str]:
        """Delete a task.

        Args:
            task_id: Id of the task.
        """
        session.delete("tasks", task_id)
        return {"status": "deleted"}


Source = Literal["search", "direct", "referral", "social"]
Value = Literal["total_visits", "engaged_users", "average_session_duration", "visits_by_source"]


class AnalyticsTools:
    """Website analytics. Days are included at both ends."""

    @tool
    async def analytics_get_visitor_information_by_id(self, visitor_id: Id, session: Office) -> list[Record]:
        """Get all visits of a visitor.

        Args:
            visitor_id: Id of the visitor.
        """
        return records_of(session.tables["visits"], visitor_id=visitor_id)

    @tool
    async def analytics_total_visits_count(
        self, session: Office, time_min: date | None = None, time_max: date | None = None
    ) -> int:
        """Count the visits.

        Args:
            time_min: First day, YYYY-MM-DD.
            time_max: Last day, YYYY-MM-DD.
        """
        return len(_visits(session, time_min, time_max))

    @tool
    async def analytics_engaged_users_count(
        self, session: Office, time_min: date | None = None, time_max: date | None = None
    ) -> int:
        """Count the visits in which the visitor did something.

        Args:
            time_min: First day, YYYY-MM-DD.
            time_max: Last day, YYYY-MM-DD.
        """
        return sum(visit["engaged"] == "yes" for visit in _visits(session, time_min, time_max))

    @tool
    async def analytics_traffic_source_count(
        self,
        session: Office,
        traffic_source: Source,
        time_min: date | None = None,
        time_max: date | None = None,
    ) -> int:
        """Count the visits that came from a source.

        Args:
            traffic_source: The source.
            time_min: First day, YYYY-MM-DD.
            time_max: Last day, YYYY-MM-DD.
        """
        return sum(visit["source"] == traffic_source for visit in _visits(session, time_min, time_max))

    @tool
    async def analytics_get_average_session_duration(
        self, session: Office, time_min: date | None = None, time_max: date | None = None
    ) -> float:
        """Mean duration of the visits in seconds; 0 if there are none.

        Args:
            time_min: First day, YYYY-MM-DD.
            time_max: Last day, YYYY-MM-DD.
        """
        seconds = [int(visit["seconds"]) for visit in _visits(session, time_min, time_max)]
        return round(fmean(seconds), 1) if seconds else 0.0

    @tool
    async def analytics_create_plot(
        self,
        time_min: date,
        time_max: date,
        value_to_plot: Value,
        plot_type: Literal["bar", "line", "scatter", "histogram"],
        session: Office,
    ) -> dict[str, str]:
        """Plot a value over time.

        Args:
            time_min: First day, YYYY-MM-DD.
            time_max: Last day, YYYY-MM-DD.
            value_to_plot: The value.
            plot_type: Kind of plot.
        """
        plot_id = session.add(
            "plots",
            time_min=time_min.isoformat(),
            time_max=time_max.isoformat(),
            value_to_plot=value_to_plot,
            plot_type=plot_type,
        )
        return {"status": "created", "plot_id": plot_id}


def _visits(office: Office, time_min: date | None, time_max: date | None) -> list[Record]:
    return [visit for visit in office.tables["visits"].values() if within(visit["day"], time_min, time_max)]
