"""`Collation`: files of rows become a training and a validation set that share no prompt.

Validation rows are read first, so that every training row can be held against them. A share of the
training rows for validation is drawn by a hash of the prompt: the same rows each time, and all rows with one
prompt on the same side. Both files appear when both are complete, or neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gym_serve.cli.dataset.checks import Duplicates, checked_rows
from gym_serve.rollouts.files import readable_line, replacing, writing
from gym_serve.rollouts.rows import METADATA_KEYS, Problems
from gym_serve.rollouts.tables import IntTable, digest
from gym_serve.types.requests import JSON

_SOURCE = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)=(.+)", re.DOTALL)


class Source(NamedTuple):
    """A file of rows, and the agent that runs them."""

    path: Path
    agent: str | None = None

    def for_agent(self, row: JSON) -> JSON:
        """The row for its agent, without the metadata of an earlier run."""
        fresh = {key: value for key, value in row.items() if key not in METADATA_KEYS}
        if self.agent is not None:
            fresh["agent_ref"] = {"type": "responses_api_agents", "name": self.agent}
        return fresh


def source_of(text: str) -> Source:
    """The source that ``"rows.jsonl"`` or ``"agent=rows.jsonl"`` names; the name of an existing file wins."""
    match = _SOURCE.fullmatch(text)
    if match is None or Path(text).exists():
        return Source(Path(text))
    return Source(Path(match[2]), match[1])


@dataclass
class Tally:
    """What became of the rows of a source."""

    file: str
    agent: str | None
    set: str
    """``train`` or ``validation``."""
    read: int = 0
    bad: int = 0
    duplicates: int = 0
    in_validation: int = 0
    """Training rows whose prompt is in the validation set."""
    moved: int = 0
    """Training rows drawn for validation."""
    written: int = 0
    """Rows written to this source's own set."""

    def cells(self) -> tuple[str, ...]:
        """The tally as text, field by field."""
        return tuple("" if value is None else str(value) for value in asdict(self).values())


class Collation:
    """Puts sources together; ``validation_share`` of the training rows, 0 to 1, is drawn for validation."""

    def __init__(
        self, problems: Problems, check: Callable[[JSON], Iterator[str]], validation_share: float = 0.0
    ) -> None:
        self.tallies: list[Tally] = []
        self._problems = problems
        self._check = check
        self._drawn_below = int(validation_share * 2**63)
        self._seen = Duplicates()
        self._validation_prompts = IntTable()
        self._without_agent = 0

    def write(
        self, train: Sequence[Source], validation: Sequence[Source], folder: Path, *, skip_invalid: bool
    ) -> dict[str, int]:
        """Write ``train.jsonl`` and ``validation.jsonl`` into a folder, as far as there are rows for them.

        Returns:
            the number of rows by path.

        Raises:
            InvalidRequest: a file cannot be read, or a row has a problem; nothing was written.
            BadRequest: the folder cannot be created: the one around it is missing, say.
        """
        wanted = {
            "train": bool(train),
            "validation": bool(validation) or (bool(train) and self._drawn_below > 0),
        }
        paths = {name: folder / f"{name}.jsonl" for name, is_wanted in wanted.items() if is_wanted}
        with writing(folder):
            folder.mkdir(exist_ok=True)
        with ExitStack() as stack:
            files = {name: stack.enter_context(replacing(path)) for name, path in paths.items()}
            for source in validation:
                self._add_validation(source, files)
            for source in train:
                self._add_train(source, files)
            if not skip_invalid:
                self._problems.raise_if_any(f"{self._problems.count} problems, so nothing was written")
        if self._without_agent:
            self._problems.notes.append(
                f"{self._without_agent:,} rows have no agent_ref: the graph's default agent will run them"
            )
        counts = {name: sum(t.written for t in self.tallies if t.set == name) for name in paths}
        if "validation" in counts:
            counts["validation"] += sum(tally.moved for tally in self.tallies)
        return {str(paths[name]): count for name, count in counts.items()}

    def _add_validation(self, source: Source, files: Mapping[str, BinaryIO]) -> None:
        tally = self._tally(source, "validation")
        for where, row in self._rows(source, tally):
            self._validation_prompts[_prompt(row)] = 1
            if self._seen.first_place(row, where) is not None:
                tally.duplicates += 1
            else:
                tally.written += 1
                self._write(files["validation"], row)

    def _add_train(self, source: Source, files: Mapping[str, BinaryIO]) -> None:
        tally = self._tally(source, "train")
        for where, row in self._rows(source, tally):
            prompt = _prompt(row)
            if self._validation_prompts.get(prompt):
                tally.in_validation += 1
            elif self._seen.first_place(row, where) is not None:
                tally.duplicates += 1
            elif prompt < self._drawn_below:
                tally.moved += 1
                self._write(files["validation"], row)
            else:
                tally.written += 1
                self._write(files["train"], row)

    def _rows(self, source: Source, tally: Tally) -> Iterator[tuple[str, JSON]]:
        """The usable rows of a source, for its agent."""
        checked = checked_rows(source.path, self._problems, lambda row: self._check(source.for_agent(row)))
        for where, row in checked:
            tally.read += 1
            if row is None:
                tally.bad += 1
            else:
                yield where, source.for_agent(row)

    def _tally(self, source: Source, name: str) -> Tally:
        tally = Tally(str(source.path), source.agent, name)
        self.tallies.append(tally)
        return tally

    def _write(self, file: BinaryIO, row: JSON) -> None:
        self._without_agent += "agent_ref" not in row
        file.write(readable_line(row))


def _prompt(row: JSON) -> int:
    return digest(row["responses_create_params"]["input"])
