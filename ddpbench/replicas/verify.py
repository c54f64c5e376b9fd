"""Verify that replicas are equal, bit for bit. Every rank calls it after a step.

`gather_report` reads this rank's replica (state.py), compares it with those of the other ranks
(compare.py) and explains what is wrong (findings.py, causes.py). Healthy replicas cost one pass
over the replica's memory and one all_reduce of a few hundred bytes, however many ranks and tensors
there are.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from ddpbench.records.wording import counted, list_kinds
from ddpbench.replicas.causes import Facts
from ddpbench.replicas.channel import Channel, Target, choose_target
from ddpbench.replicas.compare import Comparison, Options
from ddpbench.replicas.digest import may_be_nonfinite, total
from ddpbench.replicas.findings import list_findings
from ddpbench.replicas.report import Key, Origin, Report, count_by_kind, few
from ddpbench.replicas.state import KINDS, read_state, unwrap, wrapper

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


OUTPUT = "the output of forward"


def verify_replicas(
    module: torch.nn.Module,
    optimizer: Optimizers = None,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    gradients: bool = False,
    step: int | None = None,
) -> Report:
    """Compare the replicas of all ranks of a group or a mesh, bit for bit. Call it in every rank.

    Call it after `optimizer.step()` and before `zero_grad()`. It changes nothing.

    module: bare, compiled, divided by fully_shard or tensor parallelism, or wrapped in
        DistributedDataParallel. A DTensor must be equal in the ranks that hold the same shard, also
        along dimensions of the root mesh that its own mesh does not have; a plain tensor in all
        ranks. What one rank alone holds is counted in `report.held_once`, and searched for NaN.
    optimizer: also compare its options and state; a list for several. Of the numbers in the state
        only step counts are compared: others may be a rank's own, such as LBFGS's loss.
    group: the process group or DeviceMesh of the ranks to compare (default: the mesh of the
        DTensors, else DDP's own group, else the default group). Its timeout bounds every wait.
        Without a process group the report covers this process alone. Of a mesh with pipeline
        stages, pass the part without them: `mesh["dp", "tp"]`.
    gradients: compare gradients each time, not only if parameters differ, to find the cause. With
        gradient accumulation, gradients differ until they are reduced.
    step: number of the step, for the report.

    The report is the same in all ranks. A difference never raises; see `Report` for its answers
    `ok` and `failed`. Raises ValueError if the ranks call with different arguments or if this rank
    is not in the group. Raises TypeError, before anything is sent, for a wrong module or optimizer.
    """
    verifier = Verifier(module, optimizer, group, gradients=gradients)
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
        group: ProcessGroup | DeviceMesh | None = None,
        *,
        gradients: bool = False,
        trace_nonfinite: bool = False,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        listed: Sequence[Any] = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        optimizers = tuple(each for each in listed if each is not None)
        for each in optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                name = type(each).__name__
                raise TypeError(f"optimizer must be an Optimizer or a list of them, not {name}")
        if trace_nonfinite and not optimizers:
            raise ValueError("trace_nonfinite=True needs the optimizer: its steps are counted")
        self._target = module, optimizers, group
        self._options = Options(gradients=gradients, trace_nonfinite=trace_nonfinite)
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
        history = {key: self._options.history.get(key, step) for key in report.wrong}
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
            checks += f" (not compared: {list_kinds(count_by_kind(self._last.not_compared))})"
        if self._last.nothing_to_compare:
            checks += " (nothing to compare: each element of each parameter is in one rank only)"
        if self.first_report is None:
            return f"{checks}: none failed"
        steps: dict[int, list[str]] = {}
        for (kind, name), step in self.first_bad.items():
            steps.setdefault(step, []).append(f"{kind} {name}")
        lines = [f"{checks}: {self._failures} failed, first in step {self.first_report.step}"]
        lines += [f"  from step {step} on: {few(names)}" for step, names in steps.items()]
        return "\n".join([*lines, str(self.first_report)])

    def close(self) -> None:
        """Remove the hooks of trace_nonfinite."""
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None
            self._options = replace(self._options, trace_nonfinite=False)


# --- one verification


def gather_report(
    module: torch.nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    target: Target,
    options: Options,
    tracer: Tracer | None = None,
) -> Report:
    """Verify the replicas of a target: every rank calls it."""
    state = read_state(module, optimizers)
    target, root = choose_target(target, wrapper(module), state.meshes)
    channel = Channel(target, module)
    comparison = Comparison(channel, channel.make_base(root, target), state, options)
    report = comparison.report
    comparison.gather([kind for kind in KINDS if kind != "gradient" or options.gradients])
    if not options.gradients and any(d.kind == "parameter" for d in report.differences):
        comparison.gather(["gradient"])
    report.origins = _gather_origins(channel, tracer, wanted=bool(report.nonfinite))
    history: dict[Key, int] = {k: at for k, at in options.history.items() if k in report.wrong}
    report.repeated = bool(history) and report.wrong <= history.keys()
    if report.wrong:
        report.since = min(history.values()) if history else options.step
    facts = Facts(report, state, module)
    report.findings = list_findings(report, facts, history, traced=tracer is not None)
    return report


def _gather_origins(channel: Channel, tracer: Tracer | None, wanted: bool) -> tuple[Origin, ...]:
    if tracer is None:
        return ()
    first = tracer.find_first() if wanted else None
    tracer.clear()
    firsts = channel.gather_objects(first) if wanted else []
    origins = [Origin(channel.ranks[i], *each) for i, each in enumerate(firsts) if each]
    earliest = max((origin.steps_ago for origin in origins), default=0)
    return tuple(origin for origin in origins if origin.steps_ago == earliest)


# --- origins of NaN and infinity


class Tracer:
    """Watch one replica until `close`, for the origins of NaN and infinity.

    After the reduction every rank has the NaN, and its origin is lost. Therefore hooks on the
    module's forward and on each parameter sum up every output and gradient, on the tensor's device
    and without waiting for it. Only a verification that finds such a value reads these sums.
    """

    def __init__(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._passed: list[tuple[str, Tensor]] = []  # places and sums since the last step
        self._steps: list[tuple[list[str], Tensor]] = []  # places and sums per step since `clear`
        self._hooks: list[Any] = [module.register_forward_hook(self._add_output)]
        for name, parameter in unwrap(module).named_parameters():
            if parameter.requires_grad:
                hook = partial(self._add, f"the gradient of {name}")
                self._hooks.append(parameter.register_hook(hook))
        # Steps are counted at the first optimizer.
        self._hooks.append(optimizers[0].register_step_post_hook(self._end_step))

    def _add_output(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                self._add(OUTPUT, tensor)

    def _add(self, place: str, tensor: Any) -> None:
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        if is_plain and may_be_nonfinite(tensor):
            self._passed.append((place, total(tensor)))

    def _end_step(self, *_: Any) -> None:
        if self._passed:
            device = self._passed[-1][1].device  # of a gradient; outputs may be on the CPU
            sums = torch.stack([value.to(device, torch.float32) for _, value in self._passed])
            self._steps.append(([place for place, _ in self._passed], sums))
            self._passed.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forget all sums."""
        self._passed.clear()
        self._steps.clear()

    def find_first(self) -> tuple[int, str] | None:
        """Return how many optimizer steps ago and where a value was not finite first, else None.

        A gradient also counts if the sum of its elements overflows, an output only if it has a NaN:
        infinite logits may be a mask.
        """
        count = len(self._steps)
        self._end_step()
        for number, (places, sums) in enumerate(self._steps):
            is_output = torch.tensor([place == OUTPUT for place in places], device=sums.device)
            bad = (sums.isnan() | ~(sums.isfinite() | is_output)).nonzero()
            if len(bad):
                first = int(bad[0])
                place = places[first]
                # Backward begins with the loss: the first gradient may have the NaN from there.
                if place != OUTPUT and (first == 0 or places[first - 1] == OUTPUT):
                    place = f"its loss, or {place}"
                return max(0, count - 1 - number), place
        return None
