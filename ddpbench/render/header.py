"""The block above the tables and the notes below: what, where, versions, warnings, legends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpbench.analysis import stats
from ddpbench.analysis.lines import FLAGS, Line
from ddpbench.catalog.sizes import readable
from ddpbench.records.schema import Finding, Launch, Run
from ddpbench.render.collective_columns import digits

TENSORS = 2  # that differ, told above the tables


def header(run: Run) -> list[str]:
    """Lines that say what was measured, where, and with what."""
    launches = run.launches
    if not launches:
        return [f"ddpbench {run.command}   {run.id}   nothing was measured"]
    facts: dict[str, Any] = launches[0].facts
    plan = run.plan
    backends = [launch.backend for launch in launches]
    many = max(map(backends.count, backends))
    repeats = (
        f"launches  {many} a backend; the interval is "
        + ("within this launch" if many < 2 else "over launches")
        + (f", and needs {stats.FEWEST} launches" if 1 < many < stats.FEWEST else "")
    )
    if "tool" in facts:
        alone = "launches  1 a backend; of one launch there is no interval"
        return [*_of_another_tool(run, facts["tool"]), alone if many < 2 else repeats]
    shown = [
        f"ddpbench {run.command}   {run.id}",
        f"where     {_where(launches[0])}",
        f"versions  ddpbench {facts.get('ddpbench')}, torch {facts.get('torch')}, "
        f"Python {facts.get('python')}, Linux {facts.get('kernel')}",
    ]
    for launch in {launch.backend: launch for launch in launches}.values():
        provider = "" if launch.provider == "native" else f" (provider {launch.provider})"
        shown.append(f"{launch.backend:<9} {launch.library}{provider}, {launch.launcher}")
        shown += [*_net(launch), *_clocks(launch)]
    if of_doctor(run):
        return shown
    how = _how_steps(run) if of_steps(run) else _how_calls(run)
    return [*shown, f"how       {how}; seed {plan.seed}", repeats]


def _of_another_tool(run: Run, tool: str) -> list[str]:
    """The same of what was read from the log of another tool, which tells less."""
    launch, case = run.launches[0], run.results[0].case
    ranks, gpu = _ranks(launch), next((r.get("gpu_name") for r in launch.ranks), None)
    over = case.rank_reduction + ("" if case.rank_reduction == "rank 0" else " over ranks")
    depth = f", {case.depth or 'unknown'} in flight" if case.issue == "pipelined" else ""
    return [
        f"{tool}   {run.id}",
        f"where     {ranks}; {gpu or 'nothing is told of the machine'}",
        f"{launch.backend:<9} {launch.library}",
        f"how       {case.issue}{depth}, start {case.start}; {case.statistic} over calls, "
        f"{over}, of {case.time_definition} ({case.clock} clock); "
        f"checks {'on' if run.plan.check else 'off'}",
    ]


def of_steps(run: Run) -> bool:
    """Whether a run is of DDP steps rather than of collectives."""
    return bool(run.steps) or run.command == "ddp"


def of_doctor(run: Run) -> bool:
    """Whether a run is of the doctor's examinations."""
    return bool(run.examinations) or run.command == "doctor"


def _how_calls(run: Run) -> str:
    plan, facts = run.plan, run.launches[0].facts
    issue = "isolated calls" if plan.issue == "isolated" else f"pipelined, {plan.depth} in flight"
    first = run.results[0].case if run.results else None
    return (
        f"{issue}, start {first.start if first else plan.start}; median of t_max = slowest rank's "
        f"exit - entry ({first.clock if first else 'host'} clock); "
        f"checks {'on' if plan.check else 'off'}; buffers {first.buffers if first else 'torch'}, "
        f"huge pages {facts.get('transparent_huge_pages') or 'unknown'}{_granted(run)}"
    )


def _granted(run: Run) -> str:
    """How much of the buffers was in huge pages, over cases and launches."""
    shares = [r.huge_share for r in run.results if r.huge_share is not None]
    if not shares:
        return ""
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return f" (granted: {low if low == high else f'{low} to {high}'})"


def _how_steps(run: Run) -> str:
    known = [each.summary for each in run.steps if each.summary]
    words = []
    if known:
        rounds = _span((each.rounds for each in known), "round")
        in_a_row = _span((each.in_a_row for each in known), "step")
        words.append(f"{rounds} of {in_a_row} an arm, median of the slowest rank")
    if run.steps:
        words.append(f"{_span((each.case.threads for each in run.steps), 'thread')} a rank")
    return "; ".join([*words, verified(run.plan.verify)])


