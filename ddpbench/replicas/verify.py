"""Verify that replicas are equal, bit for bit: called in every rank, after a step.

A healthy verification costs one pass over the replica's memory and one all_reduce of a few hundred
bytes, however many ranks and tensors there are: count, structure and content of each kind of tensor
stand in it as digests. Only what differs there is looked at further: structures as names, contents
as one digest a tensor, and then the differing tensors themselves (locate.py).
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ddpbench.replicas import causes, findings
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.compare import Found, Options, gather_comparison
from ddpbench.replicas.digest import of_bytes
from ddpbench.replicas.origin import Tracer
from ddpbench.replicas.report import (
    NotCompared,
    Origin,
    Report,
    few,
    listed_kinds,
)
from ddpbench.replicas.state import (
    KINDS,
    State,
    collect,
    is_option,
    shards_state,
    unwrap,
    wrapper,
)
from ddpbench.replicas.usage import (
    FROZEN,
    Agreeing,
    Usage,
    agreeing,
    frozen_in_some,
    gather_without_gradient,
    usage,
)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
None_ = type(None)


def verify_replicas(
    module: torch.nn.Module,
    optimizer: Optimizers = None,
    group: ProcessGroup | None = None,
    *,
    gradients: bool | None = None,
    finite: bool = True,
    locate: int = 16,
    step: int | None = None,
) -> Report:
    """Compare this rank's replica with the other ranks', bit for bit; called in all of them.

    module: wrapped in DistributedDataParallel or bare; its parameters and buffers are compared,
        and nothing is changed. Best called after `optimizer.step()` and before `zero_grad()`.
    optimizer: its options and state too; of several, a list. What each rank holds a part of
        (DTensors, FSDP, ZeroRedundancyOptimizer) is not compared: the report has its names.
    group: whose ranks; by default DDP's own, else the default group. Every wait is bounded by its
        timeout. Without any process group the report is on this process alone.
    gradients: True compares them each time, False never; None only where parameters differ, to
        tell the cause. Under gradient accumulation they differ until they are reduced.
    finite: look for NaN and infinite elements too (a second, faster pass over what is in cache).
    locate: how many differing tensors of a kind are compared element by element.

    The report is the same in all ranks. A difference never raises: see `Report` for the three
    answers (`ok`, `failed`, neither: not all was compared). ValueError: the ranks call with
    different arguments, or this one is not in the group. TypeError: an argument is not what it must
    be; nothing was sent then.
    """
    how: Any = {"gradients": gradients, "finite": finite, "locate": locate}
    _check(module=module, optimizer=optimizer, group=group, **how)
    return _gather_report(
        module,
        listed(optimizer),
        group,
        Options(**how, step=None if step is None else _number(step)),
    )


class Verifier:
    """Verifies one replica step after step, and remembers where and when it first went wrong.

    Takes verify_replicas' arguments. The report that explains a difference is the first. A later
    one, while the replicas stay different, has one line (`repeated`), and more only for tensors
    that were right before. `summary()` says at the end what there was.

    trace_nonfinite: watch each output of `module` and each gradient before it is reduced, by hooks,
        so that a NaN is reported with the rank that had it first. `close()` removes the hooks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Optimizers = None,
        group: ProcessGroup | None = None,
        *,
        gradients: bool | None = None,
        finite: bool = True,
        locate: int = 16,
        trace_nonfinite: bool = False,
    ) -> None:
        self._how: Any = {"gradients": gradients, "finite": finite, "locate": locate}
        typed = {"module": module, "optimizer": optimizer, "group": group, **self._how}
        _check(**typed, trace_nonfinite=trace_nonfinite)
        self._what = module, listed(optimizer), group
        if trace_nonfinite and not listed(optimizer):
            raise ValueError("trace_nonfinite=True needs the optimizer: its steps are counted")
        self._tracer = Tracer(module, listed(optimizer)) if trace_nonfinite else None
        self._told: set[tuple[str, str]] = set()  # (kind, name) that differed at the last check
        self._before: findings.Before | None = None
        self._checks, self._failed, self._last = 0, 0, (0, 0)
        self._uncompared: Counter[str] = Counter()  # by kind, at the last check
        self.equal_until: int | None = None  # the last step after which they were equal
        self.first_bad: dict[tuple[str, str], int] = {}  # (kind, name): step, buffers too
        self.first_report: Report | None = None  # the first that has `failed`

    def check(self, step: int) -> Report:
        """verify_replicas after this step, which must have the same number in all ranks."""
        step = _number(step)
        options = Options(
            **self._how, step=step, equal_until=self.equal_until, known=self._told,
            traced=self._tracer is not None,
        )  # fmt: skip
        report = _gather_report(*self._what, options, tracer=self._tracer, before=self._before)
        self._told = {(found.kind, found.name) for found in report.differences}
        for key in [*self._told, *((found.kind, found.name) for found in report.mismatches)]:
            self.first_bad.setdefault(key, step)
        if not report.differs:
            self.equal_until = step
        self._checks += 1
        self._uncompared = Counter(each.kind for each in report.not_compared)
        self._last = (self._last[0] if self._checks > 1 else step, step)
        self._remember(report, step)
        return report

    def _remember(self, report: Report, step: int) -> None:
        if not report.failed:
            self._before = None
            return
        self._failed += 1
        self.first_report = self.first_report or report
        told = findings.keys(report)
        if self._before is None or report.since == step:
            self._before = findings.Before(report.findings[0], step, told)
        else:
            self._before = replace(self._before, known=self._before.known | told)

    def summary(self) -> str:
        """What all checks so far have found, in a few lines; asks no other rank."""
        times = f"{self._checks} verification{'' if self._checks == 1 else 's'}"
        where = f"{times}, of steps {self._last[0]} to {self._last[1]}" if self._checks else times
        if self._uncompared:
            where += f" (not compared: {listed_kinds(self._uncompared)})"
        if self.first_report is None:
            return f"{where}: nothing that was compared differed or was not finite"
        steps: dict[int, list[str]] = {}
        for (kind, name), step in self.first_bad.items():
            steps.setdefault(step, []).append(f"{kind} {name}")
        lines = [f"{where}: {self._failed} failed, first in step {self.first_report.step}"]
        lines += [f"  from step {step} on: {few(names)}" for step, names in steps.items()]
        return "\n".join([*lines, *str(self.first_report).splitlines()])

    def close(self) -> None:
        """Remove the hooks of trace_nonfinite."""
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None


