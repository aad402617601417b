"""Two runs of a made-up policy with everything that the page can show; docs/viewer.md has its pictures."""

import base64
import json
import math
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from view.made import write

QUESTIONS = [
    ("What is the sum of the decimal digits of $3^{500}$?", "1035"),
    ("How many integers between 1 and 1000 are divisible by 3 or by 5?", "467"),
    ("Evaluate $\\int_0^1 x^2 e^x \\, dx$.", "e - 2"),
    ("How many ways are there to tile a $2 \\times 10$ board with dominoes?", "89"),
    ("What is the smallest prime $p$ with $p \\equiv 3 \\pmod{7}$ and $p > 100$?", "101"),
    ("A fair die is rolled until a six comes. What is the expected number of rolls?", "6"),
    ("What is the area of the triangle with the sides 13, 14 and 15?", "84"),
    ("How many zeros does $100!$ end with?", "24"),
]
CODE = "n = 3**500\ndigits = [int(d) for d in str(n)]\n\nprint(len(digits), sum(digits))"


USAGE = {"calls": 2, "input_tokens": 1000}


def picture() -> str:
    """A small image as a data URL: a curve."""
    width, height = 240, 90
    lines = []
    for y in range(height):
        line = b""
        for x in range(width):
            at = 75 - 60 * (x / width) ** 2
            near = abs(y - at) < 2.5
            line += bytes((43, 83, 198) if near else (244, 246, 252))
        lines.append(b"\0" + line)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"".join(lines)))
    return "data:image/png;base64," + base64.b64encode(png + chunk(b"IEND", b"")).decode()


def _tokens(dice: random.Random, text: str, prompt: int, version: str) -> dict[str, Any]:
    words = [word if at == 0 else " " + word for at, word in enumerate(text.split(" "))]
    probabilities = [dice.random() ** 0.35 * 0.98 + 0.01 for _ in words]
    logprobs = [_log(share) for share in probabilities]
    told = [
        {
            "token": word,
            "logprob": value,
            "top_logprobs": [{"logprob": value}, {"logprob": _log(1.001 - share)}],
        }
        for word, value, share in zip(words, logprobs, probabilities, strict=True)
    ]
    return {
        "told": told,
        "kept": {
            "prompt_token_ids": list(range(1000, 1000 + prompt)),
            "generation_token_ids": [dice.randrange(1000, 32000) for _ in words],
            "generation_log_probs": logprobs,
            "weight_version": version,
        },
    }


def _log(share: float) -> float:
    return math.log(max(share, 1e-9))


def attempt(dice: random.Random, task: int, index: int, skill: float, version: int) -> dict[str, Any]:
    """A rollout: the model thinks, runs a program, looks at a picture, and answers."""
    question, answer = QUESTIONS[task % len(QUESTIONS)]
    right = dice.random() < skill
    given = answer if right else str(dice.randrange(10, 900))
    thought = (
        "The user wants an exact value. I could look for a closed form, but the number is small enough to "
        "compute it.\n\nPlan:\n1. compute $3^{500}$ with Python's integers\n2. add its digits\n3. check"
    )
    said = (
        f"I computed it and **checked the result twice**:\n\n| step | value |\n|---|---|\n| digits | 239 |\n"
        f"| answer | {given} |\n\n```python\n{CODE}\n```\n\nBy the formula $\\sum_{{i=0}}^{{n}} d_i$ with "
        f"$n = \\lfloor 500 \\log_{{10}} 3 \\rfloor$, the answer is \\boxed{{{given}}}.\n\nSee also "
        "[the table of powers](https://example.com/powers)."
    )
    first = _tokens(dice, "I will compute it with Python.", 412, str(version))
    last = _tokens(dice, said, 588, str(version + (index == 3)))
    output = (
        "239 1035"
        if right
        else "Traceback (most recent call last):\n"
        + "\n".join(f'  File "cell.py", line {line}, in step_{line}' for line in range(1, 60))
    )
    seconds = dice.uniform(2.2, 9.0)
    begin = 1_795_413_975.0 + 400 * version + task * 11 + index * 2
    judged = 0.0 if not right else 1.0
    exchange = (
        f"Question: {question}\nReference: {answer}\nAnswer: {given}\n\nAre the two answers equal?",
        f"The reference is ${answer}$ and the answer is ${given}$. "
        + ("They are **equal**: [[A=B]]" if right else "They are **not equal**: [[A!=B]]"),
    )
    style = round(dice.uniform(0.2, 1.0), 2)
    return {
        "responses_create_params": {
            "instructions": "Solve the problem. Use tools for calculations.\nGive the answer in \\boxed{}.",
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": question},
                        *([{"type": "input_image", "image_url": picture()}] if task % 4 == 2 else []),
                    ],
                }
            ],
        },
        "agent_ref": {"name": "math_agent"},
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "_ng_rollout_id": f"{task}-{index}",
        "response": {
            "tools": [
                {
                    "type": "function",
                    "name": "run_python",
                    "description": "Run a program and return what it prints.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "code": {"type": "string", "description": "the program"},
                            "timeout": {"type": "integer", "description": "seconds"},
                        },
                        "required": ["code"],
                    },
                }
            ],
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]},
                {
                    "type": "function_call",
                    "name": "run_python",
                    "call_id": "call_1",
                    "arguments": json.dumps({"code": CODE, "timeout": 10}),
                    **first["kept"],
                },
                {"type": "function_call_output", "call_id": "call_1", "output": output},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": said, "logprobs": last["told"]}],
                    **last["kept"],
                },
            ],
        },
        "reward": judged if not right else round(0.8 + 0.2 * style, 2) if task % 3 == 0 else 1.0,
        "reward_components": {"correct": judged, "style": style},
        "extracted_answer": given,
        "expected_answer": answer,
        "judge_agrees": right,
        "edit_distance": dice.randrange(0, 40),
        "model_usage": {
            "model": {"policy": USAGE | {"output_tokens": 60 + dice.randrange(200)}},
            "verify": {"judge": {"calls": 1, "input_tokens": 240, "output_tokens": 12}},
        },
        "_ng_latency_s": seconds,
        "_ng_timeline": _timeline(begin, seconds, version, version + (index == 3), exchange),
    }


