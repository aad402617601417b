"""Hides chardet: see `support.processes`."""

raise ModuleNotFoundError("No module named 'chardet'", name="chardet")
