"""Verify that replicas are equal, bit for bit. Every rank calls it after a step.

A healthy verification costs one pass over the replica's memory and one all_reduce of a few hundred
bytes, however many ranks and tensors there are. The all_reduce carries digests of the count, the
structure and the contents of each kind of tensor. Only where these differ, the ranks compare more:
structures by name, contents by one digest per tensor, then the differing tensors (locate.py).

Tensors on a DeviceMesh (fully_shard, HSDP, tensor parallelism) are compared in the ranks that must
hold the same shard (scopes.py). That takes a second all_reduce of a few hundred bytes, along the
mesh if no process group covers it (compare_scopes.py). With pipeline stages, 16 bytes of each rank
travel as well, and the names of parameters that have no gradient or are frozen.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ddpbench.replicas import findings
from ddpbench.replicas.compare import Key, Options
from ddpbench.replicas.gather import gather_report
from ddpbench.replicas.origin import Tracer
from ddpbench.replicas.report import Difference, Mismatch, Report, count_kind, few, listed_kinds

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
_NONE = type(None)
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "module": ((torch.nn.Module,), "a torch.nn.Module"),
    "optimizer": (
        (torch.optim.Optimizer, _NONE),
        "a torch.optim.Optimizer, a list of them or None",
    ),
    "group": ((ProcessGroup, _NONE), "a process group or None"),
    "mesh": ((DeviceMesh, _NONE), "a DeviceMesh or None"),
    "gradients": ((bool, _NONE), "True, False or None"),
    "finite": ((bool,), "True or False"),
    "locate": ((int,), "a whole number"),
    "trace_nonfinite": ((bool,), "True or False"),
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

    module: the module, bare, divided by fully_shard or tensor parallelism, or wrapped in
        DistributedDataParallel. Its parameters and buffers are compared. A DTensor must be equal in
        the ranks that hold the same shard, also along dimensions of the root mesh that its own mesh
        does not have; a plain tensor in all ranks. What one rank alone holds is counted in
        `report.held_once`, and only searched for NaN. FullyShardedDataParallel and tensors with a
        Partial placement are not compared; the report names them.
    optimizer: also compare its options and state; give a list for several optimizers. The state of
        ZeroRedundancyOptimizer is held once.
    group: the process group (default: the ranks of the mesh of the DTensors, else DDP's own group,
        else the default group). Its timeout bounds every wait. Without a process group the report
        covers this process alone.
    gradients: True compares gradients each time, False never, None only if parameters differ, to
        find the cause. With gradient accumulation, gradients differ until they are reduced; those
        that fully_shard has not synchronised yet are not compared.
    finite: also look for NaN and infinite elements. Of equal tensors, each rank looks at its share.
    locate: how many differing tensors of a kind are compared element by element.
    step: number of the step, for the report.
    mesh: the DeviceMesh of the ranks to compare, instead of `group`. Without DTensors, it names the
        ranks in the report. A dimension along which the ranks hold other parameters (pipeline
        stages) is not compared.

    The report is the same in all ranks. A difference never raises; see `Report` for its answers
    `ok` and `failed`. Raises ValueError if the ranks call with different arguments or if this rank
    is not in the group, or for a group together with a mesh. Raises TypeError, before anything is
    sent, if an argument has a wrong type.
    """
    settings: Any = {"gradients": gradients, "finite": finite, "locate": locate}
    _check_types(module=module, optimizer=optimizer, group=group, mesh=mesh, **settings)
    options = Options(**settings, step=None if step is None else _as_step_number(step))
    return gather_report(module, _as_tuple(optimizer), mesh or group, options)


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
        self._settings: Any = {"gradients": gradients, "finite": finite, "locate": locate}
        _check_types(module=module, optimizer=optimizer, group=group, mesh=mesh, **self._settings)
        _check_types(trace_nonfinite=trace_nonfinite)
        optimizers = _as_tuple(optimizer)
        self._target = module, optimizers, mesh or group
        if trace_nonfinite and not optimizers:
            raise ValueError("trace_nonfinite=True needs the optimizer: its steps are counted")
        self._tracer = Tracer(module, optimizers) if trace_nonfinite else None
        self._differing: tuple[Key, ...] = ()  # at the last check
        self._history: findings.History = {}
        self._stages: dict[bytes, tuple[int, ...]] = {}
        self._checks, self._failures = 0, 0
        self._steps = (0, 0)  # the first and the last step checked
        self._uncompared: Counter[str] = Counter()  # by kind, at the last check
        self._nothing = False  # whether there was nothing to compare, at the last check
        self.equal_until: int | None = None  # the last step after which they were equal
        self.first_bad: dict[tuple[str, str], int] = {}  # (kind, name): step, buffers too
        self.first_report: Report | None = None  # the first that has `failed`

    def check(self, step: int) -> Report:
        """Verify the replicas after this step; its number must be the same in all ranks."""
        step = _as_step_number(step)
        options = Options(
            **self._settings,
            step=step,
            equal_until=self.equal_until,
            known=self._differing,
            traced=self._tracer is not None,
            stages=self._stages,
        )
        report = gather_report(*self._target, options, tracer=self._tracer, history=self._history)
        self._differing = tuple((d.kind, d.name, d.values) for d in report.differences)
        wrong: list[Difference | Mismatch] = [*report.differences, *report.mismatches]
        for tensor in wrong:
            self.first_bad.setdefault((tensor.kind, tensor.name), step)
        if not report.differs:
            self.equal_until = step
        self._checks += 1
        self._uncompared = Counter(skipped.kind for skipped in report.not_compared)
        self._nothing = report.nothing_to_compare
        self._steps = (self._steps[0] if self._checks > 1 else step, step)
        self._remember(report, step)
        return report

    def _remember(self, report: Report, step: int) -> None:
        if report.failed:
            self._failures += 1
            self.first_report = self.first_report or report
        # What is right again is forgotten: if it goes wrong again, the report explains it again.
        code = report.findings[0].code if report.since == step else "replicas-differ"
        self._history = {key: self._history.get(key, (step, code)) for key in findings.keys(report)}

    def summary(self) -> str:
        """Return the outcome of all checks so far in a few lines, without asking other ranks."""
        checks = f"{self._checks} verification{'' if self._checks == 1 else 's'}"
        if self._checks:
            checks += f", of steps {self._steps[0]} to {self._steps[1]}"
        if self._uncompared:
            checks += f" (not compared: {listed_kinds(self._uncompared)})"
        if self._nothing:
            checks += " (nothing to compare: each element of each parameter is in one rank only)"
        if not self._checks:
            return f"{checks}: nothing was compared"
        buffers = [name for kind, name in self.first_bad if kind == "buffer"]
        if self.first_report is None:
            others = f", except {count_kind('buffer', len(buffers))}: {few(buffers)}"
            return f"{checks}: all compared tensors were equal and finite{others * bool(buffers)}"
        steps: dict[int, list[str]] = {}
        for (kind, name), step in self.first_bad.items():
            steps.setdefault(step, []).append(f"{kind} {name}")
        lines = [f"{checks}: {self._failures} failed, first in step {self.first_report.step}"]
        lines += [f"  from step {step} on: {few(names)}" for step, names in steps.items()]
        return "\n".join([*lines, *str(self.first_report).splitlines()])

    def close(self) -> None:
        """Remove the hooks of trace_nonfinite."""
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None


def _check_types(**arguments: object) -> None:
    for name, value in arguments.items():
        types, allowed = _TYPES[name]
        if name == "group" and value is GroupMember.NON_GROUP_MEMBER:
            continue  # Channel refuses it: this rank is not in the group
        if name == "optimizer" and isinstance(value, (list, tuple)):
            wrong = [type(item) for item in value if not isinstance(item, torch.optim.Optimizer)]
            if wrong:
                raise TypeError(f"{name} must be {allowed}, not a list with a {wrong[0].__name__}")
        elif not isinstance(value, types):
            raise TypeError(f"{name} must be {allowed}, not of type {type(value).__name__}")
    if arguments.get("group") is not None and arguments.get("mesh") is not None:
        raise ValueError("group and mesh both name the ranks to compare: pass one of them")


def _as_step_number(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step must be a whole number, not {step!r}") from None


def _as_tuple(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
