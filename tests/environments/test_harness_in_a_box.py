"""The program of a `harness_agent` in the box of its session: what it reaches, what comes of its calls."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from support.environments import Bench, called, said
from support.sandboxes import children, needs_bubblewrap

from gym_serve import Gym
from gym_serve.deployments.harness_agent import BoxHarness
from gym_serve.environments.workspace import Workspace
from gym_serve.environments.workspace.rows import HarborRows
from gym_serve.gateway.local import LocalIngress
from gym_serve.training import samples
from gym_serve.types.errors import Forbidden, GraphError
from gym_serve.types.requests import JSON

pytestmark = needs_bubblewrap


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


PYTHON = "/usr/bin/python3"

# An agent with nothing but the standard library: it asks, runs the commands of the answer, and asks again.
PROGRAM = """
import json, os, subprocess, sys, urllib.request
def ask(items):
    body = json.dumps({"model": "policy", "input": items}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/responses", body, headers)
    return json.load(urllib.request.urlopen(request))["output"]
given = json.load(sys.stdin)
print(sorted(given), os.environ["GYM_SERVE_PROMPT"], os.getcwd())
items = [{"role": "user", "content": os.environ["GYM_SERVE_PROMPT"]}]
while True:
    output = ask(items)
    items += output
    calls = [item for item in output if item["type"] == "function_call"]
    if not calls:
        break
    for call in calls:
        command = json.loads(call["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": done.stdout})
"""


def graph(*script: list[JSON], command: list[str] | None = None, **agent: Any) -> JSON:
    """A graph of one harness, whose model says these turns."""
    return {
        "models": {"policy": {"type": "scripted_model", "script": list(script)}},
        "resources": {"workspace": {"type": "workspace"}},
        "agents": {
            "coder": {
                "type": "harness_agent",
                "model": "policy",
                "resources": "workspace",
                "command": command or [PYTHON, "-c", PROGRAM],
                "box": True,
                **agent,
            }
        },
    }


def bash(command: str, call_id: str = "call_1") -> list[JSON]:
    return [called("bash", {"command": command}, call_id)]


ROW = {
    "responses_create_params": {"input": "Make the file done."},
    "test_command": "test -e done",
    "tests": {"hidden": "secret"},
    "solution": "touch done",
}


def rollouts(graph: JSON, row: JSON = ROW, **options: Any) -> list[JSON]:
    before = children()
    with Gym.from_graph(graph, ray=False) as gym:
        done = list(gym.run([row], **options))
    assert children() <= before
    return done


def test_turns_are_captured_with_their_tokens() -> None:
    script = (bash("touch done; ls"), said("Done."))
    (rollout,) = rollouts(graph(*script))
    assert rollout["reward"] == 1.0, rollout
    assert rollout["harness"]["exit_status"] == 0
    assert rollout["harness"]["output"] == "['responses_create_params'] Make the file done. /app\n"
    output = rollout["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
    assert output[1]["output"] == "done\n"
    for item in (output[0], output[2]):
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
    before = output[0]["prompt_token_ids"] + output[0]["generation_token_ids"]
    assert output[2]["prompt_token_ids"][: len(before)] == before
    (sample,) = samples(rollout)
    assert [len(sample.prompt_ids), sum(sample.loss_mask)] == [
        len(output[0]["prompt_token_ids"]),
        sum(len(item["generation_token_ids"]) for item in (output[0], output[2])),
    ]


# Everything that a program might reach but its own recording of the model, and what it must not learn.
REACH = {
    "the graph": "curl -s http://127.0.0.1:$GATEWAY/health",
    "another port of the machine": "(echo > /dev/tcp/127.0.0.1/$OPEN) 2>/dev/null && echo open",
    "another address": "curl -s --max-time 3 http://1.1.1.1 http://10.0.0.1 http://[::1]:$OPEN",
    "names": "getent hosts pypi.org deb.debian.org",
    "other routes of the graph": "for path in /health /workspace/verify /v1/../graph /v1/%2e%2e/graph; do "
    'curl -s --path-as-is -H "authorization: Bearer $OPENAI_API_KEY" $ANTHROPIC_BASE_URL$path '
    "| grep -v 'only a model here'; done",
    "the model without the key": "curl -s $OPENAI_BASE_URL/responses -d '{}' | grep -v 'key must be'",
    "the graph's token": "env | grep -c $TOKEN",
    "the tests, the row": "grep -rlI secret /app /tmp /root /home /logs /opt /srv /run /var/tmp 2>/dev/null; "
    "ls /tests /solution 2>/dev/null",
    "an interface": "ls /sys/class/net 2>/dev/null; grep -v 'lo:' /proc/net/dev | tail -n +3",
}


@pytest.mark.parametrize("what", REACH)
def test_what_a_program_does_not_reach(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = LocalIngress.__init__

    def remember(self: LocalIngress) -> None:
        opened(self)
        seen.append(self)

    seen: list[LocalIngress] = []
    monkeypatch.setattr(LocalIngress, "__init__", remember)
    run = BoxHarness.run

    async def told(self: BoxHarness, task: Any) -> JSON:
        self._env = {
            "GATEWAY": SecretStr(seen[0].url.rpartition(":")[2]),
            "OPEN": SecretStr(str(server.getsockname()[1])),
        }
        told_token = seen[0].token.get_secret_value()
        self._command = [word.replace("$TOKEN", told_token) for word in self._command]
        return await run(self, task)

    monkeypatch.setattr(BoxHarness, "run", told)
    # The token is in the command line of the shell that looks for it, and nowhere else.
    command = ["/bin/bash", "-c", f'{REACH[what]}; {PYTHON} -c "$1"', "bash", ONE_CALL]
    with socket.create_server(("127.0.0.1", 0)) as server:
        (rollout,) = rollouts(graph(said("Done."), command=command))
    assert rollout["harness"]["output"].split() in ([], ["0"]), rollout["harness"]


ONE_CALL = """
import json, os, urllib.request
headers = {"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"]}
body = b'{"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}'
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages?beta=true"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
"""


@pytest.mark.parametrize(
    ("end", "settings", "expected"),
    [
        ("touch done; exit 3", {}, {"reward": 1.0, "stopped_by": "harness_exit"}),
        ("touch done; sleep 60", {"harness_timeout": 3.0}, {"reward": 1.0, "stopped_by": "harness_deadline"}),
        ("sleep 60", {"harness_timeout": 3.0}, {"reward": 0.0, "stopped_by": "harness_deadline"}),
        ("kill -9 $$", {}, {"reward": 0.0, "stopped_by": "harness_exit"}),
        ("kill -9 1; kill -9 -1", {}, {"reward": 0.0, "stopped_by": "harness_exit"}),
    ],
)
def test_how_a_program_ends_is_graded(end: str, settings: JSON, expected: JSON) -> None:
    command = ["/bin/bash", "-c", f'{PYTHON} -c "$1"; {end}', "bash", ONE_CALL]
    (rollout,) = rollouts(graph(said("Done."), command=command, **settings))
    assert {key: rollout.get(key) for key in expected} == expected, rollout
    assert rollout["harness"]["ended"] == ("timeout" if "harness_timeout" in settings else "exit")
    assert rollout["response"]["output"][0]["content"][0]["text"] == "Done."


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A task of Harbor of two steps, which want the files ``one`` and ``two``."""
    folder = tmp_path / "task"
    config = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n'
    for name in ("one", "two"):
        config += f'[[steps]]\nname = "{name}"\nmin_reward = 1.0\n'
        own = folder / "steps" / name
        (own / "tests").mkdir(parents=True)
        (own / "instruction.md").write_text(f"Make {name}.")
        test = f"if [ -e {name} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
        (own / "tests" / "test.sh").write_text(f"#!/bin/sh\n{test}\n")
    (folder / "task.toml").write_text(config)
    return folder


