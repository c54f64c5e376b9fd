"""One verification: read this rank's replica, compare it over all ranks, and build the report."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpbench.replicas import causes, findings
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.compare import (
    Comparison,
    Options,
    gather_contents,
    read_contents,
)
from ddpbench.replicas.compare_scopes import gather_wrong, keep_shared
from ddpbench.replicas.digest import of_bytes
from ddpbench.replicas.facts import Facts
from ddpbench.replicas.origin import Tracer
from ddpbench.replicas.report import NotCompared, Origin, Report, WithoutGradient
from ddpbench.replicas.scopes import name_stages
from ddpbench.replicas.sharding import Target, choose_target, make_base
from ddpbench.replicas.state import (
    IGNORED,
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
    EqualCounts,
    Usage,
    count_equal,
    fill_stages,
    find_frozen_in_some,
    gather_without_gradient,
    read_usage,
)
from ddpbench.runtime import devices


@dataclass(frozen=True)
class _Replica:
    """This rank's replica, and the flags of all ranks."""

    module: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    state: State
    usage: Usage
    least: Mapping[str, int]  # of each flag, over all ranks
    most: Mapping[str, int]


def gather_report(
    module: torch.nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    target: Target,
    options: Options,
    *,
    tracer: Tracer | None = None,
    history: findings.History | None = None,
) -> Report:
    """Verify the replicas of a target: every rank calls it. `history` is of earlier reports."""
    state = collect(module, optimizers, options.gradients is not False)
    target, root = choose_target(target, wrapper(module), state.meshes)
    channel = Channel(target, module)
    base = make_base(channel.ranks, channel.rank, target, root)
    usage = read_usage(state, options.gradients is not False)
    flags = read_flags(module, optimizers, state, usage)
    kinds = [kind for kind in KINDS if kind != "gradient" or options.gradients]
    comparison = Comparison(base, root is not None, held_once=dict(state.held_once))
    extremes = _gather_comparison(
        channel, state, kinds, options, comparison, extras=[*flags.values()]
    )
    own_numbers = _remove_own_numbers(comparison)
    least, most = (dict(zip(flags, values, strict=True)) for values in zip(*extremes, strict=True))
    replica = _Replica(module, optimizers, state, usage, least, most)
    facts = _gather_facts(channel, replica, comparison, options)
    report = Report(
        ranks=tuple(channel.ranks),
        step=options.step,
        compared=comparison.compared,
        nbytes=comparison.nbytes,
        differences=facts.differences,
        mismatches=facts.mismatches,
        nonfinite=facts.nonfinite,
        without_gradient=facts.without_gradient,
        origins=_gather_origins(channel, comparison, tracer),
        not_compared=_gather_not_compared(channel, replica, comparison),
        rng_equal=least["rng"] == most["rng"],
        held_once={kind: n for kind, n in comparison.held_once.items() if n},
        coordinates=_list_coordinates(channel, comparison),
        equal_until=options.equal_until,
    )
    wrong = findings.keys(report)
    history = {key: report for key, report in (history or {}).items() if key in wrong}
    cause = None
    if not history:
        facts = _gather_pattern(channel, replica, comparison, facts)
        cause = causes.find_cause(facts)
    aside = findings.Aside(
        cause=cause,
        example=cause.choose_example(facts) if cause else None,
        history=history,
        rebroadcast=facts.rebroadcast,
        traced=tracer is not None,
        stages=tuple(comparison.base.grid.names[d] for d in comparison.base.stages),
        own_numbers=own_numbers,
    )
    since = min(history.values())[0] if history else options.step
    return replace(
        report,
        findings=findings.findings(report, aside),
        since=since if wrong else None,
        repeated=bool(wrong) and wrong <= history.keys(),
    )


def _gather_comparison(
    channel: Channel,
    state: State,
    kinds: Sequence[str],
    options: Options,
    comparison: Comparison,
    *,
    extras: Sequence[int] = (),
) -> list[tuple[int, int]]:
    # Where the ranks hold the same bits, one of them looks for NaN; on a mesh they hold others.
    share = (0, 1) if comparison.meshed else (channel.rank, len(channel.ranks))
    contents = [read_contents(state, kind, share if options.finite else None) for kind in kinds]
    extremes = gather_contents(channel, contents, options, extras=extras, meshed=comparison.meshed)
    if options.finite and extremes.plain:
        for i, kind in enumerate(kinds):
            if extremes.nonfinite[i] or extremes.meshed or not extremes.same[i, :3].all():
                contents[i], extremes.nonfinite[i] = read_contents(state, kind, (0, 1)), True
    comparison.meshed = extremes.meshed
    gather_wrong(channel, contents, extremes, options, comparison)
    return extremes.extras


