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
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
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
from ddpbench.records.wording import counted, spans
from ddpbench.replicas import Report, sharding
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.compare import Options
from ddpbench.replicas.gather import gather_report
from ddpbench.replicas.report import few, listed_kinds
from ddpbench.replicas.state import unwrap, wrapper
from ddpbench.watch.observe.observer import Meetings, Observer

FREE_SECONDS, SHARE = 1.0, 0.005  # of waits in vain, in all: so long, and this share of the job
LOCATED = 16  # differing tensors of a kind that are compared element by element
EQUAL, UNEQUAL, LATE = "equal", "unequal", "late"  # what the ranks have agreed on
COMPARED, NOT_COMPARED = "replicas-compared", "replicas-not-compared"  # codes of findings
JOIN = "it trains within Join, where ranks may take different numbers of steps"

_times = itertools.count()  # how often a proof began in this process, equal in all ranks


class Replica(NamedTuple):
    """A model of this rank that others hold too.

    name: the same in all ranks; target, ranks: which it is compared in; groups: that all have
    collectives in a synchronised backward of it.
    """

    name: str
    module: nn.Module
    optimizers: list[Optimizer]
    target: sharding.Target
    ranks: tuple[int, ...]
    groups: Meetings


@dataclass
class Record:
    """How often a replica was compared."""

    ranks: tuple[int, ...]
    compared: int = 0
    equal: int = 0
    missed: int = 0
    equal_until: int | None = None
    contents: dict[str, int] = field(default_factory=dict)  # of the last comparison, by kind
    reason: str = ""  # why it is not compared


