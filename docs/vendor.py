"""Copies the libraries of the viewer's page from npm into ``static/vendor``, so that users need no npm.

``static/vendor/package.json`` pins them, its lock file has their hashes, and ``npm ci`` checks these. Run
``make vendor`` after a change of a pin. The files that it writes are kept in git; ``vendor.json`` lists each
with its SHA-256, and the versions and licences of the libraries in it.

A page without a build step cannot resolve a bare name such as ``preact``, and its content security policy
forbids the inline import map that could. So imports between the files are rewritten to their paths, and
scripts that are no modules get an ``export``.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "gym_serve" / "view" / "static" / "vendor"


def _module(text: str) -> str:
    """A module as it is; only the names of the other files become paths."""
    return re.sub(r'(from\s?)"(preact|htm)"', r'\1"./\2.js"', text)


def _script(text: str) -> str:
    """A script for Node (CommonJS) or a page (a global name) becomes a module."""
    begin = "const module = {exports: {}}, exports = module.exports;"
    return f"{begin}\n{text}\nexport default module.exports;\n"


class Part(NamedTuple):
    """A file of the page.

    Attributes:
        name: in ``static/vendor``.
        library: its name on npm.
        path: in the library.
        rewrite: what the text becomes.
        contains: libraries that are part of the file, whose licences come along.
    """

    name: str
    library: str
    path: str
    rewrite: Callable[[str], str] = _module
    contains: tuple[str, ...] = ()


PARTS = [
    Part("preact.js", "preact", "dist/preact.mjs"),
    Part("hooks.js", "preact", "hooks/dist/hooks.mjs"),
    Part("htm.js", "htm", "dist/htm.mjs"),
    Part("uplot.js", "uplot", "dist/uPlot.esm.js"),
    Part("uplot.css", "uplot", "dist/uPlot.min.css"),
    Part(
        "markdown-it.js",
        "markdown-it",
        "dist/browser/markdown-it.esm.min.mjs",
        contains=("entities", "linkify-it", "mdurl", "punycode.js", "uc.micro"),
    ),
    Part("highlight.js", "@highlightjs/cdn-assets", "es/highlight.min.js"),
    Part("katex.js", "katex", "dist/katex.min.js", _script),
    Part("diff.js", "diff", "dist/diff.min.js", _script),
]


def vendor() -> None:
    """Install what ``package.json`` pins into a folder that is then deleted, and copy `PARTS` from it."""
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(FOLDER / name, temporary)
        subprocess.run(
            ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=temporary, check=True
        )
        modules = Path(temporary, "node_modules")
        files = []
        for part in PARTS:
            text = (modules / part.library / part.path).read_text("utf-8")
            text = part.rewrite(re.sub(r"\n?//# sourceMappingURL=.*", "", text))
            (FOLDER / part.name).write_text(text, "utf-8", newline="\n")
            files.append(
                {
                    "file": part.name,
                    "sha256": hashlib.sha256(text.encode()).hexdigest(),
                    "libraries": [_library(modules, name) for name in (part.library, *part.contains)],
                }
            )
    (FOLDER / "vendor.json").write_text(json.dumps(files, indent=2) + "\n", "utf-8")


def _library(modules: Path, name: str) -> dict[str, str]:
    """Name, version and licence of a library; the text of the licence is copied."""
    package = json.loads((modules / name / "package.json").read_text("utf-8"))
    text = next(path for path in (modules / name).iterdir() if path.name.lower().startswith("license"))
    licence = f"licences/{name.replace('/', '-').lstrip('@')}.txt"
    (FOLDER / licence).parent.mkdir(exist_ok=True)
    shutil.copy(text, FOLDER / licence)
    return {"name": name, "version": package["version"], "licence": package["license"], "text": licence}


if __name__ == "__main__":
    vendor()
