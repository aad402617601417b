"""Boxes of E2B's API, by its SDK, on a service that is an API and no more: it never ran on the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.sandboxes import check_remote_box, needs_bubblewrap
from support.waiting import until

from gym_serve.sandbox import (
    SandboxProvider,
    SandboxSpec,
    e2b_boxes,
    find_provider,
)
from gym_serve.sandbox.e2b_boxes import OWNER
from gym_serve.types.errors import (
    EndpointAccessDenied,
    GraphError,
    InvalidRequest,
    SessionLost,
    Unavailable,
)

pytest.importorskip("e2b", reason="pip install 'gym-serve[e2b]', on Python 3.11 or newer")
pytestmark = needs_bubblewrap

from support.e2b import Service, service  # noqa: E402 - it imports the SDK

SPEC = SandboxSpec(image="base", workdir="/app", env={"A": "b c"})
LONG = 60.0


@pytest.fixture
async def there(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    async with service() as (there, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield there


@pytest.fixture
def provider(there: Service) -> SandboxProvider:
    return find_provider("e2b")


def test_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(GraphError, match="E2B_API_KEY must be the key of an account"):
        find_provider("e2b")


async def test_a_sandbox_is_a_box(there: Service, provider: SandboxProvider) -> None:
    box = await provider.create(SPEC)
    await check_remote_box(box)
    [process] = there.processes.values()
    await box.close()
    assert there.asked == {}
    assert process.returncode is not None
    with pytest.raises(SessionLost):
        await box.exec("true", timeout=LONG)


async def test_what_an_agent_reaches(there: Service, provider: SandboxProvider) -> None:
    """Root of a box can neither end the first process nor change the machine."""
    box = await provider.create(SPEC)
    done = await box.exec(
        "kill -9 1 -1; mount -t tmpfs t /tmp; ls /proc/1/fd; unshare --net true", timeout=LONG
    )
    assert done.stderr.count(b"\n") >= 3
    assert (await box.exec("tail -n +3 /proc/net/dev | cut -d: -f1", timeout=LONG)).text.split() in (
        [],
        ["lo"],
    )
    rights = await box.exec("grep CapEff /proc/self/status", timeout=LONG)
    assert int(rights.text.split()[1], 16) & (1 << 21 | 1 << 19) == 0  # SYS_ADMIN, SYS_PTRACE
    assert box.alive
    await box.close()


async def test_what_is_asked_for(there: Service, provider: SandboxProvider) -> None:
    listed = {"network": "allowlist", "allowed_hosts": ("pypi.org", "*.example.com", "192.0.2.1")}
    boxes = [
        await provider.create(SPEC.model_copy(update=changes))
        for changes in ({}, {"network": "full"}, listed)
    ]
    asked = list(there.asked.values())
    assert [each.allow_internet_access for each in asked] == [False, True, True]
    networks = [each.network.to_dict() if each.network else None for each in asked]
    allowed = {"allowOut": ["pypi.org", "*.example.com", "192.0.2.1"], "denyOut": ["0.0.0.0/0"]}
    assert networks == [None, None, allowed]
    assert asked[0].metadata[OWNER]
    assert there.lives == {"i1": [120], "i2": [120], "i3": [120]}
    for box in boxes:
        await box.close()


async def test_a_sandbox_is_renewed_while_it_is_had(
    there: Service, provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2b_boxes, "_RENEW_SECONDS", 0.05)
    box = await provider.create(SPEC)
    await until(lambda: len(there.lives["i1"]) > 3)
    assert set(there.lives["i1"]) == {120}
    await box.close()
    renewed = len(there.lives["i1"])
    await asyncio.sleep(0.2)
    assert len(there.lives["i1"]) == renewed


async def test_a_sandbox_that_the_service_ends(there: Service, provider: SandboxProvider) -> None:
    box = await provider.create(SPEC)
    running = asyncio.create_task(box.exec("sleep 60", timeout=LONG))
    await asyncio.sleep(0.2)
    await there.end("i1")
    with pytest.raises(SessionLost):
        await running
    assert not box.alive
    await box.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": None}, "made of a template"),
        ({"network": "model"}, "must be none, allowlist or full"),
        ({"network": "allowlist", "allowed_hosts": ["10.0.0.0/8", "a.test"]}, "not 10.0.0.0/8$"),
        ({"image": "none"}, "template 'none' not found"),
        ({"image": "no-python"}, "needs python3"),
        ({"image": "no-unshare"}, "unshare: Permission denied"),
    ],
)
async def test_a_box_that_cannot_be_made(
    there: Service, provider: SandboxProvider, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await provider.create(SPEC.model_copy(update=changes))
    assert there.asked == {}


@pytest.mark.parametrize(("status", "failure"), [(429, Unavailable), (500, Unavailable), (503, Unavailable)])
async def test_a_service_that_is_busy(
    there: Service,
    provider: SandboxProvider,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    failure: type[Exception],
) -> None:
    monkeypatch.setattr("e2b.connection_config.DEFAULT_RETRIES", 0)
    there.refuses = status
    with pytest.raises(failure, match=str(status)):
        await provider.create(SPEC)


async def test_a_key_that_is_refused(
    there: Service, provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "f" * 40)
    with pytest.raises(EndpointAccessDenied, match="E2B_API_KEY"):
        await provider.create(SPEC)


async def test_a_service_that_does_not_answer(
    provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="does not start"):
        await provider.create(SPEC)
