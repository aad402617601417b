"""The same conversations in Inspect View: ``PYTHON inspect_log.py ROLLOUTS FOLDER``.

Runs in a virtual environment with inspect-ai. Writes the rollouts as an Inspect log, starts ``inspect view``,
and asks its server what its page asks before it shows the list of samples: the log's directory (it is a zip
file), its header and the summaries of all samples, by ranges of bytes; then one sample. What the browser does
with them is not counted. Prints one JSON object.
"""

from __future__ import annotations

import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Measure, and print."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2]) / "inspect"
    folder.mkdir()
    began = time.monotonic()
    path = write_log(source, folder)
    found: dict[str, Any] = {"write_s": time.monotonic() - began, "bytes": path.stat().st_size}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    program = "from inspect_ai._cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        program,
        "view",
        "start",
        "--log-dir",
        os.fspath(folder),
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found |= measure(f"http://127.0.0.1:{port}/api", path, server, began)
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(found))


def write_log(source: Path, folder: Path) -> Path:
    """The rollouts as an Inspect log."""
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSample, EvalSpec, write_eval_log
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ChatMessageUser
    from inspect_ai.scorer import Score
    from inspect_ai.tool import ToolCall

    samples = []
    with open(source, "rb") as file:
        for line in file:
            rollout = json.loads(line)
            asked = rollout["responses_create_params"]["input"][0]["content"]
            call, result, said = rollout["response"]["output"]
            arguments = json.loads(call["arguments"])
            made = ToolCall(id="c", function=call["name"], arguments=arguments)
            samples.append(
                EvalSample(
                    id=rollout["_ng_task_index"],
                    epoch=rollout["_ng_rollout_index"] + 1,
                    input=asked,
                    target="",
                    messages=[
                        ChatMessageUser(content=asked),
                        ChatMessageAssistant(content="", tool_calls=[made]),
                        ChatMessageTool(content=result["output"], tool_call_id="c", function=call["name"]),
                        ChatMessageAssistant(content=said["content"][0]["text"]),
                    ],
                    scores={"reward": Score(value=rollout["reward"])},
                    total_time=rollout["_ng_latency_s"],
                )
            )
    spec = EvalSpec(
        created="2026-11-23T00:00:00+00:00",
        task="viewer",
        dataset=EvalDataset(name="viewer", samples=len(samples)),
        model="policy",
        config=EvalConfig(),
    )
    path = folder / "2026-11-23T00-00-00_viewer_benchmark.eval"
    write_eval_log(EvalLog(eval=spec, status="success", samples=samples), path)
    return path


def measure(api: str, path: Path, server: subprocess.Popen[bytes], began: float) -> dict[str, Any]:
    """The figures, in seconds and bytes."""
    peak = Peak(server.pid)
    while True:
        try:
            files = json.loads(ask(f"{api}/log-files"))["files"]
            break
        except OSError:
            time.sleep(0.02)
    log = Log(api, files[0]["name"])
    archive = zipfile.ZipFile(io.BufferedReader(log, 1 << 16))
    archive.read("header.json")
    archive.read("summaries.json")
    found = {"first_page_s": time.monotonic() - began, "first_page_bytes": log.asked}
    names = [name for name in archive.namelist() if name.startswith("samples/")]
    times = []
    for name in random.Random(1).sample(names, min(50, len(names))):
        at = time.perf_counter()
        archive.read(name)
        times.append(time.perf_counter() - at)
    times.sort()
    return {
        **found,
        "samples": len(names),
        "sample_s": {"median": times[len(times) // 2], "slowest": times[-1]},
        "server_memory_bytes": peak.bytes,
    }


def ask(url: str) -> bytes:
    """The body of an answer."""
    with urllib.request.urlopen(url, timeout=600) as answer:
        body: bytes = answer.read()
        return body


class Log(io.RawIOBase):
    """A log as its page reads it: by ranges of bytes over HTTP."""

    def __init__(self, api: str, name: str) -> None:
        self._log = urllib.parse.quote(name, safe="")
        self._api = api
        self._size = int(ask(f"{api}/log-size/{self._log}"))
        self._at = 0
        self.asked = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        body = ask(f"{self._api}/log-bytes/{self._log}?start={self._at}&end={end - 1}")
        buffer[: len(body)] = body
        self._at += len(body)
        self.asked += len(body)
        return len(body)


class Peak:
    """The most memory of a process, looked at ten times a second: what is its alone."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._file = Path(f"/proc/{pid}/smaps_rollup")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            try:
                lines = self._file.read_text().splitlines()
            except OSError:
                return
            private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
            self.bytes = max(self.bytes, 1024 * private)
            time.sleep(0.1)


if __name__ == "__main__":
    main()
