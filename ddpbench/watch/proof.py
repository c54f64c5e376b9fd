"""Verify while a job trains that its replicas are equal, bit for bit, after every N steps.

A comparison is a collective call of the ranks that hold a replica, so it takes place where they
meet anyway: at the end of their n-th synchronised backward, one in which each of their process
groups had collectives, such as DDP's reductions. Optimizer steps, which a rank may skip, count only
for models without such a backward.

Before they compare, the ranks meet at the store. A rank that waits in vain gives this comparison up
and goes on. What such waits may cost is bounded: FREE_SECONDS and SHARE of the job's time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpbench.launch import placement
from ddpbench.records.schema import Finding
from ddpbench.records.wording import counted, list_kinds, spans
from ddpbench.replicas import channel, state
from ddpbench.replicas.compare import Options
from ddpbench.replicas.state import shards_state, unwrap, wrapper
from ddpbench.replicas.verify import gather_report
from ddpbench.watch.observe.phases import Meetings, Observer

FREE_SECONDS, SHARE = 1.0, 0.005  # of waits in vain, in all: so long, and this share of the job
MET, LATE = "met", "late"  # what the ranks agree on
COMPARED, NOT_COMPARED = "replicas-compared", "replicas-not-compared"  # codes of findings
NOTED = ("nothing-to-compare", "not-compared")  # findings of a comparison that are reported once


class Replica(NamedTuple):
    """A model of this rank that others hold too.

    name: the same in all ranks; ranks: that are compared; groups: that all have collectives in a
    synchronised backward of it.
    """

    name: str
    module: nn.Module
    optimizers: list[Optimizer]
    ranks: tuple[int, ...]
    groups: Meetings


@dataclass
class Record:
    """How often a replica was compared."""

    ranks: tuple[int, ...]
    compared: int = 0
    equal: int = 0
    missed: bool = False
    failed: bool = False  # so it is compared no more
    equal_until: int | None = None
    contents: dict[str, int] = field(default_factory=dict)  # of the last comparison, by kind
    store: dist.Store | None = None  # of the last comparison
    findings: tuple[Finding, ...] = ()


class Proof:
    """Compares the replicas that an observer finds, each until its first error.

    every: steps from one comparison to the next; 0: none; prefix: of keys in the store, the same in
    all ranks. A step has the number that it has for the first of the replica's ranks.
    """

    def __init__(self, every: int, observer: Observer, prefix: str) -> None:
        self._every, self._observer = every, observer
        self._records: dict[str, Record] = {}
        self._backwards: Counter[tuple[int, ...]] = Counter()  # synchronised ones of each group
        self._steps = 0  # optimizer steps
        self._began, self._lost = time.monotonic(), 0.0
        self._prefix = f"{prefix}/proof/{placement.read_restarts()}"
        if every:
            observer.after_backward = self._after_backward
            observer.after_step = self._after_step

    def list_findings(self, rank: int, ended: bool) -> Iterator[Finding]:
        """Yield the findings on the replicas whose first rank is this one. For any thread."""
        for name, record in [*self._records.items()]:
            if record.ranks[0] == rank:
                yield from record.findings
                if record.compared or ended:
                    yield _describe_record(name, record)

    def conclude(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return an error if no rank has compared anything, although this was asked for."""
        if not self._every or any(f.code in (COMPARED, NOT_COMPARED) for f in findings):
            return []
        steps = max([self._steps, *self._backwards.values()])
        return [_explain_never_compared(f"the job ended after {counted(steps, 'step')}")]

    def _after_backward(self, met: Meetings) -> None:
        counts = self._backwards
        counts.update(met)
        if all(counts[ranks] % self._every for ranks in met):
            return
        for one in self._list_replicas():
            # Of groups that do not meet equally often, the one that meets least has the number.
            count = min(counts[ranks] for ranks in one.groups)
            if one.groups <= met and count % self._every == 0:
                steps = self._steps if self._observer.optimizers else count - 1
                self._compare(f"backward/{count}", steps, one)

    def _after_step(self, number: int) -> None:
        self._steps = number + 1
        if self._steps % self._every == 0 and dist.is_initialized():
            for one in self._list_replicas():
                if not all(self._backwards[ranks] for ranks in one.groups):
                    self._compare(f"step/{number}", number, one)

    def _compare(self, point: str, number: int, one: Replica) -> None:
        """Compare a replica if all of its ranks come to this point."""
        record = self._records.setdefault(one.name, Record(one.ranks))
        if record.failed:
            return
        step = self._meet(point, number, one, record)
        if step is None:
            if not record.missed:
                record.findings += (_describe_missed(one, number),)
            record.missed = True
            return
        options = Options(step=step, equal_until=record.equal_until)
        report = gather_report(one.module, tuple(one.optimizers), None, options)
        record.contents = report.compared
        record.compared += 1
        record.failed = report.failed
        if not report.differs:
            record.equal += 1
            record.equal_until = step
        known = {finding.code for finding in record.findings}
        for finding in report.findings:
            if finding.severity == "error":
                sentence = f"step {step}: {finding.sentence}"
                next_step = finding.next_step or "ddpbench guide replicas"
                record.findings += (replace(finding, sentence=sentence, next_step=next_step),)
            elif finding.code in NOTED and finding.code not in known:
                record.findings += (finding,)

    def _list_replicas(self) -> list[Replica]:
        """Return this rank's replicas with names that are the same in all ranks, in their order."""
        stepped = self._observer.optimizers
        # ZeroRedundancyOptimizer steps another one, which has this rank's part of the state.
        inner = {id(getattr(one, "optim", None)) for one in stepped if shards_state(one)}
        owners: dict[int, list[Optimizer]] = {}  # by parameter
        for optimizer in (one for one in stepped if id(one) not in inner):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    owners.setdefault(id(parameter), []).append(optimizer)
        count: Counter[str] = Counter()
        replicas = []
        for module in itertools.chain.from_iterable(map(_list_parts, self._observer.modules)):
            keys = [id(p) for p in module.parameters() if id(p) in owners]
            ddp: Any = wrapper(module)
            held: list[Any] = [each.parameter for each in state.list_parameters(unwrap(module))]
            meshes = [one.device_mesh for one in held if state.is_dtensor(one)]
            if ddp is not None and ddp.process_group not in distributed_c10d._world.pg_map:
                continue  # of a training before: its group is destroyed
            if keys or ddp is not None or meshes:
                optimizers = {id(one): one for key in keys for one in owners[key]}
                ranks, groups = _list_ranks(channel.choose_target(None, ddp, meshes)[0])
                forms = [(name, *p.shape) for name, p in unwrap(module).named_parameters()]
                digest = hashlib.sha256(repr((forms, ranks)).encode()).hexdigest()
                name = f"{type(unwrap(module)).__name__} {digest[:8]}"
                count[name] += 1
                name = f"{name} {count[name]}"
                replicas.append(Replica(name, module, [*optimizers.values()], ranks, groups))
        return sorted(replicas, key=lambda one: one.name)

    def _meet(self, point: str, step: int, one: Replica, record: Record) -> int | None:
        """Wait for the ranks of a replica; return the first one's step, None if not all came."""
        default = distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"{self._prefix}/{one.name}/{point}", default)
        if dist.get_rank() == one.ranks[0]:
            store.set("step", str(step))
        decision = b""
        if store.add("arrived", 1) == len(one.ranks):
            decision = store.compare_set("decision", "", MET)
            if record.store is not None:  # all are here, so all have left the point before
                with contextlib.suppress(RuntimeError):  # where the store cannot
                    for key in ("step", "arrived", "decision"):
                        record.store.delete_key(key)
        record.store = store
        began, pause = time.monotonic(), 0.0005
        until = began + FREE_SECONDS + SHARE * (began - self._began) - self._lost
        while not decision:
            if store.check(["decision"]) or time.monotonic() > until:
                decision = store.compare_set("decision", "", LATE)
            else:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        is_met = decision == MET.encode()
        # Ranks that meet in a backward anyway lose nothing by waiting for each other.
        if not is_met or point.startswith("step"):
            self._lost += time.monotonic() - began
        return int(store.get("step")) if is_met else None