def _remove_own_numbers(comparison: Comparison) -> tuple[str, ...]:
    """Remove and return numbers of the optimizer's state that alone differ.

    LBFGS keeps each rank's own loss. A number that reaches a parameter makes that differ, too; a
    count of steps is in each update.
    """
    main = [d for d in comparison.differences if d.kind != "buffer"]
    for d in main:
        is_number = d.kind == "optimizer" and d.shape == () and d.dtype in ("float64", "int64")
        if not is_number or is_option(d.name) or d.name.endswith(".step"):
            return ()
    if comparison.mismatches:
        return ()
    comparison.differences = [d for d in comparison.differences if d.kind == "buffer"]
    return tuple(d.name for d in main)


def _gather_facts(
    channel: Channel, replica: _Replica, comparison: Comparison, options: Options
) -> Facts:
    state, usage, least, most = replica.state, replica.usage, replica.least, replica.most
    usages = [usage] * len(channel.ranks)
    if least["usage"] != most["usage"]:
        usages = channel.gather_objects(usage)
        fill_stages(usages, name_stages(channel.ranks, comparison.base))
    comparison.mismatches += find_frozen_in_some(channel, usages, comparison)
    if options.gradients is None and any(d.kind == "parameter" for d in comparison.differences):
        _gather_comparison(channel, state, ["gradient"], options, comparison)
    without_gradient: tuple[WithoutGradient, ...] = ()
    if most["trains"]:
        ddp = wrapper(replica.module)
        without_gradient = gather_without_gradient(channel, state, comparison, usages, ddp)
    frozen = frozenset(name for each in usages for name in each if each[name] == FROZEN)
    return Facts(
        differences=tuple(comparison.differences),
        mismatches=tuple(comparison.mismatches),
        nonfinite=tuple(
            replace(each, frozen=each.kind == "parameter" and each.name in frozen)
            for each in comparison.nonfinite
        ),
        without_gradient=without_gradient,
        gradients=comparison.compared.get("gradient", 0),
        frozen=frozen,
        earlier=options.equal_until is not None,
        unsynced=bool(most["unsynced"]),
        unmanaged=most["unmanaged"],
        finds_unused=bool(most["finds_unused"]),
        rebroadcast=bool(least["rebroadcast"]),
        optimizers=bool(replica.optimizers),
        stepped=bool(most["stepped"]),
        stateless=bool(most["stateless"]),
        equal=EqualCounts(),
        steps=sum(e.name.endswith(".step") for e in state.entries["optimizer"]),
    )


def _gather_pattern(
    channel: Channel, replica: _Replica, comparison: Comparison, facts: Facts
) -> Facts:
    state = replica.state
    if not comparison.differences:
        return facts
    averagers = channel.gather_extremes(np.array([find_averager()]))[1]
    facts = replace(facts, averages=bool(averagers[0]))
    equal = count_equal(keep_shared(state, comparison.base), comparison, replica.usage)
    counts = np.array([*astuple(equal), facts.steps], np.int64)
    *most, steps = channel.gather_extremes(counts)[1].tolist()
    sharded, spanned = _name_dimensions(state)
    if comparison.base.stages:
        tables = channel.gather_objects([sharded, spanned])
        sharded, spanned = ({k: v for t in tables for k, v in t[i].items()} for i in range(2))
    return replace(
        facts,
        equal=EqualCounts(*most),
        steps=steps,
        coordinates=_list_coordinates(channel, comparison),
        sharded={name: frozenset(names) for name, names in sharded.items()},
        spanned={name: frozenset(names) for name, names in spanned.items()},
    )


def _name_dimensions(state: State) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    sharded, spanned = {}, {}
    for entry in state.entries["parameter"]:
        if entry.layout is not None:
            pairs = list(zip(entry.layout.grid.names, entry.layout.splits, strict=True))
            sharded[entry.name] = [name for name, split in pairs if split is not None]
            spanned[entry.name] = [name for name, split in pairs if split is None]
    return sharded, spanned


def _list_coordinates(channel: Channel, comparison: Comparison) -> tuple[tuple[int, str], ...]:
    if not comparison.meshed:
        return ()
    return tuple((rank, comparison.base.grid.describe(rank)) for rank in channel.ranks)