MAKE = "[ -e one ] && touch two; touch one; ls"


@pytest.mark.parametrize(
    ("make", "end", "prompts", "expected"),
    [
        (MAKE, "exit 0", ["Make one.", "Make two."], {"reward": 1.0}),
        ("true", "exit 0", ["Make one."], {"reward": 0.0}),
        ("touch one", "exit 0", ["Make one.", "Make two."], {"reward": 0.5}),
        (MAKE, "exit 3", ["Make one.", "Make two."], {"reward": 1.0, "stopped_by": "harness_exit"}),
        (
            MAKE,
            "[ ! -e two ] || sleep 60",
            ["Make one.", "Make two."],
            {"reward": 1.0, "stopped_by": "harness_deadline"},
        ),
        (MAKE, "sleep 60", ["Make one."], {"reward": 0.5, "stopped_by": "harness_deadline"}),
    ],
)
def test_a_program_is_started_for_each_step(
    steps: Path, make: str, end: str, prompts: list[str], expected: JSON
) -> None:
    command = ["/bin/bash", "-c", f'{PYTHON} -c "$1"; {end}', "bash", PROGRAM]
    (row,) = HarborRows().rows(steps)
    deadline = {"harness_timeout": 5.0} if "sleep" in end else {}
    (rollout,) = rollouts(graph(bash(make), said("Done."), command=command, **deadline), row)
    assert {key: rollout.get(key) for key in expected} == expected, rollout
    earlier = [branch["response"]["output"] for branch in rollout["branches"]]
    assert len(earlier) == len(prompts) - 1
    for output in (*earlier, rollout["response"]["output"]):
        assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
    assert rollout["captured_input"] == [{"role": "user", "content": prompts[-1]}]
    assert f"{prompts[-1]} /app\n" in rollout["harness"]["output"]
    assert rollout["model_usage"]["model"]["policy"]["calls"] == 2 * len(prompts)
    assert [sum(sample.loss_mask) > 0 for sample in samples(rollout)] == [True] * len(prompts)


