"""Hides pandas: see `support.processes`."""

raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
