"""`harness_agent` without Ray: programs and servers as harnesses, what comes of their calls, failures."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import openai
import pydantic
import pytest
from aiohttp import web
from support.processes import is_running
from support.waiting import until

from gym_serve import (
    EnvironmentClient,
    ModelClient,
    ModelServer,
    ResourcesServer,
    Rollout,
    ServerRunner,
    Verdict,
    VerifyRequest,
)
from gym_serve.deployments.harness_agent import HarnessAgent
from gym_serve.deployments.http_client import HttpClient
from gym_serve.servers.transport import Call
from gym_serve.transports import InlineTransport
from gym_serve.types.errors import EndpointAccessDenied, GymError, Unavailable

ROW = {"responses_create_params": {"input": "Count to two."}, "_ng_rollout_id": "7-0", "wanted": "two"}

# A harness with nothing but the standard library: two turns of chat, with what the environment gives it.
PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
messages = [{"role": "system", "content": "Be brief."},
            {"role": "user", "content": row["responses_create_params"]["input"]}]
for _ in range(2):
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "Go on."}]
print("said", message["content"], os.environ["GYM_SERVE_SESSION_ID"] != "", sorted(os.environ)[:2])
"""


class Counter(ModelServer):
    """Says a number word, with tokens that go on from turn to turn."""

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        turn = sum(item.get("role") == "assistant" for item in body["input"])
        content = [{"type": "output_text", "text": ["one", "two"][turn], "annotations": []}]
        item = {"type": "message", "role": "assistant", "content": content}
        tokens = {
            "prompt_token_ids": [1, 2, 3][: 1 + 2 * turn],
            "generation_token_ids": [2 + 2 * turn],
            "generation_log_probs": [-0.1],
        }
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        return {"id": "r", "created_at": 0, "model": "m", "output": [{**item, **tokens}], "usage": usage}


class Wanted(ResourcesServer):
    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=float(request.response.last_text == request.model_extra["wanted"]))  # type: ignore[index]


async def idle(task: dict[str, Any]) -> web.Response:
    return web.json_response({})


class Bench:
    """A graph in this process, with a gateway for the captured calls alone, and a harness behind a URL."""

    def __init__(self) -> None:
        self.model, self.resources = ServerRunner(Counter(name="policy")), ServerRunner(Wanted(name="env"))
        self.work: Callable[[dict[str, Any]], Awaitable[web.Response]] = idle
        self.authorized: list[str | None] = []

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/policy/rollouts/{id}/{op:.*}", self._captured)
        app.router.add_post("/work", self._work)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _captured(self, request: web.Request) -> web.Response:
        self.authorized.append(request.headers.get("authorization"))
        op = f"rollouts/{request.match_info['op']}"
        reply = await self.model.dispatch(Call(op, await request.read(), request.match_info["id"]))
        return web.Response(body=reply.body, status=reply.status, content_type="application/json")

    async def _work(self, request: web.Request) -> web.Response:
        return await self.work(await request.json())

    async def run(self, **settings: Any) -> dict[str, Any]:
        agent = HarnessAgent(
            name="agent",
            model=ModelClient(InlineTransport(self.model)),
            resources=EnvironmentClient(InlineTransport(self.resources)),
            gateway_url=self.url,
            **{"gateway_token": "token-1", **settings},
        )
        host = ServerRunner(agent)
        await host.start()
        try:
            reply = await host.dispatch(Call("run", json.dumps(ROW).encode()))
        finally:
            await host.stop()
        assert self.model.server.live_sessions == self.resources.server.live_sessions == 0
        rollout: dict[str, Any] = reply.json()
        return rollout


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.start()
    yield bench
    await bench.runner.cleanup()


async def ask(task: dict[str, Any], *texts: str) -> None:
    client = openai.AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0)
    async with client:
        conversation: list[Any] = []
        for text in texts:
            conversation.append({"role": "user", "content": text})
            response = await client.responses.create(model="any", input=conversation)
            conversation += [item.to_dict() for item in response.output]