def listed(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers, of one, several or none."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


# What arguments must be. The step is a number as numpy or a tensor may have it, too.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "module": ((torch.nn.Module,), "a torch.nn.Module"),
    "optimizer": (
        (torch.optim.Optimizer, None_),
        "a torch.optim.Optimizer, a list of them or None",
    ),
    "group": ((ProcessGroup, None_), "a process group or None"),
    "gradients": ((bool, None_), "True, False or None"),
    "finite": ((bool,), "True or False"),
    "locate": ((int,), "a whole number"),
    "trace_nonfinite": ((bool,), "True or False"),
}


def _check(**arguments: object) -> None:
    for name, value in arguments.items():
        types, wanted = _TYPES[name]
        outside = name == "group" and value is GroupMember.NON_GROUP_MEMBER  # is told later
        if name == "optimizer" and isinstance(value, (list, tuple)):
            odd = [type(each) for each in value if not isinstance(each, torch.optim.Optimizer)]
            if odd:
                raise TypeError(f"{name} must be {wanted}, not a list with a {odd[0].__name__}")
        elif not isinstance(value, types) and not outside:
            raise TypeError(f"{name} must be {wanted}, not of type {type(value).__name__}")


def _number(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step must be a whole number, not {step!r}") from None


def _gather_report(
    module: torch.nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    group: ProcessGroup | None,
    options: Options,
    *,
    tracer: Tracer | None = None,
    before: findings.Before | None = None,
) -> Report:
    outer = wrapper(module)
    if group is None and outer is not None:
        group = outer.process_group
    channel = Channel(group)
    state = collect(module, optimizers, options.gradients is not False)
    kinds = [kind for kind in KINDS if kind != "gradient" or options.gradients]
    used = usage(module, state, options.gradients is not False)
    own = _summarise(module, optimizers, state, used)
    found = Found()
    extremes = gather_comparison(channel, state, kinds, options, found, extras=[*own.values()])
    least, most = (dict(zip(own, values, strict=True)) for values in zip(*extremes, strict=True))
    everyone = [used] * len(channel.ranks)
    if least["usage"] != most["usage"]:
        everyone = channel.gather_objects(used)
    found.mismatches += frozen_in_some(channel, everyone, found)
    if options.gradients is None and any(d.kind == "parameter" for d in found.differences):
        gather_comparison(channel, state, ["gradient"], options, found)
    if before is not None and not findings.keys(found) & before.known:
        before = None  # what was wrong is right again
    facts = causes.Facts(
        world_size=len(channel.ranks),
        differences=tuple(found.differences),
        mismatches=tuple(found.mismatches),
        nonfinite=tuple(found.nonfinite),
        without_gradient=gather_without_gradient(channel, state, found, everyone, outer)
        if most["trains"]
        else (),
        parameters=found.compared["parameter"],
        gradients=found.compared.get("gradient", 0),
        agreeing=agreeing(state, found, used) if before is None else Agreeing(),
        frozen=frozenset(name for name in used if used[name] == FROZEN),
        earlier=options.equal_until is not None,
        unsynced=bool(most["unsynced"]),
        finds_unused=bool(most["finds_unused"]),
        rebroadcast=bool(least["rebroadcast"]),
        optimizers=bool(optimizers),
        stepped=bool(most["stepped"]),
        stateless=bool(most["stateless"]),
        steps=sum(e.name.endswith(".step") for e in state.entries["optimizer"]),
    )
    skipped = [_skipped(state)]
    if least["skipped"] != most["skipped"]:
        skipped = channel.gather_objects(skipped[0])
    not_compared = dict.fromkeys(
        NotCompared(*row) for rows in skipped for row in rows if row[0] in found.compared
    )
    seen = findings.Seen(
        tuple(not_compared),
        _gather_origins(channel, found, tracer),
        tracer is not None,
        least["rng"] == most["rng"],
        options.step,
        found.compared,
    )
    ranks = tuple(channel.ranks)
    return _report(facts, seen, before, options=options, ranks=ranks, nbytes=found.nbytes)


def _summarise(
    module: torch.nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    state: State,
    used: Usage,
) -> dict[str, int]:
    """Numbers of this rank, of which the least and the greatest over all ranks are wanted."""
    outer = wrapper(module)
    return {
        "rng": _rng(module),
        "usage": _digest(used),
        "skipped": _digest(_skipped(state)),
        "unsynced": _unsynced(outer),
        "finds_unused": _finds_unused(outer),
        "rebroadcast": _rebroadcast(module),
        "stateless": _stateless(optimizers),
        "stepped": int(any(not is_option(entry.name) for entry in state.entries["optimizer"])),
        "trains": int(any(parameter.grad is not None for parameter in module.parameters())),
    }


def _skipped(state: State) -> list[list[str]]:
    return [list(astuple(skipped)) for skipped in state.not_compared]


def _report(
    facts: causes.Facts,
    seen: findings.Seen,
    before: findings.Before | None,
    *,
    options: Options,
    ranks: tuple[int, ...],
    nbytes: int,
) -> Report:
    wrong = findings.keys(facts)
    since = options.step if before is None else before.since
    return Report(
        ranks=ranks,
        step=options.step,
        compared=seen.compared,
        nbytes=nbytes,
        differences=facts.differences,
        mismatches=facts.mismatches,
        nonfinite=facts.nonfinite,
        without_gradient=facts.without_gradient,
        origins=seen.origins,
        not_compared=seen.not_compared,
        rng_equal=seen.rng_equal,
        findings=findings.findings(facts, causes.likely(facts), before, seen),
        equal_until=options.equal_until,
        since=since if wrong else None,
        repeated=before is not None and bool(wrong) and wrong <= before.known,
    )


def _digest(value: Any) -> int:
    return of_bytes(json.dumps(value).encode()) >> 1


def _gather_origins(channel: Channel, found: Found, tracer: Tracer | None) -> tuple[Origin, ...]:
    """The ranks in which something was not finite first, by the number of optimizer steps."""
    if tracer is None:
        return ()
    first = tracer.first() if found.nonfinite else None
    tracer.clear()
    if not found.nonfinite:
        return ()
    everyone = zip(channel.ranks, channel.gather_objects(first), strict=True)
    origins = [Origin(rank, *each) for rank, each in everyone if each is not None]
    earliest = max((each.steps_ago for each in origins), default=0)
    return tuple(each for each in origins if each.steps_ago == earliest)


def _rng(module: torch.nn.Module) -> int:
    """A digest of the states of torch's generators that this replica can draw from."""
    states = [torch.get_rng_state()]
    first: Any = next(unwrap(module).parameters(), None)
    if first is not None and first.is_cuda:
        states.append(torch.cuda.get_rng_state(first.device))
    return of_bytes(b"".join(state.numpy().tobytes() for state in states)) >> 1


def _unsynced(outer: Any) -> int:
    """1 if DDP's last forward was one after which it does not reduce; 0 if not, or unknown."""
    # Not documented: where a torch has no such attribute, one cause is told less sharply.
    return int(not getattr(outer, "require_forward_param_sync", True))


def _finds_unused(outer: Any) -> int:
    """1 if DDP finds the parameters that a loss does not use."""
    return int(
        bool(
            getattr(outer, "find_unused_parameters", False) or getattr(outer, "static_graph", False)
        )
    )


def _stateless(optimizers: tuple[torch.optim.Optimizer, ...]) -> int:
    """1 if an optimizer keeps no state, as SGD without momentum, or none that is compared."""
    # Of the others none has momentum=0 among its options.
    plain = any(group.get("momentum", 1) == 0 for o in optimizers for group in o.param_groups)
    return int(plain or any(map(shards_state, optimizers)))


def _rebroadcast(module: torch.nn.Module) -> int:
    """1 if a DDP around or within the module sends rank 0's buffers before each forward."""
    wrapped = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return int(any(getattr(m, "broadcast_buffers", True) for m in wrapped))
