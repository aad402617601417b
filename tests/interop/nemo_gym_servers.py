"""Host every resources server of NeMo Gym, run each as NeMo Gym does, and print what both make of its rows.

Run by `test_nemo_gym_servers.py` in a venv with NeMo Gym: ``python nemo_gym_servers.py [SERVER...]``. NeMo
Gym ships each server with example rows and with rollouts of them. A rollout is replayed twice: the session is
seeded with the row, the recorded tool calls are made, and the recorded response is verified. Then the same
row is verified with an answer that says nothing. Once the server is hosted, in a graph without Ray that is
imported from the server's own config. And once it is NeMo Gym's: its FastAPI app, started in its folder, that
calls judges over HTTP. Each server and each way has a process of its own.

A judge says what it said in the recorded rollout; without a record, it says `VERDICTS`.
"""

import asyncio
import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import httpx
import nemo_gym.base_resources_server
import nemo_gym.openai_utils
import nemo_gym.server_utils
import resources_servers
from aiohttp import web
from nemo_gym.config_types import BaseServerConfig
from omegaconf import OmegaConf

from gym_serve.assembly import LocalGraph
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import GraphSpec
from gym_serve.interop import nemo_gym as ours
from gym_serve.interop.nemo_gym import import_config
from gym_serve.interop.nemo_gym.construction import with_secrets
from gym_serve.interop.nemo_gym.hosting import _complete  # a field that openai came to require
from gym_serve.servers import EnvironmentClient, ModelServer
from gym_serve.types.errors import GraphError, GymError

FOLDER = Path(next(iter(resources_servers.__path__)))
SECONDS = 600  # for one server, one way
VERDICTS = "[[A=B]]\nJudgement: YES\nGrade: A"
NOTHING = "I do not know."
NO_TOOL = "there is no such tool"
OPEN = re.compile(r"\$\{(\w+)(?::-)?\}")  # variables without a default
JUDGED = ("judge_response", "judge_output", "judge_text", "judgement_gen_base", "judgement_base_gen")
CLOCK = re.compile("time|seconds")  # of fields
MISSING = re.compile(r"there is no server '([^']+)'")
CONFIGS = {"openenv": "openenv_echo.yaml"}  # the config that the rows are for, if it is not the first one
SETTINGS = {  # that NeMo Gym's own config leaves open, or that would change this machine
    "google_search": {"google_api_key": "x", "google_cx": "x"},
    "gdpval": {"preconvert_office_to_pdf": False},  # else it installs LibreOffice
}
VARIABLE = Path(__file__).with_name("no_notices.json")  # the value of each variable: a secret, or a file


def response_of(text):
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "r",
        "created_at": 0,
        "model": "model",
        "object": "response",
        "output": [message],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }


def chat_of(text):
    message = {"role": "assistant", "content": text}
    return {
        "id": "c",
        "created": 0,
        "model": "model",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
    }


class Seeded(random.Random):
    """A generator that draws the same numbers each time, also without a seed."""

    def __init__(self, seed=0):
        super().__init__(0 if seed is None else seed)


class Script:
    """What the judges of this process say, in turn; the last reply again and again."""

    replies: ClassVar = [VERDICTS]
    asked: ClassVar = []

    @classmethod
    def begin(cls, replies):
        cls.replies, cls.asked = list(replies) or [VERDICTS], []

    @classmethod
    def next(cls, body):
        messages = body.get("messages") or body.get("input") or []
        cls.asked.append(messages if isinstance(messages, str) else [m.get("content") for m in messages])
        return cls.replies.pop(0) if len(cls.replies) > 1 else cls.replies[0]


class Judge(ModelServer):
    """A model of the graph."""

    async def responses(self, params):
        return response_of(Script.next(params))

    async def chat_completions(self, body):
        return chat_of(Script.next(body))


def lines(path):
    """The rows of a file; a few files have rows for people to fill in."""
    rows = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def texts(response):
    for item in response.get("output", ()):
        content = item.get("content") or ()
        yield from (part["text"] for part in content if part.get("type") == "output_text")


def judged(rollout):
    """What the judges said in a recorded rollout, in order."""
    evaluations = rollout.get("judge_evaluations") or rollout.get("rubric_evaluations") or ()
    found = [evaluation.get("response") or evaluation.get("judge_response") for evaluation in evaluations]
    found += [rollout.get(key) for key in JUDGED]
    return ["".join(texts(item)) if isinstance(item, dict) else item for item in found if item]


def prompts(row):
    """The texts of the first message and of the last one of the user. Rollouts write more about pictures."""
    given = row["responses_create_params"].get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    contents = [item["content"] for item in items if item.get("role") == "user"][-1:]
    contents = [item.get("content") for item in items[:1]] + contents
    return [[part.get("text") for part in c] if isinstance(c, list) else c for c in contents]