async def test_a_program(bench: Bench) -> None:
    rollout = await bench.run(command=[sys.executable, "-c", PROGRAM], env={"AAA": "1"})
    assert rollout["reward"] == 1.0, rollout
    assert rollout["harness"]["output"] == "said two True ['AAA', 'ANTHROPIC_AUTH_TOKEN']\n"
    assert rollout["captured_input"][0] == {"role": "system", "content": "Be brief.", "type": "message"}
    assert rollout["branches"] == []
    output = rollout["response"]["output"]
    assert [item.get("role") for item in output] == ["assistant", "user", "assistant"]
    assert [item.get("prompt_token_ids") for item in output] == [[1], None, [1, 2, 3]]
    assert rollout["response"]["usage"]["output_tokens"] == 2
    assert bench.authorized == ["Bearer token-1"] * 2
    timeline = Rollout(rollout).timeline
    assert timeline is not None
    steps = timeline.steps
    assert [(step.kind, step.server, step.output_tokens) for step in steps] == [
        ("seed", "env", None),
        ("model", "policy", 1),
        ("model", "policy", 1),
        ("verify", "env", None),
    ]
    assert all(0 <= step.start <= step.end for step in steps)


async def test_secrets_that_a_harness_repeats_are_not_kept(bench: Bench) -> None:
    async def work(task: dict[str, Any]) -> web.Response:
        await ask(task, "Hi")
        return web.json_response({"said": f"{task['api_key']} key-of-mine none"})

    bench.work = work
    of_server = await bench.run(url=f"{bench.url}/work", headers={"X-Key": "key-of-mine"})
    assert of_server["harness"] == {"said": "*** *** none"}
    code = "import os; print(os.environ['OPENAI_API_KEY'], os.environ['KEY'], os.environ['N'])"
    command = [sys.executable, "-c", f"{PROGRAM}\n{code}"]
    of_program = await bench.run(command=command, env={"KEY": "key-of-mine", "N": "none"})
    assert of_program["harness"]["output"].splitlines()[-1] == "*** *** none"


async def test_a_server(bench: Bench) -> None:
    async def work(task: dict[str, Any]) -> web.Response:
        assert task["row"]["wanted"] == "two"
        assert task["resources_url"] == f"{bench.url}/env"
        await ask(task, "A sub-agent's question")
        await ask(task, "First", "Second")
        return web.json_response({"cost": 3})

    bench.work = work
    rollout = await bench.run(url=f"{bench.url}/work")
    assert rollout["reward"] == 1.0, rollout
    assert rollout["harness"] == {"cost": 3}
    (branch,) = rollout["branches"]
    assert branch["input"][0]["content"] == "A sub-agent's question"
    assert branch["calls"] == 1


async def refused(task: dict[str, Any]) -> web.Response:
    await ask(task, "Hi")
    return web.json_response({"error": {"message": "no"}}, status=400)


async def broken(task: dict[str, Any]) -> web.Response:
    return web.Response(status=503)


async def no_object(task: dict[str, Any]) -> web.Response:
    return web.json_response([1])


@pytest.mark.parametrize(
    ("work", "kind", "detail", "items"),
    [
        (refused, "bad_request", "no", 1),
        (broken, "unavailable", "HTTP 503", 0),
        (no_object, "unavailable", "must answer a JSON object", 0),
        (idle, "unavailable", "nothing to verify", 0),
    ],
)
async def test_a_server_that_fails(bench: Bench, work: Any, kind: str, detail: str, items: int) -> None:
    bench.work = work
    rollout = await bench.run(url=f"{bench.url}/work")
    failure = rollout["failure"]
    assert (failure["kind"], failure["retryable"]) == (kind, kind != "bad_request")
    assert detail in failure["detail"]
    # What it cost is known all the same.
    assert len(rollout.get("response", {}).get("output", [])) == items


@pytest.mark.parametrize("error", [Unavailable("the engine is gone"), EndpointAccessDenied("expired")])
@pytest.mark.parametrize("status", [200, 500])
async def test_a_harness_that_gives_up_on_the_model_earns_no_zero(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: GymError, status: int
) -> None:
    async def work(task: dict[str, Any]) -> web.Response:
        await ask(task, "First")
        with monkeypatch.context() as patch, suppress(openai.APIStatusError):
            patch.setattr(Counter, "responses", failing)
            await ask(task, "First", "Second")
        return web.json_response({}, status=status)

    async def failing(self: Counter, body: dict[str, Any]) -> dict[str, Any]:
        raise error

    bench.work = work
    rollout = await bench.run(url=f"{bench.url}/work")
    failure = rollout["failure"]
    expected = error.code if status == 200 or isinstance(error, EndpointAccessDenied) else "unavailable"
    stage = "harness" if expected == "unavailable" and status == 500 else "model"
    assert (failure["kind"], failure["stage"]) == (expected, stage)
    assert (error.message in failure["detail"]) == (expected != "unavailable" or status == 200)
    assert len(rollout["response"]["output"]) == 1


