"""Programs that try to escape from a sandbox, outlive it, or bring down its host.

Models in training write such programs, by accident or because it paid once. `check_sandbox`
replaces SECRET_PATH, CANARY_PATH, PORT and HOST_PID by things of the host. In a sandbox without the
modules that they use, most end with an error, which is just as good.
"""

import tomllib
from pathlib import Path

HOSTILE: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
HOSTILE |= {
    "null byte": "x = 1\0",
    "half a character in its text": "x = '\ud800'",
    "too long": "x = 1\n" * 20_000,
}
