"""`gym-serve play`, and `gym-serve collect --no-ray`: without Ray, in this process."""

import json
from pathlib import Path

import pytest
from support.upstream import ChatEndpoint
from typer.testing import CliRunner

import gym_serve.view
from gym_serve import ResourcesServer, Verdict, VerifyRequest
from gym_serve.cli import main

ROOT = Path(__file__).parents[2]
WEATHER = str(ROOT / "graphs" / "weather.yaml")
ROWS = ROOT / "environments" / "simple_weather" / "data" / "example.jsonl"

MCQA = ROOT / "environments" / "mcqa" / "data" / "example.jsonl"

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


def test_a_verdict_stands_beside_the_rows_own_keys_with_its_reason() -> None:
    row = {"responses_create_params": {"input": "Hello"}, "cities": ["Par\x1b[31mis"]}
    done = runner.invoke(main, ["play", f"{__name__}:Strict", json.dumps(row), "--human"], input="Hello\n")
    assert done.exit_code == 0, done.output
    heads = ("row  its own keys", "cities: [", "verdict  reward 0", "reason: no city named")
    places = [done.stdout.index(text) for text in heads]
    assert places == sorted(places)
    assert "\x1b" not in done.stdout


class Strict(ResourcesServer):
    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=0.0, reason="no city named\x1b[2J")


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


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_number_of_any_size_is_shown(options: list[str]) -> None:
    row = {"responses_create_params": {"input": "x"}, "expected_answer": "A", "bound": 2**70}
    done = runner.invoke(main, ["play", "string_match", json.dumps(row), *options])
    assert (done.exit_code, str(2**70) in done.stdout) == (0, True), done.output


def test_collect_without_ray(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = runner.invoke(main, ["collect", WEATHER, str(ROWS), "-o", str(out), "--no-ray"])
    assert done.exit_code == 0, done.output
    assert len(out.read_text().splitlines()) == 9
    again = runner.invoke(main, ["collect", WEATHER, str(ROWS), "-o", str(out), "--no-ray", "--resume"])
    assert again.exit_code == 0
    assert "9 of 9 rollouts" in again.output


def test_collect_with_the_model_of_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no key."""
    monkeypatch.delenv("POLICY_API_KEY", raising=False)
    out = str(tmp_path / "out.jsonl")
    with ChatEndpoint("\\boxed{A}") as endpoint:
        done = runner.invoke(main, ["collect", "mcqa", "-o", out, "--no-ray", "-m", f"{endpoint.url}#m"])
    assert (done.exit_code, done.stderr.count("problem")) == (0, 0), done.output


def test_one_mean_reward_in_all_tables_and_a_note_on_rows_that_repeat(tmp_path: Path) -> None:
    """S10: equal rows are attempts at one task, everywhere, and the report says so."""
    row, other = (json.loads(line) for line in MCQA.read_text().splitlines()[:2])
    rows, out = tmp_path / "rows.jsonl", str(tmp_path / "out.jsonl")
    rows.write_text("".join(json.dumps(one) + "\n" for one in (row, row, other)))
    done = runner.invoke(main, ["collect", "mcqa", str(rows), "-o", out, "--no-ray"])
    assert "note: 3 rows are 2 tasks" in done.stdout
    rewards = [json.loads(line)["reward"] for line in Path(out).read_text().splitlines()]
    profile = json.loads(runner.invoke(main, ["profile", out, "--json"]).stdout)
    diff = json.loads(runner.invoke(main, ["diff", out, out, "--json"]).stdout)
    metrics = json.loads((tmp_path / "out_aggregate_metrics.json").read_text())
    with gym_serve.view.open(out) as view:
        viewer = view.summary()["runs"][0]
    mean = profile["mean_reward"]["value"]
    assert mean == diff["estimates"][0]["a"] == viewer["mean_reward"]
    assert f"{mean:.3f}" in done.stdout.splitlines()[1]
    assert metrics[0]["agent_metrics"]["mean/reward"] == pytest.approx(sum(rewards) / 3)
    assert profile["notes"][0].startswith("3 rows are 2 tasks")
    assert [note[:2] for note in diff["notes"]] == ["A:", "B:"]


def test_rollouts_that_nemo_gym_recorded_are_profiled_and_scored_again(tmp_path: Path) -> None:
    """They have the row, the response and the verdict, and neither an agent nor the metadata of a run."""
    out, again = tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    rollouts = []
    for row in (json.loads(line) for line in MCQA.read_text().splitlines()[:2]):
        said = {"type": "output_text", "text": f"\\boxed{{{row['expected_answer']}}}", "annotations": []}
        message = {"type": "message", "id": "m", "role": "assistant", "content": [said]}
        own = {key: value for key, value in row.items() if key != "agent_ref"}
        rollouts += [{**own, "response": {"id": "r", "output": [message]}, "reward": 0.0}] * 2
    out.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    profile = json.loads(runner.invoke(main, ["profile", str(out), "--json"]).stdout)
    assert (profile["tasks"], profile["rollouts"], profile["pass_rate"]["value"]) == (2, 4, 0.0)
    arguments = ["reverify", str(out), "-o", str(again), "--graph", "mcqa", "--no-ray"]
    done = runner.invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["reward"] for line in again.read_text().splitlines()] == [1.0] * 4


def test_a_prompt_template_makes_the_input(tmp_path: Path) -> None:
    template = tmp_path / "prompt.yaml"
    template.write_text("system: Be brief.\nuser: 'How is it in {place}?'\n")
    row = json.dumps({"place": "Paris"})
    done = runner.invoke(main, ["play", f"{__name__}:Strict", row, "--prompt", str(template)])
    assert done.exit_code == 0, done.output
    assert "How is it in Paris?" in done.stdout
    done = runner.invoke(main, ["play", f"{__name__}:Strict", "{}", "--prompt", str(template)])
    assert (done.exit_code, "needs the keys place" in done.stderr) == (1, True)


def test_no_ray_is_for_graph_files(tmp_path: Path) -> None:
    arguments = ["collect", str(ROWS), "-o", str(tmp_path / "out.jsonl"), "--attach", "x", "--no-ray"]
    done = runner.invoke(main, arguments)
    assert done.exit_code == 2
    assert "--no-ray needs a graph file" in " ".join(done.stderr.replace("│", "").split())
