"""Files of records: what was acknowledged is there, a torn end is cut off, damage is left alone."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_serve.rollouts.files import RecordFile, read_records
from gym_serve.types.errors import BadRequest, Conflict, Unavailable

SUFFIXES = ["", ".gz", ".zst"]
RECORDS = st.lists(st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.text(max_size=30)), max_size=8)


def written(path: Path, records: list[dict[str, Any]]) -> list[int]:
    """Append records; where each ends."""
    ends = [0]
    with RecordFile(path) as file:
        for record in records:
            file.append(record)
            ends.append(file.size)
    return ends


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=40, deadline=None)
@given(records=RECORDS, data=st.data())
def test_a_file_cut_anywhere_goes_on(
    suffix: str, tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / f"out.jsonl{suffix}"
    ends = written(path, records)
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    whole = [record for record, end in zip(records, ends[1:], strict=True) if end <= cut]
    assert list(read_records(path)) == whole
    with RecordFile(path) as file:
        assert list(file.recover()) == whole
        assert file.size == max(end for end in ends if end <= cut)
        file.append({"new": 1})
        file.append({"new": 2})
    assert list(read_records(path)) == [*whole, {"new": 1}, {"new": 2}]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damage_before_the_end_is_named_and_kept(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.jsonl{suffix}"
    ends = written(path, [{"n": n} for n in range(5)])
    content = bytearray(path.read_bytes())
    content[ends[2] : ends[2] + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    with (
        RecordFile(path) as file,
        pytest.raises(Conflict, match=rf"out.jsonl{suffix}:3 is damaged, {ends[2]} bytes"),
    ):
        list(file.recover())
    assert path.read_bytes() == content


def test_a_line_that_is_no_object_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"a": 1}\n[2]\n{"a": 3}\n')
    with pytest.raises(Conflict, match=r"out.jsonl:2 is damaged"):
        list(read_records(path))


def test_no_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "nothing.jsonl")) == []


def test_lines_are_plain_json_for_others(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, [{"text": "é\u2028\n", "big": 2**70, "lone": "\ud83d"}])
    assert orjson.loads(path.read_bytes()) == {"text": "é\u2028\n", "big": float(2**70), "lone": "\ufffd"}
    assert path.read_bytes().count(b"\n") == 1


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path, exclusive=True):
        with pytest.raises(Conflict, match=r"out.jsonl is being written by another process"):
            RecordFile(path, exclusive=True)
        other = (
            "from pathlib import Path; from gym_serve.rollouts.files import RecordFile; "
            f"RecordFile(Path({str(path)!r}), exclusive=True)"
        )
        result = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
        assert "Conflict" in result.stderr
    RecordFile(path, exclusive=True).close()


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match=r"cannot write .*out.jsonl: folder .*/file does not exist"):
        RecordFile(tmp_path / "file" / "out.jsonl")


def test_a_path_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="Is a directory"):
        RecordFile(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadRequest, match="Permission denied"):
        RecordFile(tmp_path / "out.jsonl")


LIMITED = """
import resource, signal, sys
from pathlib import Path
from gym_serve.rollouts.files import RecordFile, read_records
from gym_serve.types.errors import Unavailable

path = Path(sys.argv[1])
file = RecordFile(path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
acknowledged = 0
try:
    while True:
        file.append({"n": acknowledged, "text": "x" * 7000})
        acknowledged += 1
except Unavailable as error:
    assert "lost nothing that it reported" in error.message, error
assert [record["n"] for record in read_records(path)] == list(range(acknowledged))
assert path.read_bytes().endswith(b"}\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.append({"n": acknowledged})
file.close()
print(acknowledged)
"""


def test_a_full_disk_takes_back_the_half_of_a_record(tmp_path: Path) -> None:
    """A limit on the size of files ends a write in its middle, as a full disk does."""
    path = tmp_path / "out.jsonl"
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    acknowledged = int(result.stdout)
    assert acknowledged == 14
    assert [record["n"] for record in read_records(path)] == list(range(acknowledged + 1))


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, Unavailable), (errno.EDQUOT, Unavailable), (errno.EIO, BadRequest)]
)
def test_what_the_system_says_of_a_write(tmp_path: Path, code: int, error: type[Exception]) -> None:
    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: memoryview) -> int:
            if len(data) > 4:
                return int(self.file.write(data[:4]))
            raise OSError(code, os.strerror(code))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    path = tmp_path / "out.jsonl"
    with RecordFile(path) as file:
        file.append({"a": 1})
        healthy, file._file = file._file, Full(file._file)  # type: ignore[assignment]
        with pytest.raises(error, match=os.strerror(code)):
            file.append({"b": 2})
        file._file = healthy
        assert path.read_bytes() == b'{"a":1}\n'
        file.append({"c": 3})
    assert list(read_records(path)) == [{"a": 1}, {"c": 3}]
