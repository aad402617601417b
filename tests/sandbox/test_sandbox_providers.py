"""Which sandbox there is, what `bwrap` is asked for, and the filter of system calls, without running any."""

import errno
import logging
import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path

import pytest
from support.sandboxes import needs_bubblewrap

import gym_serve
from gym_serve.sandbox import Bubblewrap, Limits, PlainProcess, SandboxedPython, find_sandbox
from gym_serve.sandbox.cgroups import ControlGroups
from gym_serve.sandbox.inside.confinement import filter_program
from gym_serve.sandbox.providers import packages_of
from gym_serve.types.errors import GraphError

ALLOWED, KILLED = 0x7FFF0000, 0x80000000


def fake_bwrap(folder: Path, script: str, interpreter: str = "/bin/sh") -> None:
    program = folder / "bwrap"
    program.write_text(f"#!{interpreter}\n{script}\n")
    program.chmod(0o755)


def test_without_bwrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GraphError, match=r"no bwrap on the PATH; install it .*sandbox: process"):
        find_sandbox("bubblewrap")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions to create"),
        ("exit 7", "exit status 7"),
    ],
)
def test_bwrap_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    fake_bwrap(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        GraphError, match=rf"does not work here: .*{reason}.*it needs version 0.7 or newer.*sandbox: process"
    ):
        find_sandbox("bubblewrap")


def test_bwrap_that_cannot_be_run(tmp_path: Path) -> None:
    assert "No such file" in str(Bubblewrap(str(tmp_path / "bwrap")).problem())


@pytest.mark.parametrize(
    ("script", "reasons"),
    [
        ("exit 0", ["the check that ran in it reported nothing"]),
        (
            'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
            [
                "the package that confines is not where it should be",
                "its net namespace is this machine's",
                "its pid namespace is this machine's",
                "it sees /etc/passwd",
                "no system call is refused",
            ],
        ),
    ],
)
def test_bwrap_that_does_not_confine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reasons: list[str]
) -> None:
    fake_bwrap(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(GraphError, match="does not work here") as caught:
        find_sandbox("bubblewrap")
    for reason in reasons:
        assert reason in str(caught.value)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            "a.remove('--unshare-net') if '--unshare-net' in a else a.insert(2, '--share-net')",
            "its net namespace is this machine's",
        ),
        ("a[end:end] = ['--ro-bind', '/tmp', '/tmp']", "it sees /tmp/gym-serve-"),
        ("a[end:end] = ['--ro-bind', '/etc', '/etc']", "it sees /etc/passwd"),
        ("a[end:end] = ['--setenv', 'SECRET', '1']", "it has variables of this process: SECRET"),
        ("a[end:end] = ['--proc', '/proc']", "it may write to /proc/self/oom_score_adj"),
        (
            "a[end:end] = ['--tmpfs', '/sandbox/inside']",
            "the package that confines is not where it should be",
        ),
    ],
)
def test_bwrap_that_leaves_something_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str, reason: str
) -> None:
    real = shutil.which("bwrap")
    script = f"import os, sys\na = sys.argv[:]\nend = a.index('--')\n{change}\nos.execv({real!r}, a)"
    fake_bwrap(tmp_path, script, f"{sys.executable} -IS")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(GraphError, match=f"it does not confine: .*{reason}"):
        find_sandbox("bubblewrap")


@needs_bubblewrap
def test_bwrap_that_works() -> None:
    sandbox = find_sandbox("bubblewrap")
    assert isinstance(sandbox, Bubblewrap)
    assert sandbox.program == shutil.which("bwrap")


def test_a_machine_without_a_list_of_system_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    uname = os.uname()
    monkeypatch.setattr(os, "uname", lambda: type(uname)((*uname[:4], "riscv64")))
    assert Bubblewrap("bwrap").problem() == "riscv64 has no list of system calls, only x86_64, aarch64 have"