class Proof:
    """Compares the replicas that an observer finds. `findings` has what was found, in every rank.

    every: steps from one comparison to the next; 0: none. Each replica is compared until it first
    differs.
    """

    def __init__(self, every: int, observer: Observer) -> None:
        self.findings: tuple[Finding, ...] = ()
        self.reported: tuple[Finding, ...] = ()  # those that this rank reports to rank 0
        self._every, self._observer, self._asked = every, observer, bool(every)
        self._records: dict[str, Record] = {}
        self._stages: dict[bytes, tuple[int, ...]] = {}  # as in Options
        self._ended: set[str] = set()  # replicas that differ
        self._uncompared: set[str] = set()  # replicas of which that is reported
        self._backwards: Counter[tuple[int, ...]] = Counter()  # synchronised ones of each group
        self._steps = 0  # optimizer steps
        self._last: dict[tuple[int, ...], tuple[str, str]] = {}  # point and digest, by ranks
        self._began, self._lost = time.monotonic(), 0.0
        self._prefix = f"ddpbench/proof/{placement.read_restarts()}/{next(_times)}"
        if every:
            observer.after_backward.append(self._after_backward)
            observer.after_step.append(self._after_step)

    def close(self) -> None:
        """Compare no more. For any thread."""
        self._every = 0

    def _after_backward(self, met: Meetings) -> None:
        counts = self._backwards
        counts.update(met)
        if not self._every or all(counts[ranks] % self._every for ranks in met):
            return
        # Of groups that do not meet equally often, the one that meets least has the number.
        found = [
            (min(counts[ranks] for ranks in one.groups), one)
            for one in self._list_replicas()
            if one.groups <= met
        ]
        for number in sorted({number for number, _ in found if number % self._every == 0}):
            due = [one for count, one in found if count == number]
            self._compare_all(f"backward/{number}", number - 1, due)

    def _after_step(self, number: int) -> None:
        self._steps = number + 1
        if self._every and (number + 1) % self._every == 0 and dist.is_initialized():
            due = [
                one
                for one in self._list_replicas()
                if not all(self._backwards[ranks] for ranks in one.groups)
            ]
            self._compare_all(f"step/{number}", number, due)

    def _compare_all(self, point: str, number: int, due: Sequence[Replica]) -> None:
        """Compare replicas, those of the same ranks together, in the same order in all ranks."""
        for ranks in sorted({one.ranks for one in due}):
            replicas = {one.name: one for one in due if one.ranks == ranks}
            for name, one in [*replicas.items()]:
                record = self._records.setdefault(name, Record(ranks))
                ddp: Any = wrapper(one.module)
                if ddp is not None and ddp._join_config.enable:  # ranks without data only shadow it
                    record.reason = JOIN
                    del replicas[name]
            if not replicas:
                continue
            agreed = self._agree(point, ranks, [*replicas])
            if agreed == LATE:
                self._miss(number, ranks, replicas)
                continue
            if agreed == UNEQUAL:
                replicas = self._gather_common(replicas)
            for one in replicas.values():
                if one.name not in self._ended:
                    self._compare(number, one)

    def _miss(self, number: int, ranks: tuple[int, ...], names: Iterable[str]) -> None:
        is_first = not any(record.missed for record in self._records.values())
        for name in names:
            self._records[name].missed += 1
        if is_first:
            sentence = (
                f"the replicas were not compared at step {number}: some of ranks "
                f"{spans(ranks)} did not reach it together with the others"
            )
            step = (
                "print len(loader) in every rank: all must take the same number of optimizer steps"
            )
            self._add(ranks, Finding("warning", NOT_COMPARED, sentence, step, {"step": number}))

    def _compare(self, number: int, one: Replica) -> None:
        record = self._records[one.name]
        options = Options(
            gradients=None,
            finite=True,
            locate=LOCATED,
            step=number,
            equal_until=record.equal_until,
            stages=self._stages,
        )
        report = gather_report(one.module, tuple(one.optimizers), None, options)
        record.contents = {kind: count for kind, count in report.compared.items() if count}
        record.compared += 1
        if report.failed:
            self._ended.add(one.name)
            errors = [f for f in report.findings if f.severity == "error"]
            self._add(
                one.ranks, *(replace(f, sentence=f"step {number}: {f.sentence}") for f in errors)
            )
        else:
            record.equal += 1
            record.equal_until = number
        is_partial = report.not_compared or report.nothing_to_compare
        if is_partial and one.name not in self._uncompared:
            self._uncompared.add(one.name)
            self._add(one.ranks, _describe_uncompared(one.module, report))

    def _add(self, ranks: tuple[int, ...], *findings: Finding) -> None:
        guide = "python -m ddpbench guide replicas"
        new = tuple(f if f.next_step else replace(f, next_step=guide) for f in findings)
        self.findings += new
        if dist.get_rank() == ranks[0]:  # all of these ranks have found the same
            self.reported += new

    def summarize(self, rank: int, ended: bool) -> list[Finding]:
        """Return how often each replica was compared, if this rank reports that. For any thread."""
        return [
            _describe_record(name, record)
            for name, record in [*self._records.items()]
            if record.ranks[0] == rank and (record.compared or ended)
        ]

    def conclude(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return an error if no rank has compared anything, although this was asked for."""
        if not self._asked or any(f.code in (COMPARED, NOT_COMPARED) for f in findings):
            return []
        most = max([self._steps, *self._backwards.values()])
        reason = f"the job ended after {counted(most, 'step')}"
        if not most:
            reason = "neither an optimizer step nor a backward of a DDP or sharded model was seen"
        return [_explain_never_compared(reason)]

    def _list_replicas(self) -> list[Replica]:
        """Return this rank's replicas with names that are the same in all ranks, in the same order.

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
        for module in itertools.chain.from_iterable(map(_list_parts, self._observer.modules)):
            ids = [id(p) for p in module.parameters() if id(p) in position]
            if ids or wrapper(module) is not None or _list_meshes(module):
                own = {id(one): one for key in ids for one in owners[key]}
                first = min((position[key] for key in ids), default=len(position))
                found.append((first, module, [*own.values()]))
        found.sort(key=lambda one: one[0])
        count: Counter[str] = Counter()
        replicas = []
        for _, module, optimizers in found:
            target, _ = sharding.choose_target(None, wrapper(module), _list_meshes(module))
            ranks = _list_ranks(target)
            name = _describe(module, ranks)
            count[name] += 1
            replicas.append(
                Replica(
                    f"{name} {count[name]}",
                    *(module, optimizers, target, tuple(ranks), _list_groups(target)),
                )
            )
        return replicas

    def _agree(self, point: str, ranks: tuple[int, ...], names: list[str]) -> str:
        """Wait for these ranks; return whether all have replicas of these names, or LATE."""
        digest = _hash(names)
        store = self._open_store(point, ranks)
        same = store.add(digest, 1)
        is_last = store.add("arrived", 1) == len(ranks)
        if ranks in self._last:  # all have been there; once all are here, all have left
            last, last_digest = self._last[ranks]
            keys = ("arrived", "decided", "decision") if is_last else ()
            with contextlib.suppress(RuntimeError):  # where the store cannot
                for key in (last_digest, *keys):
                    self._open_store(last, ranks).delete_key(key)
        self._last[ranks] = point, digest
        if is_last:
            return _decide(store, EQUAL if same == len(ranks) else UNEQUAL)
        began = time.monotonic()
        until = began + FREE_SECONDS + SHARE * (began - self._began) - self._lost
        pause, decision = 0.0005, ""
        while not decision:
            if store.check(["decision"]):
                decision = store.get("decision").decode()
            elif time.monotonic() > until:
                decision = _decide(store, LATE)
            else:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        # Ranks that meet in a backward anyway lose nothing by waiting for each other.
        if decision == LATE or point.startswith("step"):
            self._lost += time.monotonic() - began
        return decision

    def _open_store(self, point: str, ranks: tuple[int, ...]) -> dist.Store:
        prefix = f"{self._prefix}/{_hash(ranks)}/{point}"
        return dist.PrefixStore(prefix, distributed_c10d._get_default_store())

    def _gather_common(self, replicas: dict[str, Replica]) -> dict[str, Replica]:
        """Return the replicas that all of these ranks have; report the others."""
        # A module tells this rank's GPU, which a script need not have made the current one.
        one = next(iter(replicas.values()))
        lists = Channel(one.target, one.module).gather_objects([*replicas])
        common = {
            name: replica
            for name, replica in replicas.items()
            if all(name in names for names in lists)
        }
        if missing := {*replicas} - {*common} - self._uncompared:
            self._uncompared |= missing
            for name in missing:
                self._records[name].reason = "some of its ranks do not have it"
            sentence = (
                f"not compared: {counted(len(missing), 'model')} that some ranks do not have: "
                f"{few(sorted(missing))}"
            )
            place = {"models": sorted(missing)}
            self._add(one.ranks, Finding("note", "not-compared", sentence, "", place))
        return common


def _describe_record(name: str, record: Record) -> Finding:
    model = f"{name.split()[0]} (ranks {spans(record.ranks)})"
    place = {"compared": record.compared, "equal": record.equal, "step": record.equal_until}
    if not record.compared:
        reason = record.reason or "some of its ranks never came to a comparison together"
        return _explain_never_compared(f"{model}: {reason}")
    sentence = (
        f"replicas of {model} were equal in {record.equal} of "
        f"{counted(record.compared, 'comparison')}"
    )
    if record.equal:
        sentence += f", the last one at step {record.equal_until}"
    sentence += f": {listed_kinds(record.contents)}"
    if record.missed:
        sentence += f"; {counted(record.missed, 'comparison')} given up, because ranks did not come"
    return Finding("note", COMPARED, sentence, "", place)


def _explain_never_compared(reason: str) -> Finding:
    """Return the error of a job whose replicas were never compared although that was asked for."""
    step = "a smaller N in --verify N, or ddpbench.Verifier: python -m ddpbench guide replicas"
    return Finding("error", NOT_COMPARED, f"the replicas were never compared: {reason}", step)


def _decide(store: dist.Store, decision: str) -> str:
    """Decide for all ranks, unless another one has decided already; return the decision."""
    if store.add("decided", 1) == 1:
        store.set("decision", decision)
    return store.get("decision").decode()


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _list_parts(root: nn.Module) -> list[nn.Module]:
    """Return the DDP modules within a module, else the module itself."""
    if wrapper(root) is not None:
        return [root]
    return [one for one in root.modules() if isinstance(one, DistributedDataParallel)] or [root]


def _list_meshes(module: nn.Module) -> list[Any]:
    """Return the meshes that a module's parameters are divided over; [] without any."""
    held: list[Any] = [each.parameter for each in sharding.list_parameters(unwrap(module))]
    return [parameter.device_mesh for parameter in held if sharding.is_dtensor(parameter)]


def _list_ranks(target: sharding.Target) -> list[int]:
    """Return the ranks that a verification of this target compares."""
    if isinstance(target, DeviceMesh):
        return sorted(sharding.read_grid(target).ranks)
    return dist.get_process_group_ranks(target or dist.group.WORLD)


def _list_groups(target: sharding.Target) -> Meetings:
    """Return the ranks of each process group of a target: of a mesh, one per dimension."""
    if not isinstance(target, DeviceMesh):
        return frozenset({tuple(_list_ranks(target))})
    sizes = sharding.read_grid(target).shape
    sized = [number for number, size in enumerate(sizes) if size > 1] or [0]
    return frozenset(tuple(_list_ranks(target.get_group(number))) for number in sized)


def _describe(module: nn.Module, ranks: list[int]) -> str:
    """Return the class of a module, and a digest of its ranks and of its parameters.

    On a mesh the parameters are left out: the stages of a pipeline hold other layers of one model,
    and the verification knows them.
    """
    inner = unwrap(module)
    form: object = "mesh"
    if not _list_meshes(module):
        form = [(name, tuple(p.shape)) for name, p in inner.named_parameters()]
    digest = hashlib.sha256(repr((form, ranks)).encode()).hexdigest()
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
