"""`/rollouts`: many rows in one request, cursors, open runs, what is refused, and what is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from support.in_process import InProcess
from support.remote_runs import Doer, graph, rows
from support.waiting import until

from gym_serve.graph import GraphSpec, resolve, runs

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


async def begin(client: httpx.AsyncClient, **body: Any) -> str:
    answer = await client.post("/rollouts", json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    run: str = answer.json()["run"]
    assert answer.headers["location"] == f"/g/rollouts/{run}"
    return run


async def read(client: httpx.AsyncClient, run: str, after: int = 0) -> list[JSON]:
    return lines_of(await client.get(f"/rollouts/{run}", params={"after": after}))


async def test_many_rows_in_one_request() -> None:
    async with served() as client:
        answer = await client.post("/rollouts", json={"rows": rows(5), "repeats": 3, "seed": 10})
        head, *found, end = lines_of(answer)
        assert (head["cursor"], answer.headers["location"]) == (0, f"/g/rollouts/{head['run']}")
        assert [line["cursor"] for line in found] == list(range(1, 16))
        assert end == {"cursor": 16, "end": {"rollouts": 15, "failed": 0}}
        keys = {(line["row"], line["rollout"]["_ng_rollout_index"]) for line in found}
        assert keys == {(row, repeat) for row in range(5) for repeat in range(3)}
        for line in found:
            rollout = line["rollout"]
            assert (rollout["number"], rollout["reward"]) == (line["row"], line["row"] % 7 / 7)
            extra = rollout["responses_create_params"]["metadata"]["extra_body"]
            assert orjson.loads(extra) == {"seed": 10 + rollout["_ng_rollout_index"]}
        assert Doer.ran == dict.fromkeys(range(5), 3)


async def test_a_failure_is_a_rollout_and_is_tried_again() -> None:
    async with served() as client:
        once = lines_of(await client.post("/rollouts", json={"rows": rows(1, act="down")}))
        assert once[1]["rollout"]["failure"]["kind"] == "unavailable"
        assert once[-1]["end"] == {"rollouts": 1, "failed": 1}
        Doer.ran.clear()
        twice = lines_of(await client.post("/rollouts", json={"rows": rows(1, act="down"), "attempts": 2}))
        assert (twice[1]["rollout"]["reward"], twice[1]["rollout"]["_ng_attempt_index"]) == (0.0, 1)
        assert twice[-1]["end"] == {"rollouts": 1, "failed": 0}


async def test_a_cursor_goes_on_and_what_it_acknowledges_is_dropped() -> None:
    async with served() as client:
        run = await begin(client, rows=rows(10))
        everything = (await read(client, run))[1:]
        assert [line["cursor"] for line in everything] == list(range(1, 12))
        assert (await read(client, run))[1:] == everything  # nothing is dropped by being sent
        assert (await read(client, run, after=7))[1:] == everything[7:]
        status, code, message = error_of(await client.get(f"/rollouts/{run}?after=3"))
        assert (status, code) == (409, "conflict")
        assert "after=7" in message
        assert error_of(await client.get(f"/rollouts/{run}?after=12"))[0] == 422
        for wrong in ("-1", "x", "1e3", "٣", ""):
            assert error_of(await client.get(f"/rollouts/{run}", params={"after": wrong}))[0] == 422
        assert Doer.ran == dict.fromkeys(range(10), 1)
        assert (await client.delete(f"/rollouts/{run}")).json() == {}
        assert (await client.delete(f"/rollouts/{run}")).json() == {}
        assert error_of(await client.get(f"/rollouts/{run}"))[:2] == (404, "session_not_found")


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
        (b'{"rows": [{"prompt": "x"}], "endpoint": {"base_url": "file:///etc"}}', 422, "_ng_model"),
    ],
)
async def test_bodies_that_cannot_be(body: bytes, status: int, says: str) -> None:
    async with served() as client:
        found = error_of(await client.post("/rollouts", content=body))
        assert found[0] == status
        assert says in found[2]


async def test_other_methods_and_routes() -> None:
    async with served() as client:
        assert (await client.get("/rollouts")).headers["allow"] == "POST"
        assert (await client.put("/rollouts/x.y")).headers["allow"] == "GET, DELETE, HEAD"
        run = await begin(client, rows=rows(1))
        assert ((head := await client.head(f"/rollouts/{run}")).status_code, head.content) == (200, b"")
        assert (await client.head("/rollouts/local.x")).status_code == 404
        assert (await client.get("/rollouts/x.y/rows")).headers["allow"] == "POST"
        assert error_of(await client.post("/rollouts/x.y/stop"))[:2] == (404, "not_found")
        # A run of a gateway that is gone, and ids that never were.
        assert error_of(await client.get("/rollouts/gone.abc"))[:2] == (409, "session_lost")
        assert error_of(await client.get("/rollouts/local.abc"))[:2] == (404, "session_not_found")
        assert error_of(await client.get("/rollouts/%20"))[:2] == (404, "session_not_found")


async def test_a_request_whose_answer_was_lost_runs_nothing_twice() -> None:
    async with served() as client:
        key = {"idempotency-key": "0d9c0e1e-1e7c-4a55-9a5c-5d1c8b7f0a11"}
        body = {"rows": rows(6, act="slow")}
        first, second = await asyncio.gather(
            client.post("/rollouts", json={**body, "stream": False}, headers=key),
            client.post("/rollouts", json={**body, "stream": False}, headers=key),
        )
        assert first.json() == second.json()
        run = first.json()["run"]
        assert len(await read(client, run)) == 8
        again = await client.post("/rollouts", json={**body, "stream": False}, headers=key)
        assert again.json()["run"] == run
        assert Doer.ran == dict.fromkeys(range(6), 1)
        other = await client.post("/rollouts", json={"rows": rows(1)}, headers=key)
        assert error_of(other)[0] == 422
        short = await client.post("/rollouts", json=body, headers={"idempotency-key": "short"})
        assert error_of(short)[0] == 400
        await client.delete(f"/rollouts/{run}")
        anew = await client.post("/rollouts", json={**body, "stream": False}, headers=key)
        assert anew.json()["run"] != run


async def test_rows_are_added_to_an_open_run() -> None:
    async with served() as client:
        run = await begin(client, open=True, rows=rows(1))
        path = f"/rollouts/{run}/rows"
        more = rows(4)[1:]
        assert (await client.post(path, json={"first": 1, "rows": more})).json() == {"rows": 4}
        assert (await client.post(path, json={"first": 1, "rows": more})).json() == {"rows": 4}
        status, code, message = error_of(await client.post(path, json={"first": 6, "rows": more}))
        assert (status, code) == (409, "conflict")
        assert "at most 4" in message
        last = {"first": 2, "rows": rows(5)[2:], "open": False}
        assert (await client.post(path, json=last)).json() == {"rows": 5}
        _, *found, end = await read(client, run)
        assert sorted(line["rollout"]["number"] for line in found) == list(range(5))
        assert all(line["row"] == line["rollout"]["number"] for line in found)
        assert end["end"] == {"rollouts": 5, "failed": 0}
        assert Doer.ran == dict.fromkeys(range(5), 1)
        assert error_of(await client.post(path, json={"first": 5, "rows": more}))[0] == 409


async def test_an_attempt_of_an_open_run_answers_as_run_does() -> None:
    async with served() as client:
        bad = [*rows(1, act="down"), {"responses_create_params": {}}, {"agent_ref": {"name": "x"}}, 7]
        run = await begin(client, open=True)
        await client.post(f"/rollouts/{run}/rows", json={"first": 0, "rows": bad, "open": False})
        _, *found, end = await read(client, run)
        told = {line["row"]: (line["status"], line["error"]["code"]) for line in found}
        assert told[0] == (503, "unavailable")
        assert told[2] == (404, "not_found")
        assert {told[1][0], told[3][0]} <= {400, 422}
        assert end["end"] == {"rollouts": 0, "failed": 4}


async def test_cancelled_rows_and_runs() -> None:
    async with served() as client:
        run = await begin(client, open=True, concurrency=2)
        path = f"/rollouts/{run}"
        await client.post(f"{path}/rows", json={"first": 0, "rows": rows(5, act="hang")})
        await until(lambda: len(Doer.ran) == 2)
        assert (await client.post(f"{path}/cancel", json={"rows": [0, 3, 99]})).status_code == 200
        await until(lambda: len(Doer.ran) == 3)
        assert Doer.cancelled == {0: 1}
        assert 3 not in Doer.ran
        await client.delete(path)
        assert Doer.cancelled == {0: 1, 1: 1, 2: 1}
        assert 4 not in Doer.ran

        scheduled = await begin(client, rows=rows(3, act="hang"))
        wrong = await client.post(f"/rollouts/{scheduled}/cancel", json={"rows": [0]})
        assert error_of(wrong)[:2] == (400, "bad_request")
        await client.delete(f"/rollouts/{scheduled}")
        assert sum(Doer.cancelled.values()) == 6


async def test_who_does_not_read_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_WINDOW", 500_000)
    monkeypatch.setattr(runs, "_PAGE", 200_000)
    for kind in ({}, {"open": True}):
        Doer.ran.clear()
        async with served() as client:
            run = await begin(client, rows=rows(40, act="large"), concurrency=2, **kind)
            await until(lambda: len(Doer.ran) >= 5)
            await asyncio.sleep(0.3)
            assert 5 <= len(Doer.ran) <= 5 + 2 * 2
            cursor, seen, responses = 0, [], 0
            while len(seen) < 40:
                lines = await read(client, run, after=cursor)
                responses += 1
                cursor = lines[-1]["cursor"]
                seen += [line["row"] for line in lines if "rollout" in line]
            assert sorted(seen) == list(range(40))
            assert responses >= 13  # no response is longer than a page and a line
            assert Doer.ran == dict.fromkeys(range(40), 1)


async def test_a_run_that_nobody_asks_for_is_dropped() -> None:
    async with served(gateway={"run_ttl": 1.0}) as client:
        run = await begin(client, rows=rows(2, act="hang"))
        async with client.stream("GET", f"/rollouts/{run}") as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await asyncio.sleep(1.5)  # while somebody reads, it lives
            assert not Doer.cancelled
        await until(lambda: Doer.cancelled == {0: 1, 1: 1})
        assert error_of(await client.get(f"/rollouts/{run}"))[:2] == (404, "session_not_found")


async def test_too_many_runs_and_rows() -> None:
    async with served(gateway={"max_runs": 2, "max_request_bytes": 2000}) as client:
        done = await begin(client, rows=rows(1))
        await read(client, done)
        open_run = await begin(client, open=True)
        third = await begin(client, rows=rows(1, act="hang"))  # in the place of the one that was read
        assert error_of(await client.get(f"/rollouts/{done}"))[0] == 404
        refused = await client.post("/rollouts", json={"rows": rows(1)})
        assert error_of(refused)[:2] == (429, "overloaded")
        assert refused.headers["retry-after"]
        path = f"/rollouts/{open_run}/rows"
        for first in range(0, 120, 10):
            answer = await client.post(path, json={"first": first, "rows": rows(10, act="hang")})
        assert error_of(answer)[:2] == (429, "overloaded")
        await client.delete(f"/rollouts/{third}")
        assert error_of(await client.post("/rollouts", json={"rows": rows(100)}))[0] == 413


async def test_a_newer_reader_takes_over() -> None:
    async with served() as client:
        run = await begin(client, open=True)
        async with client.stream("GET", f"/rollouts/{run}") as old:
            lines = old.aiter_lines()
            await anext(lines)
            async with client.stream("GET", f"/rollouts/{run}") as new:
                newer = new.aiter_lines()
                await anext(newer)
                assert [line async for line in lines] == []  # the response of the old one has ended
                await client.post(f"/rollouts/{run}/rows", json={"first": 0, "rows": rows(1)})
                assert orjson.loads(await anext(newer))["row"] == 0


async def test_signs_of_life_and_a_client_that_waits_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_BEAT_SECONDS", 0.05)
    async with served() as client:
        run = await begin(client, rows=rows(1, act="hang"))
        answer = await client.get(f"/rollouts/{run}", headers={"x-request-timeout": "0.3"})
        head, *beats = lines_of(answer)
        assert head == {"cursor": 0, "run": run}
        assert len(beats) > 2
        assert beats[0] == {"cursor": 0}


async def test_the_endpoint_of_a_run_must_be_allowed() -> None:
    async with served() as client:
        body = {
            "rows": rows(1),
            "endpoint": {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-secret-key"},
        }
        lines = lines_of(await client.post("/rollouts", json=body))
        assert b"sk-secret-key" not in orjson.dumps(lines)
        assert lines[1]["rollout"]["_ng_model"] == {"base_url": "http://127.0.0.1:9/v1"}


async def test_rollouts_are_a_part_of_the_trace_of_the_client() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with served() as client:
        answer = await client.post("/rollouts", json={"rows": rows(1)}, headers={"traceparent": trace})
        assert lines_of(answer)[1]["rollout"]["trace"] == trace
        run = await begin(client, open=True)
        given = {"first": 0, "rows": rows(2), "traceparents": {"1": trace, "0": "none"}, "open": False}
        assert (await client.post(f"/rollouts/{run}/rows", json=given)).status_code == 200
        found = {line["row"]: line["rollout"]["trace"] for line in (await read(client, run))[1:-1]}
        assert found == {0: None, 1: trace}


async def test_without_the_token_there_are_no_runs() -> None:
    async with served(auth_token="a-token-of-the-graph") as client:
        assert (await client.post("/rollouts", json={"rows": rows(1)})).status_code == 401
        assert (await client.get("/rollouts/local.x")).status_code == 401
        headers = {"authorization": "Bearer a-token-of-the-graph"}
        answer = await client.post("/rollouts", json={"rows": rows(1)}, headers=headers)
        assert len(lines_of(answer)) == 3
