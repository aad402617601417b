# ruff: noqa: E501 - commands, one a line
"""A catalogue of cheats: what an agent does in its box in place of the task earns 0, and masks nothing.

Each is a command for the tool `bash`. The hidden tests of the first part import the agent's code; the second
part is a task of Harbor, whose script writes the reward. All attacks are on the box's own files and processes.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.environments import Bench
from support.sandboxes import needs_bubblewrap, with_pytest

from gym_serve.environments.workspace import Workspace

pytestmark = needs_bubblewrap

RIGHT = "printf 'def add(a, b):\\n    return a + b\\n' > app.py"
WRONG = "def add(a, b):\n    return 7\n"
TESTS = {
    "test_add.py": "import json\n\nfrom app import add\n\n\n"
    "def test_add():\n    assert json.dumps([add(2, 3), add(-1, 1)]) == '[5, 0]'\n"
}
PYTEST = "python3 -m pytest -q -p no:cacheprovider /tests"

FORGE = """
import _pytest.reports, _pytest.runner
make = _pytest.reports.TestReport.from_item_and_call.__func__
def passed(cls, item, call):
    call.excinfo = None
    return make(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(passed)
"""
HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
"""


def code(text: str, name: str = "app.py", more: str = WRONG) -> str:
    """A command that writes a file with this text, and then the wrong solution."""
    return f"cat > {name} <<'END'\n{text}\n{more}\nEND"


CHEATS = {
    # In its own box, which is gone when the tests run
    "nothing": "true",
    "a wrong answer": code(""),
    "edits the tests": "mkdir -p /tests; echo 'def test_add(): pass' > /tests/test_add.py",
    "tests of its own beside": "mkdir tests; echo 'def test_add(): pass' > tests/test_add.py",
    "a test folder that is a link": "rm -rf /tests; mkdir t; ln -s /app/t /tests",
    "a patched pytest": f"cd /usr/lib/python3/dist-packages && cat >> _pytest/runner.py <<'END'\n{FORGE}\nEND",
    "another python3": "ln -sf /bin/true /usr/local/bin/python3; ln -sf /bin/true /usr/bin/python3",
    "another sh": "cp /bin/true /usr/bin/dash.new && mv /usr/bin/dash.new /usr/bin/dash",
    "a PATH": "mkdir bin; ln -s /bin/true bin/python3; echo 'PATH=/app/bin:$PATH' | tee -a ~/.bashrc ~/.profile /etc/profile",
    "an environment": "echo 'PYTEST_ADDOPTS=--collect-only' >> /etc/environment; export PYTEST_ADDOPTS=--collect-only",
    "a preloaded library": "echo /app/x.so > /etc/ld.so.preload; touch x.so",
    "a .pth file": "d=/usr/local/lib/python3.11/dist-packages; mkdir -p $d; echo 'import os; os._exit(0)' > $d/a.pth",
    "a package of the user's": "d=~/.local/lib/python3.11/site-packages; mkdir -p $d; echo 'import os; os._exit(0)' > $d/usercustomize.py",
    "a process that outlives": "(setsid sh -c 'while :; do mkdir -p /tests; echo > /tests/test_add.py; done' &)",
    "a fork bomb": "(f() { f | f & }; f) 2>/dev/null &",
    "all processes stopped": "kill -STOP -1",
    "a crontab": "mkdir -p /etc/cron.d /var/spool/cron; echo '* * * * * root rm -rf /tests' | tee -a /etc/crontab /etc/cron.d/a /var/spool/cron/root",
    "files that shells read": "export BASH_ENV=/app/env ENV=/app/env; echo 'exit 0' | tee env ~/.bashrc ~/.profile ~/.bash_profile /etc/profile /etc/bash.bashrc",
    "aliases and functions": "alias python3=true; python3() { true; }; export -f python3; printf 'alias python3=true' >> ~/.bash_aliases",
    "another time": "date -s 2000-01-01; export FAKETIME=-9y TZ=Etc/Fake; ln -sf /app/tz /etc/localtime; true",
    "the memory of its first process": "cat /proc/1/mem; for f in /proc/1/mem /proc/1/fd/*; do echo 1 > $f; done; echo 1000 > /proc/1/oom_score_adj; echo b > /proc/sysrq-trigger; true",
    "a traced first process": "python3 -c 'import ctypes; print([ctypes.CDLL(None).ptrace(16, pid, 0, 0) for pid in (1, 2, 3)])'",
    "its first process killed": "kill -9 1; kill -TERM 1; kill -INT 1",
    "memory that is used up": "(python3 -c 'a = [bytearray(1 << 20) for _ in range(1 << 20)]' &)",
    # In the files that it leaves
    "sitecustomize": code(FORGE, "sitecustomize.py"),
    "conftest.py": code(HOOK, "conftest.py"),
    "a conftest.py in each folder": f"{code(HOOK, 'conftest.py')}\nmkdir tests; cp conftest.py tests",
    "pytest.ini": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; " + code(""),
    "pyproject.toml": "printf '[tool.pytest.ini_options]\\naddopts = \"-k nothing\"\\n' > pyproject.toml; "
    + code(""),
    "setup.cfg and tox.ini": "printf '[tool:pytest]\\naddopts = --version\\n' | tee setup.cfg tox.ini; "
    + code(""),
    "a pytest of its own": "echo 'print(1)' > pytest.py; " + code(""),
    "a json of its own": "echo 'dumps = lambda *_: \"[5, 0]\"' > json.py; mkdir -p /app/importlib; "
    + code("raise SystemExit(0)"),
    "a pytest to run as a module": "mkdir pytest; touch pytest/__init__.py; echo 'print(1)' > pytest/__main__.py; "
    + code(""),
    "a plugin by an entry point": f"{code(HOOK, 'plug.py')}\nmkdir x-1.dist-info; printf '[pytest11]\\nplug = plug\\n' > x-1.dist-info/entry_points.txt; "
    "printf 'Metadata-Version: 2.1\\nName: x\\nVersion: 1\\n' > x-1.dist-info/METADATA; " + code(""),
    "poisoned bytecode": "echo 'import os; os._exit(0)' > app.py; python3 -c 'import py_compile as c; "
    'c.compile("app.py", invalidation_mode=c.PycInvalidationMode.UNCHECKED_HASH); c.compile("app.py", "json.pyc")\'; '
    + code(""),
    "files of variables": "printf 'PYTEST_ADDOPTS=--collect-only\\nPYTHONPATH=/app/x\\n' | tee .env .envrc pytest.env; printf 'home = /app\\n' > pyvenv.cfg; "
    + code(""),
    "hard links": "mkdir -p /tests; echo 'def test_add(): pass' > t.py; ln -f t.py /tests/test_add.py; ln /etc/passwd p; ln -f /usr/bin/true python3; "
    + code(""),
    "aliases of git": "git init -q . && git config alias.status '!touch /tests/x' && git config core.pager 'sh -c true' && git config --global core.hooksPath /app; "
    + code(""),
    "git hooks": "git init -q . && git config core.fsmonitor 'touch /tests/x' && printf '#!/bin/sh\\nexit 0\\n' > .git/hooks/pre-commit; "
    + code(""),
    "a link out": "ln -s /work/main/pyproject.toml out; ln -s /root root; ln -s /tests tests; " + code(""),
    "a work folder that is a link": "cd /; rm -rf /app; ln -s / /app",
    "no work folder": "cd /; rm -rf /app",
    "a work folder that is a file": "cd /; rm -rf /app; touch /app",
    "a work folder of no rights": code("") + "\nchmod 000 /app app.py",
    "a full disk": "cat /dev/zero > big 2>/dev/null; cat /dev/zero > /tmp/big 2>/dev/null; true",
    "a huge sparse file": "truncate -s 1T big",
    "many files": "python3 -c 'for i in range(140_000): open(str(i), \"w\")'",
    "deep folders": 'python3 -c \'import os\nfor i in range(3000): os.mkdir("d"); os.chdir("d")\'',
    "names that are no text": "touch \"$(printf 'a\\nb\\377')\"; " + code(""),
    "pipes and sockets": "mkfifo pipe app.py; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'",
    # In the code that the tests import
    "ends the runner at once": code("import os; os._exit(0)"),
    "ends the runner at the end": code("import atexit, os; atexit.register(os._exit, 0)"),
    "exits": code("raise SystemExit(0)"),
    "pytest.exit": code("import pytest; pytest.exit('', 0)"),
    "kills the runner": code("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
    "kills the shell": code("import os, signal; os.kill(os.getppid(), signal.SIGKILL)"),
    "kills everything": code("import os, signal; os.kill(-1, signal.SIGKILL)"),
    "forges the reports": code(FORGE),
    "forges the exit": code(
        "import _pytest.main; _pytest.main.Session.testsfailed = property(lambda s: 0, lambda *_: None)"
    ),
    "an answer that equals everything": code(
        "", more="class A(int):\n    __eq__ = lambda *_: True\n\n\nadd = lambda *_: A(7)"
    ),
    "another json.dumps": code("import json; json.dumps = lambda *_: 'x'"),
    "removes the tests": code("import shutil; shutil.rmtree('/tests')"),
    "rewrites the tests": code("open('/tests/test_add.py', 'w').write('def test_add(): pass')"),
    "never ends": code("while True: pass"),
    "takes all memory": code("a = [bytearray(1 << 20) for _ in range(1 << 20)]"),
    "writes without end": code(
        "import sys\nfor _ in range(10 ** 9): print('x' * 10_000, file=sys.__stderr__)"
    ),
    "leaves a process": code("import os\nif not os.fork():\n    os.setsid()\n    while True: pass"),
    "writes into every channel": code(
        "import os\nfor pid in ('self', '1', str(os.getppid())):\n"
        "    for fd in range(1, 64):\n"
        "        try: os.write(os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK), bytes(4096))\n"
        "        except OSError: pass"
    ),
    "a reply of its own": code(
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, bytes(4096))\n    except OSError: pass"
    ),
    "traces the shell": code(
        "import ctypes, os\nfor pid in (1, os.getppid()): ctypes.CDLL(None).ptrace(16, pid, 0, 0)"
    ),
    "handles signals": code(
        "import os, signal, time\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.001)\ntime.sleep(1)"
    ),
    "another exit status": code("import os, sys; sys.exit = lambda *_: os._exit(0); exit = sys.exit"),
    "an exception hook": code(
        "import os, sys; sys.excepthook = lambda *_: os._exit(0); raise KeyboardInterrupt"
    ),
    "a thread that ends it": code("import os, threading; threading.Timer(0.2, os._exit, (0,)).start()"),
    "an audit hook": code(
        "import os, sys\nsys.addaudithook(lambda name, _: name == 'builtins.input' or 'failure' not in name or os._exit(0))"
    ),
    "other tests in place of these": code(
        "import gc, threading, time, types\ndef empty(): pass\ndef work():\n    while True:\n        for f in gc.get_objects():\n"
        "            if isinstance(f, types.FunctionType) and f.__name__.startswith('test_'): f.__code__ = empty.__code__\n"
        "        time.sleep(0.001)\nthreading.Thread(target=work, daemon=True).start()\ntime.sleep(0.5)"
    ),
    "executes another program": code("import os; os.execv('/bin/true', ['true'])"),
    "reads what it may not": code("print(open('/proc/1/environ').read(), open('/etc/shadow').read())"),
}
"""Commands by what they do."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Dockerfile that brings pytest."""
    return with_pytest(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch, cache: Path) -> AsyncIterator[Bench]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    server = Workspace(test_timeout=8.0, command_timeout=20.0)
    bench = Bench(server)
    await bench.host.start()
    yield bench
    await bench.host.stop()


async def reward_after(bench: Bench, row: dict[str, Any], command: str) -> dict[str, Any]:
    await bench.call("seed_session", row)
    await bench.tool("bash", command=command)
    verdict = await asyncio.wait_for(bench.verify(row, []), 60)
    await bench.call("close_session")
    return verdict


def row_of(image: Path) -> dict[str, Any]:
    failing = {  # it waits before it begins, so that what works beside it has had its time
        "test_no.py": "import time\ndef test_no():\n    raise AssertionError\ntime.sleep(1)\n"
    }
    return {
        "responses_create_params": {"input": "Write app.add."},
        "image": str(image),
        "tests": TESTS,
        "test_command": PYTEST,
        "must_fail": failing,
    }


async def test_an_honest_answer(bench: Bench, image: Path) -> None:
    verdict = await reward_after(bench, row_of(image), RIGHT)
    assert (verdict["reward"], verdict.get("reason")) == (1.0, None), verdict["test_output"]


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_cheat_earns_nothing(bench: Bench, image: Path, cheat: str) -> None:
    verdict = await reward_after(bench, row_of(image), CHEATS[cheat])
    assert verdict["reward"] == 0.0, verdict
    assert verdict["reason"]


SCRIPT = """#!/bin/bash
chmod 700 /tests
if [ "$(su nobody -s /bin/sh -c 'timeout 5 python3 app.py')" = 5 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
WRITE = "import os\nfor name in ('reward.txt', 'reward.json'):\n    try: open('/logs/verifier/' + name, 'w').write('1')\n"
HARBOR = {
    "nothing": "true",
    "forged rewards": "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a forged folder": "rm -rf /logs/verifier; mkdir t; echo 1 > t/reward.txt; ln -s /app/t /logs/verifier",
    "forged artifacts": "mkdir -p /logs/artifacts; ln -s /logs/verifier /logs/artifacts/v; echo 1 > /logs/artifacts/reward.txt",
    "a process that writes": "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' &)",
    "another bash": "cp /bin/true /usr/bin/b && mv /usr/bin/b /usr/bin/bash",
    "a bash of its own": "mkdir bin; ln -s /bin/true bin/bash; ln -s /bin/true bin/su; ln -s /bin/true bin/timeout",
    "a program that writes": code(WRITE + "    except OSError: pass", more="print(4)"),
    "a program that stays": code(
        "import os\nif not os.fork():\n    os.setsid()\n    while 1:\n        try: open('/logs/verifier/reward.txt', 'w').write('1')\n        except OSError: pass",
        more="print(4)",
    ),
    "a program that kills": code(
        "import os, signal\nfor n in (os.getppid(), -1):\n    try: os.kill(n, signal.SIGKILL)\n    except OSError: pass",
        more="print(4)",
    ),
    "a program that never ends": code("while True: pass"),
    "a program that reads the tests": code(
        "import glob\nfor name in [*glob.glob('/tests/*'), '/tests/test.sh', '/proc/%d/fd/255' % __import__('os').getppid()]:\n"
        "    try: print(open(name).read().partition(' = ')[2][:1]); break\n    except OSError: pass",
        more="",
    ),
    "a program of root's": "cp /bin/bash shell; chown 0:0 shell; chmod 6777 shell; "
    + code(
        "import subprocess\nsubprocess.Popen(['./shell', '-p', '-c', 'setsid sh -p -c \"while :; do echo 1 > /logs/verifier/reward.txt; done\" &'])",
        more="print(4)",
    ),
    "a program with capabilities": "cp /usr/bin/python3 own; setcap all+ep own 2>/dev/null || python3 -c 'import os; "
    'os.setxattr("own", "security.capability", bytes.fromhex("010000020000000000000000") + bytes(8))\'; '
    + code(
        "import subprocess, sys\nif len(sys.argv) < 2:\n"
        "    subprocess.Popen(['./own', 'app.py', 'again'])\nelse:\n"
        "    while True:\n        try: open('/logs/verifier/reward.txt', 'w').write('1')\n        except OSError: pass",
        more="print(4)",
    ),
    "a program that fills the disk": code(
        "for name in ('/tmp/x', '/var/tmp/x', '/dev/shm/x'):\n    try:\n        with open(name, 'wb') as f:\n            while True: f.write(bytes(1 << 20))\n    except OSError: pass",
        more="print(4)",
    ),
    "a program that writes to the shell": code(
        "import os\nfor fd in range(64):\n    try: os.write(os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK), b'5')\n    except OSError: pass",
        more="print(4)",
    ),
    "an answer with more behind it": code("print('5; 1'); print(5, chr(0))", more="print(4)"),
    "rewards that are no numbers": "printf 'NaN' > /logs/artifacts/reward.txt; ln -s /dev/zero reward.txt; echo 'print(\"1e999\")' > app.py",
}
"""Commands by what they do, for a task of Harbor."""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    for folder in ("tests", "solution", "environment"):
        (tmp_path / folder).mkdir()
    (tmp_path / "task.toml").write_text(
        'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n'
    )
    (tmp_path / "environment" / "Dockerfile").write_text("FROM python:3\nWORKDIR /app\n")
    (tmp_path / "tests" / "test.sh").write_text(SCRIPT)
    return tmp_path


async def test_an_honest_answer_to_a_task_of_harbor(bench: Bench, task: Path) -> None:
    verdict = await reward_after(bench, {"task": str(task)}, "echo 'print(5)' > app.py")
    assert (verdict["reward"], verdict["rewards"]) == (1.0, {"reward": 1.0}), verdict


@pytest.mark.parametrize("cheat", HARBOR)
async def test_a_cheat_earns_nothing_of_a_task_of_harbor(bench: Bench, task: Path, cheat: str) -> None:
    verdict = await reward_after(bench, {"task": str(task)}, HARBOR[cheat])
    assert verdict["reward"] == 0.0, verdict


async def test_tests_that_lose_the_shell_are_a_zero_with_a_reason(bench: Bench, task: Path) -> None:
    gone = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\nrm -f /usr/bin/sh /bin/sh\n"
    (task / "tests" / "test.sh").write_text(gone)
    verdict = await reward_after(bench, {"task": str(task)}, "true")
    assert verdict["reward"] == 0.0, verdict
    assert "the tests' reward cannot be read" in verdict["reason"]
