"""`collect`: rows to files; nothing is lost and no rollout is made twice, whatever interrupts it.

1. Rows are checked and expanded into ``out_materialized_inputs.jsonl``: the first ones before anything runs,
   the others meanwhile (`Inputs`).
2. The `RolloutRunner` runs what the journal does not hold yet. Every result is in it before it is counted.
3. If an environment compares the rollouts of a row, its rewards replace the verifier's (`GroupStage`).
4. The metrics are computed from the files.

`merge`: joins the runs of all shards of one data set into one run, as if it had never been divided.

The result has a header of its own, without the shard, so rollouts that a shard still lacks can be made by
resuming the merged run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gym_serve.metrics import STATISTICS_ONLY, MetricSpec
from gym_serve.rollouts.expansion import FIRST, RESTORE, Expansion, Inputs, stored_groups
from gym_serve.rollouts.files import (
    RecordFile,
    read_records,
    readable_line,
    replace_records,
    replacing,
    run_in_threads,
)
from gym_serve.rollouts.groups import Compare, GroupStage
from gym_serve.rollouts.journal import Header, Journal, Outputs, differences
from gym_serve.rollouts.progress import (
    Aggregate,
    Budget,
    MetricSpecOf,
    Progress,
    Spending,
    Spent,
    Tally,
    Waiting,
    summarize_run,
)
from gym_serve.rollouts.rows import RUN_ID, Rows, rollout_key
from gym_serve.rollouts.runner import RolloutRunner, RunnerOptions, jobs_of
from gym_serve.rollouts.tables import IntTable
from gym_serve.servers.usage import Prices
from gym_serve.types.errors import Conflict, InvalidRequest, OperatorError
from gym_serve.types.requests import JSON
from gym_serve.types.rows import operator_error

_SYNC_SECONDS = 1.0


class RolloutBackend(Protocol):
    """What runs the rollouts of a collection: a graph (`gym_serve.client.rollout_client`), or any
    function."""

    async def run(self, row: JSON, /) -> JSON:
        """Run one episode of a materialized row; cancelling it cancels the episode."""
        ...

    def check(self, row: JSON, /) -> None:
        """Raise a `GymError` for a row that cannot be run."""
        return

    def description(self) -> JSON:
        """What decides what a rollout is, as JSON; a run is not resumed with another one."""
        return {}

    def prices(self) -> Mapping[str, Prices]:
        return {}

    async def comparer(self) -> Compare | None:
        """What compares the rollouts of a row, if anything does; asked for when all rollouts have ended."""
        return None

    def aggregator(self) -> Aggregate | None:
        """What asks an agent for metrics; None to compute all of them in this process."""
        return None

    def metric_spec(self, agent: str, /) -> MetricSpec:
        """The metrics of an agent, for those that are computed in this process."""
        return STATISTICS_ONLY


@dataclass(frozen=True)
class Collection:
    """What is collected, and how."""

    backend: RolloutBackend
    expansion: Expansion = field(default_factory=Expansion)
    options: RunnerOptions = field(default_factory=lambda: RunnerOptions(attempts=3))
    budget: Budget = field(default_factory=Budget)  # what the run may use, its earlier processes included


@dataclass(frozen=True)
class Report:
    """The result of a collection."""

    outputs: Outputs
    """Its files."""
    progress: Progress
    """The counts at the end."""
    metrics: list[JSON]
    """The metrics of each agent, without those of single tasks; empty if it was stopped."""
    problems: list[str]
    """The rows that were left out: place and reason of the first ones."""
    notes: list[str]
    """Anything unusual about the input, but harmless."""
    complete: bool
    """Whether all rows are read, every rollout is scored or its last attempt failed, and all groups that
    should be compared are; False if the run was stopped before that."""
    spent: Spent = field(default_factory=lambda: Spent({}))
    """Tokens and cost of its model calls, those of failed attempts included."""
    uncompared: list[str] = field(default_factory=list)
    """The groups that could not be compared, and why; resuming the run tries them again."""
    exhausted: str | None = None
    """The limit of the budget that stopped it; None if none did."""
    operator_error: OperatorError | None = None
    """The last error that only the operator can fix (a refused key, a wrong address), if it left rollouts
    open, whether it ended the run or not. Resuming the run makes those rollouts."""
    unusable: int = 0
    """How many rows could not be used, which was found when the run had begun; 0 with ``skip_invalid``."""


async def collect(
    rows: Rows,
    output: str | Path,
    collection: Collection,
    *,
    resume: bool = False,
    retry_failed: bool = False,
    skip_invalid: bool = False,
    progress: Callable[[Progress], None] = lambda progress: None,
    stop: asyncio.Event | None = None,
) -> Report:
    """Collect the rollouts of all rows into files.

    A result is *acknowledged*, i.e. counted in ``progress``, once it is written: from then on it survives a
    SIGKILL of this process, and within a second a power failure as well (`fsync`).

    Args:
        rows: rows, or the path of a JSONL file; read once, in another thread: the first 1,000 before anything
            runs, the others meanwhile.
        output: the main file, e.g. ``out.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst``; the others are beside it.
        retry_failed: resume, and make the rollouts again whose last attempt failed; each gets all of its
            attempts again. Earlier failures stay in the file of failures.
        skip_invalid: skip rows that cannot be used; without it, nothing starts if there is one among the
            first 1,000, and later ones are left out and counted as `Report.unusable`.
        progress: called with the counts after every batch of results and of comparisons.

    Raises:
        InvalidRequest: rows cannot be used (names all of the first 1,000), or there are none at all; or a
            limit of the budget is not usable.
        Conflict: ``output`` holds another run, is being written by another process, or was deleted,
            replaced or changed while this run wrote it.
        Unavailable: no space is left; every acknowledged result is in the files.
        BadRequest: a file cannot be written.
    """
    backend, prices = collection.backend, collection.backend.prices()
    collection.budget.check(prices)
    spending = Spending(prices, collection.budget)
    outputs = Outputs.of(output)
    inputs = Inputs(rows, collection.expansion, backend.check)
    metrics: list[JSON] = []
    with Journal(outputs, resume=resume or retry_failed) as journal, inputs:
        header = await _begun(journal, inputs, collection, skip_invalid=skip_invalid)
        tally = Tally()
        await run_in_threads(_recalled(journal, tally, spending))
        if retry_failed:
            await asyncio.to_thread(journal.forgive)
        tally.finish(journal.finished(collection.options.attempts))
        tally.begin()
        done, error = await _run(journal, inputs, collection, tally, spending, progress=progress, stop=stop)
        complete = not (done.remaining or done.reading)
        stage = GroupStage(outputs, header.run, collection.options, spending, stop)
        if complete and (compare := await backend.comparer()):
            complete = await stage.run(
                compare, lambda left, waits: progress(replace(done, comparing=left, waiting=waits))
            )
        if complete:
            metrics = await summarize_run(outputs, backend.aggregator(), backend.metric_spec)
    return Report(
        outputs,
        done if stage.mean_reward is None else replace(done, mean_reward=stage.mean_reward),
        metrics,
        inputs.problems.kept,
        inputs.problems.notes,
        complete,
        spending.spent(),
        stage.problems.kept,
        None if complete else spending.exhausted,
        None if complete else error or stage.operator_error,
        0 if skip_invalid else done.left_out,
    )


async def check_run(
    rows: str | Path,
    output: str | Path,
    collection: Collection,
    *,
    resume: bool = False,
    skip_invalid: bool = False,
) -> None:
    """Raise what `collect` would raise before it runs anything, without starting a graph."""
    collection.budget.check(collection.backend.prices())
    inputs, outputs = Inputs(rows, collection.expansion, collection.backend.check), Outputs.of(output)
    new = [path for path in (outputs.rollouts, outputs.failures) if not _is_there(path)]
    try:
        with Journal(outputs, resume=resume) as journal:
            if journal.header is not None:
                await _check_header(journal, inputs, collection)
            else:
                await inputs.read(FIRST)
                inputs.refuse(skip_invalid=skip_invalid)
    finally:
        for path in new:
            with suppress(OSError):  # it could not be created
                path.unlink()


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)  # a link that leads nowhere stays


async def _begun(journal: Journal, inputs: Inputs, collection: Collection, *, skip_invalid: bool) -> Header:
    """The header of a run whose first rows have been read."""
    path = journal.outputs.inputs
    if journal.header is not None:
        await _check_header(journal, inputs, collection)
        if journal.header.rollouts is None:
            inputs.store(path, anew=False)
            await inputs.read(FIRST)
        return journal.header
    try:
        inputs.store(path, anew=True)
        await inputs.read(FIRST)
        inputs.refuse(skip_invalid=skip_invalid)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    header = Header.new(
        source=inputs.source,
        prices={name: prices.model_dump() for name, prices in collection.backend.prices().items()},
        **_compared(collection),
    )
    if inputs.ended:
        header = await asyncio.to_thread(_completed, header, inputs)
    journal.begin(header)
    return header


async def _check_header(journal: Journal, inputs: Inputs, collection: Collection) -> None:
    """Raise a `Conflict` where a run cannot be resumed."""
    assert journal.header is not None
    if not journal.outputs.inputs.exists():
        name = journal.outputs.inputs.name
        raise Conflict(f"{journal.outputs.rollouts} cannot be resumed: {name} is missing")
    reading = journal.header.input is None  # then `Inputs` compares them one by one
    now = None if reading else await asyncio.to_thread(inputs.fingerprint)
    journal.header.check(journal.outputs.rollouts, input=now, **_compared(collection))


def _compared(collection: Collection) -> JSON:
    return {"expansion": collection.expansion.to_json(), "graph": collection.backend.description()}


async def _read_on(journal: Journal, inputs: Inputs) -> None:
    """Read the other rows, and complete the header."""
    assert journal.header is not None
    await inputs.read()
    inputs.sync()
    journal.begin(await asyncio.to_thread(_completed, journal.header, inputs))


def _completed(header: Header, inputs: Inputs) -> Header:
    rollouts, problems = inputs.rollouts, inputs.problems.count
    return replace(header, input=inputs.fingerprint(), rollouts=rollouts, problems=problems)


def _recalled(journal: Journal, tally: Tally, spending: Spending) -> Generator[None, None, None]:
    for record in journal.recover():
        tally.add(record)
        spending.add(record)
        yield


async def _run(
    journal: Journal,
    inputs: Inputs,
    collection: Collection,
    tally: Tally,
    spending: Spending,
    *,
    progress: Callable[[Progress], None],
    stop: asyncio.Event | None,
) -> tuple[Progress, OperatorError | None]:
    attempts = collection.options.attempts

    def read_so_far() -> int | None:
        assert journal.header is not None
        return inputs.rollouts if journal.header.rollouts is None else None

    def left() -> Iterator[list[JSON]]:
        for group in _groups_of(journal, read_so_far):
            todo = [row for row in group if journal.failed_attempts(row, attempts) is not None]
            if todo or not group:
                yield todo

    def now(running: int = 0, stopping: str | None = None, waiting: Waiting | None = None) -> Progress:
        header = journal.header
        assert header is not None
        tally.reading = header.rollouts is None
        tally.total = inputs.rollouts if header.rollouts is None else header.rollouts
        tally.left_out = inputs.problems.count if header.problems is None else header.problems
        return tally.progress(running, stopping, spending.tokens, waiting)

    def commit(row: JSON, rollout: JSON) -> None:
        record = journal.append(row, rollout)
        tally.add(record)
        spending.add(record)
        if spending.exhausted:
            runner.drain()

    runner = RolloutRunner(
        jobs_of(left(), lambda row: journal.failed_attempts(row, attempts) or (0, 0)),
        collection.backend.run,
        collection.options,
        on_result=commit,
    )
    if spending.exhausted or (stop is not None and stop.is_set()):
        runner.drain()
    elif stop is not None:
        runner.run_in_background(stop.wait(), lambda _: runner.drain())
    if (seconds := spending.seconds_left) is not None:
        runner.run_in_background(asyncio.sleep(seconds), lambda _: runner.drain())
    if read_so_far() is not None:
        runner.run_in_background(_read_on(journal, inputs), lambda _: None)
    synced, waiting = time.monotonic(), None
    try:
        progress(now())
        while runner.advance():
            for _, rollout in await runner.results(until=synced + _SYNC_SECONDS):
                if operator_error(rollout) is None:
                    tally.finish(1)
                else:
                    spending.add(rollout)  # it is in no file, because the rollout stays open
            fatal = runner.operator_errors.fatal
            stopping = None if fatal is None else fatal.message
            running, waiting = runner.scheduler.running, runner.waiting
            progress(now(running, stopping, waiting))
            if time.monotonic() >= synced + _SYNC_SECONDS:
                await asyncio.to_thread(inputs.sync)
                await asyncio.to_thread(journal.sync)
                journal.check()
                synced = time.monotonic()
        journal.check()
        tally.finish(-runner.left_open)
        return now(waiting=waiting), runner.operator_errors.last
    finally:
        await runner.close()


def _groups_of(journal: Journal, read_so_far: Callable[[], int | None]) -> Iterator[list[JSON]]:
    path, rollouts = journal.outputs.inputs, 0
    for group in stored_groups(path, read_so_far):
        rollouts += len(group)
        yield group
    assert journal.header is not None
    if rollouts != (whole := journal.header.rollouts):
        raise Conflict(f"{path} holds {rollouts:,} of the run's {whole:,} rollouts; {RESTORE}")


async def merge(
    shards: Sequence[str | Path],
    output: str | Path,
    aggregate: Aggregate | None = None,
    metric_spec: MetricSpecOf = lambda agent: STATISTICS_ONLY,
) -> list[JSON]:
    """Merge the runs of shards; returns the metrics of each agent, as `summarize_run` does.

    ``shards`` are their main files, in any order. Raises `InvalidRequest` if they are not all the shards of
    one data set, and `Conflict` if one is being written, or ``output`` exists.
    """
    sources = [Outputs.of(shard) for shard in shards]
    with ExitStack() as locks:
        for number, source in enumerate(sources):
            if not source.rollouts.is_file():
                problem = "is no file" if source.rollouts.exists() else "does not exist"
                raise InvalidRequest(f"{source.rollouts} {problem}, so there is no run to merge")
            if any(source.rollouts.samefile(other.rollouts) for other in sources[:number]):
                raise InvalidRequest(f"{source.rollouts} is given twice")
            locks.enter_context(RecordFile(source.rollouts, exclusive=True))
        await asyncio.to_thread(_merge, sources, Outputs.of(output))
    return await summarize_run(Outputs.of(output), aggregate, metric_spec)


def _merge(sources: list[Outputs], target: Outputs) -> None:
    headers = [_header(source) for source in sources]
    _check(sources, headers)
    for file in (target.rollouts, target.failures):
        if file.exists():
            raise Conflict(f"{file} exists; choose another file for the merged run")
    first = headers[0]
    merged = Header.new(
        input=first.input,
        expansion={**first.expansion, "shard": None},
        graph=first.graph,
        rollouts=sum(header.rollouts or 0 for header in headers),
        problems=first.problems,
        source=first.source,
        forgiven=sum(header.forgiven for header in headers),
        prices=first.prices,
        output=target.rollouts.name,
    )
    with ExitStack() as undo:
        for written in (target.inputs, target.header, target.failures, target.comparisons):
            undo.callback(written.unlink, missing_ok=True)
        with replacing(target.inputs) as inputs:
            for source in sources:
                for group in stored_groups(source.inputs):
                    inputs.write(b"".join(map(readable_line, group)))
        merged.write(target.header)
        _write(target.failures, _failures(sources, headers, merged.run))
        if any(source.comparisons.exists() for source in sources):
            _write(target.comparisons, _records([source.comparisons for source in sources], merged.run))
        # Written last: while it does not exist, there is no merged run.
        _write(target.rollouts, _once(_records([source.rollouts for source in sources], merged.run)))
        undo.pop_all()


def _header(source: Outputs) -> Header:
    header = Header.read(source.header)
    if header is None:
        raise InvalidRequest(f"{source.rollouts}: {source.header.name} is missing")
    if header.rollouts is None:
        raise InvalidRequest(f"{source.rollouts} was stopped while its rows were read; resume it first")
    return header


def _check(sources: list[Outputs], headers: list[Header]) -> None:
    if not headers:
        raise InvalidRequest("give at least one shard to merge")
    shards: dict[int, Path] = {}
    for source, header in zip(sources, headers, strict=True):
        if header.expansion["shard"] is None:
            raise InvalidRequest(f"{source.rollouts} is not a shard (its run was collected without --shard)")
        changes = list(differences(_common(headers[0]), _common(header)))
        if changes:
            raise InvalidRequest(
                f"{source.rollouts} and {sources[0].rollouts} are of different runs: {'; '.join(changes[:5])}"
            )
        shard = header.expansion["shard"][0]
        if shard in shards:
            raise InvalidRequest(f"{source.rollouts} and {shards[shard]} are both shard {shard}")
        shards[shard] = source.rollouts
    count = headers[0].expansion["shard"][1]
    if missing := [f"{shard}/{count}" for shard in range(1, count + 1) if shard not in shards]:
        raise InvalidRequest(f"shards are missing: {', '.join(missing)}")


def _common(header: Header) -> JSON:
    shared = {**header.expansion, "shard": header.expansion["shard"][1]}
    return {"input": header.input, "expansion": shared, "graph": header.graph}


def _records(paths: Iterable[Path], run: str) -> Iterator[JSON]:
    return ({**record, RUN_ID: run} for path in paths for record in read_records(path))


def _failures(sources: list[Outputs], headers: list[Header], run: str) -> Iterator[JSON]:
    """The failed attempts, first those that no longer count (`Header.forgiven`)."""
    for no_longer_count in (True, False):
        for source, header in zip(sources, headers, strict=True):
            for number, record in enumerate(_records([source.failures], run)):
                if (number < header.forgiven) is no_longer_count:
                    yield record


def _once(records: Iterable[JSON]) -> Iterator[JSON]:
    numbers = IntTable()
    for record in records:
        key = rollout_key(record)
        if numbers.get(key):
            raise Conflict(f"rollout {record['_ng_rollout_id']!r} is in two shards")
        numbers[key] = 1
        yield record


def _write(path: Path, records: Iterable[JSON]) -> None:
    for _ in replace_records(path, records):
        pass
