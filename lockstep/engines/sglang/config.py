"""Settings of SGLang's servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.engines.config import ServedConfig
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SGLangConfig(ServedConfig):
    """SGLang, on servers that are up. See docs/sglang.md, also for what has run on a GPU."""

    TAG: ClassVar[str] = "sglang"
    can_record_routes: ClassVar[bool] = True

    deterministic: bool = False
    """Refuse a server that was started without --enable-deterministic-inference. With it a reply
    does not depend on the batch, and a request's seed decides it."""
    weights: Literal["directory", "ipc"] = "directory"
    """How new weights reach the server. directory: a checkpoint on a disk that both see. ipc: the
    trainer's own memory, of the same GPUs on the same machine."""

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)
        if not self.urls:
            raise ConfigError(
                "engine=sglang needs a server: engine.urls=http://HOST:PORT. It is started as "
                "docs/sglang.md says."
            )
