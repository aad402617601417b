"""Single-turn samples per second beside lm-eval, Inspect and a hand-written loop, each by its own command.

    python -m benchmarks.evaluations [--inspect VENV]     # needs lm-eval[api]

A sample is one question and one answer, which is compared as text and written to a file. The model is a
server on loopback that answers at once. Counted is, as in `benchmarks.peers`, the time from the first request
to the last answer, and the CPU time of all processes within it. Set-ups run in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import aiohttp
import orjson

from benchmarks.harness.work import ROOT, model_behaviour
from benchmarks.loopback import RunningModelServer, run_model_server
from benchmarks.peers import Collection, Peer, measure, nothing_beside, numbers_of, report

BEHAVIOUR = replace(model_behaviour(), turns=0)
_GRADER = "def grade(row, response):\n    return row['answer'] in response.output_text\n"
_TASK = """
task: questions
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<end>"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
_INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def questions():
    fields = FieldSpec(input="question", target="answer")
    return Task(dataset=json_dataset("rows.jsonl", fields), solver=generate(), scorer=includes())
"""


def questions(folder: Path, count: int) -> Path:
    """A file of rows: question and right answer."""
    path = folder / "rows.jsonl"
    rows = (
        {"question": f"{number}: what is the weather?", "answer": BEHAVIOUR.answer} for number in range(count)
    )
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def gym_serve() -> Peer:
    """``gym-serve eval`` of a file, with a grader."""

    def collection(folder: Path, model: RunningModelServer, count: int, concurrency: int) -> Collection:
        (folder / "grader.py").write_text(_GRADER)
        command = [str(Path(sys.executable).with_name("gym-serve")), "eval", str(questions(folder, count))]
        command += ["--prompt", "{question}", "--grader", f"{folder}/grader.py:grade", "-o", f"{folder}/out"]
        command += ["--model", f"{model.url}/v1#loopback", "--concurrency", str(concurrency)]
        return Collection(command, lambda: numbers_of(folder / "out" / "rollouts.jsonl"), {})

    return Peer("gym-serve eval", 1, collection, nothing_beside)


def lm_eval() -> Peer:
    """``lm_eval`` with its client of Chat Completions."""

    def collection(folder: Path, model: RunningModelServer, count: int, concurrency: int) -> Collection:
        (folder / "questions.yaml").write_text(_TASK.replace("FILE", str(questions(folder, count))))
        url = f"{model.url}/v1/chat/completions"
        command = [
            sys.executable,
            "-m",
            "lm_eval",
            "--model",
            "local-chat-completions",
            "--tasks",
            "questions",
        ]
        command += ["--model_args", f"model=loopback,base_url={url},num_concurrent={concurrency}"]
        command += ["--include_path", str(folder), "--apply_chat_template", "--log_samples"]
        command += ["--output_path", f"{folder}/out"]

        def rewards() -> list[float]:
            (file,) = folder.glob("out/**/samples_*.jsonl")
            return numbers_of(file, "exact_match")

        return Collection(command, rewards, {"HF_DATASETS_CACHE": f"{folder}/cache"})

    return Peer("lm-eval", 1, collection, nothing_beside)


def inspect(venv: Path) -> Peer:
    """``inspect eval`` with its client of any OpenAI-compatible API."""

    def collection(folder: Path, model: RunningModelServer, count: int, concurrency: int) -> Collection:
        questions(folder, count)
        (folder / "task.py").write_text(_INSPECT)
        command = [f"{venv}/bin/inspect", "eval", "task.py", "--model", "openai-api/loopback/loopback"]
        command += ["--max-connections", str(concurrency), "--max-samples", str(concurrency)]
        command += ["--log-dir", f"{folder}/out", "--log-format", "json", "--display", "plain"]
        environment = {"LOOPBACK_BASE_URL": f"{model.url}/v1", "LOOPBACK_API_KEY": "none"}

        def rewards() -> list[float]:
            (file,) = folder.glob("out/*.json")
            samples: list[dict[str, Any]] = orjson.loads(file.read_bytes())["samples"]
            return [float(sample["scores"]["includes"]["value"] == "C") for sample in samples]

        return Collection(command, rewards, environment)

    return Peer("Inspect", 1, collection, nothing_beside)


def loop() -> Peer:
    """A hand-written loop, the least that such a program does."""

    def collection(folder: Path, model: RunningModelServer, count: int, concurrency: int) -> Collection:
        command = [sys.executable, "-m", "benchmarks.evaluations", "--loop", model.url]
        command += ["--rows", str(questions(folder, count)), "--concurrency", str(concurrency)]
        output = folder / "answers.jsonl"
        return Collection(
            [*command, "--output", str(output)], lambda: numbers_of(output), {"PYTHONPATH": str(ROOT)}
        )

    return Peer("aiohttp loop", 1, collection, nothing_beside)


async def ask_all(url: str, waiting: Iterator[dict[str, Any]], file: BinaryIO, concurrency: int) -> None:
    """The loop itself: ask for each row that waits, and write its answer."""
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def work() -> None:
            for row in waiting:
                messages = [{"role": "user", "content": row["question"]}]
                body = orjson.dumps({"model": "loopback", "messages": messages})
                async with session.post(f"{url}/v1/chat/completions", data=body) as answer:
                    message = orjson.loads(await answer.read())["choices"][0]["message"]
                reward = float(row["answer"] in message["content"])
                file.write(
                    orjson.dumps({**row, **message, "reward": reward}, option=orjson.OPT_APPEND_NEWLINE)
                )

        await asyncio.gather(*(work() for _ in range(concurrency)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--inspect", type=Path, help="virtual environment with inspect-ai and openai")
    parser.add_argument("--samples", type=int, default=10_000, help="of a round; Inspect does a tenth")
    parser.add_argument("--concurrency", type=int, default=256, help="samples in flight")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; figures are medians")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "evaluations.json")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.loop:
        waiting = map(orjson.loads, arguments.rows.read_bytes().splitlines())
        with arguments.output.open("wb") as file:
            asyncio.run(ask_all(arguments.loop, waiting, file, arguments.concurrency))
        return
    works = [(peer, arguments.samples) for peer in (gym_serve(), lm_eval(), loop())]
    if arguments.inspect:
        # A burst of requests, whose samples are scored after the last answer, would be no rate.
        count = max(arguments.samples // 10, 4 * arguments.concurrency)
        works.append((inspect(arguments.inspect.resolve()), count))
    rounds: dict[str, list[dict[str, float]]] = {peer.name: [] for peer, _ in works}
    with run_model_server(BEHAVIOUR) as model:
        for number in range(arguments.rounds):
            for peer, count in works:
                with TemporaryDirectory() as folder:
                    figures = measure(peer, Path(folder), model, count, arguments.concurrency)
                rounds[peer.name].append(figures)
                print(f"round {number + 1}: {peer.name}: {json.dumps(figures)}", file=sys.stderr)
    report(rounds, arguments.output, ("program", "samples/s", "CPU ms each"))


if __name__ == "__main__":
    main()
