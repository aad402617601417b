"""Rollouts per second and CPU beside NeMo Gym and verifiers: each by its own command line, on the same model.

    make peers                                                    # installs both, and runs this
    python -m benchmarks.peers --nemo-gym VENV --verifiers VENV

A rollout of gym_serve and of NeMo Gym asks for the weather: model, tool, model, verifier. verifiers starts a
program per rollout, and a server per rollout for tools; it does less here, one answer without a tool. The
model is a server on loopback that answers at once.

Counted is what each adds to the model: the seconds from the first request that reaches it to the last answer,
so no start counts, and the CPU time of all processes of the peer within them. Set-ups run in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import psutil

from benchmarks.harness.reports import machine, save, table
from benchmarks.harness.work import ROOT, graph, model_behaviour, rows
from benchmarks.loopback import RunningModelServer, run_model_server

_TASKSET = """
import verifiers.v1 as vf

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def answered(self, trace) -> float:
        return float("Paris" in (trace.last_reply or ""))

class Weather(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(name="paris", prompt="What is the weather in Paris?"), self.config.task)

__all__ = ["Weather"]
"""
_NEMO_GYM = "resources_servers/example_single_tool_call"
_NEMO_GYM_SERVERS = (
    _NEMO_GYM,
    "responses_api_models/openai_model",
    "responses_api_agents/simple_agent",
    "environment_servers/legacy_agent",
)


@dataclass(frozen=True)
class Collection:
    """A command that collects rollouts.

    Attributes:
        arguments: of its process.
        rewards: reads the rewards that it wrote, after its end.
        environment: variables beside those of this process.
    """

    arguments: list[str]
    rewards: Callable[[], list[float]]
    environment: dict[str, str]


@dataclass(frozen=True)
class Peer:
    """A library that collects.

    Attributes:
        name: of the library, and how it runs.
        requests: of one rollout to the model.
        collection: what collects so many rollouts, so many at a time.
        servers: runs what the collection needs, until the block ends.
    """

    name: str
    requests: int
    collection: Callable[[Path, RunningModelServer, int, int], Collection]
    servers: Callable[[Path, RunningModelServer], AbstractContextManager[object]]


@contextmanager
def nothing_beside(folder: Path, model: RunningModelServer) -> Iterator[None]:
    """For a peer that needs no servers."""
    yield


def gym_serve(*options: str) -> Peer:
    """This library, by ``gym-serve collect``."""

    def collection(folder: Path, model: RunningModelServer, count: int, concurrency: int) -> Collection:
        data, spec, output = folder / "rows.jsonl", folder / "graph.yaml", folder / "rollouts.jsonl"
        data.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows(count)))
        spec.write_text(json.dumps({"applications": [_application(model.url)]}))
        command = [str(Path(sys.executable).with_name("gym-serve")), "collect", str(spec), str(data)]
        command += ["--output", str(output), "--concurrency", str(concurrency), *options]
        return Collection(command, lambda: numbers_of(output), {})

    name = "gym_serve, one process" if "--no-ray" in options else "gym_serve, replicas"
    return Peer(name, 2, collection, nothing_beside)


def _application(model_url: str) -> dict[str, object]:
    return {"name": "peers", "import_path": "gym_serve.graph:app", "args": graph(model_url)}


def nemo_gym(venv: Path) -> Peer:
    """NeMo Gym 0.7, by ``gym env start`` and ``ng_collect_rollouts``; its servers share one environment."""
    packages = next(venv.glob("lib/python3*/site-packages"))
    environment = {"PATH": f"{venv}/bin:{os.environ['PATH']}"}

    @contextmanager
    def servers(folder: Path, model: RunningModelServer) -> Iterator[None]:
        for server in _NEMO_GYM_SERVERS:
            (folder / server).mkdir(parents=True)
            (folder / server / ".venv").symlink_to(venv)
        paths = (
            f"{_NEMO_GYM}/configs/example_single_tool_call.yaml",
            f"{_NEMO_GYM_SERVERS[1]}/configs/openai_model.yaml",
        )
        command = [f"{venv}/bin/gym", "env", "start", f"+config_paths=[{','.join(paths)}]"]
        command += [f"+uv_venv_dir={folder}", "+skip_venv_if_present=true", "+policy_model_name=loopback"]
        command += [f"+policy_base_url={model.url}/v1", "+policy_api_key=none"]
        log = folder / "servers.log"
        with log.open("w") as file, _running(command, folder, file, environment) as process:
            while "'process_name': 'policy_model'" not in log.read_text():
                if process.poll() is not None:
                    raise RuntimeError(f"NeMo Gym's servers did not start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield

    def collection(folder: Path, model: RunningModelServer, count: int, concurrency: int) -> Collection:
        data, output = folder / "rows.jsonl", folder / "rollouts.jsonl"
        examples = (packages / _NEMO_GYM / "data" / "example.jsonl").read_text().splitlines()
        data.write_text("".join(f"{examples[number % len(examples)]}\n" for number in range(count)))
        command = [f"{venv}/bin/ng_collect_rollouts", "+agent_name=example_single_tool_call_simple_agent"]
        command += [f"+input_jsonl_fpath={data}", f"+output_jsonl_fpath={output}"]
        command += [f"+num_samples_in_parallel={concurrency}"]
        return Collection(command, lambda: numbers_of(output), environment)

    return Peer("NeMo Gym", 2, collection, servers)


def verifiers(venv: Path) -> Peer:
    """verifiers 0.4, by ``vf-eval`` with its ``null`` harness as a subprocess."""

    def collection(folder: Path, model: RunningModelServer, count: int, concurrency: int) -> Collection:
        (folder / "weather_taskset.py").write_text(_TASKSET)
        command = [
            f"{venv}/bin/vf-eval",
            "weather_taskset",
            "--model",
            "loopback",
            "--no-push",
            "--rich",
            "None",
        ]
        command += ["--client.base-url", f"{model.url}/v1", "--client.api-key-var", "NO_KEY"]
        command += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
        command += ["--num-rollouts", str(count), "--max-concurrent", str(concurrency), "-o", f"{folder}/out"]
        environment = {
            "PATH": f"{venv}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "NO_KEY": "none",
        }

        def rewards() -> list[float]:
            (file,) = folder.glob("out/*/traces.jsonl")
            episodes = map(orjson.loads, file.read_bytes().splitlines())
            traces = (trace for episode in episodes for trace in episode["traces"])
            return [sum(reward["score"] for reward in trace["rewards"].values()) for trace in traces]

        return Collection(command, rewards, environment)

    return Peer("verifiers", 1, collection, nothing_beside)


def numbers_of(output: Path, key: str = "reward") -> list[float]:
    """A number of each line of a file of JSON."""
    return [float(orjson.loads(line)[key]) for line in output.read_bytes().splitlines()]


@contextmanager
def _running(
    command: Sequence[str], folder: Path, log: object, environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        cwd=folder,  # NeMo Gym leaves files where it runs
        env=os.environ | environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,  # type: ignore[call-overload]
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def _cpu_seconds(model: RunningModelServer) -> float:
    """CPU time of all processes below this one but the model's; those that ended count with their parents."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.pid != model.pid:
                seconds += sum(process.cpu_times()[:4])
    return seconds


