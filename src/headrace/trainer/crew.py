"""One process leads, the others follow: the loop sees one trainer, and every process makes the same calls.

The leader runs the loop. Before each verb it tells the followers which verb comes and with what; then all of them,
the leader too, call their own ``ParallelTrainer``. A follower builds everything else (model, algorithm) from the
run's configuration by itself (``headrace.follower``).

    who            waits for                     what unblocks it                      deadline
    followers      the next verb                 the leader's next call, its death     ``verb_deadline_s``
    all            each other, inside a verb     the same verb on the others           ``join_processes``'s deadline_s
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from headrace.algorithms.fields import Minibatch
from headrace.child_process import child_environment, how_it_ended
from headrace.config.load import resolved
from headrace.config.schema import RunConfig
from headrace.errors import PartLost
from headrace.model.parallel.mesh import join_processes
from headrace.protocols import Algorithm, WeightUpdate
from headrace.trainer.distributed import ParallelTrainer
from headrace.trainer.memory import MemoryUse
from headrace.trainer.weights import NonFiniteError
from headrace.types import PolicyVersion, Sample

STOP_DEADLINE_S = 10.0
END_GRACE_S = 2.0
"""From a failed verb to the end of the follower that made it fail."""
_LESS_MEMORY = "trainer.max_microbatch_tokens, or raise an axis of [parallel]"
_INHERITED = ("HEADRACE_HOME", "HF_HOME", "HF_HUB_OFFLINE")


class FollowerDied(PartLost):
    """Another process of the run ended, so that its leader cannot go on; the message says how it ended."""


class Crew(Protocol):
    """The other processes of a run, wherever they are."""

    @property
    def address(self) -> str:
        """Where all of them meet."""
        ...

    def explained(self) -> AbstractContextManager[None]:
        """What fails inside because one of them ended raises FollowerDied, which says how."""
        ...

    def ends(self) -> list[str]:
        """How those ended that have ended."""
        ...

    def stop(self) -> None: ...


@contextmanager
def explained(ends_of: Callable[[], list[str]], grace_s: float) -> Iterator[None]:
    """What fails inside because a follower ended says so: the leader's own error is only of a lost connection.
    ``ends_of``: :meth:`Crew.ends`; ``grace_s``: from the error to the news of an end. Raises FollowerDied."""
    try:
        yield
    except RuntimeError as error:
        end_s = time.monotonic() + grace_s
        while not (ends := ends_of()) and time.monotonic() < end_s:
            time.sleep(0.05)
        if ends:
            raise FollowerDied(f"{'; '.join(ends)}. The leader saw: {error}") from error
        raise


class Followers:
    """The other processes of a run on this machine. Started before the leader joins the group."""

    def __init__(self, config: RunConfig, module: str = "headrace.follower") -> None:
        """``module``: what each of them runs, with the specification's file and its rank as arguments."""
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-")
        address = f"file://{self._folder.name}/rendezvous"
        spec = Path(self._folder.name) / "spec.json"
        spec.touch(mode=0o600)  # the configuration may hold secrets
        spec.write_text(json.dumps({"config": resolved(config), "address": address}))
        if sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine; a host name may not resolve
        names = (*_INHERITED, "GLOO_SOCKET_IFNAME")
        environment = child_environment({name: os.environ[name] for name in names if name in os.environ})
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(spec), str(rank)],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
            for rank in range(1, config.parallel.world_size)
        ]
        self.address = address

    def explained(self) -> AbstractContextManager[None]:
        return explained(self.ends, grace_s=END_GRACE_S)

    def ends(self) -> list[str]:
        """How those ended that have ended."""
        return [
            f"process {rank} of the run {how_it_ended(process.returncode, lower=_LESS_MEMORY)}"
            for rank, process in enumerate(self._processes, start=1)
            if process.poll() is not None
        ]

    def stop(self) -> None:
        """End them. They hold nothing that is not on disk already."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def join_run(config: RunConfig, rank: int, address: str) -> dist.ProcessGroup:
    """Join the run's processes; returns the group in which verbs are told. Collective."""
    join_processes(
        rank=rank,
        num_processes=config.parallel.world_size,
        address=address,
        deadline_s=config.waits.forward_backward_s,
    )
    waits = config.waits
    verb_deadline_s = waits.rollout_batch_s + waits.checkpoint_s + config.evaluation.deadline_s
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=verb_deadline_s))
    return group


