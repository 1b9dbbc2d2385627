"""Shared by all tests: thread counts, and the switch between the fast and the full counts."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PROOF = os.environ.get("LOCKSTEP_PROOF") == "1"
"""True under `make proof`: property tests and schedules run their full counts."""
