"""`gym-serve play`, and `gym-serve collect --no-ray`: without Ray, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_serve.cli import main

ROOT = Path(__file__).parents[2]
WEATHER = str(ROOT / "graphs" / "weather.yaml")
ROWS = ROOT / "environments" / "simple_weather" / "data" / "example.jsonl"

runner = CliRunner()


def test_an_environment_is_played_with_its_first_example() -> None:
    done = runner.invoke(main, ["play", "simple_weather"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    heads = [line.partition(" ")[0] for line in lines if "──" in line]
    assert heads[:4] == ["system", "user", "tools", "model"]
    assert heads[-1] == "verdict"
    assert all(len(line) <= 80 for line in lines)
    assert "not_asked: " in done.stdout  # the verifier's own fields say why


def test_a_person_plays_and_sees_results_as_they_come() -> None:
    typed = '/get_weather {"city": "Paris"}\nIt is \x1b[31mcold.\n'
    done = runner.invoke(main, ["play", WEATHER, f"{ROWS}:1", "--human"], input=typed)
    assert done.exit_code == 0, done.output
    asked, called, result, answer, verdict = (
        done.stdout.index(text)
        for text in ("your answer, or /get_weather", "calls get_weather", "weather_desc", "It is", "verdict")
    )
    assert asked < called < result < answer < verdict
    assert "\x1b" not in done.stdout


def test_a_row_can_be_written_out_and_the_rollout_be_json() -> None:
    row = {"responses_create_params": {"input": "Hello"}, "cities": []}
    done = runner.invoke(
        main, ["play", "simple_weather", json.dumps(row), "--human", "--json"], input="Hello\n"
    )
    rollout = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert rollout["response"]["output"][0]["content"][0]["text"] == "Hello"


def test_an_episode_without_a_reward_says_why() -> None:
    done = runner.invoke(main, ["play", WEATHER, "--human"], input="")
    assert done.exit_code == 1
    assert "failure" in done.stdout
    assert "the input ended before the episode" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simple_wether"], "did you mean 'simple_weather'"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["mcqa", "none.jsonl"], "none.jsonl"),
        (["mcqa", f"{ROWS}:99"], "has no row 99"),
        (["mcqa", "{nonsense"], "ROW is invalid JSON"),
        (
            [WEATHER, '{"agent_ref": {"name": "who"}, "responses_create_params": {"input": "x"}}'],
            "must be an agent of the graph, got 'who'",
        ),
    ],
)
def test_what_cannot_be_played_is_named(arguments: list[str], said: str) -> None:
    done = runner.invoke(main, ["play", *arguments])
    assert done.exit_code == 1
    assert said in done.stderr


def test_collect_without_ray(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = runner.invoke(main, ["collect", WEATHER, str(ROWS), "-o", str(out), "--no-ray"])
    assert done.exit_code == 0, done.output
    assert len(out.read_text().splitlines()) == 9
    again = runner.invoke(main, ["collect", WEATHER, str(ROWS), "-o", str(out), "--no-ray", "--resume"])
    assert again.exit_code == 0
    assert "9 of 9 rollouts" in again.output


def test_no_ray_is_for_graph_files(tmp_path: Path) -> None:
    arguments = ["collect", str(ROWS), "-o", str(tmp_path / "out.jsonl"), "--attach", "x", "--no-ray"]
    done = runner.invoke(main, arguments)
    assert done.exit_code == 2
    assert "--no-ray needs a graph file" in " ".join(done.stderr.replace("│", "").split())
