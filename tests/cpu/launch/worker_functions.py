"""What the workers of test_workers.py do."""

import os
import sys


def echo(line):
    """Sends back what it is sent, until it is told to stop."""
    while (batch := line.receive()) != ["stop"]:
        line.send([os.getpid(), *batch])


def fail(line):
    print("about to fail", file=sys.stderr)
    raise ValueError("a reason")
