"""Host servers of NeMo Gym, and replay the rollouts that came with them: print what differs as JSON.

Run by `test_foreign_libraries.py` in a venv with NeMo Gym: ``python host_nemo_gym.py SERVER...``. Unlike
`nemo_gym_servers.py` it runs none as NeMo Gym does: tools must say what they said in the recorded rollout.
"""

import asyncio
import json
import sys

from nemo_gym_servers import Hosted, Script, cases, data, decoded, lines, replay, response_of


def solution(row):
    """A response that makes the calls that the row itself has for a solution."""
    calls = [
        {
            "type": "function_call",
            "call_id": str(number),
            "name": call["name"],
            "arguments": call["arguments"],
        }
        for number, call in enumerate(row["ground_truth"])
    ]
    return {**response_of(""), "output": calls}


async def replayed(name):
    host = Hosted(name)
    await host.start()
    rewards, differences, calls = [], [], 0
    for case, row, response, then, said in cases(name):
        if case.startswith("nothing"):
            continue
        Script.begin(said)
        outputs, verdict = await replay(host, row, response)
        calls += len(outputs)
        for item in response["output"]:
            if item["type"] == "function_call_output" and decoded(item["output"]) != outputs[item["call_id"]]:
                differences.append([decoded(item["output"]), outputs[item["call_id"]]])
        rewards.append([then, verdict["reward"]])
    rows = [row for row in lines(data(name, "example")) if isinstance(row.get("ground_truth"), list)]
    solved = [(await replay(host, row, solution(row)))[1]["reward"] for row in rows]
    metrics = await host.aggregate([])
    await host.stop()
    return {
        "rewards": rewards,
        "solved": solved,
        "differences": differences,
        "calls": calls,
        "metrics": sorted(metrics),
    }


async def main(names):
    return {name: await replayed(name) for name in names}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1:]))))
