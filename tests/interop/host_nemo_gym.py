"""Host servers of NeMo Gym, and replay the rollouts that came with them: print what differs as JSON.

Run by `test_hosted_nemo_gym_servers.py` in a venv with NeMo Gym: ``python host_nemo_gym.py SERVER...``. A
replay seeds a session with the row, makes the recorded tool calls, and verifies the recorded response.
"""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

from gym_serve.interop.nemo_gym.hosting import NemoGym
from gym_serve.routing.inline import InlineTransport
from gym_serve.servers import EnvironmentClient, ModelClient, ModelServer, ServerRunner

MAX_ROWS = 20


class Judge(ModelServer):
    """Finds every answer equal."""

    async def responses(self, params):
        text = {"type": "output_text", "text": "[[A=B]]", "annotations": []}
        message = {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
        return {
            "id": "r",
            "created_at": 0,
            "model": "judge",
            "object": "response",
            "output": [message],
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        }


SETTINGS = {
    "equivalence_llm_judge": {
        "config": {
            "judge_model_server": {"type": "responses_api_models", "name": "policy_model"},
            "judge_responses_create_params": {"input": []},
            "judge_prompt_template_fpath": "prompt_templates/equivalence_llm_judge.txt",
            "judge_equal_label": "[[A=B]]",
            "judge_not_equal_label": "[[A!=B]]",
        },
        "servers": {"policy_model": ModelClient(InlineTransport(ServerRunner(Judge())))},
    }
}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompt(row):
    """The text of the last user message, which tells the rows of a file apart."""
    given = row["responses_create_params"]["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return json.dumps([item["content"] for item in items if item.get("role") == "user"][-1])


def turns(output):
    """The items of each of the model's turns."""
    found = [[]]
    for item in output:
        if item.get("role") == "user":
            found.append([])
        else:
            found[-1].append(item)
    return found


def decoded(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


async def solve(client, row):
    """The reward for the calls that the row itself has for a solution."""
    session, _ = await client.seed_session(row)
    output = [
        {
            "type": "function_call",
            "call_id": str(number),
            "name": call["name"],
            "arguments": call["arguments"],
        }
        for number, call in enumerate(row["ground_truth"])
    ]
    response = {**(await Judge().responses({})), "output": output}
    verdict = await client.verify(row, response, session)
    await client.close_session(session)
    return verdict["reward"]


async def replay(name):
    server = NemoGym(name=name, server=f"resources_servers.{name}.app", **SETTINGS.get(name, {}))
    host = ServerRunner(server)
    await host.start()
    client = EnvironmentClient(InlineTransport(host))
    folder = Path(importlib.util.find_spec(f"resources_servers.{name}.app").origin).parent / "data"
    examples = lines(folder / "example.jsonl")
    rows = {prompt(row): row for row in examples}
    rewards, differences, calls = [], [], 0
    recordings = lines(folder / "example_rollouts.jsonl")
    for index, recorded in enumerate(recordings[:MAX_ROWS]):
        in_order = examples[index] if len(examples) == len(recordings) else recorded
        row = {**rows.get(prompt(recorded), in_order)}
        row.pop("response", None)
        session, _ = await client.seed_session(row)
        asked = {}
        for item in recorded["response"]["output"]:
            if item["type"] == "function_call":
                reply = await client.call_tool(item["name"], json.loads(item["arguments"]), session)
                asked[item["call_id"]] = reply.body.decode()
                calls += 1
            elif item["type"] == "function_call_output":
                then, now = decoded(item["output"]), decoded(asked[item["call_id"]])
                if then != now:
                    differences.append([then, now])
        if "reset" in host.operations:
            total = 0.0
            for turn in turns(recorded["response"]["output"]):
                response = {**recorded["response"], "output": turn}
                reply = await client.call("step", {**row, "response": response}, session=session)
                total += reply.json()["reward"]
            rewards.append([recorded["reward"], total])
        else:
            verdict = await client.verify(row, recorded["response"], session)
            rewards.append([recorded["reward"], verdict["reward"]])
        await client.close_session(session)
    solved = [await solve(client, row) for row in examples if isinstance(row.get("ground_truth"), list)]
    metrics = await client.fetch("aggregate_metrics", {"verify_responses": []})
    await host.stop()
    return {
        "rewards": rewards,
        "solved": solved,
        "differences": differences,
        "calls": calls,
        "metrics": sorted(metrics),
    }


async def main(names):
    return {name: await replay(name) for name in names}


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1:]))
    print(json.dumps(found))
