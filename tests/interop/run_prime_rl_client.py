"""Hold the `EnvClient` of the verifiers that is installed against gym_serve's env server.

Run by `test_prime_rl_client.py` in the venv of `make interop`: ``python run_prime_rl_client.py FOLDER``;
prints JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.bells import bell_graph, sample
from support.endpoint import endpoint
from support.letters import Letters

RUNS = 500
WORDS = ("ring", "refuse", "chatter", "break")


def sample_slowly(prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], list[float], str]:
    if "chatter" in Letters().decode(prompt):
        time.sleep(0.2)
    return sample(prompt, sampling)


async def served(folder: Path, address: str) -> tuple[asyncio.subprocess.Process, str]:
    """A server in a process of its own, and its address."""
    command = (
        "-m",
        "gym_serve.interop.prime_rl",
        str(folder / "graph.yaml"),
        "--address",
        address,
        "--no-ray",
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    return process, line.split()[-1]


async def run(folder: Path, url: str) -> dict[str, Any]:
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.serve.client import EnvClient
    from verifiers.v1.types import SamplingConfig

    process, address = await served(folder, "tcp://127.0.0.1:0")
    client = EnvClient(address)
    await client.wait_for_server_startup(60)
    config = EvalClientConfig(base_url=url, api_key_var="NO_SUCH_KEY")
    sampling = SamplingConfig(temperature=1.0, max_tokens=200)

    def start(word: str) -> Any:
        return asyncio.ensure_future(client.run(config, "policy", sampling, {"prompt": word}))

    begun = time.monotonic()
    episodes = await asyncio.gather(*(start(WORDS[i % 4]) for i in range(RUNS)))
    seconds = time.monotonic() - begun
    found: list[dict[str, Any]] = []
    for word, episode in zip(WORDS, episodes, strict=False):
        [trace] = episode.traces
        found.append(
            {
                "word": word,
                "ok": episode.ok,
                "reward": trace.reward,
                "truncated": trace.is_truncated,
                "branches": [
                    {"token_ids": b.token_ids, "sampled_mask": b.sampled_mask, "logprobs": b.logprobs}
                    for b in trace.branches
                ],
            }
        )
    cancelled = [start("chatter") for _ in range(20)]
    await asyncio.sleep(0.1)
    for work in cancelled:
        work.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    after = await client.run(config, "policy", sampling, {"prompt": "ring"})
    # A server that is killed, and another one in its place.
    lost = start("chatter")
    await asyncio.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    process, _ = await served(folder, address)
    await client.wait_for_server_startup(60)
    again = await client.run(config, "policy", sampling, {"prompt": "ring"})
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    process.send_signal(signal.SIGTERM)
    await process.wait()
    await client.close()
    return {
        "runs": len(episodes),
        "ok": sum(episode.ok for episode in episodes),
        "seconds": seconds,
        "episodes": found,
        "after_cancels": after.ok,
        "after_kill": again.ok,
    }


def main(folder: Path) -> dict[str, Any]:
    (folder / "graph.yaml").write_text(
        yaml.safe_dump({**bell_graph(), "resources": {"bell": {"type": "support.bells:Bell"}}})
    )
    with endpoint(Letters(), sample_slowly) as url:
        return asyncio.run(run(folder, url))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(400, exit=True)  # says where it hangs
    print(json.dumps(main(Path(sys.argv[1]))))
