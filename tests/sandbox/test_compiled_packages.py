"""Packages that no installer has compiled are, before a sandbox shows them read-only."""

from pathlib import Path

import pytest

from gym_serve.sandbox import providers


def test_packages_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, info = tmp_path / "toolbox", tmp_path / "toolbox-1.dist-info"
    files = {
        package / "__init__.py": "",
        package / "inner" / "part.py": "value = '\\d'\n",  # whose warning is nobody's
        info / "METADATA": "Metadata-Version: 2.1\nName: toolbox\nVersion: 1\n",
        info / "RECORD": "toolbox/__init__.py,,\ntoolbox/inner/part.py,,\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    providers.compile_packages(["toolbox"])
    assert len(list(package.rglob("*.pyc"))) == 2
    monkeypatch.setattr(providers.subprocess, "run", None)
    providers.compile_packages(["toolbox"])