def measure(
    peer: Peer, folder: Path, model: RunningModelServer, count: int, concurrency: int
) -> dict[str, float]:
    """One round of a peer.

    Raises:
        RuntimeError: a rollout is missing or has no reward of 1; the end of the log says why.
    """
    answered = model.stats()["answered"]
    end = answered + peer.requests * count
    collection = peer.collection(folder, model, count, concurrency)
    with (
        (folder / "collect.log").open("w+") as log,
        _running(collection.arguments, folder, log, collection.environment) as process,
    ):
        started = stopped = cpu = 0.0
        while not stopped:
            requests = model.stats()
            if not started and requests["requests"] > answered:
                started, cpu = time.perf_counter(), _cpu_seconds(model)
            if started and requests["answered"] >= end:
                stopped, cpu = time.perf_counter(), _cpu_seconds(model) - cpu
            elif process.poll() is not None:
                break
            time.sleep(0.02)
        process.wait()
    rewards = collection.rewards() if stopped else []
    if rewards != [1.0] * count:
        log_text = (folder / "collect.log").read_text()[-2000:]
        raise RuntimeError(
            f"{peer.name}: {rewards.count(1.0)} of {count} rollouts with a reward of 1; {log_text}"
        )
    return {"rollouts_per_second": count / (stopped - started), "cpu_ms": 1000 * cpu / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nemo-gym", type=Path, help="virtual environment with nemo-gym")
    parser.add_argument("--verifiers", type=Path, help="virtual environment with verifiers")
    parser.add_argument(
        "--rollouts", type=int, default=2000, help="of a round; verifiers does a twentieth of them"
    )
    parser.add_argument("--concurrency", type=int, default=256, help="rollouts in flight; verifiers takes 16")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; figures are medians")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    arguments = parser.parse_args()
    works = [
        (peer, arguments.rollouts, arguments.concurrency) for peer in (gym_serve(), gym_serve("--no-ray"))
    ]
    if arguments.nemo_gym:
        works.append((nemo_gym(arguments.nemo_gym.resolve()), arguments.rollouts, arguments.concurrency))
    if arguments.verifiers:
        works.append((verifiers(arguments.verifiers.resolve()), arguments.rollouts // 20, 16))
    rounds: dict[str, list[dict[str, float]]] = {peer.name: [] for peer, *_ in works}
    with ExitStack() as stack:
        weather = stack.enter_context(run_model_server(model_behaviour()))
        answers = stack.enter_context(run_model_server(replace(model_behaviour(), turns=0)))
        for number in range(arguments.rounds):
            for peer, count, concurrency in works:
                model = weather if peer.requests == 2 else answers
                with TemporaryDirectory() as folder, peer.servers(Path(folder), model):
                    figures = measure(peer, Path(folder), model, count, concurrency)
                rounds[peer.name].append(figures)
                print(
                    f"round {number + 1}: {peer.name}: {figures['rollouts_per_second']:.1f}/s",
                    file=sys.stderr,
                )
    report(rounds, arguments.output, ("library", "rollouts/s", "CPU ms per rollout"))


def report(rounds: dict[str, list[dict[str, float]]], output: Path, columns: Sequence[str]) -> None:
    """Save the figures of all rounds, by peer, and print their medians."""
    medians = {
        name: {key: round(statistics.median(one[key] for one in figures), 2) for key in figures[0]}
        for name, figures in rounds.items()
    }
    save(output, {"machine": machine(), "medians": medians, "rounds": rounds})
    print(table(columns, [(name, *one.values()) for name, one in medians.items()]))


if __name__ == "__main__":
    main()