def _gather_not_compared(
    channel: Channel, replica: _Replica, comparison: Comparison
) -> tuple[NotCompared, ...]:
    tables = [skipped_rows(replica.state)]
    if replica.least["skipped"] != replica.most["skipped"]:
        tables = channel.gather_objects(tables[0])
    rows = dict.fromkeys(tuple(row) for table in tables for row in table)
    return tuple(NotCompared(*row) for row in rows if row[0] in comparison.compared)


def _gather_origins(
    channel: Channel, comparison: Comparison, tracer: Tracer | None
) -> tuple[Origin, ...]:
    if tracer is None:
        return ()
    first = tracer.first() if comparison.nonfinite else None
    tracer.clear()
    if not comparison.nonfinite:
        return ()
    firsts = zip(channel.ranks, channel.gather_objects(first), strict=True)
    origins = [Origin(rank, *first) for rank, first in firsts if first is not None]
    earliest = max((origin.steps_ago for origin in origins), default=0)
    return tuple(origin for origin in origins if origin.steps_ago == earliest)


def read_flags(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: State,
    usage: Usage,
) -> dict[str, int]:
    """Return non-negative integers by name: digests of facts, and flags that are 0 or 1."""
    ddp = wrapper(module)
    return {
        "rng": _rng_digest(module),
        "usage": _digest(usage),
        "skipped": _digest(skipped_rows(state)),
        "unsynced": _is_unsynced(ddp),
        "unmanaged": _count_unmanaged(ddp, state),
        "finds_unused": _finds_unused(ddp),
        "rebroadcast": _rebroadcasts_buffers(module),
        "stateless": _is_stateless(optimizers),
        "stepped": int(any(not is_option(entry.name) for entry in state.entries["optimizer"])),
        "trains": int(any(held.parameter.grad is not None for held in state.parameters)),
    }


def skipped_rows(state: State) -> list[list[str]]:
    """Return kind, name and reason of each tensor that is not compared, as JSON keeps them."""
    return [list(astuple(skipped)) for skipped in state.not_compared]


def _digest(value: Any) -> int:
    return of_bytes(json.dumps(value).encode()) >> 1


def _rng_digest(module: torch.nn.Module) -> int:
    """Digest the states of torch's random number generators that this replica can draw from."""
    used = (p.device for p in unwrap(module).parameters() if not p.is_meta)
    device = next(used, torch.device("cpu"))
    states = devices.of(device).random_states(device)
    return of_bytes(b"".join(state.numpy().tobytes() for state in states)) >> 1


def _is_unsynced(ddp: Any) -> int:
    """Return 1 if DDP does not reduce after its last forward, else or if unknown 0."""
    # The attribute is not documented. Without it, one cause is reported less precisely.
    return int(not getattr(ddp, "require_forward_param_sync", True))


def _count_unmanaged(ddp: Any, state: State) -> int:
    """Count the trained parameters that were added or unfrozen since DDP wrapped the module."""
    if ddp is None:
        return 0
    trained = {h.parameter for h in state.parameters if h.parameter.requires_grad}
    ignored = {n for n in state.not_compared if n.kind == "parameter" and n.reason == IGNORED}
    count = len(trained) - len(ignored)
    return max(0, count - int(ddp._get_ddp_logging_data().get("num_parameter_tensors", count)))


def find_averager() -> int:
    """Return 1 if this process has an object that averages parameters, else 0. It is slow."""
    averagers: Any = sys.modules.get("torch.distributed.algorithms.model_averaging.averagers")
    kind = getattr(averagers, "ModelAverager", None)
    return int(kind is not None and any(issubclass(type(each), kind) for each in gc.get_objects()))


def _finds_unused(ddp: Any) -> int:
    names = ("find_unused_parameters", "static_graph")
    return int(any(getattr(ddp, name, False) for name in names))


def _is_stateless(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return 1 if an optimizer keeps no state (SGD without momentum) or none that is compared."""
    # Only optimizers that keep no state without momentum have the option momentum=0.
    plain = any(group.get("momentum", 1) == 0 for o in optimizers for group in o.param_groups)
    return int(plain or any(map(shards_state, optimizers)))


def _rebroadcasts_buffers(module: torch.nn.Module) -> int:
    """Return 1 if a DDP around or within the module sends rank 0's buffers before each forward."""
    wrapped = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return int(any(getattr(m, "broadcast_buffers", True) for m in wrapped))
