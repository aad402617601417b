"""The index follows files: any framing, growing, replaced, cut, in folders and behind links."""

import gzip
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from backports import zstd
from view.made import failed, rollout, write

from gym_serve.rollouts.files import RecordFile
from gym_serve.types.errors import InvalidRequest
from gym_serve.view import sources
from gym_serve.view.index import Indexer, database_of, drop_stale
from gym_serve.view.server import runs_json
from gym_serve.view.sources import RunFiles, find_runs
from gym_serve.view.statistics import recorded_prices
from gym_serve.view.view import View

LINES = b"".join(orjson.dumps(rollout(task, 0)) + b"\n" for task in range(50))


def shown(view: View) -> list[str]:
    """Ids of the rollouts after the index has followed the files."""
    view.index()
    return [row["id"] for row in view.rollouts()]


def ids(count: int) -> list[str]:
    return [f"{task}-0" for task in range(count)]


def own_framing(path: Path) -> None:
    with RecordFile(path) as file:
        for line in LINES.splitlines():
            file.append(orjson.loads(line))


def in_two_frames(compress: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """The middle of a line is at the end of a frame."""
    return lambda path: path.write_bytes(compress(LINES[:12_345]) + compress(LINES[12_345:])) and None


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("out.jsonl", lambda path: path.write_bytes(LINES)),
        ("out.jsonl", lambda path: path.write_bytes(LINES[:-1])),  # without the last newline
        ("out.jsonl.gz", own_framing),
        ("out.jsonl.gz", lambda path: path.write_bytes(gzip.compress(LINES))),
        ("out.jsonl.gz", in_two_frames(gzip.compress)),
        ("out.jsonl.zst", own_framing),
        ("out.jsonl.zst", lambda path: path.write_bytes(zstd.compress(LINES))),
        ("out.jsonl.zst", in_two_frames(zstd.compress)),
    ],
)
def test_every_framing(tmp_path: Path, name: str, make: Callable[[Path], Any]) -> None:
    make(tmp_path / name)
    with View([tmp_path / name], tmp_path / "cache") as view:
        assert shown(view) == ids(50)
        (run,) = view.runs
        assert view.rollout(run, 49) == rollout(49, 0)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_appended_lines_are_followed_byte_by_byte(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.jsonl{suffix}"
    own_framing(tmp_path / f"whole.jsonl{suffix}")
    data = (tmp_path / f"whole.jsonl{suffix}").read_bytes()
    known = 0
    path.touch()
    with View([path], tmp_path / "cache") as view:
        for end in range(0, len(data), len(data) // 40):
            append(path, data[path.stat().st_size : end])
            found = shown(view)
            assert found == ids(len(found))
            assert len(found) >= known
            known = len(found)
        append(path, data[path.stat().st_size :])
        assert shown(view) == ids(50)


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_another_process_goes_on_where_the_last_one_stopped(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.jsonl{suffix}"
    with RecordFile(path) as file:
        for task in range(3):
            file.append(rollout(task, 0))
            with View([path], tmp_path / "cache") as view:
                assert shown(view) == ids(task + 1)
                with view.reading(*view.runs) as reading:
                    assert reading.state["epoch"] == 0, "it was indexed anew"


def test_a_replaced_file_is_indexed_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, 0), rollout(1, 0)])
    with View([path], tmp_path / "cache") as view:
        assert shown(view) == ids(2)
        write(tmp_path / "new.jsonl", [rollout(0, 0), rollout(1, 0), rollout(2, 0)])
        os.replace(tmp_path / "new.jsonl", path)
        assert shown(view) == ids(3)
        assert [row["id"] for row in view.rollouts("words('question')")] == ids(3)


def test_a_file_that_was_cut_is_indexed_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, 0), rollout(1, 0)])
    with View([path], tmp_path / "cache") as view:
        assert shown(view) == ids(2)
        write(path, [rollout(0, 0)])
        assert shown(view) == ids(1)


