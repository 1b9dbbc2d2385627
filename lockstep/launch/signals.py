"""How a process is asked to end."""

from __future__ import annotations

import signal


def end_by_sigterm() -> None:
    """SIGTERM, by which a cluster's scheduler ends a job, is Ctrl-C: it leaves the same checkpoint.

    A script starts its background jobs with SIGINT ignored, and SIGTERM would then be lost with it:
    such a job hears both from here on.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
