"""`POST /rollouts`: many rows in one request, what is refused, and what is bounded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from support.in_process import InProcess
from support.remote_agents import Doer, graph, rows
from support.waiting import until

from gym_serve.gateway import batch
from gym_serve.graph import GraphSpec, resolve

JSON = dict[str, Any]


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    Doer.ran.clear()
    Doer.cancelled.clear()


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    spec = GraphSpec(**graph(**options))
    running = InProcess({"/g": resolve(spec, literal_secrets=True)})
    await running.start()
    try:
        async with httpx.AsyncClient(base_url=f"{running.url}/g", timeout=30) as client:
            yield client
    finally:
        await running.stop()


def lines_of(answer: httpx.Response) -> list[JSON]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [orjson.loads(line) for line in answer.content.splitlines()]


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def test_many_rows_in_one_request() -> None:
    async with served() as client:
        answer = await client.post("/rollouts", json={"rows": rows(5), "repeats": 3, "seed": 10})
        *found, end = lines_of(answer)
        assert end == {"end": {"rollouts": 15, "errors": 0}}
        keys = {(line["row"], line["rollout"]["_ng_rollout_index"]) for line in found}
        assert keys == {(row, repeat) for row in range(5) for repeat in range(3)}
        for line in found:
            rollout = line["rollout"]
            assert (rollout["number"], rollout["reward"]) == (line["row"], line["row"] % 7 / 7)
            extra = rollout["responses_create_params"]["metadata"]["extra_body"]
            assert orjson.loads(extra) == {"seed": 10 + rollout["_ng_rollout_index"]}
        assert Doer.ran == dict.fromkeys(range(5), 3)


async def test_each_row_is_one_attempt_and_answers_as_run_does() -> None:
    async with served() as client:
        good, down = rows(2)[1], rows(1, act="down")[0]
        lines = lines_of(await client.post("/rollouts", json={"rows": [down, good]}))
        by_row = {line["row"]: line for line in lines[:-1]}
        assert (by_row[0]["status"], by_row[0]["error"]["code"]) == (503, "unavailable")
        assert by_row[1]["rollout"]["number"] == 1
        assert lines[-1] == {"end": {"rollouts": 1, "errors": 1}}
        again = lines_of(await client.post("/rollouts", json={"rows": [down]}))
        assert again[0]["rollout"]["reward"] == 0.0


async def test_all_that_is_wrong_with_the_rows_is_named_and_nothing_starts() -> None:
    async with served() as client:
        given = [
            rows(1)[0],
            7,
            {"responses_create_params": {"input": "x", "temprature": 1}},
            {"responses_create_params": {"input": "x"}, "agent_ref": {"name": "dor"}},
            {},
        ]
        status, code, message = error_of(await client.post("/rollouts", json={"rows": given}))
        assert (status, code) == (422, "invalid_request")
        assert "4 rows cannot be used" in message
        for part in ("rows[1]: a row must be", "rows[2]: ", "temprature", "did you mean 'doer'", "rows[4]: "):
            assert part in message
        assert not Doer.ran


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "JSON"),
        (b"[]", 400, "JSON object"),
        (b'{"rows": 3}', 400, "list of `rows`"),
        (b'{"rows": [}', 400, "JSON"),
        (b'{"rows": []}', 422, "at least one row"),
        (b'{"rows": [{"a": 1e999}]}', 422, "rows[0]"),
        (b'{"rows": [], "repeat": 3}', 422, "repeat: Extra"),
        (b'{"rows": [' + b"[" * 100_000, 400, "JSON"),
        (b'{"rows": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}", 400, "JSON"),
        (b'{"rows": ["\xff"]}', 422, "rows[0]"),
        (b'{"ro\xffws": []}', 400, "JSON"),
        (b'{"rows": [], "repeats": 0, "concurrency": "9", "timeout": -1}', 422, "concurrency"),
        (b'{"rows": [], "repeats": 100000}', 422, "repeats"),
        (b'{"rows": [{"prompt": "x"}], "open": true}', 422, "open: Extra"),
        (b'{"rows": [{"prompt": "x"}], "endpoint": {"base_url": "file:///etc"}}', 422, "_ng_model"),
    ],
)
async def test_bodies_that_cannot_be(body: bytes, status: int, says: str) -> None:
    async with served() as client:
        found = error_of(await client.post("/rollouts", content=body))
        assert found[0] == status
        assert says in found[2]


async def test_the_endpoint_of_a_run_must_be_allowed() -> None:
    async with served() as client:
        body = {
            "rows": rows(1),
            "endpoint": {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-secret-key"},
        }
        lines = lines_of(await client.post("/rollouts", json=body))
        assert b"sk-secret-key" not in orjson.dumps(lines)
        assert lines[0]["rollout"]["_ng_model"] == {"base_url": "http://127.0.0.1:9/v1"}


async def test_rollouts_are_a_part_of_the_trace_of_the_client() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with served() as client:
        answer = await client.post("/rollouts", json={"rows": rows(1)}, headers={"traceparent": trace})
        assert lines_of(answer)[0]["rollout"]["trace"] == trace
        body = {"rows": rows(2), "traceparents": {"1": trace, "0": "none", "x": trace}}
        found = lines_of(await client.post("/rollouts", json=body))[:-1]
        assert {line["row"]: line["rollout"]["trace"] for line in found} == {0: None, 1: trace}


async def test_without_the_token_there_are_no_rollouts() -> None:
    async with served(auth_token="a-token-of-the-graph") as client:
        assert (await client.post("/rollouts", json={"rows": rows(1)})).status_code == 401
        headers = {"authorization": "Bearer a-token-of-the-graph"}
        answer = await client.post("/rollouts", json={"rows": rows(1)}, headers=headers)
        assert len(lines_of(answer)) == 2


async def test_other_methods_and_routes() -> None:
    async with served() as client:
        assert (await client.get("/rollouts")).headers["allow"] == "POST"
        assert error_of(await client.get("/rollouts/local.x"))[:2] == (404, "not_found")


async def test_who_leaves_cancels_what_runs() -> None:
    async with served() as client:
        body = {"rows": rows(5, act="hang"), "concurrency": 2}
        async with client.stream("POST", "/rollouts", json=body):
            await until(lambda: len(Doer.ran) == 2)
        await until(lambda: Doer.cancelled == {0: 1, 1: 1})
        assert Doer.ran == {0: 1, 1: 1}


async def test_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_BEAT_SECONDS", 0.05)
    async with (
        served() as client,
        client.stream("POST", "/rollouts", json={"rows": rows(3, act="hang")}) as answer,
    ):
        lines = answer.aiter_lines()
        assert [orjson.loads(await anext(lines)) for _ in range(3)] == [{"running": 3}] * 3


async def test_who_reads_slowly_holds_up_what_is_not_begun() -> None:
    async with served() as client:
        body = {"rows": rows(400, act="large"), "concurrency": 2}
        async with client.stream("POST", "/rollouts", json=body) as answer:
            await until(lambda: len(Doer.ran) >= 5)
            await asyncio.sleep(0.5)
            begun = len(Doer.ran)
            assert begun < 300  # what the connection's own buffers take
            numbers = [orjson.loads(line).get("row") async for line in answer.aiter_lines()]
        assert sorted(numbers[:-1]) == list(range(400))


async def test_rows_that_are_too_large_together() -> None:
    async with served(gateway={"max_request_bytes": 2000}) as client:
        assert error_of(await client.post("/rollouts", json={"rows": rows(100)}))[0] == 413
