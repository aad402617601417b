"""What `collect` writes, every reader takes: also a rollout of 60 MB."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.rollouts import JSON, collection, keys, row, write_jsonl
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.rollouts import Report, collect, files
from gym_serve.rollouts import rows as rows_module
from gym_serve.rollouts.files import read_records
from gym_serve.rollouts.journal import _SPARE_BYTES
from gym_serve.types.errors import InvalidRequest

SIZE = 60_000_000
ROWS = 4


async def run(row: JSON) -> JSON:
    """A verifier's log, an image or a tool's output may be as long as that."""
    text = "x" * SIZE if (row["number"], row["_ng_rollout_index"]) == (1, 1) else "short"
    output = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": text},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
    ]
    reward = float(row["_ng_rollout_index"] % 2)
    return {**row, "response": {"output": output, "usage": {"output_tokens": 1}}, "reward": reward}


def collected(output: Path, source: Path, shard: tuple[int, int] | None = None, **options: Any) -> Report:
    work = collection(run, repeats=2, shard=shard, concurrency=2)
    return asyncio.run(collect(source, output, work, **options))


def ran(*words: Any) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert "longer than" not in result.output
    return result.output


@pytest.mark.thorough
def test_a_rollout_of_60_mb_goes_through_everything(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [row(number) for number in range(ROWS)])
    parts = [tmp_path / f"part{part}.jsonl" for part in (1, 2)]
    for part, output in enumerate(parts, 1):
        report = collected(output, source, (part, 2))
        assert report.progress.failed == 0
        assert collected(output, source, (part, 2), resume=True).progress.earlier == ROWS
    whole = tmp_path / "out.jsonl"
    ran("merge", *parts, "-o", whole)
    assert collected(whole, source, resume=True).progress.earlier == 2 * ROWS
    assert keys(read_records(whole)) == [(task, index) for task in range(ROWS) for index in range(2)]
    assert whole.stat().st_size > SIZE
    said = ran("profile", whole, "-o", tmp_path / "next.jsonl")
    assert f"to train on next: {ROWS} of {ROWS} tasks" in said
    assert f"{ROWS} tasks in both runs" in ran("diff", whole, whole)
    exported = tmp_path / "sft.jsonl"
    assert f"{2 * ROWS} records of {2 * ROWS} rollouts" in ran("export", whole, "--to", "sft", "-o", exported)
    # Rollouts are rows as well.
    report = collected(tmp_path / "again.jsonl", whole)
    assert (report.progress.scored, report.problems) == (4 * ROWS, [])


def test_what_no_reader_would_take_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows_module, files):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", _SPARE_BYTES + 20_000)
    source = write_jsonl(tmp_path / "rows.jsonl", [row(0), row(1, padding="y" * 19_600), row(2)])

    async def long(row: JSON) -> JSON:
        return {**await run({**row, "number": 0}), "log": "x" * 30_000 * (row["_ng_task_index"] < 2)}

    output = tmp_path / "out.jsonl"
    report = asyncio.run(collect(source, output, collection(long)))
    assert (report.progress.scored, report.progress.failed) == (1, 2)
    failures = list(read_records(tmp_path / "out_failures.jsonl"))
    assert all("the line must have at most 20,000 bytes, got" in f["failure"]["detail"] for f in failures)
    # With its failure the second row would be too long as well: it stands in the inputs alone.
    assert [("padding" in f, "responses_create_params" in f) for f in failures] == [
        (False, True),
        (False, False),
    ]
    assert ran("profile", output)


def test_a_row_that_is_too_long_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows_module, files):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 2000)
    output = tmp_path / "out.jsonl"
    with pytest.raises(InvalidRequest, match=r"task 1: the line must have at most 2,000 bytes, got 2,\d+"):
        asyncio.run(collect([row(0), row(1, padding="y" * 1900)], output, collection(run)))
    assert not output.stat().st_size