def _timeline(
    begin: float, seconds: float, version: int, last: int, exchange: tuple[str, str]
) -> dict[str, Any]:
    whole = int(seconds * 1e6)

    def step(kind: str, server: int, start: float, length: float, *columns: Any, queued: float = 0.0) -> Any:
        return [kind, *(int(whole * share) for share in (start, length, queued)), server, *columns]

    policy, later = {"version": str(version)}, {"version": str(last), "retries": 1}
    prompt, answer = exchange
    judged = {"stage": "verify", "prompt": prompt, "answer": answer}
    steps = [
        step("seed", 0, 0.0, 0.01),
        step("model", 1, 0.01, 0.31, 412, None, 38, "tool_calls", policy, queued=0.05),
        step("tool", 0, 0.33, 0.14, "run_python", None, None),
        step("model", 1, 0.48, 0.38, 588, None, 97, "stop", later, queued=0.02),
        step("model", 2, 0.87, 0.11, 240, None, 12, None, judged),
        step("verify", 0, 0.865, 0.125),
    ]
    return {
        "began": begin,
        "dur": whole,
        "queued": 140_000,
        "agent": "math_agent/x7k2",
        "servers": ["math/p3n8", "policy/h6w1", "judge/k2m4"],
        "steps": steps,
    }


def failed_attempt(dice: random.Random, task: int, index: int, version: int) -> dict[str, Any]:
    """An attempt that a machine spoiled."""
    made = attempt(dice, task, index, 0.0, version)
    for key in ("response", "reward_components", "extracted_answer", "judge_agrees", "edit_distance"):
        made.pop(key)
    kind, told = dice.choice(
        [
            ("model_timeout", "the model stage ran out of time (its limit is 600 s)"),
            (
                "tool_failed",
                "run_python: the sandbox could not start\nOSError: [Errno 28] No space left on device",
            ),
        ]
    )
    failure = {
        "kind": kind,
        "stage": "model",
        "status": 504,
        "retryable": True,
        "detail": told,
        "server": "policy",
    }
    return {**made, "reward": 0.0, "_ng_failure_class": kind, "failure": failure, "mask_sample": True}


def branched(dice: random.Random) -> dict[str, Any]:
    """A rollout whose agent rewrote its history once."""
    made = attempt(dice, 6, 3, 1.0, 43)
    asked = made["responses_create_params"]["input"]
    kept = _tokens(dice, "Heron: 84.", 96, "43")["kept"]
    told = [{"type": "output_text", "text": "Heron: 84."}]
    said = [{"type": "message", "role": "assistant", "content": told, **kept}]
    other = [{"role": "user", "content": "Summary so far: the sides are 13, 14 and 15."}]
    made["branches"] = [
        {"input": [*asked, *made["response"]["output"][:3]], "response": {"output": said}},
        {"input": other, "response": {"output": said}},
    ]
    return made


def showcase(folder: Path) -> tuple[Path, Path]:
    """Two runs, of which the second one is of a better policy."""
    paths = []
    for name, skill, version, seed in (("step-100", 0.55, 17, 1), ("step-200", 0.72, 41, 2)):
        dice = random.Random(seed)
        made = [
            attempt(dice, task, index, skill * (0.6 + 0.1 * (task % 7)), version + task // 8)
            for task in range(24)
            for index in range(8)
        ]
        if version == 41:
            made[-1] = {
                **branched(dice),
                "_ng_task_index": 23,
                "_ng_rollout_index": 7,
                "_ng_rollout_id": "23-7",
            }
        prices = {"policy": {"input": 0.2, "output": 0.8}, "judge": {"input": 1.25, "output": 10.0}}
        (folder / f"{name}_run.json").write_text(json.dumps({"prices": prices}))
        paths.append(write(folder / f"{name}.jsonl", made))
        write(
            folder / f"{name}_failures.jsonl",
            [failed_attempt(dice, task, 8, version + task // 8) for task in (3, 9, 11, 14, 20)],
        )
    return paths[0], paths[1]
