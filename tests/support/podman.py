"""A daemon that speaks Docker's API: Podman's, with images that need no registry, one of them with Python."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["BUSYBOX", "PYTHON", "containers", "needs_podman", "podman"]

BUSYBOX = "localhost/gym-serve-busybox:latest"
PYTHON = "localhost/gym-serve-python:latest"
_PROGRAMS = (
    "sh cat chmod dirname find grep head id kill ls mkdir printf ps rm seq sleep sort tar test true wc"
)
_SETTINGS = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
"""

_MISSING = [name for name in ("podman", "runc", "busybox") if shutil.which(name) is None]
if not _MISSING and os.geteuid() != 0:
    _MISSING.append("root")

needs_podman = pytest.mark.skipif(
    bool(_MISSING), reason=f"needs {', '.join(_MISSING)}: apt install podman runc uidmap busybox-static"
)


@contextmanager
def podman() -> Iterator[str]:
    """A daemon with `BUSYBOX`, until the block ends; its address for ``DOCKER_HOST``."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "containers.conf")
        settings.write_text(_SETTINGS)
        environment = {**os.environ, "CONTAINERS_CONF": str(settings)}
        for image in (BUSYBOX, PYTHON):
            there = subprocess.run(["podman", "image", "exists", image], env=environment, check=False)
            if there.returncode == 0:
                continue
            files = _python() if image == PYTHON else {}
            subprocess.run(
                ["podman", "import", "-", image],
                input=_busybox(files),
                env=environment,
                check=True,
                capture_output=True,
            )
        url = f"unix://{folder}/podman.sock"
        service = subprocess.Popen(["podman", "system", "service", "--time=0", url], env=environment)
        try:
            while not Path(folder, "podman.sock").exists():
                assert service.poll() is None, "podman system service ended"
                time.sleep(0.05)
            yield url
        finally:
            service.terminate()
            service.wait()


def containers() -> list[str]:
    """The containers that were made by gym_serve."""
    listed = subprocess.run(
        ["podman", "ps", "-aq", "--filter", "label=gym-serve"], check=True, capture_output=True, text=True
    )
    return listed.stdout.split()


def _python() -> dict[str, str]:
    """This Python with its standard library, and the libraries that they are linked to; links by name."""
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    program = os.path.realpath(sys.executable)
    modules = [str(path) for path in library.rglob("*.so")]
    linked = subprocess.run(["ldd", program, *modules], capture_output=True, text=True, check=False).stdout
    files = {os.path.normpath(path): os.path.realpath(path) for path in re.findall(r"(/\S+) \(0x", linked)}
    left_out = {"test", "site-packages", "dist-packages", "idlelib", "__pycache__", "lib2to3", "ensurepip"}
    for path in library.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".so") and not left_out & {*path.parts}:
            files[str(path)] = str(path)
    return {**files, program: program}


def _busybox(files: Mapping[str, str]) -> bytes:
    """The files of a system that has one program, and these, by their place."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(shutil.which("busybox"), "bin/busybox")
        for name in _PROGRAMS.split():
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        for name, mode in (("tmp", 0o1777), ("root", 0o700), ("proc", 0o555), ("sys", 0o555), ("dev", 0o755)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            archive.addfile(folder)
        for place, file in files.items():
            member = tarfile.TarInfo(place.lstrip("/"))
            content = Path(file).read_bytes()
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
        if files:
            link = tarfile.TarInfo("bin/python3")
            link.type, link.linkname = tarfile.SYMTYPE, os.path.realpath(sys.executable)
            archive.addfile(link)
        users = b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n"
        file = tarfile.TarInfo("etc/passwd")
        file.size = len(users)
        archive.addfile(file, io.BytesIO(users))
    return data.getvalue()
