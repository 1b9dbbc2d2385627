"""Parameters that are spread over ranks: FSDP2, and how whole ones come in and go out.

Each rank holds a range of every parameter's first dim. A block's parameters are gathered when it
runs and resharded after it; gradients are summed over ranks into the shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:  # FSDP takes a second to import, which a run of one process need not wait for
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor


def shard(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Spreads a `Decoder`'s parameters over the mesh, in place: each block by itself, the rest
    together.

    A model on the meta device stays there: give it memory afterwards. From then on all ranks call
    `forward` and `score` together, and gradients are summed, not averaged: divide the loss by the
    number of tokens of all ranks.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp import register_fsdp_forward_method as register_forward

    policy = MixedPrecisionPolicy()
    if next(model.parameters()).dtype.itemsize < 4:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    # FSDP needs one dtype per group: the few numbers of another dtype stay whole on all ranks.
    dtype = model.get_parameter("embedding").dtype
    ignored = {parameter for parameter in model.parameters() if parameter.dtype != dtype}
    for block in model.get_submodule("layers").children():
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    # The head is read after the forward that gathers it: kept until backward, or `reshard`.
    fully_shard(
        model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=ignored
    )
    register_forward(model, "score")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: torch.nn.Module) -> None:
    """Frees the parameters that a forward without a backward has left gathered."""
    if callable(call := getattr(model, "reshard", None)):
        call()


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    """True if a parameter is spread over a mesh: only a DTensor has a mesh."""
    return hasattr(x, "device_mesh")


def mesh_of(x: Tensor) -> DeviceMesh | None:
    """The mesh that a parameter is sharded over; None if it is whole."""
    return x.device_mesh if is_sharded(x) else None


def local_part(x: Tensor) -> Tensor:
    """This rank's run of a parameter, in its own memory; the parameter itself if it is whole."""
    return x.to_local() if is_sharded(x) else x


def full_tensor(x: Tensor) -> Tensor:
    """All of a parameter or gradient. Collective where it is sharded: all ranks in one order."""
    return x.full_tensor() if is_sharded(x) else x


def whole_like(part: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor, gathered from each rank's `part`. It is sharded along its first dim as
    `parameter` is."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    shape = torch.Size([len(parameter), *part.shape[1:]])
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    ).full_tensor()


def part_like(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's run of a whole tensor that is laid out as `parameter` is along its first dim."""
    if not is_sharded(parameter):
        return value
    mesh, length = parameter.device_mesh, len(parameter)
    size = -(-length // mesh.size())
    start = min(mesh.get_local_rank() * size, length)
    return value[start : min(start + size, length)]


def copy_whole(
    source: torch.nn.Module, target: torch.nn.Module, *, is_trained_only: bool = False
) -> None:
    """Writes a model's parameters into a whole one; sharded ones are gathered one after another.

    is_trained_only: leaves out frozen parameters, which the target has already. Collective.
    """
    own = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if parameter.requires_grad or not is_trained_only:
                own[name].copy_(full_tensor(parameter.detach()))
