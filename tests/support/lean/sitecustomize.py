"""Collects garbage as seldom as a replica does: see `support.processes`."""

import gc

gc.set_threshold(50_000, 20, 100)