def row_of(rollout, index, examples):
    """The row that a recorded rollout is of: the one of its number, its place or its prompts, or that in it.

    Of a rollout that has a number, the user may have said more than the row.
    """
    number, known = rollout.get("_ng_task_index"), prompts(rollout)
    if number in range(len(examples)) and prompts(examples[number])[:1] == known[:1]:
        return examples[number]
    same = [row for row in [*examples[index : index + 1], *examples] if prompts(row) == known]
    fields = {key for row in examples for key in row}
    held = {key: value for key, value in rollout.items() if key in fields}
    return same[0] if same else held if held.keys() - {"responses_create_params", "agent_ref"} else None


def data(name, file):
    return FOLDER / name / "data" / f"{file}.jsonl"


def cases(name):
    """(name, row, response, reward then, what judges say) of a server."""
    examples = lines(data(name, "example"))
    recordings = lines(data(name, "example_rollouts"))
    for index, recorded in enumerate(recordings):
        if "response" not in recorded:
            continue
        row = row_of(recorded, index, examples)
        if row is None:  # its reward says nothing here, but both ways give it the same one
            yield f"misplaced {index}", examples[0], recorded["response"], None, judged(recorded)
        else:
            row = {key: value for key, value in row.items() if key != "response"}
            yield f"recorded {index}", row, recorded["response"], recorded["reward"], judged(recorded)
    for index, row in enumerate(examples):
        yield f"nothing {index}", row, response_of(NOTHING), None, []


def graph_of(name):
    """A graph with the server alone, of the first of its configs that names it; a `Judge` is each model.

    All of NeMo Gym's servers are hosted here, also those for which gym_serve has one of its own. A model that
    the config leaves to another config is in a second one.

    Returns:
        the graph, and the name of the server in it.
    """
    own, problems = ours.find_type, []
    model = {"base_url": "http://judge/v1", "api_key": "x", "model": "x"}

    def find_type(kind, implementation):
        return (None, "") if kind == "resources" else own(kind, implementation)

    def imported(file, models=()):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as more:
            json.dump({model_: {"responses_api_models": {"vllm_model": model}} for model_ in models}, more)
            more.flush()
            try:
                return import_config([file, more.name][: 1 + bool(models)], skip_unknown=True)
            except GraphError as error:
                missing = set(MISSING.findall(error.message)) - set(models)
                if not missing:
                    raise
        return imported(file, [*models, *missing])

    for file in sorted((FOLDER / name / "configs").glob(CONFIGS.get(name, "*.yaml"))):
        try:
            with patch.object(ours, "find_type", find_type):
                found = imported(file)
        except GymError as error:
            problems.append(f"{file.name}: {error.message}")
            continue
        graph = found.config["applications"][0]["args"]
        for server, settings in graph.get("resources", {}).items():
            if settings["server"].startswith(f"resources_servers.{name}."):
                settings["config"] = settings.get("config", {}) | SETTINGS.get(name, {})
                models = {model: {"type": Judge} for model in graph.get("models", {})}
                spec = GraphSpec.model_validate({"models": models, "resources": {server: settings}})
                variables = dict.fromkeys(OPEN.findall(json.dumps(settings)), str(VARIABLE))
                return resolve(spec, env=variables), server
        problems.append(f"{file.name}: {'; '.join(found.notes) or 'it has no such server'}")
    raise LookupError("\n".join(problems))


class Hosted:
    """A server in a graph of gym_serve."""

    def __init__(self, name):
        graph, self.server = graph_of(name)
        self.graph = LocalGraph(graph)

    async def start(self):
        await self.graph.start()
        self.client = EnvironmentClient(self.graph.transport(self.server))
        self.is_stepped = "reset" in self.graph.server(self.server).operations()

    async def begin(self, row):
        self.session, _ = await self.client.seed_session(row)

    async def tool(self, name, arguments):
        reply = await self.client.call_tool(name, arguments, self.session)
        return NO_TOOL if reply.status == 404 else decoded(reply.body.decode())

    async def step(self, row, response):
        reply = await self.client.call("step", {**row, "response": response}, session=self.session)
        return reply.json()

    async def verify(self, row, response):
        return await self.client.verify(row, response, self.session)

    async def end(self):
        await self.client.close_session(self.session)

    async def aggregate(self, verdicts):
        return await self.client.fetch("aggregate_metrics", {"verify_responses": verdicts})

    async def stop(self):
        await self.graph.stop()


