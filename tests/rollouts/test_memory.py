"""Memory stays flat: 50,000 rows through the whole of `collect` cost far less than they take."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.rollouts import JSON, collection, row, scored

from gym_serve.rollouts import Progress, collect

COUNT = 50_000
ALLOWED = 16 << 20  # bytes, from 10% to 100%; a digest of each row is kept, a row takes 1 KB


def source(count: int) -> Iterator[JSON]:
    return (row(number, padding="x" * 200) for number in range(count))


async def run(row: JSON) -> JSON:
    return scored(row)


@pytest.mark.timeout(600)
async def test_collecting(tmp_path: Path) -> None:
    process = psutil.Process()
    seen: dict[int, int] = {}

    def progress(now: Progress) -> None:
        tenth = 10 * now.finished // now.total
        if tenth not in seen:
            seen[tenth] = process.memory_info().rss

    report = await collect(
        source(COUNT), tmp_path / "out.jsonl", collection(run, concurrency=64), progress=progress
    )
    assert report.progress.scored == COUNT
    growth = seen[10] - seen[1]
    assert growth < ALLOWED, (
        f"{growth >> 20} MiB from 10% to 100% ({ {k: v >> 20 for k, v in seen.items()} })"
    )
