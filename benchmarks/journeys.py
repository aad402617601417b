"""How many files of gym_serve one request passes: what a reader has to open to follow it.

    python -m benchmarks.journeys [rollout collect serve-run streamed-chat]

Four journeys on a local Ray, without inline transports. A file counts if one of its functions is called, in
any process, while the journey lasts; modules that are only imported do not.

- rollout: `Gym.run` of one row and back, after a first one;
- collect: ``gym-serve collect`` of one row, the command's own process alone;
- serve-run: ``serve run``, from the file to a graph that answers;
- streamed-chat: a streamed chat completion, from the gateway to the endpoint of a `chat_model` and back.

Prints the files of each journey by folder, and their number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.work import ROOT
from benchmarks.loopback import run_model_server

ROWS = "environments/simple_weather/data/example.jsonl"

_HOOK = """
import inspect, json, os, sys, threading, time

root, folder = os.environ["JOURNEY_ROOT"], os.environ["JOURNEY_FOLDER"]
called = {}


def watch(frame, event, argument):
    if event == "call":
        code = frame.f_code
        if code.co_filename.startswith(root) and code.co_flags & inspect.CO_OPTIMIZED:  # a function
            called.setdefault(code.co_filename, set()).add(int(time.time() * 20))


def write():
    while True:
        time.sleep(0.2)
        path = os.path.join(folder, str(os.getpid()))
        with open(path + ".new", "w") as file:
            json.dump({name: sorted(moments) for name, moments in dict(called).items()}, file)
        os.replace(path + ".new", path)


threading.Thread(target=write, daemon=True).start()
threading.setprofile(watch)
sys.setprofile(watch)
"""
"""What every process runs first: the moments, in twentieths of a second, at which each file was called."""


class Watch:
    """The processes of a journey, watched by a hook that their Python runs at its start.

    Args:
        folder: an empty folder for the hook, and for what it writes.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "calls").mkdir()
        (folder / "sitecustomize.py").write_text(_HOOK)
        self._calls = folder / "calls"
        self.environment = {
            **os.environ,
            "JOURNEY_ROOT": str(ROOT / "gym_serve"),
            "JOURNEY_FOLDER": str(self._calls),
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        }

    def files(self, since: float, until: float, pid: int | None = None) -> list[str]:
        """The files that were called between two times of `time.time`, by all processes or by one."""
        time.sleep(0.5)  # until the hooks have written
        paths = self._calls.glob("*[0-9]") if pid is None else [self._calls / str(pid)]
        window = range(int(since * 20), int(until * 20) + 1)
        return sorted(
            {
                str(Path(name).relative_to(ROOT / "gym_serve"))
                for path in paths
                for name, moments in json.loads(path.read_text()).items()
                if any(moment in window for moment in moments)
            }
        )


_DRIVER = """
import sys
import time
from gym_serve import Gym

with Gym.from_graph("graphs/weather.yaml") as gym:
    gym.run({rows!r}, limit=1)
    time.sleep(1)
    begun = time.time()
    gym.run({rows!r}, limit=1)
    print("journey", begun, time.time(), flush=True)
    time.sleep(1)
"""


def rollout(watch: Watch) -> list[str]:
    """One rollout, over all processes."""
    code = _DRIVER.format(rows=ROWS)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=watch.environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("journey")]
    _, begun, ended = line.split()
    return watch.files(float(begun), float(ended))


def collect(watch: Watch) -> list[str]:
    """The command's own process."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(sys.executable).with_name("gym-serve")
        command = ["collect", "graphs/weather.yaml", ROWS, "--limit", "1", "-o", f"{folder}/out.jsonl"]
        begun = time.time()
        process = subprocess.Popen([program, *command], cwd=ROOT, env=watch.environment)
        if process.wait(300) != 0:
            raise RuntimeError(f"collect ended with exit code {process.returncode}")
        return watch.files(begun, time.time(), process.pid)


@contextmanager
def serve_run(watch: Watch, graph: str) -> Iterator[str]:
    """``serve run`` of a graph in a process group of its own; the base URL of its proxy."""
    serve = Path(sys.executable).with_name("serve")
    environment = {**watch.environment, "RAY_AUTH_MODE": "token"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([serve, "run", graph], cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            url = "http://127.0.0.1:8000"
            deadline = time.monotonic() + 240
            while not _answers(f"{url}/weather/health"):
                if time.monotonic() > deadline or process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(log.read().decode()[-3000:])
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def serving(watch: Watch) -> list[str]:
    """From the command to the graph's first answer."""
    begun = time.time()
    with serve_run(watch, "graphs/weather.yaml"):
        return watch.files(begun, time.time())


def streamed_chat(watch: Watch) -> list[str]:
    """One streamed chat completion of a `chat_model`, over all processes."""
    with run_model_server() as endpoint:
        watch.environment |= {"POLICY_BASE_URL": f"{endpoint.url}/v1", "POLICY_MODEL": "loopback"}
        with serve_run(watch, "graphs/weather.yaml") as url:
            body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
            request = urllib.request.Request(
                f"{url}/weather/policy/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            for _ in range(2):  # what is constructed once does not count
                time.sleep(1)
                begun = time.time()
                with urllib.request.urlopen(request, timeout=60) as answer:
                    if b"[DONE]" not in answer.read():
                        raise RuntimeError("the stream broke off")
                ended = time.time()
            return watch.files(begun, ended)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


JOURNEYS: dict[str, Callable[[Watch], list[str]]] = {
    "rollout": rollout,
    "collect": collect,
    "serve-run": serving,
    "streamed-chat": streamed_chat,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("journeys", nargs="*", choices=[*JOURNEYS, []], help="all by default")
    for name in parser.parse_args().journeys or JOURNEYS:
        with tempfile.TemporaryDirectory() as folder:
            files = JOURNEYS[name](Watch(Path(folder)))
        print(f"{name}: {len(files)} files")
        by_folder: dict[str, list[str]] = {}
        for file in files:
            top, _, rest = file.partition("/")
            by_folder.setdefault(top, []).append(rest.removesuffix(".py"))
        for top, names in by_folder.items():
            print(f"  {top} ({len(names)}): {', '.join(names)}")


if __name__ == "__main__":
    main()
