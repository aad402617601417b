"""`gym-serve dataset`: checks files of rows and fills prompt templates, one row at a time.

What is wrong with the rows of a file: every problem, each with its place.

`row_problems` checks the fields that docs/formats.md (Rows) defines, beyond the schema of
`gym_serve.types.rows`: input items, tools, the two JSON strings in ``metadata``, ``agent_ref`` and the
indices of an earlier run. Item and tool types that the page does not name pass: the Responses API has more of
them, and gets new ones. `row_check` also checks rows against a graph. `Duplicates` finds repeated rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from gym_serve.cli.options import App, ApplicationOption, JsonOption, resolve_file
from gym_serve.cli.printing import echo, print_json, print_problems, reports
from gym_serve.cli.publishing import push
from gym_serve.graph.spec import Graph, Node, nearest
from gym_serve.rollouts.expansion import PromptTemplate
from gym_serve.rollouts.files import replacing
from gym_serve.rollouts.rows import Problems, read_rows, rollout_index, task_index
from gym_serve.rollouts.tables import IntTable, digest
from gym_serve.servers.resources import ResourcesServer
from gym_serve.servers.transport import encode
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.protocols.bodies import misfits
from gym_serve.types.requests import JSON
from gym_serve.types.rows import check_row, marks_of, with_prompt

_PARAMS = "responses_create_params"
_OPTIONS = ("extra_body", "chat_template_kwargs")


def row_problems(row: JSON) -> Iterator[str]:
    """The problems of a row, ``"place: what"`` each; none for one that can be run."""
    try:
        row = with_prompt(row)
        check_row(row)
    except InvalidRequest as error:
        yield from error.message.removeprefix("invalid row: ").split("; ")
        return
    params = row[_PARAMS]
    yield from (f"{_PARAMS}.{misfit.place} {misfit}" for misfit in misfits(params))
    yield from _orphans(params["input"])
    for name, times in Counter(map(_tool_name, params.get("tools") or ())).items():
        if name and times > 1:
            yield f"{_PARAMS}.tools: each must have a name of its own, got {name!r} {times} times"
    yield from _metadata(params.get("metadata"))
    yield from _agent_ref(row.get("agent_ref"))
    for name in _OPTIONS:
        if not isinstance(row.get(name), dict | None):
            yield f"{name} must be an object"
    yield from _indices(row)
    if not row.get("_ng_failure_class"):  # the row of a failed rollout, which may be tried again
        for mark in marks_of(row):
            yield f"{mark}: only a run sets this key; rename it, as it is ignored"


def _orphans(items: str | list[JSON]) -> Iterator[str]:
    called: set[str] = set()
    for index, item in enumerate(items if isinstance(items, list) else ()):
        kind, call_id = item.get("type"), str(item.get("call_id"))
        if kind == "function_call":
            called.add(call_id)
        elif kind == "function_call_output" and call_id not in called:
            yield f"{_PARAMS}.input[{index}].call_id: no function_call before it has this call_id"


def _tool_name(tool: JSON) -> str | None:
    name = tool.get("name")
    return name if isinstance(name, str) and tool.get("type") == "function" else None


def _metadata(metadata: Any) -> Iterator[str]:
    for name in _OPTIONS:
        value = metadata.get(name) if isinstance(metadata, dict) else None
        if value is not None and not _is_json_object(value):
            yield f"{_PARAMS}.metadata.{name} must be a JSON object written as a string"


def _is_json_object(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return isinstance(orjson.loads(value), dict)
    except orjson.JSONDecodeError:
        return False


def _agent_ref(ref: Any) -> Iterator[str]:
    if ref is None:
        return
    if not isinstance(ref, dict) or not isinstance(ref.get("name"), str) or not ref["name"]:
        yield 'agent_ref must be {"type": "responses_api_agents", "name": "..."}'
    elif ref.get("type") not in (None, "responses_api_agents"):
        yield f"agent_ref.type must be 'responses_api_agents', got {str(ref['type'])[:50]!r}"


def _indices(row: JSON) -> Iterator[str]:
    checks: dict[str, Callable[[JSON], int]] = {
        "_ng_task_index": task_index,
        "_ng_rollout_index": rollout_index,
    }
    for key, check in checks.items():
        if row.get(key) is not None:
            try:
                check(row)
            except InvalidRequest as error:
                yield error.message


def checked_rows(
    file: Path,
    problems: Problems,
    check: Callable[[JSON], Iterable[str]] = row_problems,
) -> Iterator[tuple[str, JSON | None]]:
    """The place of each line of a file, and its row; None for one with problems, which ``problems`` takes.
    Raises InvalidRequest: the file cannot be opened."""
    empty = True
    for where, row, reason in read_rows(file, problems.notes.append):
        empty = False
        reasons = [str(reason)] if row is None else list(check(row))
        for problem in reasons:
            problems.add(f"{where}: {problem}")
        yield where, None if reasons else row
    if empty:
        problems.add(f"{file}: empty")


def row_check(graph: Path | None, application: str | None) -> Callable[[JSON], Iterator[str]]:
    """A function that yields the problems of a row: by the row format, and by a graph file if there is one.
    Raises GraphError: every problem of the graph; typer.BadParameter: an application without a file."""
    if graph is None:
        if application is not None:
            raise typer.BadParameter("--application is for a graph file: --graph FILE")
        return row_problems
    resolved = resolve_file(graph, None, application)
    agents = {name: node for name, node in resolved.nodes.items() if node.kind == "agent"}
    environments = {name: _environment_of(resolved, node) for name, node in agents.items()}

    def check(row: JSON) -> Iterator[str]:
        # A row that is malformed adds no problems of the graph.
        yield from list(row_problems(row)) or _graph_problems(row, environments, resolved.default_agent)

    return check


def _graph_problems(
    row: JSON, environments: Mapping[str, type[ResourcesServer] | None], default: str | None
) -> Iterator[str]:
    """What a graph cannot run in a row that is well-formed, by what its agents' environments take."""
    ref = row.get("agent_ref")
    name = ref["name"] if ref else default
    if name is None:
        yield f"agent_ref: missing, and the graph has no default agent{nearest('', environments)}"
    elif name not in environments:
        yield f"agent_ref.name: the graph has no agent {name!r}{nearest(name, environments)}"
    elif (environment := environments[name]) is not None:
        try:
            environment.check_row(row)
        except InvalidRequest as error:
            for problem in error.message.removeprefix("invalid row: ").split("; "):
                yield f"{problem} (the environment of {name})"


