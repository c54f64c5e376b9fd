"""The block above the tables: what was measured, where, with which versions, and the findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ddpbench.analysis import stats
from ddpbench.present.columns import digits
from ddpbench.present.document import Chart, Section, make_table
from ddpbench.records.launched import Launch
from ddpbench.records.schema import EVENTS, EXIT_ENTRY, HIDDEN_LAUNCH, TWO_STREAMS, Finding, Run

TENSORS = 2  # differing tensors of a case that are listed above the tables
SPANS = {  # what the time of a case is
    EXIT_ENTRY: "exit - entry",
    EVENTS: "time between events around the call, launch included",
    HIDDEN_LAUNCH: "time between events around the call, launch hidden",
    TWO_STREAMS: "time between events around the call, launch hidden, waits of streams included",
}
HOSTS = 8  # hosts that a line lists


def title(run: Run) -> str:
    """Return the command and the run, and whether nothing was measured."""
    tool = run.launches[0].facts.get("tool") if run.launches else None
    nothing = "" if run.launches or run.everything else "   nothing was measured"
    return f"{tool or f'ddpbench {run.command}'}   {run.id}{nothing}"


def list_facts(run: Run) -> list[tuple[str, str]]:
    """Return names and facts: where it was measured, with what, and how; none without launches."""
    if not run.launches:
        return []
    facts: dict[str, Any] = run.launches[0].facts
    if "tool" in facts:
        return [*_of_another_tool(run), ("launches", _launches(run))]
    shown = [
        ("where", _where(run.launches[0])),
        (
            "versions",
            f"ddpbench {facts.get('ddpbench')}, torch {facts.get('torch')}, "
            f"Python {facts.get('python')}, Linux {facts.get('kernel')}",
        ),
    ]
    commit = f"commit {facts['commit']}" if facts.get("commit") else ""
    if own := ", ".join(filter(None, (run.label, commit))):
        shown.append(("label", own))
    for launch in {launch.backend: launch for launch in run.launches}.values():
        provider = "" if launch.provider == "native" else f" (provider {launch.provider})"
        shown.append((launch.backend, f"{launch.library}{provider}, {launch.launcher}"))
        shown += [*_net(launch), *_clocks(launch)]
    if of_doctor(run):
        return shown
    if of_watch(run):
        times = ", ".join({result.case.time_definition for result in run.steps})
        how = f"a step is the time {times}; median over steps; {_compared(run)}"
        return [*shown, ("how", how)]
    how = _how_steps(run) if of_steps(run) else _how_calls(run)
    return [*shown, ("how", f"{how}; seed {run.plan.seed}"), ("launches", _launches(run))]


def build_setup(run: Run, title: str, chart: tuple[str, str] = ("", "")) -> Section:
    """Return the section on where, with what and how a run was measured.

    chart: the name and the title of its only table.
    """
    facts = make_table("", ("", ""), list_facts(run), left=("",))
    rows = ((Chart(*chart, "", facts),),)
    return Section("setup", title, rows=rows if facts.rows else ())


def _launches(run: Run) -> str:
    """State how many launches each backend has, and what the intervals cover."""
    backends = [launch.backend for launch in run.launches]
    count = max(map(backends.count, backends))
    if count > 1:
        if count < stats.FEWEST:
            covered = f"an interval over launches needs at least {stats.FEWEST}"
        else:
            covered = "the interval covers all launches"
        return f"{count} launches per backend; {covered}"
    alone = "there is no interval" if "tool" in run.launches[0].facts else ""
    return f"1 launch per backend; {alone or 'the interval covers this launch only'}"


def _of_another_tool(run: Run) -> list[tuple[str, str]]:
    """Return the facts of a log of another tool, which states less."""
    launch, case = run.launches[0], run.results[0].case
    over = case.rank_reduction + ("" if case.rank_reduction == "rank 0" else " over ranks")
    depth = f", {case.depth or 'unknown'} in flight" if case.issue == "pipelined" else ""
    how = (
        f"{case.issue}{depth}, start {case.start}; {case.statistic} over calls, {over}, of "
        f"{case.time_definition} ({case.clock} clock); checks {'on' if run.plan.check else 'off'}"
    )
    return [("where", _ranks(launch)), ("how", how)]


def of_steps(run: Run) -> bool:
    return bool(run.steps) or run.command == "ddp"


def of_doctor(run: Run) -> bool:
    return bool(run.examinations) or run.command == "doctor"


def of_watch(run: Run) -> bool:
    return run.command == "watch"


def _compared(run: Run) -> str:
    """State how often the replicas of a watched job were compared."""
    counts = [f.place["compared"] for f in run.findings if f.code == "replicas-compared"]
    if run.plan.verify and counts:
        return f"replicas compared {max(counts)} times"
    return "replicas not compared"


def _how_calls(run: Run) -> str:
    plan, facts = run.plan, run.launches[0].facts
    issue = "isolated calls" if plan.issue == "isolated" else f"pipelined, {plan.depth} in flight"
    case = run.results[0].case if run.results else None
    return (
        f"{issue}, start {case.start if case else plan.start}; median of t_max = slowest rank's "
        f"{_span_of_time(run)} ({case.clock if case else 'host'} clock); "
        f"checks {'on' if plan.check else 'off'}; buffers {case.buffers if case else 'torch'}, "
        f"huge pages {facts.get('transparent_huge_pages') or 'unknown'}{_granted(run)}"
    )


def _span_of_time(run: Run) -> str:
    """State what the times of the cases are."""
    definitions = sorted({result.case.time_definition for result in run.results} or {EXIT_ENTRY})
    if len(definitions) > 1:  # a barrier's launch cannot be hidden
        return "time between events around the call, launch hidden where launch µs is shown"
    return SPANS.get(definitions[0], definitions[0])


def _granted(run: Run) -> str:
    """State the share of the buffers that was in huge pages, over cases and launches."""
    shares = [r.huge_share for r in run.results if r.huge_share is not None]
    if not shares:
        return ""
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return f" (granted: {low if low == high else f'{low} to {high}'})"


def _how_steps(run: Run) -> str:
    summaries = [result.summary for result in run.steps if result.summary]
    parts = []
    if summaries:
        rounds = _span((summary.rounds for summary in summaries), "round")
        in_a_row = _span((summary.in_a_row for summary in summaries), "step")
        parts.append(f"{rounds} of {in_a_row} per arm, median of slowest rank")
    if run.steps:
        parts.append(f"{_span((r.case.threads for r in run.steps), 'thread')} per rank")
    return "; ".join([*parts, verified(run.plan.verify)])


def _span(numbers: Iterable[int], unit: str) -> str:
    """Format a range: "1 step", "13 to 16 rounds"."""
    ends = sorted(set(numbers))
    shown = str(ends[0]) if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
    return f"{shown} {unit}{'' if ends == [1] else 's'}"


def verified(every: int) -> str:
    if not every:
        return "replicas not verified"
    return f"replicas verified {'each step' if every == 1 else f'every {every} steps'}"


def _where(launch: Launch) -> str:
    facts = launch.facts
    machine = f"{facts.get('cpu_model') or 'CPU'}, {facts.get('cores_logical')} cores"
    gpu = next((r.get("gpu_name") for r in launch.ranks if r.get("gpu_name")), None)
    return f"{_ranks(launch)}; {machine}" + (f"; {gpu}" if gpu else "")


def _ranks(launch: Launch) -> str:
    """State the number of ranks, and how many run on each host."""
    hosts: dict[str, int] = {}
    for rank in launch.ranks:
        hosts[str(rank.get("hostname"))] = hosts.get(str(rank.get("hostname")), 0) + 1
    placed = _listed([f"{count} on {host}" for host, count in hosts.items()], " hosts")
    ranks = "1 rank" if launch.world_size == 1 else f"{launch.world_size} ranks"
    return f"{ranks}: {placed or 'on unknown hosts'}"


def _listed(texts: Sequence[str], noun: str = "") -> str:
    """List the first texts, and count the others."""
    more = f" and {len(texts) - HOSTS} more{noun}" if len(texts) > HOSTS else ""
    return ", ".join(texts[:HOSTS]) + more


def _net(launch: Launch) -> list[tuple[str, str]]:
    """Name the interfaces that carry traffic to other hosts: one line per kind of interface."""
    hosts: dict[str, dict[str, None]] = {}
    for rank in launch.ranks:
        addresses = rank.get("addresses")
        if not isinstance(addresses, list) or not addresses:
            continue
        interface: Any = rank.get("interface") or {}
        speed, mtu = interface.get("nominal_bytes_per_second"), interface.get("mtu_nbytes")
        nominal = f"{speed * 8 / 1e9:g} Gbit/s nominal" if speed else "speed unknown"
        where = f"{rank.get('hostname')} {', '.join(map(str, addresses))}"
        hosts.setdefault(f"{interface.get('name')}, mtu {mtu}, {nominal}", {})[where] = None
    return [("net", f"{kind}: {_listed(list(where))}") for kind, where in hosts.items()]


def _clocks(launch: Launch) -> list[tuple[str, str]]:
    """State how far the hosts' clocks are ahead of rank 0's; empty if ranks share one clock."""
    if launch.offsets:
        offsets = [
            f"{offset.host} {_ahead(offset.seconds)} ± {digits(offset.bound_seconds * 1e6)} µs"
            for offset in launch.offsets
        ]
        widest = digits(max(offset.bound_seconds for offset in launch.offsets) * 1e6)
        ahead = f"ahead of rank 0's: {_listed(offsets, f', within ± {widest} µs')}"
        return [("clocks", ahead)]
    if reason := launch.facts.get("clocks"):
        return [("clocks", f"the hosts' clocks are not compared, so there is no skew: {reason}")]
    return []


def _ahead(seconds: float) -> str:
    """Format an offset with its sign: in µs, from one second on in s."""
    return f"{seconds * 1e6:+.1f} µs" if abs(seconds) < 1 else f"{seconds:+.6f} s"


def partial(run: Run) -> list[str]:
    """Return the mark of an incomplete run, which no output hides."""
    if run.state == "complete":
        return []
    if run.state == "running":
        return ["PARTIAL: the run is still going on, or it ended without a report"]
    planned = {
        name: sum(launch.cases for launch in run.launches if launch.backend == name)
        for name in run.backends
    }
    done = [outcome.case.backend for outcome in run.outcomes]
    done += [examination.backend for examination in run.examinations]
    what = "examinations" if of_doctor(run) else "cases"
    mark = f"PARTIAL ({run.state}): {run.state_reason}"
    if of_watch(run):
        return [mark]
    missing = [
        f"{name} {done.count(name)} of {cases} {what}" if cases else f"{name} not started"
        for name, cases in planned.items()
    ]
    return [f"{mark}; {', '.join(missing)}" if missing else mark]


def choose_findings(run: Run) -> tuple[tuple[Finding, ...], list[str]]:
    """Return the findings for people, and what is left out of them.

    Of the differing tensors of a case only the first are listed: the table of replicas has them
    all.
    """
    chosen, counts = [], Counter[str]()
    for finding in run.findings:
        place = finding.place
        of_tensor = "workload" in place and "kind" in place
        case = f"{place['workload']} on {place.get('backend')}" if of_tensor else ""
        counts[case] += 1
        if not case or counts[case] <= TENSORS:
            chosen.append(finding)
    more = [
        f"{count - TENSORS} more differing tensors of {case}: see replicas"
        for case, count in counts.items()
        if case and count > TENSORS
    ]
    return tuple(chosen), more
