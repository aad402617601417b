"""How fast the viewer is on a large file: the first page, the index, filters, sorts, a rollout; and memory.

    python -m benchmarks.viewer [--rollouts 300000] [--bytes 7000] [--folder DIR]

Writes a file of rollouts of about so many bytes each (61% of them token ids, as in a run that trains),
opens it by ``gym-serve view`` with an empty cache, and asks what the page asks. Every filter and sort is
asked once, so that no answer was kept; its figure is the median and the slowest. Memory is the peak of the
server and the process that indexes together. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil

from benchmarks.harness.reports import machine

JSON = dict[str, Any]
_REPEATS = 8


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=300_000)
    parser.add_argument("--bytes", type=int, default=7000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        path = folder / "large.jsonl"
        write_rollouts(path, options.rollouts, options.bytes)
        found: JSON = {"machine": machine(), "rollouts": options.rollouts, "bytes": path.stat().st_size}
        found |= measure(path, options.rollouts, folder / "cache")
    print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())


def write_rollouts(path: Path, count: int, size: int) -> None:
    """A file of so many rollouts, ``_REPEATS`` for each task."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(20_000)]
    texts = [" ".join(rng.choices(words, k=max(20, size // 40))) for _ in range(2000)]
    ids = [rng.choices(range(100, 150_000), k=size * 21 // 1000) for _ in range(200)]
    logprobs = [[round(-rng.expovariate(3), 4) for _ in of] for of in ids]
    with open(path, "wb") as file:
        for number in range(count):
            task = number // _REPEATS
            place = rng.randrange(len(ids))
            file.write(
                orjson.dumps(_rollout(rng, task, number % _REPEATS, texts, (ids[place], logprobs[place])))
            )
            file.write(b"\n")


def _rollout(
    rng: random.Random, task: int, index: int, texts: Sequence[str], made: tuple[list[int], list[float]]
) -> JSON:
    ids, logprobs = made
    half = len(ids) // 2
    first = {
        **{
            "type": "function_call",
            "name": f"tool_{task % 12}",
            "call_id": "c",
            "arguments": '{"city": "Oslo"}',
        },
        **{
            "prompt_token_ids": ids,
            "generation_token_ids": ids[:half],
            "generation_log_probs": logprobs[:half],
        },
    }
    said = {
        **{"type": "message", "role": "assistant"},
        "content": [{"type": "output_text", "text": rng.choice(texts)}],
        **{"prompt_token_ids": [*ids, *ids[:half]], "generation_token_ids": ids[half:]},
        "generation_log_probs": logprobs[half:],
    }
    steps = [
        ["seed", 1, 90, 0, 0],
        ["model", 100, 800_000, 0, 1, None, None, None, None, {"version": str(task // 500)}],
        ["tool", 800_200, 300, 0, 0, f"tool_{task % 12}", None, None],
        ["model", 800_600, 900_000, 0, 1, None, None, None, None, {"version": str(task // 500)}],
        ["verify", 1_700_700, 500, 0, 0],
    ]
    usage = {"calls": 2, "input_tokens": len(ids) + rng.randrange(500), "output_tokens": rng.randrange(2000)}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": texts[task % len(texts)][:300]}]},
        "agent_ref": {"name": f"agent_{task % 5}"},
        **{"_ng_task_index": task, "_ng_rollout_index": index, "_ng_rollout_id": f"{task}-{index}"},
        "response": {
            "output": [
                first,
                {"type": "function_call_output", "call_id": "c", "output": rng.choice(texts)[:400]},
                said,
            ],
        },
        **{"reward": float(rng.random() < (task % 10) / 10), "score": round(rng.random(), 4)},
        **{"extracted": rng.choice(texts)[:30], "model_usage": {"model": {"policy": usage}}},
        "_ng_latency_s": round(rng.expovariate(0.2), 3),
        "_ng_timeline": {
            **{"began": 1.8e9 + task, "dur": 1_701_300, "agent": f"agent_{task % 5}/r"},
            **{"servers": [f"environment_{task % 5}/r", "policy/r"], "steps": steps},
        },
    }


FILTERS = (
    "reward >= 0.5",
    "reward < 0.5 and turns > 1",
    "agent = 'agent_3'",
    "tool('tool_7')",
    "not environment = 'environment_1'",
    "tokens > 1500 or seconds > 20",
    "fields.score > 0.9",
    "fields.extracted like '%ab%'",
    "version >= 30 and version < 40",
    "prompt like '%ing%'",
    "task = 12345",
)
SORTS = ("-reward", "seconds", "-tokens", "-fields.score", "agent", "-version", "fields.extracted")


def measure(path: Path, rollouts: int, cache: Path) -> JSON:
    """The figures of the viewer, in seconds and bytes."""
    began = time.monotonic()
    with viewer(path, cache) as (client, process):
        peak = Peak(process)
        while not (first := client.get("api/rollouts").json())["rows"]:
            time.sleep(0.02)
        found: JSON = {"first_page_s": time.monotonic() - began, "rollouts_on_first_page": first["total"]}
        meanwhile = []
        while not (run := client.get("api/runs").json()["runs"][0])["done"] or run["rollouts"] < rollouts:
            meanwhile.append(timed(client, where=f"reward >= 0.{len(meanwhile) % 9 + 1}"))
            time.sleep(0.5)
        found["index_s"] = time.monotonic() - began
        found["filter_while_indexing_s"] = spread(meanwhile)
        found["filter_s"] = spread([timed(client, where=where) for where in FILTERS])
        found["sort_s"] = spread([timed(client, sort=sort) for sort in SORTS])
        found["filter_and_sort_s"] = spread(
            [timed(client, where=f"reward >= 0.5 and turns < {9 + at}", sort=s) for at, s in enumerate(SORTS)]
        )
        found["words_s"] = spread(
            [timed(client, where=f"words('{word} oslo')") for word in first["rows"][0]["prompt"].split()[:5]]
        )
        found["last_page_s"] = timed(client, sort="-seconds", offset=rollouts - 100)
        found["tasks_s"] = timed(client, "api/tasks", sort="-spread")
        found["summary_s"] = timed(client, "api/summary")
        found["summary_of_a_filter_s"] = spread([timed(client, "api/summary", where=w) for w in FILTERS])
        id_ = run["id"]
        numbers = random.Random(1).sample(range(rollouts), 50)
        found["rollout_s"] = spread([timed(client, f"api/rollout/{id_}/{n}") for n in numbers])
        found["tokens_s"] = spread([timed(client, f"api/rollout/{id_}/{n}/tokens") for n in numbers])
        found["memory_bytes"] = peak.bytes
    sizes = [at.stat().st_size for at in cache.rglob("*") if at.is_file()]
    found["index_bytes"] = sum(sizes)
    began = time.monotonic()
    with viewer(path, cache) as (client, _):
        while client.get("api/rollouts").json()["total"] < rollouts:
            time.sleep(0.02)
        found["opened_again_s"] = time.monotonic() - began
    return found


class viewer:
    """`gym-serve view` as people start it; gives a client and the process."""

    def __init__(self, path: Path, cache: Path) -> None:
        program = "from gym_serve.cli import main; main()"
        self._command = [sys.executable, "-c", program, "view", os.fspath(path), "--no-browser", "--json"]
        self._environment = {**os.environ, "XDG_CACHE_HOME": os.fspath(cache)}

    def __enter__(self) -> tuple[httpx.Client, psutil.Process]:
        self._process = subprocess.Popen(
            [*self._command, "--port", "0"], stdout=subprocess.PIPE, env=self._environment
        )
        assert self._process.stdout is not None
        url = orjson.loads(b"".join(iter(self._process.stdout.readline, b"}\n")) + b"}")["url"]
        self._client = httpx.Client(base_url=url, timeout=600)
        return self._client, psutil.Process(self._process.pid)

    def __exit__(self, *error: object) -> None:
        self._client.close()
        indexing = psutil.Process(self._process.pid).children()
        self._process.terminate()
        self._process.wait()
        psutil.wait_procs(indexing, timeout=10)  # it ends a moment later, and until then it writes the index


class Peak:
    """The most memory of a process and its children, looked at ten times a second.

    It counts what is theirs alone (USS): pages of the index that are mapped belong to the system's cache.
    """

    def __init__(self, process: psutil.Process) -> None:
        self.bytes = 0
        self._process = process
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            try:
                of = [self._process, *self._process.children(recursive=True)]
                self.bytes = max(self.bytes, sum(process.memory_full_info().uss for process in of))
            except psutil.Error:
                return
            time.sleep(0.1)


def timed(client: httpx.Client, path: str = "api/rollouts", **query: Any) -> float:
    """Seconds of a request, answer included."""
    began = time.perf_counter()
    client.get(path, params=query).raise_for_status()
    return time.perf_counter() - began


def spread(seconds: Sequence[float]) -> JSON:
    """The median and the slowest."""
    return (
        {"median": statistics.median(seconds), "slowest": max(seconds), "times": len(seconds)}
        if seconds
        else {}
    )


if __name__ == "__main__":
    main()
