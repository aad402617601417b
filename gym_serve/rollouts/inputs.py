"""``out_materialized_inputs.jsonl``: every rollout of a run as a stamped row, written before anything runs.

Writing it checks every row, so a run with a bad one does not start; and the run then reads from it, so
that rows which can be drawn only once are no special case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path

import orjson

from gym_serve.rollouts.compression import open_decompressed
from gym_serve.rollouts.expansion import Expansion, expand
from gym_serve.rollouts.header import fingerprint
from gym_serve.rollouts.outputs import replacing
from gym_serve.rollouts.problems import Problems, ignore, refuse
from gym_serve.rollouts.records import readable_line
from gym_serve.rollouts.rows import Rows
from gym_serve.rollouts.stamps import task_index
from gym_serve.rollouts.steps import in_steps
from gym_serve.types.requests import JSON
from gym_serve.types.rows import check_row

__all__ = ["Inputs", "checked_groups", "stored_groups"]


class Inputs:
    """The rows of a run.

    Args:
        rows: where they come from.
        expansion: how they become rollouts.
        check: raises a `GymError` for a row that the graph cannot run.

    Attributes:
        problems: what is wrong with them.
        rollouts: how many there are; known once they are written.
    """

    def __init__(self, rows: Rows, expansion: Expansion, check: Callable[[JSON], None]) -> None:
        self.rows = rows
        self.problems = Problems()
        self.rollouts = 0
        self._expansion = expansion
        self._check = check
        self._drawn = 0
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def source(self) -> str:
        """Where the rows come from, in words."""
        return str(self.rows) if isinstance(self.rows, str | Path) else "rows of the caller"

    def write(self, path: Path | None, *, skip_invalid: bool) -> Generator[None, None, None]:
        """Check and expand all rows, in steps of one row.

        Args:
            path: where to; None to check and count only.
            skip_invalid: leave out rows that cannot be used.

        Raises:
            InvalidRequest: rows that cannot be used, or no rows at all.
        """
        self.rollouts = 0
        with nullcontext() if path is None else replacing(path) as file:
            for group in expand(
                self._watched(),
                self._expansion,
                problem=self.problems.add,
                check=self.check_row,
                note=self.problems.notes.append,
                unique=True,
            ):
                try:
                    lines = b"".join(map(readable_line, group)) if file is not None else b""
                except ValueError as error:
                    self.problems.add(f"task {group[0]['_ng_task_index']}: {error}")
                    continue
                if file is not None:
                    file.write(lines)
                self.rollouts += len(group)
                yield
            if not skip_invalid:
                self.problems.refuse(f"{self.problems.count} rows cannot be used, so nothing was started")
            if not self.rollouts and self._expansion.shard is None:
                self.problems.refuse(f"{self.source}: no row can be used")
                self.problems.add(f"{self.source}: empty")
                self.problems.refuse("there are no rows, so nothing was started")

    def fingerprint(self) -> JSON:
        """What tells whether the rows have changed: of a file as it is stored, else as they were drawn."""
        if isinstance(self.rows, str | Path):
            return fingerprint(Path(self.rows))
        return {"rows": self._drawn, "digest": self._digest.hexdigest()}

    def _watched(self) -> Rows:
        """The rows; those of the caller leave a fingerprint."""
        if isinstance(self.rows, str | Path):
            return self.rows
        self._digest = hashlib.blake2b(digest_size=16)
        self._drawn = 0
        return map(self._seen, self.rows)

    def _seen(self, row: JSON) -> JSON:
        try:
            content = orjson.dumps(row)
        except TypeError:
            content = repr(row).encode("utf-8", "replace")
        self._digest.update(content)
        self._drawn += 1
        return row

    def check_row(self, row: JSON) -> None:
        """Check one row, by the contract and by the graph.

        Raises:
            GymError: it cannot be run.
        """
        check_row(row)
        self._check(row)


def stored_groups(path: Path) -> Iterator[list[JSON]]:
    """The stamped rows of a file that `Inputs.write` wrote, a list for each row that they come from."""
    with open_decompressed(path) as file:
        for _, group in groupby(map(orjson.loads, file), key=task_index):
            yield list(group)


async def checked_groups(
    rows: Rows, expansion: Expansion, check: Callable[[JSON], None], *, skip_invalid: bool
) -> Iterator[list[JSON]]:
    """The stamped rows of each row. Those of a file are given out after all of it has been checked.

    Rows of the caller are drawn one by one, so only what makes expanding them impossible is an error; a
    row that the graph cannot run becomes a failed rollout.

    Args:
        rows: rows, or the path of a JSONL file.
        expansion: how they become rollouts.
        check: raises a `GymError` for a row that the graph cannot run.
        skip_invalid: leave out rows that cannot be used.

    Raises:
        InvalidRequest: rows that cannot be used; of a file, all of them.
    """
    if not isinstance(rows, str | Path):
        return expand(rows, expansion, problem=ignore if skip_invalid else refuse)
    inputs = Inputs(rows, expansion, check)
    await in_steps(inputs.write(None, skip_invalid=skip_invalid))
    return expand(rows, expansion, problem=ignore, check=inputs.check_row, unique=True)