def _span(numbers: Iterable[int], unit: str) -> str:
    """ "1 step", "13 to 16 rounds"."""
    ends = sorted(set(numbers))
    shown = str(ends[0]) if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
    return f"{shown} {unit}{'' if ends == [1] else 's'}"


def verified(every: int) -> str:
    """How often the replicas were, in words."""
    if not every:
        return "not verified"
    return "verified after each step" if every == 1 else f"verified after each {every}th step"


def _where(launch: Launch) -> str:
    facts = launch.facts
    machine = f"{facts.get('cpu_model') or 'CPU'}, {facts.get('cores_logical')} cores"
    gpu = next((r.get("gpu_name") for r in launch.ranks if r.get("gpu_name")), None)
    if gpu:
        machine += f"; {gpu}"
    return f"{_ranks(launch)}; {machine}"


def _ranks(launch: Launch) -> str:
    """How many, and how many where."""
    hosts: dict[str, int] = {}
    for rank in launch.ranks:
        hosts[str(rank.get("hostname"))] = hosts.get(str(rank.get("hostname")), 0) + 1
    placed = ", ".join(f"{count} on {host}" for host, count in list(hosts.items())[:8])
    more = f" and {len(hosts) - 8} more hosts" if len(hosts) > 8 else ""
    ranks = "1 rank" if launch.world_size == 1 else f"{launch.world_size} ranks"
    return f"{ranks}: {placed or 'on unknown hosts'}{more}"


def _net(launch: Launch) -> list[str]:
    """From where the ranks' traffic leaves for other hosts, as their sockets told; one line for
    each kind of interface, none where there is one host."""
    hosts: dict[str, dict[str, None]] = {}
    for rank in launch.ranks:
        addresses = rank.get("addresses")
        if not isinstance(addresses, list) or not addresses:
            continue
        its: Any = rank.get("interface") or {}
        speed, mtu = its.get("nominal_bytes_per_second"), its.get("mtu_nbytes")
        nominal = f"{speed * 8 / 1e9:g} Gbit/s nominal" if speed else "speed unknown"
        kind = f"{its.get('name')}, mtu {mtu}, {nominal}"
        where = f"{rank.get('hostname')} {', '.join(map(str, addresses))}"
        hosts.setdefault(kind, {})[where] = None
    return [
        f"net       {kind}: {', '.join(list(those)[:8])}"
        + (f" and {len(those) - 8} more" if len(those) > 8 else "")
        for kind, those in hosts.items()
    ]


def _clocks(launch: Launch) -> list[str]:
    """What the hosts' clocks are ahead of rank 0's; none where all ranks read one, or no stamps of
    different ranks are compared."""
    if launch.offsets:
        widest = max(its.bound_seconds for its in launch.offsets) * 1e6
        those = [
            f"{its.host} {_ahead(its.seconds)} ± {digits(its.bound_seconds * 1e6)} µs"
            for its in launch.offsets[:8]
        ]
        more = len(launch.offsets) - len(those)
        all_ = f" and {more} more, the least sure ± {digits(widest)} µs" if more else ""
        return [f"clocks    ahead of rank 0's: {', '.join(those)}{all_}"]
    if why := launch.facts.get("clocks"):
        return [f"clocks    of the hosts not compared, so no skew: {why}"]
    return []


def _ahead(seconds: float) -> str:
    """With its sign: in µs, from a second on in s."""
    return f"{seconds * 1e6:+.1f} µs" if abs(seconds) < 1 else f"{seconds:+.6f} s"


def partial(run: Run) -> list[str]:
    """The mark of a run that is not complete; no output hides it."""
    if run.state == "complete":
        return []
    if run.state == "running":
        return ["PARTIAL: the run is still going on, or ended without a word"]
    planned = {
        name: sum(launch.cases for launch in run.launches if launch.backend == name)
        for name in run.backends
    }
    done = [outcome.case.backend for outcome in run.outcomes]
    done += [examination.backend for examination in run.examinations]
    what = "examinations" if of_doctor(run) else "cases"
    missing = [
        f"{name} {done.count(name)} of {cases} {what}" if cases else f"{name} not begun"
        for name, cases in planned.items()
    ]
    told = f"PARTIAL ({run.state}): {run.state_reason}"
    return [f"{told}; {', '.join(missing)}" if missing else told]


