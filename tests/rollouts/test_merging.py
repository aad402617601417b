"""Shards, merged, are the run that was never divided."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from support.rollouts import FakeAgent, collection, keys, row, rows, write_jsonl

from gym_serve.rollouts import Outputs, collect, merge
from gym_serve.rollouts.files import RecordFile, read_records
from gym_serve.types.errors import BadRequest, Conflict, InvalidRequest, Unavailable


async def shard(source: Any, folder: Path, part: int, count: int, suffix: str = "", **options: Any) -> Path:
    output = folder / f"part{part}.jsonl{suffix}"
    errors = {(3, 0): [Unavailable("gone")], (4, 1): [BadRequest("never")]}
    await collect(
        source, output, collection(FakeAgent(errors=errors), shard=(part, count), repeats=2, **options)
    )
    return output


@pytest.mark.parametrize("suffix", ["", ".gz"])
async def test_merging(tmp_path: Path, suffix: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*rows(10), row(3)])
    parts = [await shard(source, tmp_path, part, 3, suffix) for part in (3, 1, 2)]
    merged = tmp_path / f"all.jsonl{suffix}"
    metrics = await merge(parts, merged)
    found = list(read_records(merged))
    whole = {(task, rollout) for task in range(10) for rollout in range(2)} | {(3, 2), (3, 3)}
    assert keys(found) == sorted(whole - {(4, 1)})
    assert keys(read_records(Outputs.of(merged).failures)) == [(3, 0), (4, 1)]
    assert metrics[0]["failures"] == {"bad_request": 1, "unavailable": 1}
    (stored,) = orjson.loads((tmp_path / "all_aggregate_metrics.json").read_bytes())
    assert len(stored["group_level_metrics"]) == 10

    agent = FakeAgent()
    report = await collect(source, merged, collection(agent, repeats=2), resume=True)
    assert agent.ran == []
    assert report.progress.earlier == report.progress.total == 22


async def test_what_a_shard_lacks_is_made_by_resuming(tmp_path: Path) -> None:
    parts = [await shard(rows(6), tmp_path, part, 2) for part in (1, 2)]
    content = parts[0].read_bytes().splitlines(keepends=True)
    parts[0].write_bytes(b"".join(content[:2]))
    await merge(parts, tmp_path / "all.jsonl")
    agent = FakeAgent()
    report = await collect(rows(6), tmp_path / "all.jsonl", collection(agent, repeats=2), resume=True)
    assert len(agent.ran) == len(content) - 2
    assert report.progress.scored == 11


async def test_shards_that_do_not_fit(tmp_path: Path) -> None:
    first, second = [await shard(rows(6), tmp_path, part, 2) for part in (1, 2)]
    output = tmp_path / "all.jsonl"
    with pytest.raises(InvalidRequest, match="shards are missing: 2/2"):
        await merge([first], output)
    (tmp_path / "again").mkdir()
    again = await shard(rows(6), tmp_path / "again", 1, 2)
    with pytest.raises(InvalidRequest, match="are both shard 1"):
        await merge([first, again], output)
    with pytest.raises(InvalidRequest, match=r"nothing.jsonl does not exist"):
        await merge([first, tmp_path / "nothing.jsonl"], output)
    with pytest.raises(InvalidRequest, match="at least one shard"):
        await merge([], output)
    (tmp_path / "other").mkdir()
    other = await shard(rows(6), tmp_path / "other", 2, 2, seed=1)
    with pytest.raises(InvalidRequest, match=r"are of different runs: .*expansion.seed: was null, is 1"):
        await merge([first, other], output)
    await collect(rows(2), tmp_path / "whole.jsonl", collection(FakeAgent()))
    with pytest.raises(InvalidRequest, match="is not a shard"):
        await merge([tmp_path / "whole.jsonl"], output)
    with RecordFile(second, exclusive=True), pytest.raises(Conflict, match="is being written"):
        await merge([first, second], output)
    assert not output.exists()
    with pytest.raises(Conflict, match=r"whole\.jsonl exists"):
        await merge([first, second], tmp_path / "whole.jsonl")
