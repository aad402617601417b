"""Fixtures, the generated data, every tool, and comparison of end states."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.environments import Bench, called, folder_of

from gym_serve.environments.workplace_assistant import WorkplaceAssistant
from gym_serve.environments.workplace_assistant.tools import Office, differing_tables
from gym_serve.types.errors import InvalidRequest, Rejected, ToolFailed

DATA = folder_of(WorkplaceAssistant) / "data"
BENCH = Bench(WorkplaceAssistant())


def written(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def solution(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [called(call["name"], call["arguments"]) for call in row["ground_truth"]]


async def verify(row: dict[str, Any], output: list[dict[str, Any]]) -> dict[str, Any]:
    BENCH.session = None
    return await BENCH.verify(row, output)


def test_there_are_many_different_tasks() -> None:
    tasks = written("tasks.jsonl")
    prompts = {task["responses_create_params"]["input"][-1]["content"] for task in tasks}
    assert len(prompts) == len(tasks) >= 100
    assert len({task["category"] for task in tasks}) == 6
    assert len(WorkplaceAssistant.tools) == 27


async def test_every_task_is_solved_by_its_solution_and_by_nothing_less() -> None:
    for row in written("tasks.jsonl"):
        calls = solution(row)
        declared = {tool["name"] for tool in row["responses_create_params"]["tools"]}
        assert {call["name"] for call in calls} <= declared
        verdict = await verify(row, calls[::-1])
        assert (verdict["reward"], verdict["num_failed_calls"]) == (1.0, 0), row["id"]
        if calls:
            assert (await verify(row, calls[1:]))["reward"] == 0.0, row["id"]


async def test_a_day_in_the_office() -> None:
    bench = Bench(WorkplaceAssistant())
    await bench.call("seed_session", {})
    (ada,) = await bench.tool("company_directory_find_email_address", name="quist")
    assert ada == "ada.quist@heron.example"
    sent = await bench.tool("email_send_email", recipient=ada.upper(), subject=" Hi ", body="Text")
    assert sent == {"status": "sent", "email_id": "00091"}
    (mail,) = await bench.tool("email_search_emails", query="hi text", folder="outbox")
    assert mail["contact"] == ada
    assert mail["sent"] == "2026-03-12 09:00"
    forwarded = await bench.tool("email_forward_email", email_id=mail["id"], recipient=ada)
    field = {"email_id": forwarded["email_id"], "field": "subject"}
    assert await bench.tool("email_get_email_information_by_id", **field) == {"subject": "FW: Hi"}
    await bench.tool("email_reply_email", email_id=mail["id"], body="Well?")
    await bench.tool("email_delete_email", email_id=mail["id"])
    with pytest.raises(ToolFailed, match="no record"):
        await bench.tool("email_delete_email", email_id=mail["id"])

    event = {"event_name": "Tea", "participant_email": ada, "event_start": "2026-03-13T15:00", "duration": 30}
    event_id = (await bench.tool("calendar_create_event", **event))["event_id"]
    change = {"event_id": event_id, "field": "event_start", "new_value": "2026-03-13 16:00:00"}
    await bench.tool("calendar_update_event", **change)
    (found,) = await bench.tool(
        "calendar_search_events", query="tea", date_min="2026-03-13", date_max="2026-03-13"
    )
    assert (found["event_start"], found["duration"]) == ("2026-03-13 16:00", "30")
    field = {"event_id": event_id, "field": "duration"}
    assert await bench.tool("calendar_get_event_information_by_id", **field) == {"duration": "30"}

    task = {"task_name": "Brew", "assigned_to_email": ada, "list_name": "Backlog", "board": "Research"}
    task_id = (await bench.tool("project_management_create_task", **task, due_date="2026-04-01"))["task_id"]
    await bench.tool(
        "project_management_update_task", task_id=task_id, field="list_name", new_value="In Review"
    )
    found = await bench.tool("project_management_search_tasks", assigned_to_email=ada, list_name="In Review")
    assert "Brew" in [task["task_name"] for task in found]
    field = {"task_id": task_id, "field": "due_date"}
    assert await bench.tool("project_management_get_task_information_by_id", **field) == {
        "due_date": "2026-04-01"
    }

    customer = {"customer_name": "Reed", "customer_email": "a@reed.example", "assigned_to_email": ada}
    added = await bench.tool(
        "customer_relationship_manager_add_customer", **customer, status="Lead", product_interest="Desks"
    )
    change = {"customer_id": added["customer_id"], "field": "notes", "new_value": "Likes tea."}
    await bench.tool("customer_relationship_manager_update_customer", **change)
    (found,) = await bench.tool("customer_relationship_manager_search_customers", query="likes tea")
    assert found["last_contact"] == "2026-03-12"
    await bench.tool("email_send_email", recipient="a@reed.example", subject="Hello", body="Text")


async def test_analytics() -> None:
    bench = Bench(WorkplaceAssistant())
    span = {"time_min": "2026-03-01", "time_max": "2026-03-11"}
    total = await bench.tool("analytics_total_visits_count", **span)
    by_source = [
        await bench.tool("analytics_traffic_source_count", traffic_source=source, **span)
        for source in ("search", "direct", "referral", "social")
    ]
    assert sum(by_source) == total > 0
    assert 0 < await bench.tool("analytics_engaged_users_count", **span) < total
    assert await bench.tool("analytics_get_average_session_duration", **span) > 5
    assert await bench.tool("analytics_get_average_session_duration", time_max="2000-01-01") == 0.0
    visits = await bench.tool("analytics_get_visitor_information_by_id", visitor_id="V002")
    assert {visit["visitor_id"] for visit in visits} == {"V002"}


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("email_send_email", {"recipient": "stranger@elsewhere.example", "subject": "a", "body": "b"}),
        ("email_send_email", {"recipient": "ada", "subject": "a", "body": "b"}),
        ("email_search_emails", {"date_min": "yesterday"}),
        ("email_reply_email", {"email_id": "../1", "body": "b"}),
        ("calendar_update_event", {"event_id": "00001", "field": "event_start", "new_value": "noon"}),
        ("calendar_update_event", {"event_id": "00001", "field": "id", "new_value": "00002"}),
        ("calendar_update_event", {"event_id": "00001", "field": "duration", "new_value": "100000"}),
        ("project_management_update_task", {"task_id": "00001", "field": "board", "new_value": "Gardening"}),
        ("project_management_delete_task", {"task_id": "x" * 1000}),
        (
            "customer_relationship_manager_update_customer",
            {"customer_id": "00001", "field": "status", "new_value": "won"},
        ),
        ("analytics_create_plot", {"time_min": "2026-03-01", "time_max": "2026-03-02", "plot_type": "pie"}),
    ],
)
async def test_calls_that_are_refused_change_nothing(tool: str, arguments: dict[str, Any]) -> None:
    bench = Bench(WorkplaceAssistant())
    with pytest.raises(Rejected):
        await bench.tool(tool, **arguments)
    assert (await bench.verify({"ground_truth": []}, [called(tool, arguments)]))["num_failed_calls"] == 1


async def test_sessions_have_offices_of_their_own() -> None:
    first, second = Bench(WorkplaceAssistant()), Bench(WorkplaceAssistant())
    second.host = first.host
    await first.call("seed_session", {})
    await second.call("seed_session", {})
    await first.tool("email_delete_email", email_id="00001")
    assert (await second.tool("email_get_email_information_by_id", email_id="00001", field="folder"))[
        "folder"
    ]


def test_new_records_in_any_order() -> None:
    first, second = Office(), Office()
    for office, names in ((first, ("A", "B")), (second, ("b ", "a"))):
        for name in names:
            office.add("plots", time_min=name, time_max="", value_to_plot="", plot_type="")
    assert differing_tables(first, second) == []
    second.delete("plots", "00001")
    assert differing_tables(first, second) == ["plots"]


async def test_an_email_that_was_sent_is_not_undone() -> None:
    arguments = {"recipient": "ada.quist@heron.example", "subject": "Hi", "body": "Hello."}
    sent = called("email_send_email", arguments)
    undone = [sent, called("email_delete_email", {"email_id": "00091"})]
    wanted = {"name": "email_send_email", "arguments": arguments}
    for ground_truth, output in (([], undone), ([wanted], [*undone, sent])):
        verdict = await verify({"ground_truth": ground_truth}, output)
        assert (verdict["reward"], verdict["differing_tables"]) == (0.0, ["emails"])
    deleted = {"name": "email_delete_email", "arguments": {"email_id": "00091"}}
    assert (await verify({"ground_truth": [wanted, deleted]}, undone))["reward"] == 1.0


async def test_a_tool_that_the_row_does_not_offer_changes_nothing() -> None:
    row = {
        "ground_truth": [],
        "responses_create_params": {"input": "?", "tools": [{"type": "function", "name": "x"}]},
    }
    for name in ("calendar_delete_event", {"a": 1}):
        call = {**called("", {"event_id": "00001"}), "name": name}
        verdict = await verify(row, [call])
        assert (verdict["reward"], verdict["num_failed_calls"]) == (1.0, 1)


async def test_what_is_not_looked_at_is_not_right() -> None:
    search = called("email_search_emails", {"query": "x"})
    rewards = [(await verify({"ground_truth": []}, [search] * number))["reward"] for number in (500, 501)]
    assert rewards == [1.0, 0.0]


def test_an_office_is_finite() -> None:
    office = Office()
    for _ in range(5_000):
        office.add("plots")
    with pytest.raises(ToolFailed, match="holds at most"):
        office.add("plots")


@pytest.mark.parametrize(
    "ground_truth", [None, "x", [{}], [{"name": "x"}], [{"name": "email_delete_email", "arguments": "{"}]]
)
async def test_solutions_that_are_none(ground_truth: Any) -> None:
    with pytest.raises(InvalidRequest):
        await verify({"ground_truth": ground_truth}, [])


NAMES = st.sampled_from(sorted(WorkplaceAssistant.tools))
VALUES = st.text(max_size=8) | st.integers() | st.none() | st.sampled_from(["00001", "2026-03-12", "status"])
FIELDS = st.sampled_from(
    ["email_id", "event_id", "task_id", "field", "new_value", "query", "body", "recipient"]
)


@settings(max_examples=50)
@given(st.lists(st.tuples(NAMES, st.dictionaries(FIELDS, VALUES)), max_size=5))
async def test_any_calls_lead_to_the_office_that_they_lead_to(
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    output = [called(name, arguments) for name, arguments in calls]
    verdict = await verify({"ground_truth": []}, output)
    assert verdict["reward"] == float(not verdict["differing_tables"])
    assert verdict["num_failed_calls"] <= len(calls)
