"""Rows from files of every kind: what is wrong with a line is said with the file and the line."""

import gzip
from contextlib import suppress
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.rollouts import files
from gym_serve.rollouts import rows as rows_module
from gym_serve.rollouts.rows import LocatedRow, read_rows
from gym_serve.types.errors import InvalidRequest


def read(path: Path, content: bytes) -> tuple[list[LocatedRow], list[str]]:
    path.write_bytes(content)
    notes: list[str] = []
    return list(read_rows(path, notes.append)), notes


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON: "),
        (b'{"a": 1} {"b": 2}', "not JSON: unexpected content after document at column 10"),
        (b'{"a": NaN}', "NaN is not valid JSON; use null"),
        (b'{"a": [1, -Infinity]}', "-Infinity is not valid JSON; use null"),
        (b'{"a": "\xe9t\xe9"}', "byte 0xe9 at 7 is not UTF-8"),
        (b"[1, 2]", "a row must be a JSON object, got a list"),
        (b"null", "a row must be a JSON object, got a NoneType"),
        (b'"text"', "a row must be a JSON object, got a str"),
        (b"[" * 5000, "not JSON: "),
        (b'{"a": ' + b"[" * 600 + b"]" * 600 + b"}", "a row must nest at most 500 levels"),
        (b"\x00\x00", "not JSON: "),
        (b"{'a': 1}", "not JSON: "),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    found, _ = read(path, b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    assert [one.row for one in found] == [{"a": 1}, None, {"a": 2}]
    assert found[1].where == f"{path}:3"
    assert found[1].problem is not None
    assert said in found[1].problem


def test_a_long_line_is_named_without_holding_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_ROW_BYTES", 2 << 20)
    path = tmp_path / "rows.jsonl"
    fitting = orjson.dumps({"x": "y" * ((2 << 20) - 8)})
    assert len(fitting) == 2 << 20
    found, _ = read(path, fitting + b"\n" + fitting + b" " + b"\n" + b"x" * (5 << 20) + b'\n{"a": 2}')
    assert [one.where for one in found] == [f"{path}:{n}" for n in (1, 2, 3, 4)]
    assert [one.problem for one in found] == [
        None,
        "the line is longer than 2 MiB",
        "the line is longer than 2 MiB",
        None,
    ]


def test_what_is_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides have one limit: the longest line that is written is the longest that is read."""
    for module in (rows_module, files):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / "rows.jsonl"
    with files.RecordFile(path) as file:
        for length in range((1 << 20) - 12, (1 << 20) + 4):
            record = {"x": "y" * length}
            with suppress(ValueError):
                file.append(record)
    found = list(read_rows(path))
    assert [one.problem for one in found] == [None] * 5
    assert path.stat().st_size == sum(len(orjson.dumps(one.row)) + 1 for one in found)
    assert len(orjson.dumps(found[-1].row)) == 1 << 20


def test_a_byte_order_mark_and_crlf_are_fine_and_noted_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    found, notes = read(path, b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert [one.row for one in found] == [{"a": 1}, {"a": 2}]
    assert notes == [f"{path}:1: skipped a byte order mark", f"{path}:1: lines end in CRLF"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_another_encoding_is_no_json(tmp_path: Path, encoding: str) -> None:
    found, _ = read(tmp_path / "rows.jsonl", '{"a": 1}\n'.encode(encoding))
    assert found
    assert all(one.row is None for one in found)


@pytest.mark.parametrize(
    ("name", "content", "kind", "how"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": 2}\n'.encode("utf-16"), "UTF-16 or UTF-32", "iconv -f UTF-16"),
        ("rows.jsonl", gzip.compress(b"{}", mtime=0), "gzip", "rows.jsonl.gz"),
        ("rows.parquet", b"PAR1\x15\x04\xe2\n\xe2\nPAR1", "Parquet", "pandas.read_parquet("),
        ("rows.arrow", b"ARROW1\0\0\n", "Arrow", "pandas.read_feather("),
        ("rows.xlsx", b"PK\3\4\n", "a ZIP archive or a sheet of Excel", "pandas.read_excel("),
        ("rows.csv", b"\xef\xbb\xbfquestion,answer\n1,2\n3,4\n", "CSV", "pandas.read_csv("),
        ("rows.json", b'[\n{"a": 1},\n{"a": 2}\n]', "one JSON array", "jq -c '.[]' "),
    ],
)
def test_a_file_of_another_kind_is_named_once(
    tmp_path: Path, name: str, content: bytes, kind: str, how: str
) -> None:
    (one,), _ = read(tmp_path / name, content)
    assert one.problem is not None
    assert f"the file must be JSONL, one JSON object a line in UTF-8, but is {kind}; to " in one.problem
    assert how in one.problem
    assert f"'{tmp_path / 'rows'}" in one.problem


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \r\n"])
def test_an_empty_file_has_no_rows(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path / "rows.jsonl", content)[0] == []


def compressed(suffix: str, content: bytes) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content[:9]) + gzip.compress(content[9:])
    return files.zstd.compress(content[:9]) + files.zstd.compress(content[9:])


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_empty_compressed_file_has_no_rows(tmp_path: Path, suffix: str) -> None:
    assert read(tmp_path / f"rows.jsonl{suffix}", b"")[0] == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_are_read_over_all_their_parts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    found, _ = read(path, compressed(suffix, b'{"a": 1}\n{"a": 2}\n{"a": 3}'))
    assert [one.row for one in found] == [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_ends_too_early_is_named(tmp_path: Path, suffix: str) -> None:
    lines = b"".join(orjson.dumps({"a": n}) + b"\n" for n in range(100_000))
    found, _ = read(tmp_path / f"rows.jsonl{suffix}", compressed(suffix, lines)[:-7])
    assert [one.row for one in found[:-1]] == [{"a": n} for n in range(len(found) - 1)]
    assert "damaged" in (found[-1].problem or "")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    found, _ = read(path, compressed(suffix, b'{"a": 1}\n{"a": 2}\n') + b"this is no frame at all")
    assert [one.row for one in found] == [{"a": 1}, {"a": 2}, None]
    assert found[2].where == f"{path}:3"
    assert "damaged" in (found[2].problem or "")


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nothing.jsonl: No such file"):
        list(read_rows(tmp_path / "nothing.jsonl"))
    with pytest.raises(InvalidRequest, match="Is a directory"):
        list(read_rows(tmp_path))


def test_rows_of_the_caller_are_named_by_their_number() -> None:
    found = list(read_rows([{"a": 1}, "text", {"a": 2}]))  # type: ignore[list-item]
    assert found[1] == ("row 2", None, "a row must be a JSON object, got a str")
    assert [one.row for one in found] == [{"a": 1}, None, {"a": 2}]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.thorough
@given(
    st.lists(st.dictionaries(st.text(), JSON_VALUES)),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.booleans(),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, object]], end: bytes, mark: bool
) -> None:
    content = b"\xef\xbb\xbf" * mark + b"".join(orjson.dumps(row) + end for row in written)
    found, _ = read(tmp_path_factory.getbasetemp() / "written.jsonl", content)
    assert [one.row for one in found] == written


@given(st.binary())
def test_no_content_is_too_strange(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for suffix in ("", ".gz", ".zst"):
        for one in read(tmp_path_factory.getbasetemp() / f"strange.jsonl{suffix}", content)[0]:
            assert (one.row is None) == bool(one.problem)
