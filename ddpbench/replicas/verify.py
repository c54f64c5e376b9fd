"""Are the replicas equal, bit for bit? In every rank, after a step.

A healthy verification costs one pass over the replica's memory and one all_reduce of a few hundred
bytes, however many ranks and tensors there are: count, structure and content of each kind of tensor
stand in it as digests. Only what differs there is looked at further: structures as names, contents
as one digest a tensor, and then the differing tensors themselves (locate.py).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ddpbench.records.schema import Finding
from ddpbench.replicas import causes, findings
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.compare import Found, Options, compare
from ddpbench.replicas.digest import of_bytes
from ddpbench.replicas.report import Report
from ddpbench.replicas.state import KINDS, collect, unwrap, wrapper

None_ = type(None)


def verify_replicas(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
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
    optimizer: its options and state too. One that shards its state (ZeroRedundancyOptimizer)
        differs by design: leave it out.
    group: whose ranks; by default DDP's own, else the default group. Every wait is bounded by its
        timeout. Without any process group the report is on this process alone.
    gradients: True compares them each time, False never; None only where parameters differ, to
        tell the cause. Under gradient accumulation they differ until they are reduced.
    finite: look for NaN and infinite elements too (a second, faster pass over what is in cache).
    locate: how many differing tensors of a kind are compared element by element.

    The report is the same in all ranks, but for what some of them could not compare (`skipped`). A
    difference never raises. ValueError: the ranks call with different arguments, or this one is not
    in the group. TypeError: an argument is not what it must be; nothing was sent then.
    """
    how: Any = {"gradients": gradients, "finite": finite, "locate": locate}
    _check(module=module, optimizer=optimizer, group=group, **how)
    return _verify(
        module, optimizer, group, Options(**how, step=None if step is None else _number(step))
    )


class Verifier:
    """Verifies one replica step after step, and remembers where and when it first went wrong.

    Takes verify_replicas' arguments. What differed at the last check too is not compared in full
    again, and no other cause is told of it: the report that explains a difference is the first.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        group: ProcessGroup | None = None,
        *,
        gradients: bool | None = None,
        finite: bool = True,
        locate: int = 16,
    ) -> None:
        self._what = module, optimizer, group
        self._how: Any = {"gradients": gradients, "finite": finite, "locate": locate}
        _check(module=module, optimizer=optimizer, group=group, **self._how)
        self._told: set[tuple[str, str]] = set()  # (kind, name) that differed at the last check
        self._first: Finding | None = None  # the cause told when they first differed, if they do
        self.equal_until: int | None = None  # the last step after which they were equal
        self.first_bad: dict[tuple[str, str], int] = {}  # (kind, name): step, buffers too
        self.first_report: Report | None = None  # the first that is not `equal`

    def check(self, step: int) -> Report:
        """verify_replicas after this step, which must have the same number in all ranks."""
        step = _number(step)
        options = Options(
            **self._how, step=step, equal_until=self.equal_until, first=self._first,
            known=self._told,
        )  # fmt: skip
        report = _verify(*self._what, options)
        self._told = {(found.kind, found.name) for found in report.differences}
        for key in [*self._told, *((found.kind, found.name) for found in report.mismatches)]:
            self.first_bad.setdefault(key, step)
        if report.equal:
            self.equal_until, self._first = step, None
        else:
            self.first_report = self.first_report or report
            self._first = self._first or report.cause
        return report


# What arguments must be. The step is a number as numpy or a tensor may have it, too.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "module": ((torch.nn.Module,), "a torch.nn.Module"),
    "optimizer": ((torch.optim.Optimizer, None_), "a torch.optim.Optimizer or None"),
    "group": ((ProcessGroup, None_), "a process group or None"),
    "gradients": ((bool, None_), "True, False or None"),
    "finite": ((bool,), "True or False"),
    "locate": ((int,), "a whole number"),
}


def _check(**arguments: object) -> None:
    for name, value in arguments.items():
        types, wanted = _TYPES[name]
        outside = name == "group" and value is GroupMember.NON_GROUP_MEMBER  # is told later
        if not isinstance(value, types) and not outside:
            raise TypeError(f"{name} must be {wanted}, not of type {type(value).__name__}")


def _number(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step must be a whole number, not {step!r}") from None


def _verify(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: ProcessGroup | None,
    options: Options,
) -> Report:
    outer = wrapper(module)
    if group is None and outer is not None:
        group = outer.process_group
    channel = Channel(group)
    state = collect(module, optimizer, options.gradients is not False)
    kinds = [kind for kind in KINDS if kind != "gradient" or options.gradients]
    found = Found()
    rng, unsynced, rebroadcast, unused = compare(
        channel, state, kinds, options, found,
        [_rng(module), _unsynced(outer), _rebroadcast(module), _unused(module)],
    )  # fmt: skip
    if options.gradients is None and any(d.kind == "parameter" for d in found.differences):
        compare(channel, state, ["gradient"], options, found)
    facts = causes.Facts(
        tuple(found.differences), tuple(found.mismatches), tuple(found.nonfinite),
        found.compared["parameter"], found.compared.get("gradient", 0),
        options.equal_until is not None, outer is not None, unsynced[1] == 1, unused[0] == 1,
        rebroadcast[0] == 1,
    )  # fmt: skip
    rng_equal = rng[0] == rng[1]
    skipped = {k: why for k, why in state.skipped.items() if k.split(" ")[0] in found.compared}
    told = findings.findings(
        facts, causes.likely(facts), options.first, skipped, rng_equal, options.step
    )
    return Report(
        tuple(channel.ranks), options.step, found.compared, found.nbytes, facts.differences,
        facts.mismatches, facts.nonfinite, rng_equal, skipped, told, options.equal_until,
    )  # fmt: skip


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


def _unused(module: torch.nn.Module) -> int:
    """1 if a parameter that could have a gradient has none, while others have theirs."""
    absent = {each.grad is None for each in module.parameters() if each.requires_grad}
    return int(absent == {True, False})


def _rebroadcast(module: torch.nn.Module) -> int:
    """1 if a DDP around or within the module sends rank 0's buffers before each forward."""
    wrapped = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return int(any(getattr(m, "broadcast_buffers", True) for m in wrapped))
