"""A page is not slowed by what a model wrote: Markdown, formulas and code take bounded time, in Node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import gym_serve.view

STATIC = Path(gym_serve.view.__file__).parent / "static"
TEXTS = {
    "java": "```java\n" + "$" * 20_000 + "\n```",
    "blocks of code": ("```java\n" + "$" * 1_900 + "\n```\n") * 20,
    "lines of code": "```typescript\n" + ("a" * 80 + "\n") * 240 + "```",
    "open block formulas": "\\[\n" * 13_000,
    "open formulas": "\\[" * 20_000,
    "in quotes": "> \\[\n" * 8_000,
    "in lists": "- \\[\n" * 8_000,
    "many formulas": "$x^2$ " * 6_000,
    "large formulas": ("$" + "\\sqrt{" * 400 + "x" + "}" * 400 + "$ ") * 12,
}
"""Before, one of the first three took 4 seconds, and the open block formulas 10."""
SCRIPT = """
import { readFileSync } from "node:fs";
const { Markdown } = await import(process.argv[1]);
const draw = (node) => {
  if (Array.isArray(node)) return node.map(draw);
  if (typeof node?.type === "function") return draw(node.type(node.props));
  if (node?.props) draw(node.props.children);
};
const found = {};
for (const [name, text] of Object.entries(JSON.parse(readFileSync(0)))) {
  const begun = performance.now();
  draw(Markdown({ text }));
  found[name] = performance.now() - begun;
}
console.log(JSON.stringify(found));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_hostile_texts_take_a_bounded_time() -> None:
    command = ["node", "--input-type=module", "-e", SCRIPT, str(STATIC / "markdown.js")]
    done = subprocess.run(
        command, input=json.dumps(TEXTS), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    assert sum(taken.values()) < 20_000, taken  # milliseconds, also on a busy machine