class LeadingTrainer:
    """Implements ``protocols.Trainer`` for the loop: tells the followers, then does it itself."""

    def __init__(self, own: ParallelTrainer, verbs: dist.ProcessGroup, followers: Crew) -> None:
        self._own = own
        self._verbs = verbs
        self._followers = followers
        self._telling = threading.Lock()

    @property
    def version(self) -> PolicyVersion:
        return self._own.version

    @property
    def step(self) -> int:
        return self._own.step

    @property
    def holds_published_weights(self) -> bool:
        return self._own.holds_published_weights

    def last_logprobs(self) -> dict[str, Tensor]:
        return self._own.last_logprobs()

    def set_lineage(self, lineage: int) -> None:
        with self._told("set_lineage", lineage):
            self._own.set_lineage(lineage)

    def forward(
        self, samples: Sequence[Sample], model: Literal["policy", "reference", "critic"] = "policy"
    ) -> list[Tensor]:
        with self._told("forward", tuple(samples), model):
            return self._own.forward(samples, model)

    def forward_backward(self, minibatch: Minibatch, algorithm: Algorithm) -> dict[str, float]:
        """``algorithm`` must be the one that the configuration names: followers use their own."""
        with self._told("forward_backward", minibatch):
            return self._own.forward_backward(minibatch, algorithm)

    def optim_step(self) -> dict[str, float]:
        with self._told("optim_step"):
            return self._own.optim_step()

    def memory(self) -> list[MemoryUse]:
        with self._told("memory"):
            return self._own.memory()

    def publish(self) -> WeightUpdate:
        """The next version; its weights come bucket by bucket when the engine takes them."""
        with self._told("publish"):
            return self._with_weights(self._own.publish().version)

    def current_weights(self) -> WeightUpdate:
        """The present version with its weights, after a restore."""
        return self._with_weights(self.version)

    def save(self, path: Path) -> None:
        with self._told("save", path):
            self._own.save(path)

    def restore(self, path: Path) -> None:
        with self._told("restore", path):
            self._own.restore(path)

    def check_followers(self) -> None:
        """Raises FollowerDied where one of them is gone: a verb that waits for it may not notice for long."""
        if ends := self._followers.ends():
            raise FollowerDied("; ".join(ends))

    def close(self) -> None:
        """End the followers and leave the group; no verb works afterwards. A verb that hangs ends with an error."""
        self._followers.stop()
        dist.destroy_process_group()

    def _with_weights(self, version: PolicyVersion) -> WeightUpdate:
        return WeightUpdate(version=version, buckets=self.weight_buckets)

    def weight_buckets(self) -> Iterator[dict[str, Tensor]]:
        """The present weights in the compute type, whole tensors in bounded buckets. Take all of them."""
        with self._told("publish_buckets"):
            yield from self._own.publish_buckets()

    @contextmanager
    def _told(self, verb: str, *arguments: Any) -> Iterator[None]:
        """The followers make this call; the leader's own comes inside. Raises FollowerDied where one of them ended.

        One call at a time: collectives of two threads would meet each other's on the followers, and bring wrong numbers
        without an error. Raises RuntimeError for a second one."""
        if not self._telling.acquire(blocking=False):
            raise RuntimeError(f"{verb} was called while another call of the trainer's processes runs; this is a bug")
        try:
            with self._followers.explained():
                dist.broadcast_object_list([(verb, arguments)], src=0, group=self._verbs)
                yield
        finally:
            self._telling.release()


def follow(own: ParallelTrainer, algorithm: Algorithm, verbs: dist.ProcessGroup) -> None:
    """Make the leader's calls until it is gone. Raises what ``torch.distributed`` raises then."""
    while True:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, src=0, group=verbs)
        verb, arguments = told[0]
        try:
            if verb == "forward_backward":
                own.forward_backward(arguments[0], algorithm)
            elif verb == "publish_buckets":
                for _ in own.publish_buckets():
                    pass
            else:
                getattr(own, verb)(*arguments)
        except NonFiniteError:
            continue  # raised on the leader too, which decides
