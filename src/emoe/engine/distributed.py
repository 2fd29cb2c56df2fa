"""Several processes that train one run: ranks, means over all of them, and a clear end when one is lost.

The processes are started by `torchrun`, or by anything else that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. Gradients travel by NCCL between GPUs and by gloo between CPUs; flags always by gloo, so that reading
one never waits for a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from emoe.config import ConfigError

BUCKET_BYTES = 2**26  # gradients are copied into buffers of about this size, one after the other
ANSWER_SECONDS = 2  # how long the others have to say that they are still there when a process is lost
TIMEOUT = "EMOE_RANK_TIMEOUT"  # seconds after which a process that does not answer counts as lost
TIMEOUT_SECONDS = 600.0  # must be longer than writing a checkpoint takes: the others wait for it
_MEETINGS = itertools.count()


class LostRank(RuntimeError):  # noqa: N818 - names what happened
    """Another process of the run has ended or does not answer."""

    exit_code: ClassVar[int] = 6


class World:
    """The processes of a run, of which this one has the number `rank`. Alone, every method does nothing."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None, control: Any = None):
        self.rank, self.size, self._store, self._control = rank, size, store, control
        self.leads = rank == 0  # whether this process writes logs and checkpoints

    def agree(self, *numbers: int) -> list[int]:
        """The largest number at each index over the processes, which wait for each other; equal lengths everywhere."""
        if self.size == 1:
            return list(numbers)
        largest = torch.tensor(numbers, dtype=torch.long)
        self._call(dist.all_reduce, largest, op=dist.ReduceOp.MAX, group=self._control)
        return largest.tolist()

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Put the mean over all processes into every tensor, the same bits in each process."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self._call(dist.all_reduce, flat)
            flat /= self.size
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def check_same(self, text: str, problem: str) -> None:
        """Raise a ConfigError in all processes if their texts differ; `problem` says what that means."""
        if self.size == 1:
            return
        texts: list[str] = [""] * self.size
        self._call(dist.all_gather_object, texts, text, group=self._control)
        others = [str(rank) for rank, other in enumerate(texts) if other != texts[0]]
        if others:
            raise ConfigError([f"ranks: {problem} (rank {', '.join(others)} differs from rank 0)"])

    def lead(self, act: Callable[[], object]) -> None:
        """Rank 0 acts and the others wait; if it fails there, all end."""
        try:
            if self.leads:
                act()
        except BaseException:
            self.agree(1)
            raise
        if any(self.agree(0)):
            raise LostRank(f"rank {self.rank}: rank 0 could not begin, see its message")

    def _call(self, operation: Callable[..., object], *args: Any, **options: Any) -> None:
        """Exchange something with the others; a clear error if that fails."""
        try:
            operation(*args, **options)
            return
        except RuntimeError as error:  # gloo has no type of its own for a closed connection, nor for a timeout
            reason = str(error).strip().splitlines()[0]
        del options
        # Closing the connections wakes those that wait for this process, so that they can answer. It takes that no
        # frame of the failed call holds them any longer, which is why the error is gone here.
        control, self._control = self._control, None
        dist.destroy_process_group(control)
        del control
        gc.collect()
        problem = f"an exchange with the other ranks failed, though all are there ({reason})"
        if lost := ", ".join(map(str, self._missing())):
            problem = f"lost rank {lost}, which has ended or did not answer in {timeout_seconds():g} s (${TIMEOUT})"
        raise LostRank(f"rank {self.rank}: {problem}; start all processes again with --resume")

    def _missing(self) -> list[int]:
        """The ranks that do not say that they are there, by the store that all of them met at."""
        missing = set(range(self.size)) - {self.rank}
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            self._store.set(f"here/{self.rank}", "yes")
            while missing and time.monotonic() < deadline:
                time.sleep(0.05)
                missing = {rank for rank in missing if not self._store.check([f"here/{rank}"])}
        except RuntimeError:  # the store lives in rank 0, unless torchrun keeps it
            return [0] if 0 in missing else sorted(missing)
        return sorted(missing)


ALONE = World()


def launched() -> tuple[int, int, int]:
    """Rank, number of processes, and rank on this machine, by the environment; (0, 1, 0) for a process of its own."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return 0, 1, 0
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := ", ".join(name for name in names if name not in os.environ):
        raise ConfigError(f"ranks: WORLD_SIZE is {size}, but {missing} is not set; start with torchrun, or unset it")
    texts = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    rank, count, local = (int(text) if text.isdecimal() else -1 for text in texts)
    if not (0 <= rank < count and local >= 0):
        raise ConfigError([f"ranks: RANK {os.environ['RANK']!r} of WORLD_SIZE {size!r} is none; start with torchrun"])
    return rank, count, local


def timeout_seconds() -> float:
    """How long a process waits for the others."""
    text = os.environ.get(TIMEOUT) or TIMEOUT_SECONDS
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < 1e6:
            return seconds
    raise ConfigError([f"{TIMEOUT}: must be a number of seconds > 0, got {text!r}"])


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """The world that the environment names, for the length of a `with` block; all its processes must come."""
    rank, size, _ = launched()
    if size == 1:
        yield World()
        return
    timeout = timedelta(seconds=timeout_seconds())
    try:
        store, *_ = next(iter(dist.rendezvous("env://", timeout=timeout)))
        store = dist.PrefixStore(f"run{next(_MEETINGS)}", store)  # torchrun's store remembers earlier meetings
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout) if backend == "nccl" else None
    except (RuntimeError, OSError) as error:
        raise LostRank(f"rank {rank}: the {size} processes did not come together ({error})") from error
    world = World(rank, size, store, control)
    try:
        yield world
        world.agree(0)  # a process that ends early would count as lost
    except BaseException:
        # NCCL may now wait for operations that never end; the end of the process frees it too.
        if backend == "gloo" and dist.is_initialized():
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in groups of one dtype and about BUCKET_BYTES, in the same order in every process."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket, size = [], 0
        for tensor in (tensor for tensor in tensors if tensor.dtype == dtype):
            bucket.append(tensor)
            size += tensor.nbytes
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
