"""A plugin of pytest beside hidden tests, in the box: a test that is skipped has not passed.

The code under test could else skip those that it fails: `pytest.skip` is an exception. It uses pytest alone.
"""

import pytest


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):  # type: ignore[no-untyped-def]
    """Fail a test that was skipped, unless it is marked as one that is expected to fail, and did."""
    report = (yield).get_result()
    expected = hasattr(report, "wasxfail") and item.get_closest_marker("xfail") is not None
    if report.skipped and not expected:
        report.__dict__.pop("wasxfail", None)
        report.outcome, report.longrepr = "failed", "it was skipped, and must pass"


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report):  # type: ignore[no-untyped-def]
    """Fail a module that was skipped."""
    if report.skipped:
        report.outcome, report.longrepr = "failed", "it was skipped, and must pass"
