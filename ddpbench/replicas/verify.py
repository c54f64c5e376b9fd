"""Verify that replicas are equal, bit for bit. Every rank calls it after a step.

`gather_report` reads this rank's replica (state.py), compares it with those of the other ranks
(compare.py), asks how the ranks train (training.py) and explains what is wrong (findings.py,
causes.py). Healthy replicas cost one pass over the replica's memory and one all_reduce of a few
hundred bytes, however many ranks and tensors there are. With pipeline stages, another all_reduce
and the names of the parameters travel as well.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ddpbench.records.wording import counted, list_all
from ddpbench.replicas.channel import Channel, Target, choose_target
from ddpbench.replicas.compare import Comparison, Options
from ddpbench.replicas.digest import of_bytes
from ddpbench.replicas.findings import list_findings
from ddpbench.replicas.origin import Tracer
from ddpbench.replicas.report import Origin, Report, count_by_kind, count_kind, few, listed_kinds
from ddpbench.replicas.state import KINDS, NotCompared, read_state, unwrap, wrapper
from ddpbench.replicas.training import (
    FROZEN,
    TRAINED,
    gather_facts,
    gather_usages,
    gather_without_gradient,
    read_usage,
)
from ddpbench.runtime import devices

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
_NONE = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "module": (torch.nn.Module,),
    "optimizer": (torch.optim.Optimizer, list, tuple, _NONE),
    "group": (ProcessGroup, _NONE),
    "mesh": (DeviceMesh, _NONE),
    "gradients": (bool, _NONE),
    "finite": (bool,),
    "locate": (int,),
    "trace_nonfinite": (bool,),
}


def verify_replicas(
    module: torch.nn.Module,
    optimizer: Optimizers = None,
    group: ProcessGroup | None = None,
    *,
    gradients: bool | None = None,
    finite: bool = True,
    locate: int = 16,
    step: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Report:
    """Compare the replicas of all ranks of a group or a mesh, bit for bit. Call it in every rank.

    Call it after `optimizer.step()` and before `zero_grad()`. It changes nothing.

    module: bare, compiled, divided by fully_shard or tensor parallelism, or wrapped in
        DistributedDataParallel. A DTensor must be equal in the ranks that hold the same shard, also
        along dimensions of the root mesh that its own mesh does not have; a plain tensor in all
        ranks. What one rank alone holds is counted in `report.held_once`, and searched for NaN.
    optimizer: also compare its options and state; a list for several. Of the numbers in the state
        only step counts are compared: others may be a rank's own, such as LBFGS's loss.
    group: the process group (default: the ranks of the mesh of the DTensors, else DDP's own group,
        else the default group). Its timeout bounds every wait. Without a process group the report
        covers this process alone.
    gradients: True compares gradients each time, False never, None only if parameters differ, to
        find the cause. With gradient accumulation, gradients differ until they are reduced.
    finite: also look for NaN and infinite elements. Of equal tensors, each rank looks at its share.
    locate: how many differing tensors of a kind are compared element by element.
    step: number of the step, for the report.
    mesh: the DeviceMesh of the ranks to compare, instead of `group`. A dimension along which the
        ranks hold other parameters (pipeline stages) is not compared.

    The report is the same in all ranks. A difference never raises; see `Report` for its answers
    `ok` and `failed`. Raises ValueError if the ranks call with different arguments, if this rank is
    not in the group, or for a group together with a mesh. Raises TypeError, before anything is
    sent, if an argument has a wrong type.
    """
    verifier = Verifier(
        module, optimizer, group, gradients=gradients, finite=finite, locate=locate, mesh=mesh
    )
    return verifier._gather(None if step is None else operator.index(step))


class Verifier:
    """Verify one replica step after step, and remember where and when it first went wrong.

    Takes the arguments of verify_replicas. The first report explains a difference. While the
    replicas stay different, later reports have one line (`repeated`) and explain only tensors that
    were right before. `summary()` sums up all checks.

    trace_nonfinite: watch each output of `module` and each gradient before it is reduced, so that
        the report of a NaN names the rank that had it first. Needs the optimizer, else ValueError.
        `close()` removes the hooks.
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
        mesh: DeviceMesh | None = None,
    ) -> None:
        _check_types(module=module, optimizer=optimizer, group=group, mesh=mesh)
        _check_types(gradients=gradients, finite=finite, locate=locate)
        _check_types(trace_nonfinite=trace_nonfinite)
        if group is not None and mesh is not None:
            raise ValueError("group and mesh both name the ranks to compare: pass one of them")
        listed: Sequence[Any] = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for each in listed:
            _check_types(optimizer=each)
        optimizers = tuple(each for each in listed if each is not None)
        if trace_nonfinite and not optimizers:
            raise ValueError("trace_nonfinite=True needs the optimizer: its steps are counted")
        self._target = module, optimizers, mesh or group
        self._options = Options(gradients, finite, locate, None, trace_nonfinite=trace_nonfinite)
        self._tracer = Tracer(module, optimizers) if trace_nonfinite else None
        self._checks, self._failures, self._first_step = 0, 0, 0
        self._last: Report | None = None
        self.equal_until: int | None = None  # the last step after which they were equal
        self.first_bad: dict[tuple[str, str], int] = {}  # (kind, name): step, buffers too
        self.first_report: Report | None = None  # the first that has `failed`

    def check(self, step: int) -> Report:
        """Verify the replicas after this step; its number must be the same in all ranks."""
        step = operator.index(step)
        report = self._gather(step)
        self._first_step = step if self._last is None else self._first_step
        self._last, self._checks = report, self._checks + 1
        for tensor in (*report.differences, *report.mismatches):
            self.first_bad.setdefault((tensor.kind, tensor.name), step)
        if not report.differs:
            self.equal_until = step
        if report.failed:
            self._failures += 1
            self.first_report = self.first_report or report
        # What is right again is forgotten: if it goes wrong again, the report explains it again.
        code = report.findings[0].code if report.since == step else "replicas-differ"
        known, keys = self._options.history, report.wrong | {d.key for d in report.differences}
        history = {key: known.get(key, (step, code)) for key in keys}
        self._options = replace(self._options, history=history, equal_until=self.equal_until)
        return report

    def _gather(self, step: int | None) -> Report:
        options = replace(self._options, step=step)
        return gather_report(*self._target, options, self._tracer)

    def summary(self) -> str:
        """Return the outcome of all checks so far in a few lines, without asking other ranks."""
        checks = counted(self._checks, "verification")
        if self._last is None:
            return f"{checks}: nothing was compared"
        checks += f", of steps {self._first_step} to {self._last.step}"
        if self._last.not_compared:
            checks += f" (not compared: {listed_kinds(count_by_kind(self._last.not_compared))})"
        if self._last.nothing_to_compare:
            checks += " (nothing to compare: each element of each parameter is in one rank only)"
        steps: dict[int, list[str]] = {}
        for (kind, name), step in self.first_bad.items():
            steps.setdefault(step, []).append(f"{kind} {name}")
        if self.first_report is None:
            buffers = [name for kind, name in self.first_bad if kind == "buffer"]
            others = f", except {count_kind('buffer', len(buffers))}: {few(buffers)}"
            return f"{checks}: all compared tensors were equal and finite{others * bool(buffers)}"
        lines = [f"{checks}: {self._failures} failed, first in step {self.first_report.step}"]
        lines += [f"  from step {step} on: {few(names)}" for step, names in steps.items()]
        return "\n".join([*lines, str(self.first_report)])

    def close(self) -> None:
        """Remove the hooks of trace_nonfinite."""
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None
            self._options = replace(self._options, trace_nonfinite=False)


