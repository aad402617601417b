"""`gym-serve eval`: benchmarks and models at the terminal, by an endpoint on loopback."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from click.testing import Result
from support.sandboxes import needs_bubblewrap
from support.upstream import ChatEndpoint
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.rollouts import collecting

HARBOR = Path(__file__).parents[1] / "environments" / "harbor_task"
GRADER = "def grade(row, response):\n    return str(row['answer']) in response.output_text\n"


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    with ChatEndpoint("It is 4.") as running:
        yield running


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grader.py").write_text(GRADER)
    (tmp_path / "sums.csv").write_text("question,answer,level\n2+2,4,easy\n1+3,4,easy\n17*23,391,hard\n")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["eval", *arguments])


SUMS = ("sums.csv", "--prompt", "What is {question}?", "--grader", "grader.py:grade")


def test_rows_of_a_file_with_two_models(folder: Path, endpoint: ChatEndpoint) -> None:
    models = ("--model", f"{endpoint.url}#small", "--model", f"{endpoint.url}#big")
    done = run(*SUMS, *models, "--by", "level", "--repeats", "2", "--temperature", "0.5", "-o", "out")
    assert done.exit_code == 0, done.output
    assert "sums       small  66.7" in done.output
    assert re.search(r"hard +1 +0\.0", done.output)
    assert {request["model"] for request in endpoint.requests} == {"small", "big"}
    assert {request["temperature"] for request in endpoint.requests} == {0.5}
    assert len(endpoint.requests) == 3 * 2 * 2
    results = orjson.loads((folder / "out" / "results.json").read_bytes())
    assert [(cell["model"], cell["scored"]) for cell in results["cells"]] == [("small", 6), ("big", 6)]
    assert "<title>Evaluation: sums</title>" in (folder / "out" / "report.html").read_text()
    assert "api_key" not in (folder / "out" / "results.json").read_text()


def test_it_runs_again_beside_itself(folder: Path, endpoint: ChatEndpoint) -> None:
    assert run(*SUMS, "--model", f"{endpoint.url}#m", "-o", "first").exit_code == 0
    done = run("--repeat-of", "first", "--baseline", "first", "-o", "second", "--fail-under", "70")
    assert "+0.0 (p 1, no clear difference)" in done.output
    assert done.exit_code == 6
    assert "A score is below 70." in done.output


def test_an_interrupted_run_goes_on(folder: Path, endpoint: ChatEndpoint) -> None:
    endpoint.refuses, endpoint.refuses_after = 401, 2
    arguments = (*SUMS, "--model", f"{endpoint.url}#m", "--concurrency", "1", "-o", "out")
    assert run(*arguments).exit_code == 5
    endpoint.refuses = None
    assert "out/rollouts.jsonl" in run(*arguments).output  # it is not written over
    done = run(*arguments, "--resume", "--json")
    assert done.exit_code == 0, done.output
    assert orjson.loads(done.stdout)["cells"][0]["scored"] == 3


def test_a_row_that_is_bad_later_is_told(
    folder: Path, endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "FIRST", 2)
    lines = [{"question": "2+2", "answer": 4}, {"question": "1+3", "answer": 4}, {"answer": 5}]
    (folder / "late.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    options = ("--prompt", "{question}", "--grader", "grader.py:grade", "--model", f"{endpoint.url}#m")
    done = run("late.jsonl", *options, "-o", "out")
    assert done.exit_code == 3, done.output
    assert "left out: late.jsonl:3: " in done.output.replace(f"{folder}/", "")
    assert "1 rows could not be used, as was found when the run had begun" in done.output
    results = orjson.loads((folder / "out" / "results.json").read_bytes())
    assert results["notes"] == ["1 rows cannot be used, and are in no score"]
    assert results["cells"][0]["scored"] == 2


def test_a_column_is_mapped(endpoint: ChatEndpoint) -> None:
    (Path("sums.csv")).write_text("q,gold\n2+2,4\n")
    options = ("--prompt", "{{ q }}", "--map", "answer=gold", "--grader", "grader.py:grade")
    done = run("sums.csv", *options, "--model", f"{endpoint.url}#m", "-o", "out")
    assert "100.0" in done.output
    assert endpoint.requests[0]["messages"] == [{"role": "user", "content": "2+2"}]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "name a benchmark"),
        (("gsm8k",), 2, "choose one --model or more"),
        (("gsm8k", "--model", "gpt"), 1, "--model must be openai/NAME"),
        (("sums.csv", "--model", "scripted"), 1, "say how answers are scored"),
        (("sums.csv", "--model", "scripted", "--rows", "x"), 2, "must be NAME=VALUE"),
        (("--repeat-of", "nothing"), 1, "nothing/results.json cannot be read"),
        (("gsm8k", "--model", "scripted", "--baseline", "nothing"), 1, "nothing/results.json cannot be read"),
        (("simpleqa", "--sample", "--model", "scripted", "-o", "out"), 1, "choose its model (--judge)"),
        (("countdown", "--agent", "oracle", "--model", "scripted"), 1, "reasoning_gym has no agent 'oracle'"),
        (("mmlu", "--sandbox", "docker", "--model", "scripted"), 1, "no environment of the benchmarks has"),
    ],
)
def test_what_cannot_be_run(arguments: tuple[str, ...], status: int, message: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, message in " ".join(done.output.split())) == (status, True), done.output


@needs_bubblewrap
@pytest.mark.parametrize(("agent", "score"), [("oracle", 1.0), ("nop", 0.0)])
def test_tasks_in_boxes_by_an_agent_of_their_graph(
    folder: Path, monkeypatch: pytest.MonkeyPatch, agent: str, score: float
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    shutil.copytree(HARBOR, folder / "tasks" / "one")
    done = run(
        "harbor:tasks", "--agent", agent, "--sandbox", "bubblewrap", "--model", "scripted", "-o", "out"
    )
    assert done.exit_code == 0, done.output
    results = orjson.loads((folder / "out" / "results.json").read_bytes())
    assert [cell["score"]["mean"] for cell in results["cells"]] == [score]
    assert results["agent"] == {"name": agent}
    assert results["cells"][0]["health"] == []
    (rollout,) = (folder / "out" / "rollouts.jsonl").read_bytes().splitlines()
    assert orjson.loads(rollout)["benchmark_row"] == "harbor_tasks/one"


def test_a_verdict_that_replaces_the_gold_is_verified_against_the_row(
    folder: Path, endpoint: ChatEndpoint
) -> None:
    exact = "    return {'answer': response.output_text, 'reward': response.output_text == row['answer']}\n"
    (folder / "grader.py").write_text(f"def grade(row, response):\n{exact}")
    assert run(*SUMS, "--model", f"{endpoint.url}#m", "-o", "out").exit_code == 0
    graph = {
        "models": {"policy": {"type": "scripted_model"}},
        "resources": {"sums": {"type": "graded", "function": "grader.py:grade"}},
        "agents": {"sums--m": {"type": "simple_agent", "model": "policy", "resources": "sums"}},
    }
    (folder / "graph.json").write_bytes(orjson.dumps(graph))
    for before, after in (("out/rollouts.jsonl", "one.jsonl"), ("one.jsonl", "two.jsonl")):
        arguments = ["reverify", before, "-o", after, "--graph", "graph.json", "--no-ray"]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        again = [orjson.loads(line) for line in (folder / after).read_bytes().splitlines()]
        assert [(one["reward"], one["answer"]) for one in again] == [(0.0, "It is 4.")] * 3
        assert sorted(one["_ng_replaced"]["answer"] for one in again) == [4, 4, 391]


def test_a_mistake_of_the_grader_names_its_line(folder: Path, endpoint: ChatEndpoint) -> None:
    (folder / "grader.py").write_text("def grade(row, response):\n    return row['nosuch']\n")
    done = run(*SUMS, "--model", f"{endpoint.url}#m", "-o", "out")
    assert done.exit_code == 3
    assert "grader.py:2 in grade: KeyError: 'nosuch'" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(): ...\n", "grader.py has no function grade"),
        ("def grade(:\n", "SyntaxError"),
    ],
)
def test_a_grader_that_cannot_be_used_stops_the_start(folder: Path, text: str, message: str) -> None:
    (folder / "grader.py").write_text(text)
    done = run(*SUMS, "--model", "scripted", "-o", "out")
    assert done.exit_code == 1
    assert f"sums did not start: {message}" in done.output.replace(f"AttributeError: {folder}/", "")


def test_limits_of_rollouts_and_of_the_run(folder: Path, endpoint: ChatEndpoint) -> None:
    limits = (
        *("--max-turns", "3", "--sample-tokens", "500", "--sample-seconds", "60"),
        *("--price", "m=1e3/2e3", "--sample-cost", "0.5", "--max-cost", "9"),
    )
    arguments = (*SUMS, "--model", f"{endpoint.url}#m", *limits, "-o", "out")
    done = run(*arguments, "--max-seconds", "1e-9")
    assert done.exit_code == 4
    assert "the run has lasted 1e-09 seconds" in " ".join(done.output.split())
    assert endpoint.requests == []
    assert "stopped before its end" in (folder / "out" / "report.html").read_text()
    done = run(*arguments, "--resume", "--json")
    assert done.exit_code == 0, done.output
    results = orjson.loads(done.stdout)
    assert results["agent"] == {"max_steps": 3, "max_episode_tokens": 500, "episode_timeout": 60.0}
    assert (results["models"][0]["prices"], results["notes"]) == ({"input": 1e3, "output": 2e3}, [])
    assert results["cost"] > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--sample-cost", "1"), "--sample-cost needs prices: --price scripted=INPUT/OUTPUT"),
        (("--price", "other=1/2"), "--price names other; models are scripted"),
        (("--max-cost", "1"), "eval: --price MODEL=INPUT/OUTPUT"),
    ],
)
def test_costs_need_prices(folder: Path, options: tuple[str, ...], problem: str) -> None:
    done = run(*SUMS, "--model", "scripted", "-o", "out", *options)
    assert done.exit_code == 1
    assert problem in " ".join(done.output.split())


def test_a_check_needs_no_model() -> None:
    done = run("mmlu", "--check", "--json")
    assert (done.exit_code, orjson.loads(done.stdout)) == (0, {"ok": True, "benchmarks": {"mmlu": []}})
