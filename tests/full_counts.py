"""Whether property tests and schedules run their full counts."""

import os

PROOF = os.environ.get("LOCKSTEP_PROOF") == "1"
"""True under `make proof`."""
