"""`gym-serve dataset`: every problem with file and line, and what render makes of rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import write_lines
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.graph import load_graph

runner = CliRunner()
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(map(str, ROOT.glob("environments/*/data/example.jsonl")))


def row(prompt: Any = "Hello?", **keys: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": prompt}, **keys}


def problems_of(tmp_path: Path, *rows: dict[str, Any]) -> list[str]:
    file = write_lines(tmp_path / "rows.jsonl", rows)
    result = runner.invoke(main, ["dataset", "validate", str(file), "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if report["problems"] else 0)
    return [problem.removeprefix(f"{file}:") for problem in report["problems"]]


def graph_with(agent: str) -> str:
    """The shipped graph that has an agent."""
    graphs = sorted(ROOT.glob("graphs/*.yaml"))
    return str(next(graph for graph in graphs if agent in load_graph(graph).spec.agents))


def graph_of(environment: str) -> str:
    graphs = sorted(ROOT.glob("graphs/*.yaml"))
    return str(next(graph for graph in graphs if f"{{type: {environment}," in graph.read_text()))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: Path(file).parts[-3])
def test_shipped_rows_are_valid_and_their_graph_can_run_them(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POLICY", "JUDGE"):
        monkeypatch.setenv(f"{name}_BASE_URL", "http://127.0.0.1:9/v1")
        monkeypatch.setenv(f"{name}_MODEL", "any")
    with open(file, encoding="utf-8") as lines:
        ref = json.loads(next(lines)).get("agent_ref")
    # Rows that several graphs share name no agent; any graph of the environment will do.
    graph = graph_with(ref["name"]) if ref else graph_of(Path(file).parts[-3])
    result = runner.invoke(main, ["dataset", "validate", file, "--graph", graph])
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1


MESSAGE = {"role": "user", "content": "Hello?"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({}, "responses_create_params: Field required"),
        (row(stop=1) | {"responses_create_params": {"input": "x", "stop": 1}}, "params.stop: Extra inputs"),
        (row([{"role": "usr", "content": "x"}]), "input[0].role must be one of user, assistant"),
        (
            row([{"role": "user", "content": None}]),
            "input[0].content must be a string or a list",
        ),
        (row([{"role": "user", "content": ["x"]}]), "input[0].content[0] must be an object with a type"),
        (
            row([{"role": "user", "content": [{"type": "input_text"}]}]),
            "content[0].text must be a string",
        ),
        (row([MESSAGE, {**CALL, "arguments": {}}]), "input[1].arguments must be a string, got {}"),
        (row([{"type": "function_call_output", "call_id": "c1", "output": "x"}]), "no function_call before"),
        (
            row([CALL, {"type": "function_call_output", "call_id": "c1"}]),
            "output must be a string or a list",
        ),
        (row([{"type": "reasoning"}]), "input[0].summary must be a list"),
        (row(agent_ref="math"), "agent_ref must be {"),
        (row(agent_ref={"name": "a", "type": "model"}), "agent_ref.type must be 'responses_api_agents'"),
        (row(extra_body="{}"), "extra_body must be an object"),
        (row(_ng_task_index=-1), "_ng_task_index must be an integer"),
        (row(_ng_rollout_index="0"), "_ng_rollout_index must be an integer"),
    ],
)
def test_rows_that_cannot_be_run(tmp_path: Path, bad: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(tmp_path, row(), bad)
    assert found.startswith("2: ")
    assert problem in found


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].type must be a string"),
        ({"tools": [{"type": "function"}]}, "tools[0].name must be a string"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "beside type, not in 'function'"),
        (
            {"tools": [{"type": "function", "name": "f"}] * 2},
            "tools: each must have a name of its own, got",
        ),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "parameters must be a JSON schema"),
        ({"metadata": []}, "metadata must be an object"),
        ({"temperature": 3}, "temperature must be a number from 0 to 2, got 3"),
        (
            {"metadata": {"extra_body": {"seed": 1}}},
            "metadata.extra_body must be a JSON object written as a string",
        ),
        ({"metadata": {"extra_body": "[]"}}, "metadata.extra_body must be a JSON object written as a string"),
        ({"metadata": {"chat_template_kwargs": "{"}}, "metadata.chat_template_kwargs must be a JSON object"),
    ],
)
def test_request_parameters_that_cannot_be_run(tmp_path: Path, params: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(tmp_path, {"responses_create_params": {"input": "x", **params}})
    assert problem in found


def test_what_the_contract_allows_is_no_problem(tmp_path: Path) -> None:
    output = {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": "x"}],
    }
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:..."}]}
    params = {
        "input": [
            MESSAGE,
            {"type": "reasoning", "summary": []},
            CALL,
            output,
            image,
            {"type": "web_search_call"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}],
        "metadata": {"extra_body": '{"seed": 1}', "note": "x"},
    }
    rich = {"responses_create_params": params, "extra_body": {}, "agent_ref": {"name": "a"}, "_rowidx": 4}
    assert problems_of(tmp_path, rich, row([]), row("")) == []


def test_all_kinds_of_bad_lines_are_named_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = json.dumps(row()).encode()
    lines = [b"\xef\xbb\xbf" + good + b"\r\n", b"[1]\n", b'{"a": NaN}\n', b'{"a": "\xff"}\n', b"\n", b"{"]
    file.write_bytes(b"".join(lines))
    result = runner.invoke(main, ["dataset", "validate", str(file)])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"{file}:2: a row must be a JSON object, got a list",
        f"{file}:3: NaN is not valid JSON; use null",
        f"{file}:4: byte 0xff at 7 is not UTF-8",
        f"{file}:6: not JSON: unexpected end of data at column 2",
    ]
    assert f"note: {file}:1: skipped a byte order mark" in result.stdout
    assert f"{file}: 5 rows, 4 with problems" in result.stdout


def test_empty_missing_and_compressed_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    result = runner.invoke(main, ["dataset", "validate", str(empty)])
    assert (result.exit_code, result.stderr) == (1, f"{empty}: empty\n")
    result = runner.invoke(main, ["dataset", "validate", "missing.jsonl"])
    assert (result.exit_code, result.stderr) == (1, "cannot read missing.jsonl: No such file or directory\n")
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(row()).encode()))
    assert runner.invoke(main, ["dataset", "validate", str(packed)]).exit_code == 0


def test_the_graph_knows_agents_and_what_verifiers_need(tmp_path: Path) -> None:
    rows = [
        row(agent_ref={"name": "mth_agent"}),
        row(agent_ref={"name": "math_agent"}, question="1+1?"),
        row(agent_ref={"name": "math_agent"}, question="1+1?", expected_answer="2"),
        row(),
    ]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    graph = str(ROOT / "graphs" / "quickstart.yaml")
    result = runner.invoke(main, ["dataset", "validate", str(file), "--graph", graph])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"{file}:1: agent_ref.name: the graph has no agent 'mth_agent'; did you mean 'math_agent'?",
        f"{file}:2: expected_answer: Field required (the environment of math_agent)",
        f"{file}:4: agent_ref: missing, and the graph has no default agent; known: weather_agent, "
        "mcqa_agent, math_agent",
    ]
    broken = tmp_path / "graph.yaml"
    broken.write_text("agents: {a: {type: simple_agnt}}")
    result = runner.invoke(main, ["dataset", "validate", str(file), "--graph", str(broken)])
    assert result.exit_code == 1
    assert "did you mean 'simple_agent'?" in result.stderr


def test_duplicates_are_noted_with_the_first_place(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", [row("1"), row("2"), row("1")])
    b = write_lines(tmp_path / "b.jsonl", [row("3"), row("2")])
    report = json.loads(runner.invoke(main, ["dataset", "validate", str(a), str(b), "--json"]).stdout)
    assert report["ok"] is True
    assert report["duplicates"] == 2
    assert report["notes"] == [f"{a}:3: the same row as {a}:1", f"{b}:2: the same row as {a}:2"]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["render", "x.jsonl"], "--prompt"),
        (["validate"], "Missing argument"),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], message: str) -> None:
    result = runner.invoke(main, ["dataset", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "prompt.yaml"
    path.write_text('system: "Be brief."\nuser: "What is {question}?"\n')
    return str(path)


def test_render_writes_prompts(tmp_path: Path, template: str) -> None:
    rows = write_lines(
        tmp_path / "rows.jsonl", [{"question": n, "responses_create_params": {}} for n in "ab"]
    )
    printed = runner.invoke(main, ["dataset", "render", str(rows), "--prompt", template, "--limit", "1"])
    assert printed.exit_code == 0, printed.output
    (first,) = [json.loads(line) for line in printed.stdout.splitlines()]
    assert first["responses_create_params"]["input"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a?"},
    ]
    out = tmp_path / "out.jsonl"
    written = runner.invoke(main, ["dataset", "render", str(rows), "--prompt", template, "-o", str(out)])
    assert written.exit_code == 0, written.output
    assert [line["question"] for line in read(out)] == ["a", "b"]


def test_render_reports_all_problems_and_writes_nothing(tmp_path: Path, template: str) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [row("x", question="q"), {"answer": 1}, {"question": "q"}])
    out = tmp_path / "out.jsonl"
    arguments = ["dataset", "render", str(rows), "--prompt", template, "-o", str(out)]
    result = runner.invoke(main, arguments)
    assert result.exit_code == 1
    assert (
        f"{rows}:1: `responses_create_params.input` must be left out: the prompt template makes it"
        in result.stderr
    )
    assert f"{rows}:2: the prompt template needs the keys question; the row has answer" in result.stderr
    assert not out.exists()
    assert runner.invoke(main, [*arguments, "--skip-invalid"]).exit_code == 1
    assert len(read(out)) == 1