def test_process_says_that_it_trusts_the_code(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gym_serve"):
        assert isinstance(find_sandbox("process"), PlainProcess)
    assert "trusted code only" in caplog.text


def command(*packages: str) -> list[str]:
    return Bubblewrap("bwrap", packages).command(Limits(disk_bytes=12345))


def pairs(option: str, *packages: str) -> list[tuple[str, str]]:
    words = command(*packages)
    return [(words[i + 1], words[i + 2]) for i, word in enumerate(words) if word == option]


def as_user(monkeypatch: pytest.MonkeyPatch, user: int) -> list[str]:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    words = command()
    return words[: words.index("--")]


def test_everything_is_unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (0, 1000):
        words = as_user(monkeypatch, user)
        for option in ("--die-with-parent", "--new-session", "--clearenv", "--as-pid-1"):
            assert option in words
        assert words[words.index("--cap-drop") + 1] == "ALL"
        assert "--share-net" not in words
        assert not {"--bind", "--dev-bind", "--bind-try"} & set(words)


def test_an_ordinary_user_has_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    words = as_user(monkeypatch, 1000)
    assert "--unshare-all" in words
    assert "--cap-add" not in words


def test_root_has_none_but_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a user namespace of root's, code would be the machine's root all the same."""
    words = as_user(monkeypatch, 0)
    assert not {"--unshare-all", "--unshare-user", "--unshare-user-try"} & set(words)
    assert {f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")} <= set(words)
    added = {words[i + 1] for i, word in enumerate(words) if word == "--cap-add"}
    assert added == {"CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_NICE"}
    assert Bubblewrap("bwrap").user == 65534


def test_the_kernels_settings_are_covered_and_read_only() -> None:
    words = command()
    after = words[words.index("--proc") :]
    assert after[:8] == [
        *("--proc", "/proc", "--tmpfs", "/proc/sys"),
        *("--remount-ro", "/proc/sys", "--remount-ro", "/proc"),
    ]


def test_only_a_small_folder_is_writable() -> None:
    words = command()
    assert words[words.index("/tmp") - 3 :][:4] == ["--size", "12345", "--tmpfs", "/tmp"]
    assert {folder for folder, _ in pairs("--remount-ro")} >= {"/", "/dev"}
    assert words.index("--chdir") > words.index("/tmp")


def test_python_is_shown_and_nothing_of_the_project() -> None:
    shown = [source for source, _ in pairs("--ro-bind")]
    assert os.path.realpath(sys.executable) in shown
    assert os.path.dirname(os.__file__) in shown
    project = Path(gym_serve.__file__).parent
    inside = project / "sandbox/inside"
    assert [path for path in shown if project.is_relative_to(path) or Path(path).is_relative_to(project)] == [
        str(inside)
    ]
    assert not {"/", "/usr", "/etc", "/home", sys.prefix, sys.base_prefix} & set(shown)
    assert not any("-packages" in path for path in shown)
    covered = [folder for folder, _ in pairs("--tmpfs")]
    assert f"{os.path.dirname(os.__file__)}/site-packages" in covered


def test_packages_are_shown_with_what_they_require_and_no_others() -> None:
    shown = {target for _, target in pairs("--ro-bind", "sympy") if target.startswith("/sandbox/packages")}
    names = {Path(target).name.partition("-")[0] for target in shown}
    assert names >= {"sympy", "mpmath"}
    assert not {"numpy", "ray", "pydantic", "gym_serve", ".."} & names
    assert not any(target.startswith("/sandbox/packages") for _, target in pairs("--ro-bind"))


def test_a_package_that_is_not_installed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gym_serve"):
        assert packages_of(["No_such.package", "mpmath"]) == ["mpmath"]
    assert "cannot import these packages, which are not installed: no-such-package" in caplog.text


def test_no_variable_of_this_process_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "sk-secret")
    assert not any("sk-secret" in word for word in command())
    assert {name for name, _ in pairs("--setenv")} >= {"PATH", "HOME"}


OWN = 7


def verdict(architecture: int, number: int, *arguments: int, machine: str = "x86_64") -> int:
    """What the filter of process 7 says to a system call: a small interpreter of its instructions."""
    program = filter_program(machine, OWN)
    places = zip((16, 24, 32, 40), (*arguments, 0, 0, 0, 0), strict=False)
    data = {0: number, 4: architecture, **{place: value & 0xFFFFFFFF for place, value in places}}
    instructions = list(struct.iter_unpack("=HBBI", program))
    value = at = 0
    while True:
        code, when, otherwise, constant = instructions[at]
        at += 1
        if code == 0x20:
            value = data[constant]
        elif code == 0x06:
            return int(constant)
        else:
            met = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            at += when if met else otherwise


X86, ARM = 0xC000003E, 0xC00000B7
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


@pytest.mark.parametrize(
    ("machine", "architecture", "number", "arguments", "expected"),
    [
        ("x86_64", X86, 0, (), ALLOWED),  # read
        ("x86_64", X86, 9, (0, 1 << 20, 3, 0x22), ALLOWED),  # mmap, private
        ("x86_64", X86, 9, (0, 1 << 20, 3, 0x01), ALLOWED),  # of a file
        ("x86_64", X86, 9, (0, 1 << 20, 3, 0x21), EPERM),  # shared
        ("x86_64", X86, 9, (0, 1 << 20, 3, 0x8023), EPERM),
        ("x86_64", X86, 53, (), ALLOWED),  # socketpair
        ("x86_64", X86, 56, (0x10000,), ALLOWED),  # clone of a thread
        ("x86_64", X86, 56, (17,), EPERM),
        ("x86_64", X86, 57, (), EPERM),  # fork
        ("x86_64", X86, 59, (), EPERM),  # execve
        ("x86_64", X86, 41, (), EPERM),  # socket
        ("x86_64", X86, 435, (), ENOSYS),  # clone3
        ("x86_64", X86, 462, (), ALLOWED),  # mseal
        ("x86_64", X86, 463, (), ENOSYS),  # what comes after it
        ("x86_64", X86, 0x40000039, (), ENOSYS),  # fork of x32
        ("x86_64", 0x40000003, 2, (), KILLED),  # fork of i386
        ("x86_64", X86, 62, (OWN, 9), ALLOWED),  # kill
        ("x86_64", X86, 62, (1, 2), EPERM),
        ("x86_64", X86, 62, (0, 2), EPERM),
        ("x86_64", X86, 62, (-1, 2), EPERM),
        ("x86_64", X86, 62, (-OWN, 2), EPERM),
        ("x86_64", X86, 62, (1 << 32 | 1, 2), EPERM),  # the kernel reads the lower half
        ("x86_64", X86, 234, (OWN, OWN), ALLOWED),  # tgkill
        ("x86_64", X86, 234, (1, 1), EPERM),
        ("x86_64", X86, 302, (0, 7), ALLOWED),  # prlimit64
        ("x86_64", X86, 302, (OWN, 7), ALLOWED),
        ("x86_64", X86, 302, (1, 7), EPERM),
        ("x86_64", X86, 72, (3, 4), ALLOWED),  # fcntl(F_SETFL)
        ("x86_64", X86, 72, (3, 8), EPERM),  # F_SETOWN
        ("x86_64", X86, 72, (3, 15), EPERM),  # F_SETOWN_EX
        ("x86_64", X86, 16, (3, 0x5401), ALLOWED),  # ioctl(TCGETS)
        ("x86_64", X86, 16, (3, 0x8901), EPERM),  # FIOSETOWN
        ("x86_64", X86, 157, (15,), ALLOWED),  # prctl(PR_SET_NAME)
        ("x86_64", X86, 157, (62,), EPERM),  # PR_SCHED_CORE
        ("x86_64", X86, 203, (0,), EPERM),  # sched_setaffinity
        ("x86_64", X86, 204, (0,), ALLOWED),  # sched_getaffinity
        ("x86_64", X86, 141, (0, 0), EPERM),  # setpriority
        ("aarch64", ARM, 63, (), ALLOWED),  # read
        ("aarch64", ARM, 222, (0, 1 << 20, 3, 0x21), EPERM),  # mmap
        ("aarch64", ARM, 220, (0x10000,), ALLOWED),
        ("aarch64", ARM, 220, (17,), EPERM),
        ("aarch64", ARM, 221, (), EPERM),  # execve
        ("aarch64", ARM, 198, (), EPERM),  # socket
        ("aarch64", ARM, 129, (OWN, 9), ALLOWED),  # kill
        ("aarch64", ARM, 129, (1, 2), EPERM),
        ("aarch64", ARM, 261, (1, 7), EPERM),  # prlimit64
        ("aarch64", ARM, 122, (0,), EPERM),  # sched_setaffinity
        ("aarch64", X86, 63, (), KILLED),
    ],
)
def test_filter(
    machine: str, architecture: int, number: int, arguments: tuple[int, ...], expected: int
) -> None:
    assert verdict(architecture, number, *arguments, machine=machine) == expected


# Control groups: a folder stands in for the kernel's tree, as few machines of CI give a writable one


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree in which this process is in /service/main, and /service is its to manage."""
    (tmp_path / "mountinfo").write_text(
        "20 1 0:5 / /proc rw - proc proc rw\n"
        f"30 1 0:26 / {tmp_path} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    )
    (tmp_path / "own").write_text("4:memory:/x\n0::/service/main\n")
    for group, controllers in (("", "cpu pids"), ("service", "cpu pids"), ("service/main", "")):
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "cgroup.subtree_control").write_text(controllers)
        (tmp_path / group / "cgroup.procs").write_text("")
    return tmp_path


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a group are the kernel's, so that an empty group has them and can be removed."""
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)


