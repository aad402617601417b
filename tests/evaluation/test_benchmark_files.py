"""Benchmarks: their files, rows of the published schemas, and the checks that a publishable one passes."""

from pathlib import Path

import pytest
import yaml

from gym_serve.evaluation import Benchmark, benchmark_names, find_benchmark
from gym_serve.evaluation.checking import problems_of_benchmark
from gym_serve.evaluation.plan import Request
from gym_serve.evaluation.sources import file_rows
from gym_serve.rollouts.rows import LocatedRow
from gym_serve.types.errors import InvalidRequest, NotFound, Unavailable

CAPITALS = {
    "name": "capitals",
    "description": "Capitals.",
    "license": "CC0-1.0",
    "rows": {"file": "capitals.csv"},
    "environment": {"type": "string_match"},
    "map": {"expected_answer": "capital"},
    "prompt": "What is the capital of {{ country }}?",
    "answer": "Final answer: {{ expected_answer }}",
    "sample": [{"row": {"country": "Norway", "capital": "Oslo"}}],
}


def capitals(folder: Path, **changes: object) -> Benchmark:
    (folder / "capitals.csv").write_text("country,capital\nNorway,Oslo\nPeru,Lima\n")
    (folder / "capitals.yaml").write_text(yaml.safe_dump({**CAPITALS, **changes}))
    return find_benchmark(str(folder / "capitals.yaml"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", benchmark_names())
def test_right_answers_score_one_and_empty_ones_less(name: str) -> None:
    assert list(problems_of_benchmark(find_benchmark(name))) == []


def test_there_are_many_of_several_kinds() -> None:
    benchmarks = [find_benchmark(name) for name in benchmark_names()]
    assert len(benchmarks) >= 20
    assert len({benchmark.environment["type"] for benchmark in benchmarks}) >= 10
    assert all(benchmark.name == name for benchmark, name in zip(benchmarks, benchmark_names(), strict=True))


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    benchmark = capitals(tmp_path)
    rows = [row for _, row, _ in benchmark.rows(agent="a")]
    assert rows[1] == {
        "country": "Peru",
        "capital": "Lima",
        "expected_answer": "Lima",
        "benchmark_row": "capitals/1",
        "agent_ref": {"type": "responses_api_agents", "name": "a"},
        "responses_create_params": {"input": [{"role": "user", "content": "What is the capital of Peru?"}]},
    }
    assert list(problems_of_benchmark(benchmark)) == []


def test_a_file_says_which_splits_it_has(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("country,capital\nChile,Santiago\n")
    rows = {"file": "{split}.csv", "splits": {"train": "train", "test": "capitals"}}
    benchmark = capitals(tmp_path, rows=rows)
    countries = {
        split: [row["country"] for _, row, _ in benchmark.rows(split) if row] for split in ("train", "test")
    }
    assert countries == {"train": ["Chile"], "test": ["Norway", "Peru"]}
    with pytest.raises(InvalidRequest, match=r"capitals.csv has no split 'train'; it has test"):
        next(capitals(tmp_path).rows("train"))
    with pytest.raises(InvalidRequest, match=r"file must have \{split\}, as there are test, train"):
        capitals(tmp_path, rows={**rows, "file": "capitals.csv"})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"answer": "Final answer: Rome"}, "capitals.sample:1: the right answer scores 0.0"),
        ({"answer": None}, "capitals.sample:1: it has no right answer"),
        ({"sample": []}, "it has no sample"),
        ({"map": {"expected_answer": "city"}}, "capitals.sample:1: `city`: the row has no such field"),
    ],
)
def test_a_check_says_what_is_wrong(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    assert [p[: len(problem)] for p in problems_of_benchmark(capitals(tmp_path, **changes))] == [problem]


def test_an_empty_answer_must_not_score(tmp_path: Path) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("def grade(row, response):\n    return True\n")
    benchmark = capitals(tmp_path, environment={"type": "graded", "function": f"{grader}:grade"})
    assert list(problems_of_benchmark(benchmark)) == ["capitals.sample:1: an empty answer scores 1.0"]


def test_columns_that_mean_something_else_in_a_row_are_left_out(tmp_path: Path) -> None:
    row = capitals(tmp_path).row(
        {"country": "Norway", "capital": "Oslo", "reward": 1, "response": {}, "agent_ref": 3}
    )
    assert not row.keys() & {"reward", "response", "agent_ref"}


def test_a_row_that_does_not_fit_has_its_place(tmp_path: Path) -> None:
    benchmark = capitals(tmp_path)
    (tmp_path / "capitals.csv").write_text("country\nNorway\n")
    ((where, row, problem),) = benchmark.rows()
    assert (where, row) == (f"{tmp_path}/capitals.csv:1", None)
    assert problem is not None
    assert "`capital`: the row has no such field" in problem


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl", "json", "arrow"])
def test_rows_of_files(tmp_path: Path, suffix: str) -> None:
    import datasets

    made = datasets.Dataset.from_list([{"country": "Norway", "capital": "Oslo"}])
    file = tmp_path / f"rows.{suffix}"
    if suffix == "arrow":
        made.save_to_disk(str(tmp_path / "set"))
        next((tmp_path / "set").glob("*.arrow")).rename(file)
    else:
        {"parquet": made.to_parquet, "csv": made.to_csv}.get(suffix, made.to_json)(file)
    rows = list(capitals(tmp_path).rows(file=str(file)))
    assert [row and row["expected_answer"] for _, row, _ in rows] == ["Oslo"]


def test_pictures_become_data_urls(tmp_path: Path) -> None:
    import datasets

    picture = b"\x89PNG\r\n\x1a\n"
    made = datasets.Dataset.from_list(
        [{"country": "Norway", "capital": "Oslo", "flag": {"bytes": picture, "path": None}}]
    )
    made.cast_column("flag", datasets.Image(decode=False)).to_parquet(tmp_path / "rows.parquet")
    ((_, row, _),) = capitals(tmp_path).rows(file=str(tmp_path / "rows.parquet"))
    assert row is not None
    assert row["flag"] == "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("request_", "error", "problem"),
    [
        (Request(["gsm8"], ["scripted"]), NotFound, "no benchmark 'gsm8'; did you mean 'gsm8k'"),
        (Request(["gsm8k"], ["gpt"]), InvalidRequest, "--model must be openai/NAME"),
        (Request(["nosuch:x"], ["scripted"]), NotFound, "no catalogue of benchmarks 'nosuch'"),
        (Request(["rows.csv"], ["scripted"]), InvalidRequest, "say how answers are scored"),
        (Request(["gsm8k", "gsm8k"], ["scripted"]), InvalidRequest, "two benchmarks are called gsm8k"),
        (Request(["gsm8k"], ["scripted"], files={"mmlu": "x"}), InvalidRequest, "--rows names mmlu"),
    ],
)
def test_a_request_that_means_nothing(request_: Request, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        request_.plan()


def test_a_judge_is_chosen_by_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="simpleqa: answers are scored by a judge; choose its model"):
        Request(["simpleqa"], ["scripted"]).plan().graph()
    graph = Request(["simpleqa"], ["scripted"], judge="http://h/v1#big").plan().graph()
    assert graph["models"]["judge"]["model"] == "big"