def warnings(run: Run) -> list[str]:
    """Findings, one line each with its next step; of tensors that differ the first two of a case,
    for the tables have them all."""
    out: list[str] = []
    kinds = [_of_tensor(finding) for finding in run.findings]
    for i, (finding, kind) in enumerate(zip(run.findings, kinds, strict=True)):
        before, all_ = kinds[:i].count(kind), kinds.count(kind)
        if kind is None or before < TENSORS:
            told = f"{finding.severity.upper()}: {finding.sentence}"
            out.append(told + (f". Next: {finding.next_step}" if finding.next_step else ""))
        elif before + 1 == all_:
            out.append(f"  and {all_ - TENSORS} more of {kind}, under replicas below")
    return out


def _of_tensor(finding: Finding) -> str | None:
    """The case of which it tells a tensor, or the rest of some; None: it tells something else."""
    place = finding.place
    if "workload" in place and "kind" in place:
        return f"{place['workload']} on {place.get('backend')}"
    return None


def skipped(shown: list[Line]) -> list[str]:
    """Why cases have no row, sizes of one reason together."""
    reasons: dict[tuple[str, str, str, str, str], list[int]] = {}
    for line in shown:
        if line.reason is not None:
            case = line.case
            key = (case.called, case.backend, case.dtype, case.reduce_op or "", line.reason)
            reasons.setdefault(key, []).append(case.nbytes)
    out = []
    for (operation, backend, dtype, reduce_op, reason), nbytes in reasons.items():
        span = readable(nbytes[0]) + (f" … {readable(nbytes[-1])}" if len(nbytes) > 1 else "")
        name = " ".join(word for word in (operation, dtype, reduce_op) if word)
        out.append(f"skipped {name} on {backend}, {span}: {reason}")
    return out


def legend(shown: list[Line], columns: list[str], starred: bool) -> list[str]:
    """What is not obvious in the columns that were printed."""
    statistic = shown[0].case.statistic if shown else "median"
    known = {
        "time": f"time µs: of one call, {statistic} over repetitions; 95 %: half-width of its "
        "interval",
        "p99": "p99: where 368 repetitions of all launches give it an interval of its own",
        "osu": "osu µs: as OSU prints it, the mean over calls and ranks of calls between barriers",
        "nccl_tests": "nccl-tests µs: as nccl-tests prints it, calls in flight / their number, the "
        "mean over ranks",
        "skew": "skew µs: last rank's entry - first's, median",
        "busbw": "algbw = size / time; busbw = algbw × the operation's bus factor (nccl-tests); "
        "GB = 10⁹ bytes; size: total buffer, 1 KiB = 1024 bytes",
    }
    if any(r.summary and r.summary.skew_seconds is None and r.clock_off_seconds
           for line in shown for r in line.results):  # fmt: skip
        known["skew"] += "; -: the hosts' clocks are not known to 5 % of the time"
    out = [text for name, text in known.items() if name in columns]
    if starred:
        out.append("*: the faster backend, its interval clear of the others'")
    if "limit" in columns:
        out += _limits(shown)
    raised = {flag for line in shown for flag in line.flags} if "flags" in columns else set()
    return out + [f"{name}: {text}" for name, (text, _) in FLAGS.items() if name in raised]


def _limits(shown: list[Line]) -> list[str]:
    """The rates that the column `% limit` refers to, one line a backend, source and group."""
    rates: dict[tuple[str, str, str], list[float]] = {}
    operations: dict[tuple[str, str, str], dict[str, None]] = {}
    for line in shown:
        for limit in (result.limit for result in line.results):
            if limit is not None and line.fraction is not None:
                key = (line.case.backend, limit.source, line.case.group)
                rates.setdefault(key, []).append(limit.bytes_per_second / 1e9)
                operations.setdefault(key, {})[line.case.called] = None
    out = []
    for key, values in rates.items():
        backend, source, _ = key
        low, high = digits(min(values)), digits(max(values))
        span = low if low == high else f"{low} … {high} (by size)"
        names = ", ".join(operations[key])
        out.append(f"% limit on {backend} of {names}: busbw over {span} GB/s, {source}")
    return out
