"""How fast answers are verified, and whether right ones are ever refused: math-verify and the sandbox.

    python -m benchmarks.verifiers [--answers 2000] [--programs 400] [--executions 400] [--concurrency 256]

No Ray: each environment is called through a `ServerRunner`, as a replica calls it, all verifications at
once up to the concurrency. Every answer and every program is right, so a reward of 0 is a *false zero*, and a
failure is counted with the reason. Three parts:

- math: right answers in many forms (benchmarks/harness/right_answers.py), `math_with_judge` without a judge;
- execution: ``print(1)`` in a fresh sandbox each, as many at a time as there are cores;
- code_gen: right programs (stdin and function mode), two tests each.

The sandbox is bubblewrap where it works, else `process`; the output says which. Prints one JSON object, and
exits with status 1 if there was a false zero or a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.harness.reports import machine, save
from benchmarks.harness.right_answers import right_answers
from gym_serve.environments.code_gen import CodeGen
from gym_serve.environments.math_with_judge import MathWithJudge
from gym_serve.sandbox import Limits, SandboxName, SandboxPool, find_sandbox
from gym_serve.servers import Call, ResourcesServer, ServerRunner
from gym_serve.types.errors import GraphError, GymError

JSON = dict[str, Any]

CORES = os.cpu_count() or 1
WARM_UP = 16


def request(text: str, **row: Any) -> JSON:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {**row, "response": {"output": [{"type": "message", "role": "assistant", "content": [part]}]}}


def answers(count: int) -> list[tuple[str, JSON]]:
    """Verifications of right answers, each with its form and how it is written."""
    return [
        (f"{form}: {expected} | {text}", request(text, question="?", expected_answer=expected))
        for form, expected, text in right_answers(count)
    ]


def programs(count: int) -> list[tuple[str, JSON]]:
    """Verifications of right programs, each different from the others."""
    work = []
    for number in range(count):
        if number % 2:
            name, mode = "add", "function"
            code = (
                f"class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b + {number}"
            )
            inputs = ["1\n2", "-5\n7"]
        else:
            name, mode = None, "stdin"
            code = f"a, b = map(int, input().split())\nprint(a + b + {number})"
            inputs = ["1 2\n", "-5 7\n"]
        tests = {"inputs": inputs, "outputs": [str(3 + number), str(2 + number)], "fn_name": name}
        text = f"```python\n{code}\n```"
        work.append((f"{mode} {number}", request(text, verifier_metadata={"unit_tests": tests})))
    return work


async def rewards(server: ResourcesServer, work: Sequence[tuple[str, JSON]], concurrency: int) -> JSON:
    """Verify all of the work on a server that is started for it."""
    host = ServerRunner(server)
    await server.start()
    try:
        slots = asyncio.Semaphore(concurrency)

        async def verify(body: JSON) -> float | str:
            async with slots:
                try:
                    reply = await host.dispatch(Call("verify", orjson.dumps(body), None))
                except GymError as error:
                    return f"{type(error).__name__}: {error}"
            return float(reply.json()["reward"])

        await asyncio.gather(*(verify(body) for _, body in work[:WARM_UP]))
        started = time.perf_counter()
        found = await asyncio.gather(*(verify(body) for _, body in work))
        seconds = time.perf_counter() - started
    finally:
        await server.stop()
    zeros = [name for (name, _), reward in zip(work, found, strict=True) if reward == 0.0]
    return {
        "count": len(work),
        "concurrency": concurrency,
        "per_second": round(len(work) / seconds, 1),
        "false_zeros": len(zeros),
        "examples": zeros[:20],
        "failures": dict(Counter(reward for reward in found if isinstance(reward, str))),
    }


async def executions(sandbox: SandboxName, count: int) -> JSON:
    """Run ``print(1)`` in sandboxes of a warm pool, each used once."""
    pool = SandboxPool(find_sandbox(sandbox), Limits(), size=CORES)
    await pool.start()
    slots = asyncio.Semaphore(CORES)

    async def execute() -> str:
        async with slots:
            python = await pool.take()
            try:
                return (await python.execute("print(1)", timeout=10, output_limit=1_000)).stdout
            finally:
                await python.stop()

    try:
        await asyncio.gather(*(execute() for _ in range(WARM_UP)))
        started = time.perf_counter()
        found = await asyncio.gather(*(execute() for _ in range(count)))
        seconds = time.perf_counter() - started
    finally:
        await pool.stop()
    return {
        "count": count,
        "concurrency": CORES,
        "per_second": round(count / seconds, 1),
        "false_zeros": sum(output != "1\n" for output in found),
        "failures": {},
    }


def available() -> SandboxName:
    """Bubblewrap where it works, else processes of this user."""
    try:
        find_sandbox("bubblewrap")
    except GraphError as error:
        print(f"not confined: {error}", file=sys.stderr)
        return "process"
    return "bubblewrap"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--answers", type=int, default=2_000, help="right answers to verify")
    parser.add_argument("--programs", type=int, default=400, help="right programs to verify")
    parser.add_argument("--executions", type=int, default=400, help="executions of print(1)")
    parser.add_argument("--concurrency", type=int, default=256, help="verifications at the same time")
    parser.add_argument("--output", type=Path, help="JSON file of the result")
    arguments = parser.parse_args()
    where, sandbox, concurrency = machine(), available(), arguments.concurrency
    parts: dict[str, Callable[[], Awaitable[JSON]]] = {
        "math": lambda: rewards(
            MathWithJudge(should_use_judge=False, num_workers=CORES), answers(arguments.answers), concurrency
        ),
        "execution": lambda: executions(sandbox, arguments.executions),
        "code_gen": lambda: rewards(
            CodeGen(sandbox=sandbox, num_processes=CORES), programs(arguments.programs), concurrency
        ),
    }

    async def run() -> dict[str, JSON]:
        return {name: await part() for name, part in parts.items()}

    found = asyncio.run(run())
    result = {"machine": where, "sandbox": sandbox, **found}
    if arguments.output:
        save(arguments.output, result)
    print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    sys.exit(any(part["false_zeros"] or part["failures"] for part in found.values()))


if __name__ == "__main__":
    main()
