"""Hidden tests by pytest, in the box: ``python3 all_passed.py TEST...``, or the tests' ``conftest.py``.

A test that is skipped has not passed: the code under test could else skip those that it fails, as
`pytest.skip` is an exception. With a file ``one_must_fail`` beside this one, one of the tests, drawn by lot,
fails at its end, whatever it found. It uses pytest alone.
"""

# mypy: ignore-errors
# It runs on the Python of an image, which may be old.
import os
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_mark = Path(__file__).with_name("one_must_fail")
_lot = None
if _mark.exists():
    _lot = random.SystemRandom().random()
    _mark.unlink()  # before anything of the code under test is there
_drawn = []


def pytest_collection_finish(session):
    """Draw the test that fails."""
    if _lot is not None and session.items:
        item = session.items[int(_lot * len(session.items))]
        item.runtest = _failing(item.runtest)
        _drawn.append(item)


def _failing(runtest):
    def run():
        try:
            runtest()
        finally:
            raise AssertionError

    return run


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Fail a test that was skipped, unless it is marked as one that is expected to fail, and did."""
    report = (yield).get_result()
    expected = hasattr(report, "wasxfail") and item.get_closest_marker("xfail") and item not in _drawn
    if report.skipped and not expected:
        report.__dict__.pop("wasxfail", None)
        report.outcome, report.longrepr = "failed", "it was skipped, and must pass"


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report):
    """Fail a module that was skipped."""
    if report.skipped:
        report.outcome, report.longrepr = "failed", "it was skipped, and must pass"


if __name__ == "__main__":
    options = ["-q", "-p", "no:cacheprovider"]
    if find_spec("xdist"):
        options.append("-n0")  # its workers would not know this plugin
    sys.path[0] = os.getcwd()  # as of `python -m pytest`, but pytest itself is not one of the code under test
    sys.exit(pytest.main([*options, *sys.argv[1:]], plugins=[sys.modules[__name__]]))
