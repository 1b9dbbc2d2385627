"""Runs programs that a model wrote, isolated and within limits."""

from lockstep.agent.sandbox.base import (
    ENDINGS,
    Ending,
    ProgramResult,
    Sandbox,
    SandboxConfig,
    SandboxLimits,
)
from lockstep.agent.sandbox.bubblewrap import BubblewrapConfig
from lockstep.agent.sandbox.container import ContainerConfig
from lockstep.agent.sandbox.monty import MontyConfig
from lockstep.agent.sandbox.tool import python_tool

__all__ = [
    "ENDINGS",
    "BubblewrapConfig",
    "ContainerConfig",
    "Ending",
    "MontyConfig",
    "ProgramResult",
    "Sandbox",
    "SandboxConfig",
    "SandboxLimits",
    "python_tool",
]
