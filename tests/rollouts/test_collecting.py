"""`collect`: all of the rows or none, into files that a later process goes on with."""

import asyncio
import gzip
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.rollouts import (
    JSON,
    FakeAgent,
    collection,
    keys,
    read_jsonl,
    row,
    rows,
    scored,
    with_backend,
    write_jsonl,
)

from gym_serve.rollouts import Progress, PromptTemplate, check_run, collect, collecting, files
from gym_serve.types.errors import BadRequest, Conflict, InvalidRequest, NotFound, Unavailable


async def test_the_files_of_a_run(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    output = tmp_path / "out.jsonl"
    agent = FakeAgent(errors={(1, 0): [Unavailable("gone")], (2, 1): [BadRequest("never")]})
    report = await collect(source, output, collection(agent, repeats=2))
    assert keys(read_jsonl(output)) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert all(r["reward"] == 1.0 and r["agent_ref"]["name"] == "agent" for r in read_jsonl(output))
    failures = read_jsonl(output.with_name("out_failures.jsonl"))
    assert keys(failures) == [(1, 0), (2, 1)]
    inputs = read_jsonl(output.with_name("out_materialized_inputs.jsonl"))
    assert [r["_ng_rollout_id"] for r in inputs] == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert inputs[0]["responses_create_params"] == {"input": "question 0"}
    assert report.complete
    assert report.progress == Progress(
        total=6,
        finished=6,
        scored=5,
        earlier=0,
        running=0,
        failed_attempts={"unavailable": 1, "bad_request": 1},
        mean_reward=1.0,
        tokens=report.spent.tokens,
    )
    assert (report.progress.failed, report.progress.remaining) == (1, 0)


async def test_the_metrics_of_a_run(tmp_path: Path) -> None:
    agent = FakeAgent(errors={(0, 0): [Unavailable("gone")], (1, 0): [BadRequest("never")]})
    source = [
        row(0, agent_ref={"name": "b"}),
        row(1, agent_ref={"name": "a"}),
        row(2, agent_ref={"name": "a"}),
    ]
    report = await collect(source, tmp_path / "out.jsonl", collection(agent))
    stored = orjson.loads((tmp_path / "out_aggregate_metrics.json").read_bytes())
    assert [entry["agent_ref"] for entry in stored] == [{"name": "a"}, {"name": "b"}]
    assert [entry["failures"] for entry in stored] == [{"bad_request": 1}, {"unavailable": 1}]
    assert [entry["agent_metrics"]["mean/reward"] for entry in stored] == [1.0, 1.0]
    assert [group["missing_num_rollouts"] for group in stored[0]["group_level_metrics"]] == [1, 0]
    assert report.metrics == [{k: v for k, v in e.items() if k != "group_level_metrics"} for e in stored]


BAD = b"""{"responses_create_params": {"input": "x"}}
{"responses_create_params": {"input": NaN}}
[1]
{"responses_create_params": {"input": "x", "tempratur": 1}}
{"no": "params"}
{"responses_create_params": {"input": "\xff"}}
{"responses_create_params": {"input": "y"}, "agent_ref": {"name": "nobody"}}
{"responses_create_params": {"input": "z"}}
"""


def check(row: JSON) -> None:
    if row["agent_ref"]["name"] != "agent":
        raise NotFound(f"no agent {row['agent_ref']['name']!r}")


async def test_bad_rows_are_all_named_and_nothing_starts(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(BAD)
    agent = FakeAgent()
    strict = collection(agent)
    with pytest.raises(InvalidRequest) as caught:
        await collect(source, tmp_path / "out.jsonl", with_backend(strict, checks=check))
    lines = caught.value.message.splitlines()
    assert lines[0] == "6 rows cannot be used, so nothing was started:"
    assert [line.split(": ")[0] for line in lines[1:]] == [f"  - {source}:{n}" for n in range(2, 8)]
    assert "no agent 'nobody'" in lines[-1]
    assert "tempratur" in lines[3]
    assert agent.ran == []
    assert not (tmp_path / "out_materialized_inputs.jsonl").exists()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.iterdir()}


async def test_what_would_be_refused_is_known_before(tmp_path: Path) -> None:
    """And looking for it leaves everything as it is."""
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    agent = FakeAgent()
    with pytest.raises(InvalidRequest, match=r"cannot read .*rows\.jsonl"):
        await check_run(source, output, collection(agent))
    source.write_bytes(BAD)
    with pytest.raises(InvalidRequest, match="nothing was started") as caught:
        await check_run(source, output, with_backend(collection(agent), checks=check))
    assert "nobody" in caught.value.message
    write_jsonl(source, rows(3))
    await check_run(source, output, collection(agent))
    assert contents(tmp_path) == {source: source.read_bytes()}

    await collect(source, output, collection(agent))
    before = contents(tmp_path)
    await check_run(source, output, collection(agent), resume=True)
    with pytest.raises(Conflict, match="holds a run"):
        await check_run(source, output, collection(agent))
    with pytest.raises(Conflict, match="repeats: was 1, is 2"):
        await check_run(source, output, collection(agent, repeats=2), resume=True)
    assert contents(tmp_path) == before


async def test_bad_rows_can_be_left_out(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(BAD)
    lenient = collection(FakeAgent())
    lenient = with_backend(lenient, checks=check)
    report = await collect(source, tmp_path / "out.jsonl", lenient, skip_invalid=True)
    assert [r["responses_create_params"]["input"] for r in read_jsonl(tmp_path / "out.jsonl")] == ["x", "z"]
    assert len(report.problems) == 6
    again = await collect(source, tmp_path / "out.jsonl", lenient, skip_invalid=True, resume=True)
    assert again.progress.earlier == 2


@pytest.mark.parametrize("content", [b"", b"\r\n\r\n"])
@pytest.mark.parametrize("skip_invalid", [False, True])
async def test_no_rows(tmp_path: Path, content: bytes, skip_invalid: bool) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(content)
    with pytest.raises(
        InvalidRequest, match=r"there are no rows, so nothing was started:\n  - .*rows.jsonl: empty"
    ):
        await collect(source, tmp_path / "out.jsonl", collection(FakeAgent()), skip_invalid=skip_invalid)


async def test_only_bad_rows(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no row can be used"):
        await collect([{"x": 1}], tmp_path / "out.jsonl", collection(FakeAgent()), skip_invalid=True)


async def test_notes_are_in_the_report(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + orjson.dumps(row(0)) + b"\r\n")
    report = await collect(source, tmp_path / "out.jsonl", collection(FakeAgent()))
    assert report.notes == [f"{source}:1: skipped a byte order mark", f"{source}:1: lines end in CRLF"]


async def stopped_after(count: int, source: Any, output: Path, **options: Any) -> None:
    """Collect until about ``count`` rollouts are in, then stop as Ctrl-C does."""
    stop = asyncio.Event()
    agent = FakeAgent(lambda row: asyncio.sleep(0.001))

    def progress(now: Progress) -> None:
        if now.finished >= count:
            stop.set()

    report = await collect(source, output, collection(agent, **options), progress=progress, stop=stop)
    assert not report.complete
    assert report.metrics == []
    assert count <= report.progress.finished <= count + 2 * 8
    assert agent.cancelled == []
    assert len(read_jsonl(output)) == report.progress.scored if output.suffix == ".jsonl" else True


async def test_a_stopped_run_is_resumed(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    await stopped_after(20, rows(50), output, repeats=2)
    before = read_jsonl(output)
    agent = FakeAgent()
    report = await collect(rows(50), output, collection(agent, repeats=2), resume=True)
    after = read_jsonl(output)
    assert after[: len(before)] == before
    assert keys(after) == [(task, n) for task in range(50) for n in range(2)]
    assert len(agent.ran) == 100 - len(before)
    assert (report.progress.earlier, report.progress.finished) == (len(before), 100)
    assert len({r["_ng_run_id"] for r in after}) == 1


async def test_a_run_that_is_stopped_before_it_begins(tmp_path: Path) -> None:
    stop = asyncio.Event()
    stop.set()
    agent = FakeAgent()
    report = await collect(rows(9), tmp_path / "out.jsonl", collection(agent), stop=stop)
    assert agent.ran == []
    assert (report.complete, report.progress.remaining) == (False, 9)


async def test_a_finished_run_is_resumed_to_no_effect(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for _ in range(2):
        agent = FakeAgent()
        report = await collect(rows(5), output, collection(agent), resume=True)
    assert agent.ran == []
    assert report.complete
    assert len(read_jsonl(output)) == 5
    assert report.metrics[0]["agent_metrics"]["mean/reward"] == 1.0


async def test_failed_attempts_are_carried_over(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    agent = FakeAgent(
        errors={(0, 0): [Unavailable("1")], (1, 0): [Unavailable("1")] * 9, (2, 0): [BadRequest("no")]}
    )
    once = collection(agent)
    once = replace(once, options=type(once.options)(attempts=1))
    report = await collect(rows(4), output, once)
    assert report.progress.failed == 3
    report = await collect(rows(4), output, collection(agent), resume=True)
    assert agent.attempts == {(0, 0): 2, (1, 0): 3, (2, 0): 1, (3, 0): 1}
    assert keys(read_jsonl(output)) == [(0, 0), (3, 0)]
    failures = read_jsonl(tmp_path / "out_failures.jsonl")
    assert Counter(r["_ng_rollout_id"] for r in failures) == Counter(
        ["0-0", "1-0", "1-0-a1", "1-0-a2", "2-0"]
    )
    assert (report.progress.scored, report.progress.failed) == (2, 2)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
async def test_compressed_outputs(tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"out.jsonl{suffix}"
    await stopped_after(5, rows(30), output)
    await collect(rows(30), output, collection(FakeAgent()), resume=True)

    def content(path: Path) -> bytes:
        if suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        return files.zstd.decompress(path.read_bytes())

    for name in ("out", "out_materialized_inputs"):
        lines = [orjson.loads(line) for line in content(tmp_path / f"{name}.jsonl{suffix}").splitlines()]
        assert keys(lines) == [(task, 0) for task in range(30)]


CHANGES = [
    ({"repeats": 3}, "expansion.repeats: was 2, is 3"),
    ({"limit": 7}, "expansion.limit: was null, is 7"),
    ({"seed": 0}, "expansion.seed: was null, is 0"),
    ({"shard": (1, 2)}, r"expansion.shard: was null, is \[1,2\]"),
    ({"params": {"temperature": 0.5}}, "expansion.params.temperature: is new, 0.5"),
    ({"agent": "other"}, 'expansion.agent: was null, is "other"'),
    ({"graph": {"agents": {"agent": {"max_steps": 9}}}}, "graph.agents.agent.max_steps: was 3, is 9"),
    ({"graph": {"agents": {}}}, "graph.agents.agent: was .*, is missing"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
async def test_another_run_is_not_mixed_in(tmp_path: Path, change: JSON, said: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", rows(10))
    output = tmp_path / "out.jsonl"
    await stopped_after(3, source, output, repeats=2)
    before = output.read_bytes()
    agent = FakeAgent()
    with pytest.raises(Conflict, match=said):
        await collect(source, output, collection(agent, **{"repeats": 2, **change}), resume=True)
    assert agent.ran == []
    assert output.read_bytes() == before


async def test_a_changed_file_is_explained(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", rows(30))
    output = tmp_path / "out.jsonl"
    await stopped_after(3, source, output)
    write_jsonl(source, [*rows(29), row(99)])
    with pytest.raises(
        Conflict, match=r"was started on .* with other settings(.|\n)*the rows or their prompts"
    ):
        await collect(source, output, collection(FakeAgent()), resume=True)


async def test_changed_rows_of_the_caller_are_explained(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    await stopped_after(3, rows(30), output)
    with pytest.raises(Conflict, match=r"input.rows: was 30, is 29"):
        await collect(rows(29), output, collection(FakeAgent()), resume=True)


async def test_a_changed_prompt_is_explained(tmp_path: Path) -> None:
    source = [{"q": n} for n in range(30)]
    output = tmp_path / "out.jsonl"
    await stopped_after(3, source, output, prompt=PromptTemplate("{q}?"))
    with pytest.raises(Conflict, match=r'expansion.prompt.user: was "\{q\}\?", is "\{q\}!"'):
        await collect(source, output, collection(FakeAgent(), prompt=PromptTemplate("{q}!")), resume=True)


async def test_without_its_inputs_a_run_is_not_resumed(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    await stopped_after(3, rows(30), output)
    (tmp_path / "out_materialized_inputs.jsonl").unlink()
    with pytest.raises(Conflict, match=r"out_materialized_inputs.jsonl is missing"):
        await collect(rows(30), output, collection(FakeAgent()), resume=True)


async def test_two_collections_into_one_file(tmp_path: Path) -> None:
    second: list[Exception] = []

    async def act(row: JSON) -> None:
        if row["number"] == 0:
            try:
                await collect(rows(3), tmp_path / "out.jsonl", collection(FakeAgent()), resume=True)
            except Conflict as error:
                second.append(error)

    report = await collect(rows(3), tmp_path / "out.jsonl", collection(FakeAgent(act)))
    assert report.complete
    assert "is being written by another process" in str(second[0])


async def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gym_serve.rollouts.files import RecordFile

    output = tmp_path / "out.jsonl"
    append = RecordFile.append
    acknowledged: list[Progress] = []

    def full(self: RecordFile, record: JSON) -> None:
        if self.size > 3000:
            raise Unavailable("no space left")
        append(self, record)

    agent = FakeAgent()
    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append", full)
        with pytest.raises(Unavailable, match="no space left"):
            await collect(rows(100), output, collection(agent), progress=acknowledged.append)
    assert agent.running == 0
    assert len(read_jsonl(output)) >= acknowledged[-1].scored > 0
    await collect(rows(100), output, collection(agent), resume=True)
    assert keys(read_jsonl(output)) == [(task, 0) for task in range(100)]


def replaced(path: Path) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").replace(path)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def appended_to(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"{}\n")


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        ("out.jsonl", Path.unlink, "out.jsonl was deleted while this run wrote it"),
        ("out.jsonl", replaced, "out.jsonl was replaced while this run wrote it"),
        ("out.jsonl", emptied, "out.jsonl was changed by another program"),
        ("out.jsonl", appended_to, "out.jsonl was changed by another program"),
        ("out_failures.jsonl", Path.unlink, "out_failures.jsonl was deleted"),
        ("out_run.json", Path.unlink, "out_run.json was deleted"),
        ("out_materialized_inputs.jsonl", Path.unlink, "out_materialized_inputs.jsonl was deleted"),
    ],
)
async def test_output_that_is_lost_under_a_run_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: tuple[str, Any, str], at_the_end: bool
) -> None:
    name, harm, said = loss
    monkeypatch.setattr(collecting, "_SYNC_SECONDS", 3600.0 if at_the_end else 0.01)

    async def lose(row: JSON) -> None:
        if row["number"] == 5:
            harm(tmp_path / name)
        if row["number"] > 5 and not at_the_end:
            await asyncio.Event().wait()  # the run would go on for hours

    agent = FakeAgent(lose)
    work = collection(agent, concurrency=2)
    with pytest.raises(Conflict, match=said):
        await collect(rows(8), tmp_path / "out.jsonl", work)
    assert agent.running == 0
    assert not (tmp_path / "out_aggregate_metrics.json").exists()


@pytest.mark.parametrize("output", ["mispelt/out.jsonl", "a/b/c/out.jsonl.zst"])
async def test_no_folder_is_created(tmp_path: Path, output: str) -> None:
    agent = FakeAgent()
    with pytest.raises(BadRequest, match=r"folder .* does not exist; create it first"):
        await collect(rows(8), tmp_path / output, collection(agent))
    assert agent.ran == []
    assert not (tmp_path / output).parent.exists()


async def test_cancelling_closes_everything(tmp_path: Path) -> None:
    running = asyncio.Event()

    async def hang(row: JSON) -> None:
        running.set()
        await asyncio.Event().wait()

    agent = FakeAgent(hang)
    task = asyncio.ensure_future(collect(rows(30), tmp_path / "out.jsonl", collection(agent)))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert agent.running == 0
    report = await collect(rows(30), tmp_path / "out.jsonl", collection(FakeAgent()), resume=True)
    assert report.progress.scored == 30


async def test_rows_that_can_be_drawn_only_once(tmp_path: Path) -> None:
    report = await collect(iter(rows(20)), tmp_path / "out.jsonl", collection(FakeAgent(), repeats=2))
    assert report.progress.scored == 40


async def test_an_empty_shard(tmp_path: Path) -> None:
    report = await collect(rows(1), tmp_path / "out.jsonl", collection(FakeAgent(), shard=(2, 2)))
    assert report.complete
    assert report.progress.total == 0


async def test_agents_are_asked_for_their_metrics(tmp_path: Path) -> None:
    asked: list[tuple[str, list[JSON]]] = []

    async def aggregate(agent: str, rollouts: list[JSON]) -> JSON:
        asked.append((agent, rollouts))
        return {"group_level_metrics": [{"own": 1}], "agent_metrics": {"own/metric": 5.0}, "key_metrics": {}}

    agent = FakeAgent(errors={(0, 0): [Unavailable("gone")], (1, 0): [BadRequest("never")]})
    plain = collection(agent)
    report = await collect(rows(3), tmp_path / "out.jsonl", with_backend(plain, aggregate=aggregate))
    assert report.metrics == [
        {
            "agent_ref": {"name": "agent"},
            "agent_metrics": {"own/metric": 5.0},
            "key_metrics": {},
            "coverage": {"scored": 2, "asked": 3},
            "failures": {"bad_request": 1, "unavailable": 1},
        }
    ]
    ((name, rollouts),) = asked
    assert name == "agent"
    assert keys(rollouts) == [(0, 0), (1, 0), (2, 0)]
    assert "responses_create_params" not in rollouts[0]
    assert rollouts[0]["response"] == {"usage": {"output_tokens": 1}}


@pytest.mark.parametrize("answer", [NotFound("no such route"), None, {"no": "groups"}])
async def test_an_agent_that_gives_no_metrics(
    tmp_path: Path, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def aggregate(agent: str, rollouts: list[JSON]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    plain = collection(scored_async)
    report = await collect(rows(3), tmp_path / "out.jsonl", with_backend(plain, aggregate=aggregate))
    assert report.metrics[0]["agent_metrics"]["mean/reward"] == 1.0
    assert "agent agent gave no metrics" in caplog.text


async def scored_async(row: JSON) -> JSON:
    return scored(row)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "it must be a regular file"),
        (os.mkdir, "Is a directory"),
        (lambda path: os.symlink(path, path), "Too many levels of symbolic links"),
        (lambda path: os.symlink(path.with_name("x" * 260), path), "File name too long"),
        (lambda path: os.symlink("/nowhere/out.jsonl", path), "does not exist; create it first"),
    ],
    ids=["pipe", "folder", "loop", "long name", "no folder"],
)
async def test_an_output_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, make: Any, problem: str
) -> None:
    make(out := tmp_path / "out.jsonl")
    source = tmp_path / "rows.jsonl"
    write_jsonl(source, rows(1))
    for started in (check_run, collect):
        with pytest.raises(BadRequest, match=f"^cannot write .*{problem}"):
            await started(source, out, collection(FakeAgent()))


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe, text = tmp_path / "rows", b'{"prompt": "a"}\n' * 1000
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[text])
    writer.start()
    with files.regular(pipe) as rows:
        assert [rows.read_bytes(), rows.read_bytes()] == [text, text]
    writer.join()
    assert not rows.exists()
    with files.regular(tmp_path / "missing.jsonl") as rows:
        assert rows == tmp_path / "missing.jsonl"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:20]], "out_materialized_inputs.jsonl:30 is damaged: "),
        (
            lambda lines: [b"[]\n", *lines],
            "out_materialized_inputs.jsonl:1 is damaged: it must be a JSON object",
        ),
        (
            lambda lines: [b'{"q": 1}\n', *lines],
            "out_materialized_inputs.jsonl:1 is damaged: .*_ng_task_index",
        ),
        (
            lambda lines: lines[:-2],
            "out_materialized_inputs.jsonl holds 28 of the run's 30 rollouts; restore",
        ),
    ],
)
async def test_with_other_inputs_a_run_is_not_resumed(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], said: str
) -> None:
    output, inputs = tmp_path / "out.jsonl", tmp_path / "out_materialized_inputs.jsonl"
    await stopped_after(3, rows(30), output)
    inputs.write_bytes(b"".join(damage(inputs.read_bytes().splitlines(keepends=True))))
    with pytest.raises(Conflict, match=said):
        await collect(rows(30), output, collection(FakeAgent()), resume=True)
