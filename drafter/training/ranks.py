"""The processes that train one drafter together: this one alone, or those of torchrun.

Every rank plans the same batches and takes its part of each, so a run's losses do not depend on how many there are. The
weights, their gradients and AdamW's moments are sharded by FSDP2 as one unit (a drafter is one layer): gloo on CPUs,
nccl on GPUs. What a clock or a signal decides, the first rank decides for all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm

from drafter.settings import read_settings

WAIT = timedelta(hours=2)  # for the slowest disk, or the first rank's checks; torchrun notices a rank that ends


@dataclass(frozen=True)
class Ranks:
    """`rank` of `world` processes, `beside` of them on this machine, on `device`; `mesh` is None for one alone."""

    device: torch.device
    rank: int = 0
    world: int = 1
    beside: int = 1
    mesh: DeviceMesh | None = None

    @property
    def leads(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on the CPU."""
        if self.mesh is None:
            return x
        there = x.to(self.device)
        dist.all_reduce(there)
        return there.cpu()

    def decided(self, *by_the_first: float) -> list[float]:
        """The first rank's numbers, on every rank."""
        mine = torch.tensor(by_the_first, dtype=torch.float64)
        return [float(x) for x in self.sum(mine if self.leads else torch.zeros_like(mine))]

    def any(self, flag: bool) -> bool:
        """Whether any rank's flag is set."""
        return bool(self.sum(torch.tensor(float(flag))) > 0)

    def shard(self, module: nn.Module) -> nn.Module:
        """The module on this device; its parameters become this rank's shards, its gradients the sum over ranks."""
        module.to(self.device)
        if self.mesh is not None:
            fully_shard(module, mesh=self.mesh, reshard_after_forward=False)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return module

    def parts(self, documents: Sequence[int], length: Callable[[int], int], pieces: int) -> list[list[int]]:
        """This rank's share of a batch in `pieces`, for gradients that are added up; a piece may be empty.

        Longest first, each to the piece with the least: a function of the documents alone.
        """
        shares: list[list[int]] = [[] for _ in range(self.world * pieces)]
        loads = [0] * len(shares)
        for document in sorted(documents, key=lambda index: (-length(index), index)):
            least = loads.index(min(loads))
            shares[least].append(document)
            loads[least] += length(document)
        mine = shares[self.rank :: self.world]
        return mine if self.mesh is not None else [share for share in mine if share]

    def say(self, line: str) -> None:
        """A line on stderr, beside the bar; once, not from every rank."""
        if self.leads:
            tqdm.write(line, file=sys.stderr)


def join_ranks(device: torch.device) -> Ranks:
    """Under torchrun the group that it started, else this process alone. On GPUs each rank takes its own.

    torchrun sets one thread a process where nobody has chosen; what is done on the processor before the first step
    would then take hours, so the ranks of a machine share its cores.
    """
    if not dist.is_torchelastic_launched():
        return Ranks(device)
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=WAIT)
    world, beside = dist.get_world_size(), read_settings().local_world
    if torch.get_num_threads() == 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // beside))
    return Ranks(device, dist.get_rank(), world, beside, init_device_mesh(device.type, (world,)))


def leave_ranks() -> None:
    """Let go of the group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def whole(x: Tensor) -> Tensor:
    """A parameter or a moment in full, on the CPU; of a shard every rank must ask at once."""
    full = x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()
    return full.cpu()


def like(full: Tensor, x: Tensor) -> Tensor:
    """A full tensor laid out as `x` is."""
    if isinstance(x, DTensor):
        return distribute_tensor(full.to(x.device), x.device_mesh, x.placements)
    return full.to(x.device)
