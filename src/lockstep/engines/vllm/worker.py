"""An extension of vLLM's workers, named to a server by --worker-extension-cls.

vLLM imports it before the model is made; /collective_rpc calls its methods on every worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.engines.vllm.cpu_kernels import mend_cpu_kernels
from lockstep.engines.vllm.weights import update_weights, why_not_in_place
from lockstep.engines.weight_link import WeightReceiver
from lockstep.package import package_version

# vLLM imports this module, and calls nothing of it, before it makes the model.
mend_cpu_kernels()


class LockstepWorker:
    """Methods that vLLM adds to its worker. No name may be one of the worker's own."""

    model_runner: Any
    vllm_config: Any
    rank: int
    device: torch.device
    lockstep_receiver: WeightReceiver | None = None

    def lockstep_facts(self) -> dict[str, Any]:
        """The model's config.json, and three facts: the reason why its weights cannot be replaced
        while it runs (empty if they can), the numerics of its log-probs (empty for vLLM's own
        models), and the version of this package here."""
        config = self.vllm_config.model_config.hf_config.to_dict()
        plain = {
            name: value
            for name, value in config.items()
            if isinstance(value, (str, int, float, bool)) and not name.startswith("_")
        }
        model = self.model_runner.get_model()
        return {
            "config": plain,
            "why_not_in_place": why_not_in_place(model, self.vllm_config),
            "fingerprint": getattr(model, "fingerprint", ""),
            "version": package_version(),
        }

    def lockstep_load_directory(self, directory: str) -> None:
        """Loads the weights of a checkpoint. The caller pauses before, and drops caches
        afterwards."""
        update_weights(self.model_runner.get_model(), self.vllm_config, directory)

    def lockstep_load_link(self, invitation: Mapping[str, Any], load: Mapping[str, Any]) -> None:
        """Loads the tensors that a trainer sends meanwhile, over a link that stays for the next
        load: see `WeightSender`."""
        receiver = self.lockstep_receiver
        if receiver is None or receiver.name != invitation["name"]:
            receiver = WeightReceiver(invitation, rank=self.rank, device=self.device)
            self.lockstep_receiver = receiver
        update_weights(self.model_runner.get_model(), self.vllm_config, receiver.tensors(**load))
