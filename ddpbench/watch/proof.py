"""Verify while a job trains that its replicas are equal, bit for bit, after every N steps.

The comparison is a collective call, so all ranks must be at the same step. They make sure of that
over the store first, with a deadline: if one does not come, as after an uneven number of steps,
the verification ends and the job goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ddpbench.launch import placement
from ddpbench.records.schema import Finding
from ddpbench.records.wording import counted
from ddpbench.replicas import Report, sharding
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.compare import Options
from ddpbench.replicas.gather import gather_report
from ddpbench.replicas.report import few, listed_kinds
from ddpbench.replicas.state import unwrap, wrapper
from ddpbench.watch.observe.observer import Observer

MEET_SECONDS = 60.0  # for all ranks to reach the same step
LOCATED = 16  # differing tensors of a kind that are compared element by element
EQUAL, UNEQUAL, LATE = "equal", "unequal", "late"  # what the ranks have agreed on

_times = itertools.count()  # how often a proof began in this process, equal in all ranks


class Proof:
    """Compares the replicas that an observer finds. `findings` has what was found, in every rank.

    every: steps from one comparison to the next; 0: none. Each replica is compared until it first
    differs.
    """

    def __init__(self, every: int, observer: Observer) -> None:
        self.findings: tuple[Finding, ...] = ()
        self._every, self._observer = every, observer
        self._equal_until: dict[str, int] = {}
        self._stages: dict[bytes, tuple[int, ...]] = {}  # as in Options
        self._ended: set[str] = set()  # replicas that differ
        self._uncompared: set[str] = set()  # replicas of which that is reported
        self._last: tuple[int, str] | None = None  # step and digest of the last comparison
        self._prefix = f"ddpbench/proof/{placement.read_restarts()}/{next(_times)}"
        if every:
            observer.after_step.append(self._after_step)

    def close(self) -> None:
        """Compare no more. For any thread."""
        self._every = 0

    def _after_step(self, number: int) -> None:
        if not self._every or (number + 1) % self._every or not dist.is_initialized():
            return
        replicas = self._list_replicas()
        agreed = self._agree(number, hashlib.sha256(json.dumps([*replicas]).encode()).hexdigest())
        if agreed == LATE:
            self._every = 0
            sentence = (
                f"the replicas are no longer compared: some ranks did not reach step {number} "
                f"within {MEET_SECONDS:g} s of the others"
            )
            step = (
                "print len(loader) in every rank: all must take the same number of optimizer steps"
            )
            self._add(Finding("warning", "replicas-not-compared", sentence, step, {"step": number}))
            return
        if agreed == UNEQUAL:
            replicas = self._gather_common(replicas)
        for name, (module, optimizers) in replicas.items():
            if name not in self._ended:
                self._compare(number, name, module, optimizers)

    def _compare(
        self, number: int, name: str, module: nn.Module, optimizers: list[Optimizer]
    ) -> None:
        options = Options(
            gradients=None,
            finite=True,
            locate=LOCATED,
            step=number,
            equal_until=self._equal_until.get(name),
            stages=self._stages,
        )
        report = gather_report(module, tuple(optimizers), None, options)
        if report.failed:
            self._ended.add(name)
            errors = [f for f in report.findings if f.severity == "error"]
            self._add(*(replace(f, sentence=f"step {number}: {f.sentence}") for f in errors))
        else:
            self._equal_until[name] = number
        is_partial = report.not_compared or report.nothing_to_compare
        if is_partial and name not in self._uncompared:
            self._uncompared.add(name)
            self._add(_describe_uncompared(module, report))

    def _add(self, *findings: Finding) -> None:
        self.findings += tuple(
            f if f.next_step else replace(f, next_step="python -m ddpbench guide replicas")
            for f in findings
        )

    def _list_replicas(self) -> dict[str, tuple[nn.Module, list[Optimizer]]]:
        """Return this rank's replicas by a name that is the same in all ranks, in the same order.

        Their order is that of their parameters in the optimizers.
        """
        position: dict[int, int] = {}
        owners: dict[int, list[Optimizer]] = {}
        for optimizer in self._observer.optimizers:
            for parameter in itertools.chain.from_iterable(
                group["params"] for group in optimizer.param_groups
            ):
                position.setdefault(id(parameter), len(position))
                owners.setdefault(id(parameter), []).append(optimizer)
        found: list[tuple[int, nn.Module, list[Optimizer]]] = []
        for module in self._observer.modules:
            ids = [id(p) for p in module.parameters() if id(p) in position]
            if ids:
                own = {id(one): one for key in ids for one in owners[key]}
                found.append((min(position[key] for key in ids), module, [*own.values()]))
        found.sort(key=lambda one: one[0])
        count: Counter[str] = Counter()
        replicas = {}
        for _, module, optimizers in found:
            name = _describe(module)
            count[name] += 1
            replicas[f"{name} {count[name]}"] = module, optimizers
        return replicas

    def _agree(self, number: int, digest: str) -> str:
        """Wait for all ranks; return whether all have replicas of the same names, or LATE."""
        store = self._open_store(number)
        world_size = dist.get_world_size()
        same = store.add(digest, 1)
        is_last = store.add("arrived", 1) == world_size
        if self._last is not None:  # all ranks have been there; once all are here, all have left
            last, last_digest = self._last
            keys = ("arrived", "decided", "decision") if is_last else ()
            with contextlib.suppress(RuntimeError):  # where the store cannot
                for key in (last_digest, *keys):
                    self._open_store(last).delete_key(key)
        self._last = number, digest
        if is_last:
            return _decide(store, EQUAL if same == world_size else UNEQUAL)
        until, pause = time.monotonic() + MEET_SECONDS, 0.0005
        while not store.check(["decision"]):
            if time.monotonic() > until:
                return _decide(store, LATE)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return store.get("decision").decode()

    def _open_store(self, number: int) -> dist.Store:
        return dist.PrefixStore(f"{self._prefix}/{number}", distributed_c10d._get_default_store())

    def _gather_common(self, replicas: dict[str, Any]) -> dict[str, Any]:
        """Return the replicas that each rank of their groups has; report the others."""
        # A module tells this rank's GPU, which a script need not have made the current one.
        module = next((module for module, _ in replicas.values()), nn.Module())
        lists = Channel(None, module).gather_objects([*replicas])
        common = {
            name: replica
            for name, replica in replicas.items()
            if all(name in lists[rank] for rank in _list_ranks(replica[0]))
        }
        if missing := {*replicas} - {*common} - self._uncompared:
            self._uncompared |= missing
            sentence = (
                f"not compared: {counted(len(missing), 'model')} that some ranks do not have: "
                f"{few(sorted(missing))}"
            )
            self._add(Finding("note", "not-compared", sentence, "", {"models": sorted(missing)}))
        return common


def _decide(store: dist.Store, decision: str) -> str:
    """Decide for all ranks, unless another one has decided already; return the decision."""
    if store.add("decided", 1) == 1:
        store.set("decision", decision)
    return store.get("decision").decode()


def _list_meshes(module: nn.Module) -> list[Any]:
    """Return the meshes that a module's parameters are divided over; [] without any."""
    held: list[Any] = [each.parameter for each in sharding.list_parameters(unwrap(module))]
    return [parameter.device_mesh for parameter in held if sharding.is_dtensor(parameter)]


