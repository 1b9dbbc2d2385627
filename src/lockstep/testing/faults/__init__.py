"""Faults that are injected into a run on purpose: `lockstep train quickstart --fault
kernel_noise,std=0.01`, or `with injected(KernelNoise(std=0.01)): train(config)`.

A fault is in what the two sides compute (`sides`), in the rows between them (`rows`), or in the
engine as a server (`servers`). The run goes on and measures what a user with that defect would see.

No torch is imported here, so that the command line can read the settings.
"""

from lockstep.testing.faults import rows as rows
from lockstep.testing.faults import servers as servers
from lockstep.testing.faults import sides as sides
from lockstep.testing.faults.base import FaultConfig as FaultConfig
from lockstep.testing.faults.base import Faults as Faults
from lockstep.testing.faults.base import injected as injected
from lockstep.testing.faults.base import parse_fault as parse_fault
from lockstep.testing.faults.base import split_faults as split_faults
