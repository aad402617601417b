"""A benchmark trains as it evaluates: the same rows, prompt and verifier, for every trainer."""

import pickle
from pathlib import Path

import orjson
import pyarrow.parquet
import pytest
import yaml
from typer.testing import CliRunner

from gym_serve import AsyncGym, Gym
from gym_serve.cli import main
from gym_serve.evaluation import find_benchmark
from gym_serve.rollouts.rows import LocatedRow
from gym_serve.training.episodes import row_of
from gym_serve.training.trl import dataset
from gym_serve.training.verl import _row_of as verl_row
from gym_serve.types.errors import InvalidRequest, NotFound
from gym_serve.types.protocols.items import message_item

BENCHMARK = """
name: capitals
description: Capitals of countries.
license: CC0-1.0
rows: {file: "{split}.csv", splits: {train: train, test: test}}
environment: {type: string_match}
map: {expected_answer: capital}
prompt: What is the capital of {{ country }}?
"""
MODEL = {"type": "scripted_model", "script": [[message_item("Final answer: Oslo")]]}


@pytest.fixture
def capitals(tmp_path: Path) -> str:
    (tmp_path / "train.csv").write_text("country,capital\nNorway,Oslo\nPeru,Lima\n")
    (tmp_path / "test.csv").write_text("country,capital\nChile,Santiago\n")
    (tmp_path / "capitals.yaml").write_text(BENCHMARK)
    return str(tmp_path / "capitals.yaml")


def rows_of(capitals: str, split: str = "train") -> list[dict[str, object]]:
    return [row for _, row, _ in find_benchmark(capitals).rows(split) if row is not None]


def test_a_gym_has_the_rows_of_a_split(capitals: str) -> None:
    with Gym.from_benchmark(capitals, MODEL, ray=False) as gym:
        assert [row.row for row in gym.rows if isinstance(row, LocatedRow)] == rows_of(capitals)
        rollouts = gym.run(gym.rows)
        assert [(rollout["country"], rollout["reward"]) for rollout in rollouts] == [
            ("Norway", 1.0),
            ("Peru", 0.0),
        ]
        assert gym.run(gym.rows)[0]["country"] == "Norway"  # from their beginning again
        assert pickle.loads(pickle.dumps(gym.rows)) == gym.rows
    with Gym.from_benchmark(capitals, "scripted", split="test", ray=False) as gym:
        assert [rollout["country"] for rollout in gym.run(gym.rows)] == ["Chile"]


async def test_the_asynchronous_gym_is_the_same(capitals: str) -> None:
    async with await AsyncGym.from_benchmark(capitals, MODEL, ray=False) as gym:
        rollouts = [rollout async for rollout in gym.rollouts(gym.rows, order="row")]
    assert [rollout["benchmark_row"] for rollout in rollouts] == ["capitals/0", "capitals/1"]


def test_a_graph_has_no_rows() -> None:
    with Gym.from_graph("graphs/weather.yaml", ray=False) as gym:
        assert list(gym.rows) == []


def test_what_is_not_there_is_told_before_anything_starts(capitals: str) -> None:
    with pytest.raises(NotFound, match="no benchmark 'gsm9k'"):
        Gym.from_benchmark("gsm9k", "scripted", ray=False)
    with pytest.raises(InvalidRequest, match="has no split 'dev'; it has train, test"):
        Gym.from_benchmark(capitals, "scripted", split="dev", ray=False)
    with pytest.raises(InvalidRequest, match="choose its model"):
        Gym.from_benchmark("simpleqa", "scripted", split="test", ray=False)


def test_the_data_set_of_trl_has_its_prompts_and_rows(capitals: str) -> None:
    with Gym.from_benchmark(capitals, MODEL, ray=False) as gym:
        data = dataset(gym.rows)
    assert data["prompt"][0] == [{"role": "user", "content": "What is the capital of Norway?"}]
    assert [orjson.loads(text) for text in data["row"]] == rows_of(capitals)


def test_files_for_trainers_that_are_started_with_files(capitals: str, tmp_path: Path) -> None:
    parquet, plain, graph = tmp_path / "rows.parquet", tmp_path / "rows.jsonl", tmp_path / "graph.yaml"
    for output in (parquet, plain):
        arguments = ["dataset", "benchmark", capitals, "--graph", str(graph), "-o", str(output)]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        assert "2 rows" in done.output
    rows = rows_of(capitals)
    assert [orjson.loads(line) for line in plain.read_bytes().splitlines()] == rows
    records = pyarrow.parquet.read_table(parquet).to_pylist()
    assert [record["prompt"] for record in records] == [
        [{"role": "user", "content": f"What is the capital of {name}?"}] for name in ("Norway", "Peru")
    ]
    assert [verl_row(record) for record in records] == rows
    assert [row_of(record) for record in records] == rows  # SkyRL, AReaL; OpenRLHF by its label
    assert [row_of(record["metadata"]) for record in records] == rows  # slime
    with Gym.from_graph(yaml.safe_load(graph.read_text()), ray=False) as gym:
        assert [rollout["country"] for rollout in gym.run(plain)] == ["Norway", "Peru"]


def test_a_row_with_a_problem_is_told_and_nothing_is_written(capitals: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("country\nNorway\n")
    output = tmp_path / "rows.parquet"
    done = CliRunner().invoke(main, ["dataset", "benchmark", capitals, "-o", str(output)])
    assert done.exit_code == 1
    assert "`capital`: the row has no such field" in " ".join(done.output.split())
    assert not output.exists()