def _list_ranks(module: nn.Module) -> list[int]:
    """Return the ranks that a verification of this module compares."""
    target, _ = sharding.choose_target(None, wrapper(module), _list_meshes(module))
    if isinstance(target, DeviceMesh):
        return sorted(sharding.read_grid(target).ranks)
    return dist.get_process_group_ranks(target or dist.group.WORLD)


def _describe(module: nn.Module) -> str:
    """Return the class of a module, and a digest of its ranks and of its parameters.

    On a mesh the parameters are left out: the stages of a pipeline hold other layers of one model,
    and the verification knows them.
    """
    inner = unwrap(module)
    form: object = "mesh"
    if not _list_meshes(module):
        form = [(name, tuple(p.shape)) for name, p in inner.named_parameters()]
    digest = hashlib.sha256(repr((form, _list_ranks(module))).encode()).hexdigest()
    return f"{type(inner).__name__} {digest[:8]}"


def _describe_uncompared(module: nn.Module, report: Report) -> Finding:
    if not report.not_compared:
        sentence = (
            f"nothing to compare in {type(unwrap(module)).__name__}: each element of each "
            "parameter is in one rank only, so no other rank can show whether it is right. "
            f"Held once: {listed_kinds(report.held_once)}"
        )
        return Finding("note", "nothing-to-compare", sentence, "", {"held_once": report.held_once})
    reasons = sorted({skipped.reason for skipped in report.not_compared})
    names = [skipped.name for skipped in report.not_compared]
    kinds = listed_kinds(Counter(skipped.kind for skipped in report.not_compared))
    sentence = f"not compared: {kinds}: {few(names)} ({'; '.join(reasons)})"
    return Finding("note", "not-compared", sentence, "", {"tensors": names})
