"""The block above the tables and the notes below: what, where, versions, warnings, legends."""

from __future__ import annotations

from typing import Any

from ddpbench.analysis import stats
from ddpbench.analysis.lines import FLAGS, Line
from ddpbench.catalog.sizes import readable
from ddpbench.records.schema import Launch, Run


def header(run: Run) -> list[str]:
    """Lines that say what was measured, where, and with what."""
    launches = run.launches
    if not launches:
        return [f"ddpbench {run.command}   {run.id}   nothing was measured"]
    facts: dict[str, Any] = launches[0].facts
    plan = run.plan
    backends = [launch.backend for launch in launches]
    many = max(map(backends.count, backends))
    issue = "isolated calls" if plan.issue == "isolated" else f"pipelined, {plan.depth} in flight"
    shown = [
        f"ddpbench {run.command}   {run.id}",
        f"where     {_where(launches[0])}",
        f"versions  ddpbench {facts.get('ddpbench')}, torch {facts.get('torch')}, "
        f"Python {facts.get('python')}, Linux {facts.get('kernel')}",
    ]
    for launch in {launch.backend: launch for launch in launches}.values():
        provider = "" if launch.provider == "native" else f" (provider {launch.provider})"
        shown.append(f"{launch.backend:<9} {launch.library}{provider}, {launch.launcher}")
    first = run.results[0].case if run.results else None
    start = first.start if first else plan.start
    shown += [
        f"how       {issue}, start {start}; median of t_max = slowest rank's exit - entry "
        f"({first.clock if first else 'host'} clock); checks {'on' if plan.check else 'off'}; "
        f"buffers torch, huge pages {facts.get('transparent_huge_pages') or 'unknown'}; "
        f"seed {plan.seed}",
        f"launches  {many} a backend; the interval is "
        + ("within this launch" if many < 2 else "over launches")
        + (f", and needs {stats.FEWEST} launches" if 1 < many < stats.FEWEST else ""),
    ]
    return shown


def _where(launch: Launch) -> str:
    facts = launch.facts
    hosts: dict[str, int] = {}
    for rank in launch.ranks:
        hosts[str(rank.get("hostname"))] = hosts.get(str(rank.get("hostname")), 0) + 1
    placed = ", ".join(f"{count} on {host}" for host, count in list(hosts.items())[:8])
    more = f" and {len(hosts) - 8} more hosts" if len(hosts) > 8 else ""
    machine = f"{facts.get('cpu_model') or 'CPU'}, {facts.get('cores_logical')} cores"
    gpu = next((r.get("gpu_name") for r in launch.ranks if r.get("gpu_name")), None)
    return f"{launch.world_size} ranks: {placed}{more}; {machine}{f'; {gpu}' if gpu else ''}"


def warnings(run: Run) -> list[str]:
    """Findings, one line each with its next step."""
    return [
        f"{finding.severity.upper()}: {finding.sentence}"
        + (f". Next: {finding.next_step}" if finding.next_step else "")
        for finding in run.findings
    ]


def skipped(shown: list[Line]) -> list[str]:
    """Why cases have no row, sizes of one reason together."""
    reasons: dict[tuple[str, str, str, str, str], list[int]] = {}
    for line in shown:
        if line.reason is not None:
            case = line.case
            key = (case.operation, case.backend, case.dtype, case.reduce_op or "", line.reason)
            reasons.setdefault(key, []).append(case.nbytes)
    out = []
    for (operation, backend, dtype, reduce_op, reason), nbytes in reasons.items():
        span = readable(nbytes[0]) + (f" … {readable(nbytes[-1])}" if len(nbytes) > 1 else "")
        name = " ".join(word for word in (operation, dtype, reduce_op) if word)
        out.append(f"skipped {name} on {backend}, {span}: {reason}")
    return out


def legend(run: Run, shown: list[Line]) -> list[str]:
    """What is not obvious in the tables that were printed."""
    out = [
        "time µs: of one call, median over repetitions; 95 %: half-width of its interval; "
        "skew: last rank's entry - first's",
        "algbw = size / time; busbw = algbw × the operation's bus factor (nccl-tests); "
        "GB = 10⁹ bytes; size: total buffer, 1 KiB = 1024 bytes",
    ]
    sources = {r.limit.source: None for line in shown for r in line.results if r.limit}
    rates: dict[str, list[float]] = {
        source: [
            r.limit.bytes_per_second / 1e9
            for line in shown
            for r in line.results
            if r.limit and r.limit.source == source
        ]
        for source in sources
    }
    for source, values in rates.items():
        low, high = min(values), max(values)
        span = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} … {high:.2f}"
        backends = {
            line.case.backend: None
            for line in shown
            for r in line.results
            if r.limit and r.limit.source == source
        }
        out.append(f"% limit ({', '.join(backends)}): busbw over {span} GB/s, {source}")
    if any("p99" in line.percentiles for line in shown):
        out.append("p99: where at least 368 repetitions give it an interval of its own")
    raised = {flag for line in shown for flag in line.flags}
    out += [f"{name}: {text}" for name, (text, _) in FLAGS.items() if name in raised]
    return out
