"""vLLM's worker and scheduler for Lockstep's decoder, named by --worker-cls and --scheduler-cls.

What differs is who draws, and that the ids which a token was drawn from (its support) travel with
it. vLLM has a place for them in its outputs, which its other model runner alone fills.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import SamplingMaskLists

from lockstep.engines.vllm.sampler import ExactSampler

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class DecoderWorker(Worker):
    """The platform's own worker, with draws of the trainer's arithmetic."""

    def load_model(self, **settings: Any) -> None:
        super().load_model(**settings)
        runner = self.model_runner
        runner.sampler = ExactSampler(runner.get_model().decoder)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        support = self.model_runner.sampler.support
        if support is not None and output is not None:
            offsets = np.cumsum([0, *map(len, support)])
            output.sampling_masks = SamplingMaskLists(np.concatenate(support), offsets)
        return output


class DecoderScheduler(Scheduler):
    """vLLM's own scheduler, handing on each request's support."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.return_sampling_mask = True