def test_a_step_whose_model_calls_fail_is_a_failure_of_all(
    steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = HarborRows().rows(steps)
    ran: list[str] = []
    run = BoxHarness.run

    async def noted(self: BoxHarness, task: Any) -> JSON:
        ran.append(task.row["responses_create_params"]["input"][0]["content"])
        return await run(self, task)

    monkeypatch.setattr(BoxHarness, "run", noted)
    command = ["/bin/bash", "-c", f'touch one two; {PYTHON} -c "$1"; exit 0', "bash", PROGRAM]
    broken = graph(command=command)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    broken["models"]["policy"] = {"type": "chat_model", "base_url": url, "model": "m", "max_retries": 0}
    (rollout,) = rollouts(broken, row)
    assert rollout["failure"]["stage"] == "model", rollout
    assert ran == ["Make one."]


def test_a_program_that_never_comes_to_the_model_is_a_failure() -> None:
    (rollout,) = rollouts(graph(said("Done."), command=["no-such-program"]))
    assert "exit status 127" in rollout["failure"]["detail"]
    assert "no-such-program" in rollout["failure"]["detail"]


def test_an_environment_without_boxes() -> None:
    mcqa = graph(said("Done."))
    mcqa["resources"]["workspace"] = {"type": "mcqa"}
    with Gym.from_graph(mcqa, ray=False) as gym:
        (rollout,) = gym.run(
            [{"responses_create_params": {"input": "A"}, "expected_answer": "A", "options": [{"A": "a"}]}]
        )
    assert "workspace owns no box" in rollout["failure"]["detail"], rollout


async def test_clients_of_the_graph_run_no_program() -> None:
    bench = Bench(Workspace())
    await bench.host.start()
    await bench.call("seed_session", {**ROW, "harness_box": {}})
    body = {"command": ["true"], "model_url": "http://10.0.0.1/v1", "model_token": "t"}
    with pytest.raises(Forbidden, match="only an agent of this graph"):
        await bench.call("harness", body)
    await bench.host.stop()


def test_an_image_puts_the_program_into_the_box_of_the_agent_alone(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    (image / "agent.py").write_text(PROGRAM)
    (image / "Dockerfile").write_text(
        "ARG BASE=debian\nFROM $BASE\nENV AGENT=/opt/agent\nWORKDIR /opt\nCOPY agent.py /opt/agent/\n"
    )
    row = {**ROW, "test_command": "test -e done && test ! -e /opt/agent && test -z $AGENT"}
    command = ["/bin/sh", "-c", f"exec {PYTHON} $AGENT/agent.py"]
    script = (bash("touch done; pwd"), said("Done."))
    for _ in range(2):
        (rollout,) = rollouts(graph(*script, command=command, image=str(image)), row)
        assert rollout["reward"] == 1.0, rollout
        assert rollout["response"]["output"][1]["output"] == "/app\n"
    assert len(list((tmp_path / "cache").rglob("upper"))) == 1


@pytest.mark.parametrize("image", ["no-such-name", "/no/such/folder"])
def test_an_image_that_is_not_there(image: str) -> None:
    (rollout,) = rollouts(graph(said("Done."), image=image))
    assert "image must be a folder with a Dockerfile, or one of" in rollout["failure"]["detail"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"command": None, "url": "http://127.0.0.1:1"}, "box needs a command"),
        ({"box": False, "image": "a"}, "image needs box: true"),
    ],
)
def test_settings_that_are_refused(settings: JSON, reason: str) -> None:
    bad = graph(said("Done."))
    bad["agents"]["coder"] |= settings
    with pytest.raises(GraphError, match=reason):
        Gym.from_graph(bad, ray=False)