def test_a_file_that_was_rewritten_in_place_is_indexed_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, 0, reward=0.5)])
    with View([path], tmp_path / "cache") as view:
        assert shown(view) == ids(1)
        path.write_bytes(path.read_bytes().replace(b'"0-0"', b'"7-0"'))
        assert shown(view) == ["7-0"]


def test_a_file_that_is_gone_shows_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, 0)])
    write(tmp_path / "out_failures.jsonl", [failed(1, 0)])
    with View([tmp_path], tmp_path / "cache") as view:
        assert shown(view) == ["0-0", "1-0"]
        path.unlink()
        assert shown(view) == ["1-0"]


def test_two_processes_do_not_write_one_index(tmp_path: Path) -> None:
    (files,) = find_runs([write(tmp_path / "out.jsonl", [rollout(0, 0)])])
    first, second = Indexer(files, tmp_path / "cache"), Indexer(files, tmp_path / "cache")
    assert first.become_writer()
    assert not second.become_writer()
    assert not second.index_for()
    first.close()
    assert second.become_writer()
    second.close()


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, 0)])
    with View([path], tmp_path / "cache") as view:
        assert shown(view) == ids(1)
        database = database_of(tmp_path / "cache" / next(iter(view.runs)))
    database.write_bytes(b"no database" * 1000)
    with View([path], tmp_path / "cache") as view:
        assert shown(view) == ids(1)