def _environment_of(graph: Graph, agent: Node) -> type[ResourcesServer] | None:
    target = agent.references.get("resources")
    cls = graph.nodes[target].cls if target is not None else None
    return cls if cls is not None and issubclass(cls, ResourcesServer) else None


class Duplicates:
    """Remembers values and the place of each one's first occurrence."""

    def __init__(self) -> None:
        self._first = IntTable()
        self._files: list[tuple[str, int]] = []
        self._lines = 0

    def first_place(self, value: object, where: str) -> str | None:
        """Where the same JSON value was first seen; None if it was not, and is now.

        The lines of one file come one after the other: ``"rows.jsonl:17"``.
        """
        file, _, line = where.rpartition(":")
        if not self._files or self._files[-1][0] != file:
            self._files.append((file, self._lines))
        position = self._files[-1][1] + int(line)
        self._lines = position
        key = digest(value)
        first = self._first.get(key)
        if first is None:
            self._first[key] = position
            return None
        name, start = next(entry for entry in reversed(self._files) if entry[1] < first)
        return f"{name}:{first - start}"


RowsArgument = Annotated[
    list[Path], typer.Argument(metavar="ROWS...", help="Files of rows: .jsonl, .jsonl.gz or .jsonl.zst.")
]
GraphOption = Annotated[
    Path | None,
    typer.Option(
        "--graph",
        metavar="FILE",
        help="Check agents and verifiers against this graph.",
    ),
]

_DUPLICATES_NAMED = 20
_BATCH = 1000  # rows of a row group of Parquet


def validate(
    rows: RowsArgument,
    *,
    graph: GraphOption = None,
    application: ApplicationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every row against the row format, and print what is wrong with file and line.

    With --graph, each row is also checked against the graph: its agent must exist,
    and it must have the fields that its environment's verifier needs. A repeated
    row is only a note; both rows count as one task.

    Exit status: 0, or 1 if a row has a problem, or a file is empty or cannot be
    read.

    Example: gym-serve dataset validate data/train.jsonl --graph graphs/math.yaml
    """
    problems, earlier = Problems(), Duplicates()
    files, duplicates = [], 0
    check = row_check(graph, application)
    for file in rows:
        good = bad = 0
        for where, row in checked_rows(file, problems, check):
            if row is None:
                bad += 1
                continue
            good += 1
            if (first := earlier.first_place(row, where)) is not None:
                duplicates += 1
                if duplicates <= _DUPLICATES_NAMED:
                    problems.notes.append(f"{where}: the same row as {first}")
        files.append({"file": str(file), "rows": good + bad, "bad_rows": bad})
    if as_json:
        print_json(
            {
                "ok": not problems.count,
                "files": files,
                "duplicates": duplicates,
                "problem_count": problems.count,
                "problems": problems.kept,
                "notes": problems.notes,
            }
        )
    else:
        print_problems(problems)
        for note in problems.notes:
            echo(f"note: {note}")
        for entry in files:
            echo("{file}: {rows:,} rows, {bad_rows:,} with problems".format(**entry))
        if duplicates:
            echo(f"{duplicates:,} repeated rows")
    if problems.count:
        raise typer.Exit(1)


SkipOption = Annotated[
    bool,
    typer.Option(
        "--skip-invalid", help="Skip rows with problems; by default nothing is written if there are any."
    ),
]


def render(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Rows without input, in JSONL.")],
    *,
    prompt: Annotated[
        Path,
        typer.Option(
            metavar="YAML", help="Prompt template {system?, user}, with {field} for fields of the row."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="File for the rows with prompts; by default they are printed.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many rows.")] = None,
    skip_invalid: SkipOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write rows with the input that a prompt template makes of their fields.

    Rows must not have an input yet. {field} is a top-level field; write {{ for a
    literal brace. If a row has a problem, all problems are reported and nothing
    is written.

    Exit status: 0, or 1 if a row has a problem (also with --skip-invalid).

    Example: gym-serve dataset render rows.jsonl --prompt prompt.yaml -o prompted.jsonl
    """
    if as_json and output is None:
        raise typer.BadParameter("--json needs --output: without it, the rows themselves are printed")
    problems = Problems()
    written = 0
    template = PromptTemplate.of(prompt)

    def check(row: JSON) -> Iterator[str]:
        try:
            yield from row_problems(template.apply(row))
        except InvalidRequest as error:
            yield error.message

    with replacing(output) if output else nullcontext(reports().buffer) as file:
        for _, row in checked_rows(rows, problems, check):
            if row is not None:
                file.write(encode(template.apply(row)) + b"\n")
                written += 1
            if written == limit:
                break
        if output and not skip_invalid:
            problems.raise_if_any(f"{problems.count} problems, so nothing was written")
    _show_written(written, output, problems, as_json=as_json)
    if problems.count:
        raise typer.Exit(1)


def _show_written(written: int, output: Path | None, problems: Problems, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"ok": not problems.count, "file": str(output), "rows": written, "problems": problems.kept}
        )
    else:
        print_problems(problems)
        if output:
            echo(f"{written:,} rows: {output}")


