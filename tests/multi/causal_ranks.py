"""LockstepForCausalLM under FSDP2 on each rank, and the same model on one process."""

from __future__ import annotations

import peft
import torch
from torch.distributed.fsdp import fully_shard

from lockstep.errors import CapabilityError
from lockstep.integrations.causal_lm import IGNORED, LockstepForCausalLM
from lockstep.models.sharding import full_tensor, local_part

LENGTHS = (9, 17, 5, 12)
WORLD = 2


def make_model(*, has_adapter):
    model = LockstepForCausalLM.from_pretrained("tiny-qwen3")
    if not has_adapter:
        return model.train()
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    return model.train()


def make_batch():
    """Rows with padding on either side."""
    generator, width = torch.Generator().manual_seed(1), max(LENGTHS)
    ids = torch.randint(5, 200, (len(LENGTHS), width), generator=generator)
    places = torch.arange(width)
    is_token = torch.stack(
        [places < size if row % 2 else places >= width - size for row, size in enumerate(LENGTHS)]
    )
    return ids, is_token, torch.where(is_token, ids, IGNORED)


def script(model, rows=slice(None), *, scale=1.0):
    """(log-probs of some rows, gradients of the mean over all rows). scale: FSDP2 averages the
    gradients of the ranks."""
    ids, is_token, labels = (column[rows] for column in make_batch())
    total = sum(LENGTHS) - len(LENGTHS)
    out = model(
        input_ids=ids, attention_mask=is_token, labels=labels, fused_lm_head=True,
        num_items_in_batch=total,
    )  # fmt: skip
    (out.loss * scale).backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {
        "log_probs": out.log_probs.detach(),
        "gradients": {name: full_tensor(p.grad) for name, p in trained.items()},
        "num_local": sum(local_part(p.detach()).numel() for p in model.parameters()),
    }


def work(rank, directory):
    found = {}
    for has_adapter in (False, True):
        model = make_model(has_adapter=has_adapter)
        own = model.get_base_model() if has_adapter else model
        for block in own.decoder.layers.children():
            fully_shard(block)
        fully_shard(model)
        size = len(LENGTHS) // WORLD
        rows = slice(rank * size, (rank + 1) * size)
        found[has_adapter] = script(model, rows, scale=WORLD)
        try:
            own.for_engine()
        except CapabilityError as error:
            found[has_adapter]["refused"] = str(error)
    return found
