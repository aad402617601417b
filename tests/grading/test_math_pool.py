"""`MathVerifyPool`: math-verify in workers; who is at fault when a comparison does not end."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gym_serve.grading import MathVerifyPool
from gym_serve.grading import math_pool as pool_module
from gym_serve.types.errors import InvalidRequest, VerifierFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")  # starting a worker for each test takes long

MEMORY = 2 << 30
LONG = 60.0
ENDLESS = r"\gcd(9^{9^9},3)"
HUGE = "9^{9^{9^9}}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[MathVerifyPool]:
    pool = MathVerifyPool(1, memory_bytes=MEMORY)
    await pool.start()
    yield pool
    await pool.stop()


async def test_compares(pool: MathVerifyPool) -> None:
    comparison = await pool.verify("\\boxed{\\frac34}", "It is \\boxed{0.75}.", timeout=LONG)
    assert comparison == (True, "0.750000000000000", "0.75", None)
    assert await pool.verify("\\boxed{\\frac12}", "Who knows?", timeout=LONG) == (False, None, None, None)


async def test_an_answer_without_end_is_wrong(pool: MathVerifyPool) -> None:
    for _ in range(2):
        comparison = await pool.verify("\\boxed{42}", f"\\boxed{{{ENDLESS}}}", timeout=0.5)
        assert comparison == (False, None, None, "it takes more than 0.5 s of CPU time")
    assert "\\boxed{42}" in pool._sound
    assert (await pool.verify("\\boxed{5}", "\\boxed{5}", timeout=LONG)).equal


async def test_a_right_answer_without_end_is_the_rows_fault(pool: MathVerifyPool) -> None:
    with pytest.raises(InvalidRequest, match="expected answer cannot be compared with itself: it takes more"):
        await pool.verify(f"\\boxed{{{ENDLESS}}}", "\\boxed{5}", timeout=0.5)


async def test_memory_is_remembered_of_few_rows(
    pool: MathVerifyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_KEPT", 1)
    for gold in ("6", "7"):
        await pool.verify(f"\\boxed{{{gold}}}", f"\\boxed{{{ENDLESS}}}", timeout=0.3)
    assert list(pool._sound) == ["\\boxed{7}"]


async def test_an_answer_that_takes_much_memory_is_wrong() -> None:
    pool = MathVerifyPool(1, memory_bytes=200 << 20)
    await pool.start()
    try:
        assert not (await pool.verify("\\boxed{5}", "\\boxed{2^{10^{10}}+1}", timeout=LONG)).equal
        assert (await pool.verify("\\boxed{5}", "\\boxed{5}", timeout=LONG)).equal
    finally:
        await pool.stop()


async def test_math_verify_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "worker.py"
    path.write_text("import math_verify_of_another_name")
    monkeypatch.setattr(pool_module, "_WORK", path)
    with pytest.raises(VerifierFailed, match=r"pip install 'gym-serve\[math\]'"):
        await MathVerifyPool(2, memory_bytes=MEMORY).start()


async def test_a_number_that_is_too_long_is_wrong_at_once(pool: MathVerifyPool) -> None:
    comparison = await pool.verify("\\boxed{42}", f"\\boxed{{{HUGE}}}", timeout=LONG)
    assert comparison == (False, None, None, "it has a number of more than 100,000 digits or terms")


async def test_long_answers_hold_up_nobody(pool: MathVerifyPool) -> None:
    """6 answers that each would take 10 s of CPU time, with 3 right and 3 wrong ones behind them."""
    until = time.monotonic() + 6
    burners = [f"\\boxed{{\\gcd(9^{{9^9}},{n})}}" for n in range(2, 8)]
    honest = ["\\boxed{5}"] * 3 + ["\\boxed{6}", "\\boxed{7}", "\\boxed{8}"]
    verdicts = await asyncio.gather(
        *(pool.verify("\\boxed{5}", answer, timeout=10, until=until) for answer in [*burners, *honest])
    )
    assert [verdict.equal for verdict in verdicts] == [False] * 6 + [True] * 3 + [False] * 3
    assert all("CPU time" in (verdict.reason or "") for verdict in verdicts[:6])


async def test_the_same_answer_is_compared_once(pool: MathVerifyPool) -> None:
    before = time.monotonic()
    answer = r"\boxed{\gcd(9^{9^9},77)}"
    verdicts = await asyncio.gather(*(pool.verify("\\boxed{5}", answer, timeout=0.4) for _ in range(200)))
    assert {verdict.reason for verdict in verdicts} == {"it takes more than 0.4 s of CPU time"}
    assert time.monotonic() - before < 30