def _check_types(**arguments: object) -> None:
    for name, value in arguments.items():
        # Channel refuses a group that this rank is not in.
        if not isinstance(value, _TYPES[name]) and value is not GroupMember.NON_GROUP_MEMBER:
            names = list_all((kind.__name__ for kind in _TYPES[name]), "or")
            given = type(value).__name__
            raise TypeError(f"{name} must be {names.replace('NoneType', 'None')}, not {given}")


# --- one verification


def gather_report(
    module: torch.nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    target: Target,
    options: Options,
    tracer: Tracer | None = None,
) -> Report:
    """Verify the replicas of a target: every rank calls it."""
    state = read_state(module, optimizers, options.gradients is not False)
    usage = read_usage(state, options.gradients is not False)
    untrained = {name: form for name, form in usage.items() if form != TRAINED}
    skipped = [astuple(each) for each in state.not_compared]
    digests = [of_bytes(json.dumps(each).encode()) for each in (untrained, skipped)]

    target, root = choose_target(target, wrapper(module), state.meshes)
    channel = Channel(target, module)
    comparison = Comparison(channel, channel.make_base(root, target), state, options)
    kinds = [kind for kind in KINDS if kind != "gradient" or options.gradients]
    same = comparison.gather(kinds, [digest_rng(module), *digests])
    usages = gather_usages(comparison, usage, same=same[1])
    report = comparison.report
    if options.gradients is None and any(d.kind == "parameter" for d in report.differences):
        comparison.gather(["gradient"])
    report.rng_equal = same[0]
    report.without_gradient = gather_without_gradient(comparison, usages, module)
    report.origins = _gather_origins(channel, tracer, wanted=bool(report.nonfinite))
    report.not_compared = _gather_not_compared(comparison, skipped, same=same[2])
    facts = None
    if report.differences or report.mismatches:
        frozen = {name for name, forms in usages.items() if FROZEN in forms}
        facts = gather_facts(comparison, frozen, module, optimizers)
    history = {key: when for key, when in options.history.items() if key in report.wrong}
    report.repeated = bool(history) and report.wrong <= history.keys()
    if report.wrong:
        report.since = min(history.values())[0] if history else options.step
    stages = [comparison.base.grid.names[d] for d in comparison.base.stages]
    report.findings = list_findings(report, facts, history, stages, traced=tracer is not None)
    return report


def _gather_not_compared(
    comparison: Comparison, skipped: list[tuple[str, ...]], same: bool
) -> tuple[NotCompared, ...]:
    tables = [skipped] if same else comparison.channel.gather_objects(skipped)
    rows = dict.fromkeys(tuple(row) for table in tables for row in table)
    return tuple(NotCompared(*row) for row in rows if row[0] in comparison.report.compared)


def _gather_origins(channel: Channel, tracer: Tracer | None, wanted: bool) -> tuple[Origin, ...]:
    if tracer is None:
        return ()
    first = tracer.find_first() if wanted else None
    tracer.clear()
    firsts = channel.gather_objects(first) if wanted else []
    origins = [Origin(channel.ranks[i], *each) for i, each in enumerate(firsts) if each]
    earliest = max((origin.steps_ago for origin in origins), default=0)
    return tuple(origin for origin in origins if origin.steps_ago == earliest)


def digest_rng(module: torch.nn.Module) -> int:
    """Digest the states of torch's random number generators that this replica can draw from."""
    used = (p.device for p in unwrap(module).parameters() if not p.is_meta)
    device = next(used, torch.device("cpu"))
    states = devices.of(device).random_states(device)
    return of_bytes(b"".join(state.numpy().tobytes() for state in states))