def benchmark(
    name: Annotated[
        str, typer.Argument(metavar="BENCHMARK", help="As for gym-serve eval: a name, a file, or NAME:WHAT.")
    ],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="File of the rows: .jsonl, or .parquet with the columns that trainers read.",
        ),
    ],
    graph: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the graph too: the environment, the agent and a policy."),
    ] = None,
    split: Annotated[str, typer.Option(help="One that the benchmark names.")] = "train",
    judge: Annotated[str | None, typer.Option(metavar="MODEL", help="The judge, if it needs one.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many rows.")] = None,
    skip_invalid: SkipOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write rows and graph of a benchmark, for trainers that are started with files.

    The policy of the graph is a stand-in, as verl, OpenRLHF, SkyRL, slime and AReaL
    put their own engine in its place.

    Exit status: 0, or 1 if a row has a problem (also with --skip-invalid).

    Example: gym-serve dataset benchmark countdown --graph graph.yaml -o train.parquet
    """
    # Imported here, so that --help starts fast.
    import yaml

    from gym_serve.evaluation.benchmark import find_benchmark
    from gym_serve.evaluation.models import settings_of

    chosen = find_benchmark(name)
    if graph is not None:
        content = chosen.graph({"type": "scripted_model"}, None if judge is None else settings_of(judge))
        graph.write_text(yaml.safe_dump(content, sort_keys=False))
    problems = Problems()

    def usable() -> Iterator[JSON]:
        for where, row, reason in chosen.rows(split, limit=limit):
            reasons = [str(reason)] if row is None else list(row_problems(row))
            for problem in reasons:
                problems.add(f"{where}: {problem}")
            if row is not None and not reasons:
                yield row
        if not skip_invalid:
            problems.raise_if_any(f"{problems.count} problems, so nothing was written")

    written = write_rows(usable(), output)
    _show_written(written, output, problems, as_json=as_json)
    if problems.count:
        raise typer.Exit(1)


def write_rows(rows: Iterator[JSON], output: Path) -> int:
    """Write rows to a file, which is there once it is complete; how many. Raises InvalidRequest: the suffix
    is neither ``.jsonl`` nor ``.parquet``, or a package is missing."""

    written = 0
    if output.suffix == ".jsonl":
        with replacing(output) as file:
            for row in rows:
                file.write(encode(row) + b"\n")
                written += 1
        return written
    if output.suffix != ".parquet":
        raise InvalidRequest(f"--output must end in .jsonl or .parquet, got {output}")
    from gym_serve.interop.export.files import pyarrow
    from gym_serve.training.episodes import columns_of

    arrow, writer = pyarrow(), None
    parquet = import_module("pyarrow.parquet")
    with replacing(output) as file:
        while batch := [columns_of(row) for row in islice(rows, _BATCH)]:
            table = arrow.Table.from_pylist(batch, schema=None if writer is None else writer.schema)
            writer = writer or parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
            written += len(batch)
        if writer is None:
            raise InvalidRequest("there are no rows, so nothing was written")
        writer.close()
    return written


dataset = App(name="dataset", no_args_is_help=True, help="Check, prepare and publish files of rows.")
for command in (validate, render, benchmark, push):
    dataset.command()(command)
