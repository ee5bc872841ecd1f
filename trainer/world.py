"""The processes that train together, as torchrun starts them; one alone needs nothing of it.

Guarantees: after an error in one process the others end too (torchrun sees its exit code).
"""

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among those that train together."""

    rank: int
    """Its number."""
    size: int
    """How many there are."""
    local_size: int
    """How many there are on this machine."""
    device: torch.device
    """Where it computes."""


PATIENCE = datetime.timedelta(hours=6)
"""How long ranks wait for each other: torch's 10 minutes are less than a large checkpoint takes on a slow disk, while
which the other ranks wait for the one that writes. That a process has ended torchrun sees by itself."""


@contextlib.contextmanager
def join_world() -> Iterator[World]:
    """Join the processes that torchrun started, or be alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size > 1:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, timeout=PATIENCE)  # else a barrier has to guess the GPU
        else:
            dist.init_process_group("gloo", timeout=PATIENCE)
    yield World(rank=rank, size=size, local_size=local_size, device=device)
    if size > 1:  # after an error the others may be waiting in a call: ending the process is what frees them
        dist.destroy_process_group()


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_sum(values: list[int], *, device: torch.device) -> list[int]:
    """Sum each value over all ranks; several ranks wait for their devices once."""
    if world_size() == 1:
        return values
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")  # else its copy would wait too
    tensor = pinned.to(device, non_blocking=True)
    dist.all_reduce(tensor)
    return [int(value) for value in tensor.tolist()]


def on_rank_0(world: World, act: Callable[[], T]) -> T:
    """Do something on rank 0 alone, while the others wait for it; returns on all ranks what ``act`` returned.

    Raises:
        ValueError: on all ranks, what ``act`` raised as a ValueError or OSError.
    """
    outcome: list[Any] = ["", None]
    if world.rank == 0:
        try:
            outcome[1] = act()
        except (ValueError, OSError) as error:
            outcome[0] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(outcome)
    raised, result = outcome
    if raised:
        raise ValueError(raised)
    return cast("T", result)


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def say(world: World, text: str) -> None:
    """Print on rank 0."""
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)
