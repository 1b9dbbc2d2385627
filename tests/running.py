"""Tells whether a process runs."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """False for a process that is gone, and for one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
