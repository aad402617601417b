"""`View`: rollouts of any number of runs, found, filtered and read; what the page and notebooks use."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from gym_serve.metrics import Failures
from gym_serve.servers.usage import Prices
from gym_serve.types.errors import InvalidRequest, NotFound
from gym_serve.view.index import index_run
from gym_serve.view.queries import RolloutRow, each_rollout, numeric_fields, reading_all
from gym_serve.view.runs import Reading, Run
from gym_serve.view.sources import cache_folder, find_runs
from gym_serve.view.statistics import read_summary

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    import pyarrow  # type: ignore[import-untyped]


class View:
    """Runs that are read by their indices; see `gym_serve.view.open`."""

    def __init__(
        self,
        paths: Iterable[str | Path],
        cache: Path | None = None,
        prices: Mapping[str, Prices] | None = None,
    ) -> None:
        self._prices = prices
        self._paths = [Path(path) for path in paths]
        self._cache = (cache or cache_folder()).absolute()
        self._runs: dict[str, Run] = {}
        self.find()

    @property
    def runs(self) -> dict[str, Run]:
        return dict(self._runs)

    def find(self) -> None:
        """Look for runs that are new in the folders. Raises InvalidRequest: a path does not exist, or is a
        file of another kind."""
        there = [path for path in self._paths if path.exists()] if self._runs else self._paths
        for files in find_runs(there):
            if files.id in self._runs:
                self._runs[files.id].files = files
            else:
                self._runs[files.id] = Run(files, self._cache, self._prices)

    def index(self) -> None:
        self.find()
        for run in self._runs.values():
            index_run(run.files, self._cache)

    def chosen(self, ids: Sequence[str]) -> list[Run]:
        """Runs by their ids; all without any. Raises NotFound: there is no such run."""
        return [self.run(id_) for id_ in ids] if ids else list(self._runs.values())

    def run(self, id_: str) -> Run:
        """A run by its id. Raises NotFound: there is none."""
        run = self._runs.get(id_)
        if run is None:
            raise NotFound(f"there is no run {id_[:40]!r}")
        return run

    def rollouts(self, where: str = "", sort: str | None = None) -> Iterator[RolloutRow]:
        """The rollouts that a filter selects, run by run.

        Args:
            where: a filter, which is a condition of SQL (docs/viewer.md).
            sort: ``reward`` or ``-reward``, likewise other names of filters; by default as in the file.

        Raises:
            InvalidRequest: the filter or the sort cannot be understood.
        """
        yield from each_rollout(list(self._runs.values()), where, sort)

    def rollout(self, run: str, n: int) -> dict[str, Any]:
        """A whole rollout, as it is in the file (docs/formats.md). Raises NotFound: there is none."""
        with self.run(run).reading() as reading:
            return reading.rollout(n)

    def annotate(
        self,
        run: str,
        n: int,
        *,
        tags: Sequence[str] = (),
        comment: str = "",
        reward: float | None = None,
        by: str = "",
    ) -> None:
        """Note something of a rollout beside its file, in place of what was noted before, as the page does.

        Args:
            run: id of the run.
            n: the rollout's number.
            tags: short labels.
            comment: any text.
            reward: the right verdict, where the verifier's is wrong, or the same to confirm it.
            by: who says so.

        Raises:
            NotFound: there is no such rollout.
            InvalidRequest: a value is not what it must be.
            BadRequest: the file cannot be written.
        """
        with self.reading(run) as reading:
            rows = reading.sql("SELECT id FROM details WHERE n = ?", (n,))
        if not rows:
            raise NotFound(f"there is no rollout {n}")
        note = {"tags": list(tags), "comment": comment, "reward": reward, "by": by}
        self.run(run).annotations.put(n, rows[0][0], note)

    def summary(self, where: str = "", failures: Failures = "mask") -> dict[str, Any]:
        """Figures of each run: mean reward, pass@k, failures, tokens; and how many rollouts have each agent,
        tool and so on.

        Args:
            where: which rollouts.
            failures: ``mask`` leaves failed rollouts out of the mean reward, ``zero`` counts them as 0.

        Raises:
            InvalidRequest: the filter cannot be understood.
        """
        return read_summary(list(self._runs.values()), where, failures)

    def to_arrow(self, where: str = "", sort: str | None = None) -> pyarrow.Table:
        """`rollouts` as a table; the verifier's fields are columns ``fields.NAME``. Raises
        ModuleNotFoundError: ``pip install 'gym-serve[view]'`` has pyarrow."""
        pa = _package("pyarrow")
        return pa.Table.from_pylist(list(self._flat(where, sort)), schema=self._schema(pa))

    def to_pandas(self, where: str = "", sort: str | None = None) -> pandas.DataFrame:
        """`rollouts` as a data frame; the verifier's fields are columns ``fields.NAME``. Raises
        ModuleNotFoundError: ``pip install 'gym-serve[view]'`` has pandas and pyarrow."""
        _package("pandas")
        return self.to_arrow(where, sort).to_pandas()

    def _flat(self, where: str, sort: str | None) -> Iterator[dict[str, Any]]:
        texts = {name for name, numeric in self._fields().items() if not numeric}
        for row in self.rollouts(where, sort):
            fields = row["fields"]
            own = {f"fields.{k}": str(v) if k in texts else float(v) for k, v in fields.items()}
            yield {**{k: v for k, v in row.items() if k != "fields"}, **own}

    def _fields(self) -> dict[str, bool]:
        with reading_all(list(self._runs.values())) as readings:
            return numeric_fields(readings)

    def _schema(self, pa: Any) -> Any:
        texts = ("run", "id", "task", "agent", "environment", "failure", "version", "last_version", "prompt")
        whole = ("n", "attempt", "turns", "behind", "tokens", "input_tokens", "output_tokens")
        types = {
            **dict.fromkeys(texts, pa.string()),
            **dict.fromkeys(whole, pa.int64()),
            **dict.fromkeys(("reward", "seconds"), pa.float64()),
            **dict.fromkeys(("tools", "marks"), pa.list_(pa.string())),
        }
        fields = {
            f"fields.{n}": pa.float64() if numeric else pa.string() for n, numeric in self._fields().items()
        }
        names = [name for name in RolloutRow.__annotations__ if name != "fields"]
        return pa.schema([(name, types[name]) for name in names] + list(fields.items()))

    def reading(self, run: str) -> AbstractContextManager[Reading]:
        """The index of a run as it is now. Raises NotFound: there is no such run."""
        return self.run(run).reading()

    def close(self) -> None:
        """Close the indices."""
        for run in self._runs.values():
            run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def open_view(*paths: str | Path) -> View:
    """Open the rollouts of runs: index what is new in their files, then read them.

    Args:
        paths: files (``.jsonl``, ``.gz``, ``.zst``) and folders.

    Raises:
        InvalidRequest: a path does not exist, or is a file of another kind.
    """
    if not paths:
        raise InvalidRequest("`paths` must name a file or a folder")
    view = View(paths)
    view.index()
    return view


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"data frames and tables need {name}: pip install 'gym-serve[view]'", name=error.name
        ) from None
