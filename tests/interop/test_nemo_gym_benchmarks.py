"""Benchmarks of NeMo Gym by name: config, rows, prompt and prepare script of a folder in its layout."""

from pathlib import Path

import pytest
import yaml

from gym_serve.evaluation.plan import Request
from gym_serve.types.errors import InvalidRequest, NotFound, Unavailable

CONFIG = {
    "made_server": {"resources_servers": {"mcqa": {"entrypoint": "app.py", "grading_mode": "lenient_boxed"}}},
    "made_agent": {
        "responses_api_agents": {
            "simple_agent": {
                "entrypoint": "app.py",
                "max_steps": 1,
                "resources_server": {"type": "resources_servers", "name": "made_server"},
                "model_server": {"type": "responses_api_models", "name": "policy_model"},
                "datasets": [
                    {
                        "name": "made",
                        "type": "benchmark",
                        "jsonl_fpath": "benchmarks/made/data/rows.jsonl",
                        "prompt_config": "benchmarks/made/prompt.yaml",
                        "num_repeats": 2,
                    }
                ],
            }
        }
    },
}
PREPARE = """
import json, pathlib
folder = pathlib.Path(__file__).parent / "data"
folder.mkdir()
row = {"question": "Which is a metal?", "options": [{"A": "iron"}, {"B": "salt"}], "expected_answer": "A"}
(folder / "rows.jsonl").write_text(json.dumps(row) + "\\n")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_GYM", str(tmp_path))
    place = tmp_path / "benchmarks" / "made"
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (place / "prompt.yaml").write_text('user: "{question} Answer in \\\\boxed{{}}."\n')
    (place / "prepare.py").write_text(PREPARE)
    return place


@pytest.mark.parametrize("by_path", [False, True])
def test_a_benchmark_by_name_or_path(folder: Path, by_path: bool) -> None:
    (benchmark,) = Request([f"nemo_gym:{folder if by_path else 'made'}"], ["scripted"]).find()
    assert benchmark.environment == {"type": "mcqa", "grading_mode": "lenient_boxed"}
    assert benchmark.agent == {"type": "simple_agent", "max_steps": 1}
    assert benchmark.repeats == 2
    ((_, row, _),) = benchmark.rows()  # its script has made the file
    assert row is not None
    assert row["responses_create_params"]["input"] == [
        {"role": "user", "content": "Which is a metal? Answer in \\boxed{}."}
    ]
    assert row["expected_answer"] == "A"


def test_a_script_that_fails_is_told(folder: Path) -> None:
    (folder / "prepare.py").write_text("raise SystemExit('no network')")
    (benchmark,) = Request(["nemo_gym:made"], ["scripted"]).find()
    with pytest.raises(Unavailable, match=r"prepare\.py failed: no network"):
        next(benchmark.rows())


def test_a_name_that_there_is_not(folder: Path) -> None:
    with pytest.raises(NotFound, match="NeMo Gym has no benchmark 'nosuch'"):
        Request(["nemo_gym:nosuch"], ["scripted"]).find()


def test_a_config_without_data(folder: Path) -> None:
    agent = CONFIG["made_agent"]["responses_api_agents"]["simple_agent"]
    bare = {key: value for key, value in agent.items() if key != "datasets"}
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**CONFIG, "made_agent": {"responses_api_agents": {"simple_agent": bare}}})
    )
    with pytest.raises(InvalidRequest, match="has no data set"):
        Request(["nemo_gym:made"], ["scripted"]).find()