def _describe_missed(one: Replica, number: int) -> Finding:
    sentence = (
        f"{one.name.split()[0]} was not compared at step {number}: some of ranks "
        f"{spans(one.ranks)} did not reach it with such a model when the others did"
    )
    next_step = "print len(loader) and the model in every rank: all must take the same steps"
    return Finding("warning", NOT_COMPARED, sentence, next_step, {"step": number})


def _describe_record(name: str, record: Record) -> Finding:
    model = f"{name.split()[0]} (ranks {spans(record.ranks)})"
    if not record.compared:
        reason = "some of its ranks never came to a comparison together"
        return _explain_never_compared(f"{model}: {reason}")
    sentence = (
        f"replicas of {model} were equal in {record.equal} of "
        f"{counted(record.compared, 'comparison')}: {list_kinds(record.contents)}"
    )
    place = {"compared": record.compared, "equal": record.equal, "step": record.equal_until}
    return Finding("note", COMPARED, sentence, "", place)


def _explain_never_compared(reason: str) -> Finding:
    """Return the error of a job whose replicas were never compared although that was asked for."""
    step = "a smaller N in --verify N, or ddpbench.Verifier: ddpbench guide replicas"
    return Finding("error", NOT_COMPARED, f"the replicas were never compared: {reason}", step)


def _list_parts(root: nn.Module) -> list[nn.Module]:
    """Return the DDP modules within a module, else the module itself."""
    if wrapper(root) is not None:
        return [root]
    return [one for one in root.modules() if isinstance(one, DistributedDataParallel)] or [root]


def _list_ranks(target: channel.Target) -> tuple[tuple[int, ...], Meetings]:
    """Return the ranks that are compared, and those of each process group of the target.

    A mesh has a group per dimension.
    """
    if not isinstance(target, DeviceMesh):
        ranks = tuple(dist.get_process_group_ranks(target or dist.group.WORLD))
        return ranks, frozenset({ranks})
    grid = channel.read_grid(target)
    sized = [number for number, size in enumerate(grid.shape) if size > 1] or [0]
    groups = [dist.get_process_group_ranks(target.get_group(number)) for number in sized]
    return tuple(sorted(grid.ranks)), frozenset(map(tuple, groups))