class Original:
    """A server as NeMo Gym runs it, with the settings that the graph has, in the server's folder."""

    def __init__(self, name):
        graph, self.server = graph_of(name)
        settings = graph.nodes[self.server].settings
        module = settings["server"]
        folder = Path(importlib.util.find_spec(module).origin).parent
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        self.config = with_secrets(settings.get("config", {}), settings.get("secrets", {}))
        self.models = settings.get("servers", {})
        self.module = importlib.import_module(module)
        base = nemo_gym.base_resources_server.SimpleResourcesServer
        # The last one that the file defines: it is the one that its last line runs.
        *_, self.cls = [
            value
            for value in vars(self.module).values()
            if isinstance(value, type) and issubclass(value, base) and value.__module__ == module
        ]

    async def start(self):
        utils = nemo_gym.server_utils
        utils.set_global_aiohttp_client(utils.GlobalAIOHTTPAsyncClientConfig())
        judge = web.Application(client_max_size=1 << 30)
        judge.router.add_post("/v1/responses", self._responses)
        judge.router.add_post("/v1/chat/completions", self._chat)
        self.judge = web.AppRunner(judge)
        await self.judge.setup()
        site = web.TCPSite(self.judge, "127.0.0.1", 0)
        await site.start()
        port = self.judge.addresses[0][1]
        placed = {"host": "127.0.0.1", "port": port, "entrypoint": "app.py"}
        servers = {name: {"responses_api_models": {"judge": placed}} for name in self.models}
        head = BaseServerConfig(host="127.0.0.1", port=port)
        known = OmegaConf.create({**servers, "head_server": head.model_dump()})
        os.environ["NEMO_GYM_CONFIG_DICT"] = OmegaConf.to_yaml(known)  # NeMo Gym's own way
        client = utils.ServerClient(head_server_config=head, global_config_dict=known)
        config = self.cls.model_fields["config"].annotation.model_validate(
            {**self.config, **placed, "name": self.server}
        )
        server = self.cls(config=config, server_client=client)
        self.app = server.setup_webserver()
        self.routes = {getattr(route, "path", "") for route in self.app.routes}
        self.is_stepped = "/reset" in self.routes
        self.lifespan = self.app.router.lifespan_context(self.app)
        await self.lifespan.__aenter__()

    async def _responses(self, request):
        return web.json_response(response_of(Script.next(await request.json())))

    async def _chat(self, request):
        return web.json_response(chat_of(Script.next(await request.json())))

    async def post(self, route, body):
        answer = await self.http.post(f"/{route}", json=body)
        if answer.status_code >= 400 and route in ("seed_session", "reset", "step", "verify"):
            raise RuntimeError(f"{answer.status_code} {answer.text[:300]}")
        return answer

    async def begin(self, row):
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://nemo-gym", timeout=SECONDS)
        self.headers = {}
        answer = await self.post("seed_session" if "/seed_session" in self.routes else "reset", row)
        seeded = answer.json()
        if isinstance(seeded, dict) and seeded.get("mcp"):
            self.headers = seeded["mcp"]["headers"]

    async def tool(self, name, arguments):
        if not self.headers:
            answer = await self.post(name, arguments)
            return NO_TOOL if answer.status_code == 404 else decoded(answer.text)
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
        body = {**call, "params": {"name": name, "arguments": arguments}}
        accept = {"accept": "application/json, text/event-stream"}
        answer = await self.http.post("/mcp", json=body, headers={**accept, **self.headers})
        return decoded(answer.json()["result"]["content"][0]["text"])

    async def step(self, row, response):
        return (await self.post("step", _complete({**row, "response": response}))).json()

    async def verify(self, row, response):
        return (await self.post("verify", _complete({**row, "response": response}))).json()

    async def end(self):
        await self.http.aclose()

    async def aggregate(self, verdicts):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://nemo-gym", timeout=SECONDS
        ) as http:
            return (await http.post("/aggregate_metrics", json={"verify_responses": verdicts})).json()

    async def stop(self):
        await self.lifespan.__aexit__(None, None, None)
        await nemo_gym.server_utils.get_global_aiohttp_client().close()
        await self.judge.cleanup()