def test_models_have_names_of_their_own() -> None:
    models = (
        Request(["gsm8k"], ["http://a/v1#q/8b", "http://b/v1#q/8b", "hf:/w/q-8b/", "openai/x"]).plan().models
    )
    assert [model.server for model in models] == ["m-8b", "m-8b-2", "q-8b", "x"]


def test_a_source_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(**options: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(Unavailable, match=r"cannot load openai/gsm8k .main.: no route.*--rows NAME=FILE"):
        next(find_benchmark("gsm8k").rows())


def test_a_split_that_is_not_there() -> None:
    with pytest.raises(InvalidRequest, match="has no split 'train'; it has test"):
        next(find_benchmark("math_500").rows("train"))


def test_train_and_test_differ() -> None:
    benchmark = find_benchmark("countdown")
    first = [next(benchmark.rows(split, limit=1)) for split in ("train", "test")]
    assert all(isinstance(located, LocatedRow) and located.row for located in first)
    assert first[0].row != first[1].row


CSV = """question,answer,zip,gold,flag,big,size,level
q1,1.50,00501,None,True,18446744073709551617,3,1
"q,2",3.0,01002,NA,False,9007199254740993,3.5,2

q3,,10001,nan,True,-1,-2,
q4,1,1,1,True,1,1,1,1
q5
"""


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_a_value_of_csv_is_what_its_text_says(tmp_path: Path, suffix: str, delimiter: str) -> None:
    file = tmp_path / f"rows{suffix}"
    text = CSV.replace('"q,2"', "q2").replace(",", delimiter) if delimiter != "," else CSV
    file.write_text("\ufeff" + text, "utf-8")
    one, two, three, four, five = file_rows(str(file))
    assert one.row == {
        **{"question": "q1", "answer": "1.50", "zip": "00501", "gold": "None", "flag": True},
        **{"big": 2**64 + 1, "size": 3, "level": 1},
    }
    assert two.row is not None
    assert (two.row["answer"], two.row["gold"], two.row["big"], two.row["size"]) == (
        "3.0",
        "NA",
        2**53 + 1,
        3.5,
    )
    assert three.row is not None
    assert (three.row["answer"], three.row["gold"], three.row["level"]) == (None, "nan", None)
    assert (four.row, four.problem) == (None, "it has 9 values, and there are 8 columns")
    assert five.row == {**dict.fromkeys(one.row), "question": "q5"}


@pytest.mark.parametrize(
    ("content", "problem"), [(b"a,a\n1,2\n", "two columns"), (b"a\n\xff\n", "cannot read")]
)
def test_a_file_of_csv_that_cannot_be_read_is_told(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(InvalidRequest, match=problem):
        list(file_rows(str(tmp_path / "rows.csv")))
