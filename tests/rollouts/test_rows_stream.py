"""Rollouts start when the first rows are checked; what the other rows bring is told, and loses nothing."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rollouts import JSON, FakeAgent, collection, keys, read_jsonl, row, rows, write_jsonl

from gym_serve.rollouts import Outputs, Progress, collect, collecting, merge
from gym_serve.rollouts.files import read_records
from gym_serve.rollouts.journal import Header
from gym_serve.types.errors import Conflict, InvalidRequest


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "FIRST", 3)


class SlowRows:
    """Rows whose source waits, after the first ones, until it is told to go on."""

    def __init__(self, content: list[JSON], first: int) -> None:
        self.go_on = threading.Event()
        self._content = content
        self._first = first

    def __iter__(self) -> Iterator[JSON]:
        yield from self._content[: self._first]
        assert self.go_on.wait(60)
        yield from self._content[self._first :]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
async def test_rollouts_are_made_while_rows_are_read(tmp_path: Path, suffix: str) -> None:
    source, output = SlowRows(rows(20), 5), tmp_path / f"out.jsonl{suffix}"
    told: list[Progress] = []

    def progress(now: Progress) -> None:
        told.append(now)
        if now.finished == 5:
            source.go_on.set()

    report = await collect(source, output, collection(FakeAgent()), progress=progress)
    assert (told[0].reading, told[0].finished) == (True, 0)
    assert next(now for now in told if now.finished == 5).reading
    assert (report.complete, report.progress.reading, report.progress.total) == (True, False, 20)
    assert keys(read_records(output)) == keys(read_records(Outputs.of(output).inputs))
    header = Header.read(Outputs.of(output).header)
    assert header is not None
    assert (header.rollouts, header.problems, header.input) == (20, 0, header.input)
    again = await collect(rows(20), output, collection(FakeAgent()), resume=True)
    assert again.progress.earlier == 20


async def test_a_row_that_is_bad_later_is_told_at_the_end(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_jsonl(source, [*rows(10), {"no": "prompt"}, *rows(12)[10:]])
    report = await collect(source, output, collection(FakeAgent()))
    assert report.complete
    assert (report.unusable, report.progress.left_out, report.progress.scored) == (1, 1, 12)
    assert report.problems[0].startswith(f"{source}:11: ")
    again = await collect(source, output, collection(FakeAgent()), resume=True)
    assert (again.unusable, again.progress.earlier) == (1, 12)
    skipped = await collect(source, tmp_path / "b.jsonl", collection(FakeAgent()), skip_invalid=True)
    assert (skipped.unusable, skipped.progress.left_out) == (0, 1)


async def stopped_while_reading(output: Path, content: list[JSON]) -> None:
    source, stop = SlowRows(content, 8), asyncio.Event()

    def progress(now: Progress) -> None:
        if now.finished == 8:
            stop.set()
            source.go_on.set()

    report = await collect(source, output, collection(FakeAgent()), progress=progress, stop=stop)
    assert (report.complete, report.progress.finished, report.progress.reading) == (False, 8, True)


async def test_a_run_that_was_stopped_while_rows_were_read_is_resumed(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    content = rows(2000)  # more than one step of reading
    await stopped_while_reading(output, content)
    inputs = Outputs.of(output).inputs
    with inputs.open("ab") as file:
        file.write(b'{"torn')
    agent = FakeAgent()
    report = await collect(content, output, collection(agent), resume=True)
    assert report.complete
    assert len(agent.ran) == 2000 - 8
    assert keys(read_jsonl(output)) == keys(read_jsonl(inputs)) == [(task, 0) for task in range(2000)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:4], "fewer rows than when the run began"),
        (lambda content: [*content[:4], row(99), *content[5:]], "rollout 4-0 is another one than when"),
    ],
)
async def test_such_a_run_is_not_resumed_with_other_rows(tmp_path: Path, change, said: str) -> None:
    output = tmp_path / "out.jsonl"
    await stopped_while_reading(output, rows(2000))
    before, agent = output.read_bytes(), FakeAgent()
    with pytest.raises(Conflict, match=said):
        await collect(change(rows(2000)), output, collection(agent), resume=True)
    assert agent.ran == []
    assert output.read_bytes() == before


async def test_such_a_shard_is_not_merged(tmp_path: Path) -> None:
    await stopped_while_reading(tmp_path / "out.jsonl", rows(2000))
    with pytest.raises(InvalidRequest, match="stopped while its rows were read; resume it first"):
        await merge([tmp_path / "out.jsonl"], tmp_path / "all.jsonl")


async def test_a_source_that_fails_ends_the_run(tmp_path: Path) -> None:
    """What was made is kept, and the run is resumed."""
    output, agent = tmp_path / "out.jsonl", FakeAgent()
    made = threading.Event()

    def failing() -> Iterator[JSON]:
        yield from rows(5)
        assert made.wait(60)
        raise OSError("the source is away")

    def progress(now: Progress) -> None:
        if now.finished == 5:
            made.set()

    with pytest.raises(OSError, match="the source is away"):
        await collect(failing(), output, collection(agent), progress=progress)
    report = await collect(rows(9), output, collection(agent), resume=True)
    assert (report.progress.earlier, report.progress.scored) == (5, 9)


async def test_a_file_that_changes_while_it_is_read_ends_the_run(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", rows(2000))

    def progress(now: Progress) -> None:
        if now.finished == 0:
            write_jsonl(source, rows(2001))

    with pytest.raises(Conflict, match="was changed while its rows were read"):
        await collect(source, tmp_path / "out.jsonl", collection(FakeAgent()), progress=progress)