def decoded(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def turns(output):
    """The items of each of the model's turns."""
    found = [[]]
    for item in output:
        if item.get("role") == "user":
            found.append([])
        else:
            found[-1].append(item)
    return [turn for turn in found if turn]


async def replay(way, row, response):
    """The outputs of the tool calls of a response, and the verdict of it."""
    asked = {}
    await way.begin(row)
    try:
        for item in response["output"]:
            if item["type"] == "function_call" and isinstance(decoded(item["arguments"]), dict):
                asked[item["call_id"]] = await way.tool(item["name"], decoded(item["arguments"]))
        if not way.is_stepped:
            return asked, await way.verify(row, response)
        total, verdict = 0.0, {}
        for turn in turns(response["output"]):
            verdict = await way.step(row, {**response, "output": turn})
            total += verdict["reward"]
            if verdict.get("terminated") or verdict.get("truncated"):
                break
        return asked, {**verdict, "reward": total}
    finally:
        await way.end()


async def run(kind, name):
    """What one way makes of a server's cases, and of the metrics of its recorded rollouts."""
    way = kind(name)
    await way.start()
    found = {}
    for case, row, response, then, said in cases(name):
        Script.begin(said)
        random.seed(0)
        found[case] = {"then": then}
        try:
            outputs, verdict = await replay(way, row, response)
        except Exception as error:  # of NeMo Gym's code: the other way should fail, too
            found[case]["error"] = f"{type(error).__name__}: {error}"[:600]
            continue
        found[case] |= {"verdict": verdict, "outputs": outputs, "judge": Script.asked}
    rollouts = [
        {**rollout, "_ng_task_index": index, "_ng_rollout_index": 0}
        for index, rollout in enumerate(lines(data(name, "example_rollouts")))
        if "reward" in rollout
    ]
    metrics = await way.aggregate(rollouts) if rollouts else None
    await way.stop()
    return {"cases": found, "metrics": metrics}


def in_child(kind, name, file):
    os.dup2(2, 1)  # what servers print is no result
    random.Random = Seeded
    begin = time.monotonic()
    try:
        result = asyncio.run(run(kind, name))
    except BaseException as error:  # a few of them call sys.exit
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:2000]}
    Path(file).write_text(json.dumps({**result, "seconds": round(time.monotonic() - begin, 1)}))
    os._exit(0)  # without the atexit hooks of what it has imported


def results(jobs, at_once=3):
    """What a process of its own makes of each job: the name of a way, and of a server."""
    waiting, running, found = list(jobs), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < at_once:
                kind, name = job = waiting.pop(0)
                file = Path(folder, f"{kind.__name__}-{name}.json")
                child = multiprocessing.get_context("fork").Process(target=in_child, args=(kind, name, file))
                child.start()
                running[child.sentinel] = child, job, file, time.monotonic() + SECONDS
            multiprocessing.connection.wait(list(running), timeout=1)
            for sentinel, (child, job, file, deadline) in list(running.items()):
                is_late = time.monotonic() > deadline
                if child.is_alive() and not is_late:
                    continue
                if is_late:
                    child.kill()
                child.join()
                del running[sentinel]
                reason = f"not done after {SECONDS} s" if is_late else f"its process ended: {child.exitcode}"
                found[job] = json.loads(file.read_text()) if file.exists() else {"error": reason}
    return found


def lasting(value):
    """``value`` without what the clock says."""
    if isinstance(value, dict):
        return {key: lasting(item) for key, item in value.items() if not CLOCK.search(key)}
    return [lasting(item) for item in value] if isinstance(value, list) else value


def compared(hosted, original):
    """What two ways make of a server, in a few numbers; and every difference.

    Returns:
        ``failed``: why it does not start, by way; or ``cases``: how many were tried, and how many
        ended ``alike``; ``replayed``: how many were recorded rollouts of rows that are here, and how many of
        these got the reward ``as_recorded``; ``refused``: errors, by case.
    """
    ways = {"hosted": hosted, "original": original}
    failed = {way: found["error"] for way, found in ways.items() if "error" in found}
    if failed:
        return {"failed": failed, "seconds": [hosted.get("seconds"), original.get("seconds")]}
    differences, replayed, as_recorded = [], 0, 0
    for case, here in hosted["cases"].items():
        there = original["cases"][case]
        replayed += here["then"] is not None
        if "error" in here or "error" in there:
            if "error" not in here or "error" not in there:
                differences.append([case, "error", here.get("error"), there.get("error")])
            continue
        for what in ("outputs", "judge", "verdict"):
            ours, theirs = lasting(here[what]), lasting(there[what])
            if what == "verdict":  # hosted, it is without what it repeats of the row
                theirs = {key: theirs.get(key) for key in ours}
            if ours != theirs:
                differences.append([case, what, ours, theirs])
        as_recorded += here["verdict"]["reward"] == here["then"]
    if lasting(hosted["metrics"]) != lasting(original["metrics"]):
        differences.append(["aggregate_metrics", "metrics", hosted["metrics"], original["metrics"]])
    unlike = {case for case, *_ in differences} - {"aggregate_metrics"}
    refused = {case: here["error"] for case, here in hosted["cases"].items() if "error" in here}
    return {
        "cases": len(hosted["cases"]),
        "alike": len(hosted["cases"]) - len(unlike),
        "replayed": replayed,
        "as_recorded": as_recorded,
        "refused": refused,
        "differences": differences,
        "seconds": [hosted["seconds"], original["seconds"]],
    }


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.name for path in FOLDER.iterdir() if (path / "configs").is_dir())
    found = results([(kind, name) for name in names for kind in (Hosted, Original)])
    print(json.dumps({name: compared(found[Hosted, name], found[Original, name]) for name in names}))
