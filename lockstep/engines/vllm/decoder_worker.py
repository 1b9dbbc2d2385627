"""vLLM's worker for Lockstep's decoder, named to vLLM by --worker-cls."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

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
