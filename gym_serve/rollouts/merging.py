"""`merge`: joins the runs of all shards of one data set into one run, as if it had never been divided.

The result has a header of its own, without the shard, so rollouts that a shard still lacks can be made by
resuming the merged run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from gym_serve.metrics import STATISTICS_ONLY
from gym_serve.rollouts.expansion import stored_groups
from gym_serve.rollouts.files import RecordFile, read_records, readable_line, replace_records, replacing
from gym_serve.rollouts.journal import Header, Outputs, differences
from gym_serve.rollouts.progress import Aggregate, MetricSpecOf, summarize_run
from gym_serve.rollouts.rows import RUN_ID, rollout_key
from gym_serve.rollouts.tables import IntTable
from gym_serve.types.errors import Conflict, InvalidRequest
from gym_serve.types.requests import JSON


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
        for source in sources:
            if not source.rollouts.exists():
                raise InvalidRequest(f"{source.rollouts} does not exist, so there is no run to merge")
            locks.enter_context(RecordFile(source.rollouts, exclusive=True))
        await asyncio.to_thread(_merge, sources, Outputs.of(output))
    return await summarize_run(Outputs.of(output), aggregate, metric_spec)


def _merge(sources: list[Outputs], target: Outputs) -> None:
    headers = [_header(source) for source in sources]
    _check(sources, headers)
    if target.rollouts.exists() or target.failures.exists():
        raise Conflict(f"{target.rollouts} holds a run; choose another file for the merged run")
    first = headers[0]
    merged = Header.new(
        input=first.input,
        expansion={**first.expansion, "shard": None},
        graph=first.graph,
        rollouts=sum(header.rollouts for header in headers),
        problems=first.problems,
        source=first.source,
        forgiven=sum(header.forgiven for header in headers),
        prices=first.prices,
        output=target.rollouts.name,
    )
    with replacing(target.inputs) as file:
        for source in sources:
            for group in stored_groups(source.inputs):
                file.write(b"".join(map(readable_line, group)))
    merged.write(target.header)
    _write(target.failures, _failures(sources, headers, merged.run))
    if any(source.comparisons.exists() for source in sources):
        _write(target.comparisons, _records([source.comparisons for source in sources], merged.run))
    # Written last: while it does not exist, there is no merged run.
    _write(target.rollouts, _once(_records([source.rollouts for source in sources], merged.run)))


def _header(source: Outputs) -> Header:
    header = Header.read(source.header)
    if header is None:
        raise InvalidRequest(f"{source.rollouts}: {source.header.name} is missing")
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