async def test_a_call_that_is_made_again_is_no_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(task: dict[str, Any]) -> web.Response:
        with monkeypatch.context() as patch, suppress(openai.APIStatusError):
            patch.setattr(Counter, "responses", failing)
            await ask(task, "First")
        await ask(task, "First", "Second")
        return web.json_response({})

    async def failing(self: Counter, body: dict[str, Any]) -> dict[str, Any]:
        raise Unavailable("for a moment")

    bench.work = work
    assert (await bench.run(url=f"{bench.url}/work"))["reward"] == 1.0


@pytest.mark.parametrize(
    ("command", "detail"),
    [
        (["/no/such/program"], "cannot be started"),
        ([sys.executable, "-c", "import os; print(os.environ['OPENAI_API_KEY']); exit(3)"], "status 3: ***"),
    ],
)
async def test_a_program_that_fails(bench: Bench, command: list[str], detail: str) -> None:
    rollout = await bench.run(command=command)
    assert rollout["failure"]["kind"] == "unavailable"
    assert detail in rollout["failure"]["detail"]


async def test_a_program_that_fails_after_the_policy_has_answered_is_graded(bench: Bench) -> None:
    code = "import os, openai; c = openai.OpenAI(); "
    code += "c.responses.create(model='m', input=[{'role': 'user', 'content': 'Hi'}]); exit(3)"
    rollout = await bench.run(command=[sys.executable, "-c", code])
    assert (rollout["stopped_by"], rollout["harness"]["exit_status"]) == ("harness_exit", 3), rollout
    assert "failure" not in rollout


async def test_a_program_ends_with_its_time_and_with_all_its_children(bench: Bench, tmp_path: Any) -> None:
    pids = tmp_path / "pids"
    code = f"import os, time; os.fork(); open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"
    rollout = await bench.run(command=[sys.executable, "-c", code], harness_timeout=5.0)
    assert (rollout["stopped_by"], rollout["reward"]) == ("harness_deadline", 0.0)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    await until(lambda: not any(map(is_running, started)))


def test_one_kind_of_harness() -> None:
    for settings in ({}, {"url": "http://h", "command": ["x"]}, {"command": []}):
        with pytest.raises(pydantic.ValidationError):
            HarnessAgent(model="m", resources="r", gateway_url="http://g", **settings)


async def asleep(task: dict[str, Any]) -> web.Response:
    await ask(task, "Hi")
    await asyncio.sleep(60)
    raise AssertionError


async def never_asks(task: dict[str, Any]) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


@pytest.mark.parametrize("stage", ["harness", "episode"])
@pytest.mark.parametrize(("work", "seconds", "items"), [(asleep, 5.0, 1), (never_asks, 0.5, 0)])
async def test_the_time_of_a_harness_is_graded(
    bench: Bench, work: Any, seconds: float, items: int, stage: str
) -> None:
    bench.work = work
    rollout = await bench.run(url=f"{bench.url}/work", **{f"{stage}_timeout": seconds})
    assert "failure" not in rollout
    assert (rollout["reward"], rollout["stopped_by"]) == (0.0, f"{stage}_deadline")
    assert len(rollout["response"]["output"]) == items
    assert f"{seconds:g} s" in rollout["reason"]


async def test_a_harness_that_waits_for_a_slow_model_is_the_machines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(self: Counter, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(Counter, "responses", hangs)
    bench.work = asleep
    failure = (await bench.run(url=f"{bench.url}/work", harness_timeout=6.0))["failure"]
    assert (failure["kind"], failure["retryable"]) == ("harness_timeout", True)
    assert "slow model calls took" in failure["detail"]


async def test_a_harness_that_is_gone_is_the_machines(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(self: HttpClient, url: str) -> bool:
        return False

    monkeypatch.setattr(HttpClient, "answers", gone)
    bench.work = asleep
    failure = (await bench.run(url=f"{bench.url}/work", harness_timeout=0.5))["failure"]
    assert (failure["kind"], failure["retryable"]) == ("harness_timeout", True)


async def test_whether_a_server_answers(bench: Bench) -> None:
    client = HttpClient({}, 1024)
    await client.start()
    assert await client.answers(f"{bench.url}/work")  # 405 is an answer
    assert not await client.answers("http://127.0.0.1:9/work")
    await client.stop()
    assert not await client.answers(f"{bench.url}/work")