def found(tree: Path) -> ControlGroups | None:
    return ControlGroups.found(tree / "mountinfo", tree / "own")


@pytest.mark.usefixtures("virtual")
def test_a_group_for_each_sandbox(tree: Path) -> None:
    groups = found(tree)
    assert groups is not None
    group = groups.create()
    assert group.parent == tree / "service"
    assert (group / "cpu.max").read_text() == "100000 100000"
    assert (group / "pids.max").read_text() == "512"
    assert groups.create() != group
    groups.remove(group)
    assert not group.exists()
    groups.remove(group)  # gone already


@pytest.mark.usefixtures("virtual")
def test_groups_of_servers_that_are_gone_are_removed(tree: Path) -> None:
    left, ours = tree / "service/gym-serve-4194305-0", tree / f"service/gym-serve-{os.getpid()}-9"
    left.mkdir()
    ours.mkdir()
    assert found(tree) is not None
    assert (left.exists(), ours.exists()) == (False, True)


def test_no_group_without_the_processor_or_the_right_to_make_one(tree: Path) -> None:
    for group in ("service", ""):
        (tree / group / "cgroup.subtree_control").write_text("memory pids")
    assert found(tree) is None
    (tree / "own").write_text("4:memory:/x\n")
    assert found(tree) is None
    (tree / "mountinfo").write_text("20 1 0:5 / /proc rw - proc proc rw\n")
    assert found(tree) is None
    assert ControlGroups.found(tree / "none", tree / "none") is None


@pytest.mark.usefixtures("virtual")
async def test_a_sandbox_joins_its_group_and_leaves_none(tree: Path) -> None:
    groups = found(tree)
    assert groups is not None
    sandbox = PlainProcess()
    sandbox.groups = groups
    python = SandboxedPython(sandbox, Limits())
    await python.start()
    try:
        (group,) = (tree / "service").glob("gym-serve-*")
        assert (group / "cgroup.procs").read_text() == "0\n"  # to the kernel: who writes this
        assert (await python.run("print(1)", timeout=60, output_limit=10)).stdout == "1\n"
    finally:
        await python.stop()
    assert not group.exists()
