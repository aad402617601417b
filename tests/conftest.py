"""Fixtures of the whole suite: one Ray cluster with Serve for every test that needs one."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import haproxy
from support.processes import environment

from gym_serve.cluster.starting import free_port

# A shared machine is slow at times; that is no failure of a property. In CI (`.ci/run` sets the variable) a
# test has the same examples every time, so that a change is judged by what it changes: new ones are looked
# for wherever else the tests run.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("patient")

gc.set_threshold(50_000, 20, 100)  # collecting the tests makes much garbage

TESTS = Path(__file__).parent
ROOT = TESTS.parent

# A Ray folder of its own, so that no Ray program of this user finds the clusters of the suite, alive or
# dead. Not below TMPDIR: the paths of Ray's sockets lie in it, and have at most 107 bytes.
_RAY_FOLDER = tempfile.TemporaryDirectory(
    prefix="gs", dir=os.environ.get("RAY_TMPDIR", "/tmp"), ignore_cleanup_errors=True
)
os.environ["RAY_TMPDIR"] = _RAY_FOLDER.name
os.environ.pop("COLUMNS", None)  # pytest-xdist's: tables are as wide as in a pipe


def pytest_unconfigure() -> None:
    _RAY_FOLDER.cleanup()


THOROUGH = (
    *("cli/test_catalog", "cli/test_every_command", "cli/test_init", "client/test_batcher.py"),
    *("deployments/test_harness_agent", "deployments/test_sick_answers"),
    *(
        f"environments/test_{name}"
        for name in (
            *("code_gen", "every_", "google_search", "harness_in_a_box", "instruction_following"),
            *("math_with", "mcp_", "mcqa_grading", "nothing_evaluates", "reasoning_gym", "same_rewards"),
            *("structured_outputs", "text_to_sql", "workplace_assistant", "workspace"),
        )
    ),
    *("grading/", "http/test_openapi", "http/test_tls_ingress", "interop/test_nemo_gym.py"),
    *("rollouts/test_crashes", "rollouts/test_dead_endpoint", "rollouts/test_memory"),
    *("sandbox/", "servers/test_process", "servers/test_sessions_many", "testing/test_conformance"),
    *("types/test_client_", "types/test_hostile_requests", "types/test_messages", "types/test_official"),
    *("types/test_round_trip", "view/test_hostile", "view/test_mutations", "view/test_server", "workers/"),
)
"""Tests that need no Ray and take long: sandboxes, pools of workers, generated values, official clients. The
others take two minutes together (`make check`)."""

PARTLY_THOROUGH = ("docs/test_docs",)
"""Modules that mark some of their tests ``thorough`` themselves: pages whose blocks start no Ray."""

WITHOUT_RAY = (
    *(
        "benchmarking/",
        "deployments/",
        "environments/",
        "grading/",
        "graph/",
        "interop/",
        "judging/",
        "metrics/",
    ),
    *("sandbox/", "servers/", "testing/", "training/", "types/", "workers/"),
)
"""Folders of which no test needs Ray."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules of which no test would run: each worker of a suite imports what it collects."""
    if not (collection_path.is_file() and collection_path.is_relative_to(TESTS)):
        return None
    name = collection_path.relative_to(TESTS).as_posix()
    wanted = set(config.option.markexpr.split(" and "))
    ignored = (
        ({"not ray", "not thorough"} <= wanted and name.startswith(THOROUGH))
        or ("thorough" in wanted and not name.startswith((*THOROUGH, *PARTLY_THOROUGH)))
        or ("ray" in wanted and name.startswith(WITHOUT_RAY))
        or ("not interop" in wanted and name.endswith("_in_a_browser.py"))  # `make test-browser`
    )
    return ignored or None


def pytest_collection_finish() -> None:
    """Take the imported modules and collected tests out of the garbage collector's later passes."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the cluster, or takes long; tests that start a Ray themselves carry ``ray`` already."""
    for item in items:
        name = item.path.relative_to(TESTS).as_posix()
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")
        elif name.startswith(THOROUGH):
            item.add_marker("thorough")
        if name.startswith("interop/test_table_"):
            item.add_marker("interop")
        if item.get_closest_marker("ray") and name.startswith(WITHOUT_RAY):
            raise pytest.UsageError(
                f"{item.nodeid} needs Ray: take its folder out of WITHOUT_RAY in {__file__}"
            )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A local Ray with Serve; the base URL of its proxy. Stopped at the end of the session."""
    import ray
    from ray import serve
    from ray.serve._private import client

    # Else Serve looks only once a second whether an application runs, or is gone.
    client.CLIENT_POLLING_INTERVAL_S = 0.1
    # Replicas import the servers of the tests (tests/support).
    os.environ["PYTHONPATH"] = environment(tests=True, lean=True)["PYTHONPATH"]
    if haproxy.ENABLED:
        os.environ |= haproxy.environment(tmp_path_factory.mktemp("haproxy"))
    ray.init(
        address="local",
        num_cpus=16,
        resources={"gpu_share": 2.0},  # of examples/on_the_trainers_cluster.py
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def deploy(cluster: str) -> Iterator[Callable[..., Any]]:
    """Deploy graphs for a module: ``deploy(graph, name=...) -> Gym``."""
    from gym_serve import Gym

    with ExitStack() as stack:
        yield lambda graph, **options: stack.enter_context(Gym.from_graph(graph, **options))