def test_the_index_of_a_folder_that_is_gone_is_removed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    kept = write(tmp_path / "kept.jsonl", [rollout(0, 0)])
    gone = write(tmp_path / "runs" / "gone.jsonl", [rollout(0, 0)])
    with View([kept, gone], tmp_path / "cache") as view:
        view.index()
        own = {run.files.main: run.id for run in view.runs.values()}
    gone.unlink()
    gone.parent.rmdir()
    drop_stale(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [own[kept]]


def test_damage_in_a_compressed_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.gz"
    path.write_bytes(gzip.compress(LINES[:20_000]) + b"damaged" * 100)
    with View([path], tmp_path / "cache") as view:
        found = shown(view)
        assert found == ids(len(found)) != []
        with view.reading(*view.runs) as reading:
            assert "out.jsonl.gz is damaged" in reading.problems()[0]["message"]


class TestPaths:
    """Which runs there are below paths."""

    def names(self, *paths: Path) -> list[str]:
        return [files.name for files in find_runs(paths)]

    def test_a_folder_has_its_runs_without_their_other_files(self, tmp_path: Path) -> None:
        for name in ("a.jsonl", "b.jsonl.zst", "deep/c.jsonl.gz", ".hidden.jsonl", "notes.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        for name in ("a_failures.jsonl", "a_materialized_inputs.jsonl", "a_comparisons.jsonl"):
            (tmp_path / name).touch()
        (tmp_path / "a.annotations.jsonl").touch()
        (tmp_path / "lonely_failures.jsonl").touch()
        assert self.names(tmp_path) == ["a.jsonl", "b.jsonl.zst", "deep/c.jsonl.gz", "lonely.jsonl"]

    def test_links_out_of_a_folder_are_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "secret.jsonl").write_bytes(LINES)
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
        (folder / "out.jsonl").write_bytes(LINES[:0])
        (folder / "out_failures.jsonl").symlink_to(tmp_path / "secret.jsonl")
        (folder / "inside.jsonl").symlink_to(folder / "out.jsonl")
        for name in ("loop.jsonl", "out_run.json"):
            (folder / name).symlink_to(folder / name)
        with View([folder], tmp_path / "cache") as view:
            assert shown(view) == []
        assert "link.jsonl" not in self.names(folder)

    def test_a_note_is_not_written_through_a_link(self, tmp_path: Path) -> None:
        path = write(tmp_path / "out.jsonl", [rollout(0, 0)])
        (tmp_path / "out.annotations.jsonl").symlink_to(tmp_path / "elsewhere")
        with View([path], tmp_path / "cache") as view:
            (run,) = view.runs.values()
            with pytest.raises(Exception, match="cannot write"):
                run.annotations.put(0, "0-0", {"comment": "x"})
        assert not (tmp_path / "elsewhere").exists()

    @pytest.mark.parametrize("name", ["missing.jsonl", "notes.txt"])
    def test_what_cannot_be_read_is_told(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(InvalidRequest, match=name):
            self.names(tmp_path / name)

    def test_names_of_any_bytes(self, tmp_path: Path) -> None:
        path = os.path.join(os.fsencode(tmp_path), b"\xff<script>.jsonl")
        Path(os.fsdecode(path)).write_bytes(LINES)
        (files,) = find_runs([tmp_path])
        assert files.name == "\ufffd<script>.jsonl"
        assert isinstance(files, RunFiles)
        with View([tmp_path], tmp_path / "cache") as view:
            assert shown(view) == ids(50)
            orjson.dumps(runs_json(view))


def test_a_notebook(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl", [rollout(task, index) for task in range(4) for index in range(4)])
    with View([tmp_path / "out.jsonl"], tmp_path / "cache") as view:
        view.index()
        rows = list(view.rollouts("reward = 1", sort="-seconds"))
        assert [row["task"] for row in rows][:2] == ["3", "3"]
        assert rows[0]["tools"] == ["get_weather"]
        frame = view.to_pandas("task = 2")
        assert list(frame["fields.score"]) == [0.0, 0.5, 0.0, 0.5]
        assert list(frame["fields.extracted"])[:2] == ["answer 0", "answer 1"]
        table = view.to_arrow()
        assert table.num_rows == 16
        assert view.to_arrow("task = 99").schema == table.schema
        assert view.summary("task = 1")["runs"][0]["rollouts"] == 4


def test_the_state_is_read_by_anybody_meanwhile(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, 0)])
    (files,) = find_runs([path])
    indexer = Indexer(files, tmp_path / "cache")
    indexer.index_for()
    with View([path], tmp_path / "cache") as view, view.reading(files.id) as reading:
        append(path, LINES)
        while indexer.index_for():
            pass
        assert reading.count("") == 1
        assert reading.sql("SELECT count(*) FROM rollouts") == [(1,)]
    with View([path], tmp_path / "cache") as view, view.reading(files.id) as reading:
        assert reading.count("") == 51
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reading.sql("DELETE FROM rollouts")
    indexer.close()


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress])
def test_a_file_that_becomes_far_larger_is_shown_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(sources, "_FREE", 1 << 20)
    monkeypatch.setattr(sources, "_RATIO", 4)
    path = tmp_path / ("out.jsonl.gz" if compress is gzip.compress else "out.jsonl.zst")
    path.write_bytes(compress(LINES) + compress(b" " * (64 << 20)))
    with View([path], tmp_path / "cache") as view:
        assert shown(view) == shown(view) == ids(50)
        with view.reading(*view.runs) as reading:
            assert "become more than rollouts do" in reading.problems()[0]["message"]
    (copy,) = (tmp_path / "cache").rglob("main.jsonl")
    assert copy.stat().st_size < 4 << 20


@pytest.mark.parametrize("name", ["out_failures.jsonl", "out.annotations.jsonl", "out_run.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_side_files_that_are_none_are_not_read(tmp_path: Path, name: str, kind: str) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secret.jsonl"
    folder.mkdir()
    write(folder / "out.jsonl", [rollout(0, 0)])
    secret.write_bytes(b'{"n": 0, "id": "0-0", "comment": "secret", "prices": {}}\n' + LINES)
    with View([folder], tmp_path / "cache") as view:  # at first there is none
        assert shown(view) == ids(1)
        if kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero" if kind == "device" else secret)
        (run,) = view.runs.values()
        assert shown(view) == ids(1)
        assert run.annotations.all_tags() == list(run.annotations.lines()) == []
        assert recorded_prices(run.files) == {}
    with View([folder], tmp_path / "other") as view:
        assert shown(view) == ids(1)
