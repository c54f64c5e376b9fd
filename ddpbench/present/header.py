"""What was measured, where and with which versions: the block above the tables, and on a page the
section on hosts, ranks and variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddpbench.analysis import stats
from ddpbench.catalog.sizes import readable
from ddpbench.present.columns import format_number
from ddpbench.present.document import Chart, ReportRun, Section, make_table, tabulate_rows
from ddpbench.records.launched import Launch
from ddpbench.records.schema import EVENTS, EXIT_ENTRY, HIDDEN_LAUNCH, TWO_STREAMS, Run
from ddpbench.records.wording import counted, spans

HOSTS = 8  # hosts that a line lists
SPANS = {  # the time of a case, by its definition
    EXIT_ENTRY: "exit - entry",
    EVENTS: "time between events around the call, launch included",
    HIDDEN_LAUNCH: "time between events around the call, launch hidden",
    TWO_STREAMS: "time between events around the call, launch hidden, waits of streams included",
}
# Facts that other tables show, or that identify a process.
NOT_SHOWN = ("rates", "variables", "cpu", "pid", "boot_id", "time_namespace", "gpu_uuid")
Facts = Iterator[tuple[str, str]]  # name, text


def format_title(run: Run) -> str:
    """Return the command and the run."""
    tool = run.launches[0].facts.get("tool") if run.launches else None
    return f"{tool or f'ddpbench {run.command}'}   {run.id}"


def build_setup(run: Run, title: str, chart: tuple[str, str] = ("", "")) -> Section:
    """Return the section on where, with what and how a run was measured.

    chart: the name and the title of its only table.
    """
    facts = make_table("", ("", ""), _list_facts(run), left=("",))
    rows = ((Chart(*chart, "", facts),),)
    return Section("setup", title, rows=rows if facts.rows else ())


def _list_facts(run: Run) -> Facts:
    """Yield names and facts: where it was measured, with what, and how; none without launches."""
    if not run.launches:
        return
    facts: dict[str, Any] = run.launches[0].facts
    if "tool" in facts:
        yield from _describe_log(run)
        return
    machine = f"{facts.get('cpu_model') or 'CPU'}, {facts.get('cores_logical')} cores"
    gpu = next((r["gpu_name"] for r in run.launches[0].ranks if r.get("gpu_name")), "")
    yield "where", "; ".join(filter(None, (_count_ranks(run.launches[0]), machine, gpu)))
    yield (
        "versions",
        f"ddpbench {facts.get('ddpbench')}, torch {facts.get('torch')}, "
        f"Python {facts.get('python')}, Linux {facts.get('kernel')}",
    )
    if facts.get("commit"):
        yield "commit", facts["commit"]
    for launch in {launch.backend: launch for launch in run.launches}.values():
        provider = "" if launch.provider == "native" else f" (provider {launch.provider})"
        yield launch.backend, f"{launch.library}{provider}, {launch.launcher}"
        yield from _list_interfaces(launch)
        yield from _describe_clocks(launch)
    if of_watch(run):
        yield "how", _describe_watch(run)
    elif not of_doctor(run):
        how = _describe_steps(run) if of_steps(run) else _describe_calls(run)
        yield "how", f"{how}; seed {run.plan.seed}"
        yield "launches", _count_launches(run)


def _count_launches(run: Run) -> str:
    """State how many launches each backend has, and what the intervals cover."""
    backends = [launch.backend for launch in run.launches]
    count = max(map(backends.count, backends))
    covered = "the interval covers all launches"
    if count == 1:
        covered = "the interval covers this launch only"
    elif count < stats.FEWEST:
        covered = f"an interval over launches needs at least {stats.FEWEST}"
    return f"{counted(count, 'launch')} per backend; {covered}"


def _describe_log(run: Run) -> Facts:
    """Yield the facts of a log of another tool, which states less."""
    launch, case = run.launches[0], run.results[0].case
    over = case.rank_reduction + ("" if case.rank_reduction == "rank 0" else " over ranks")
    depth = f", {case.depth or 'unknown'} in flight" if case.issue == "pipelined" else ""
    yield "where", _count_ranks(launch)
    yield (
        "how",
        f"{case.issue}{depth}, start {case.start}; {case.statistic} over calls, {over}, of "
        f"{case.time_definition} ({case.clock} clock); checks {'on' if run.plan.check else 'off'}",
    )
    yield "launches", _count_launches(run)


def of_steps(run: Run) -> bool:
    return bool(run.steps) or run.command == "ddp"


def of_doctor(run: Run) -> bool:
    return bool(run.examinations) or run.command == "doctor"


def of_watch(run: Run) -> bool:
    return run.command == "watch"


def _describe_watch(run: Run) -> str:
    times = ", ".join({result.case.time_definition for result in run.steps})
    counts = [f.place["compared"] for f in run.findings if f.code == "replicas-compared"]
    compared = "replicas not compared"
    if run.plan.verify and counts:
        compared = f"replicas compared {max(counts)} times"
    return f"a step is the time {times}; median over steps; {compared}"


def _describe_calls(run: Run) -> str:
    plan, facts = run.plan, run.launches[0].facts
    issue = "isolated calls" if plan.issue == "isolated" else f"pipelined, {plan.depth} in flight"
    case = run.results[0].case if run.results else None
    definitions = sorted({result.case.time_definition for result in run.results} or {EXIT_ENTRY})
    span = SPANS.get(definitions[0], definitions[0])
    if len(definitions) > 1:  # a barrier's launch cannot be hidden
        span = "time between events around the call, launch hidden where launch µs is shown"
    return (
        f"{issue}, start {case.start if case else plan.start}; median of t_max = slowest rank's "
        f"{span} ({case.clock if case else 'host'} clock); "
        f"checks {'on' if plan.check else 'off'}; buffers {case.buffers if case else 'torch'}, "
        f"huge pages {facts.get('transparent_huge_pages') or 'unknown'}"
    )


def _describe_steps(run: Run) -> str:
    summaries = [result.summary for result in run.steps if result.summary]
    parts = []
    if summaries:
        rounds = _format_range((summary.rounds for summary in summaries), "round")
        in_a_row = _format_range((summary.in_a_row for summary in summaries), "step")
        parts.append(f"{rounds} of {in_a_row} per arm, median of slowest rank")
    if run.steps:
        parts.append(f"{_format_range((r.case.threads for r in run.steps), 'thread')} per rank")
    every = run.plan.verify
    when = "each step" if every == 1 else f"every {every} steps"
    parts.append(f"replicas verified {when}" if every else "replicas not verified")
    return "; ".join(parts)


def _format_range(numbers: Iterable[int], unit: str) -> str:
    """Format a range: "1 step", "13 to 16 rounds"."""
    low, *_, high = [*sorted(numbers) * 2]
    return counted(low, unit) if low == high else f"{low} to {high} {unit}s"


def _count_ranks(launch: Launch) -> str:
    """State the number of ranks, and how many run on each host."""
    hosts = Counter(str(rank.get("hostname")) for rank in launch.ranks)
    placed = _list_hosts([f"{count} on {host}" for host, count in hosts.items()], " hosts")
    return f"{counted(launch.world_size, 'rank')}: {placed or 'on unknown hosts'}"


def _list_hosts(texts: Sequence[str], noun: str = "") -> str:
    more = f" and {len(texts) - HOSTS} more{noun}" if len(texts) > HOSTS else ""
    return ", ".join(texts[:HOSTS]) + more


def _list_interfaces(launch: Launch) -> Facts:
    """Yield the interfaces that carry traffic to other hosts: one line per kind of interface."""
    hosts: dict[str, dict[str, None]] = {}
    for rank in launch.ranks:
        if isinstance(addresses := rank.get("addresses"), list) and addresses:
            interface: Any = rank.get("interface") or {}
            speed, mtu = interface.get("nominal_bytes_per_second"), interface.get("mtu_nbytes")
            nominal = f"{speed * 8 / 1e9:g} Gbit/s nominal" if speed else "speed unknown"
            where = f"{rank.get('hostname')} {', '.join(map(str, addresses))}"
            hosts.setdefault(f"{interface.get('name')}, mtu {mtu}, {nominal}", {})[where] = None
    for kind, places in hosts.items():
        yield "net", f"{kind}: {_list_hosts(list(places))}"


def _describe_clocks(launch: Launch) -> Facts:
    """Yield how far the hosts' clocks are ahead of rank 0's; nothing if ranks share one clock."""
    if launch.offsets:
        offsets = [
            f"{each.host} {each.seconds:+.6f} s ± {format_number(each.bound_seconds * 1e6)} µs"
            for each in launch.offsets
        ]
        yield "clocks", f"ahead of rank 0's: {_list_hosts(offsets)}"
    elif reason := launch.facts.get("clocks"):
        yield "clocks", f"the hosts' clocks are not compared, so there is no skew: {reason}"


def explain_partial(run: Run) -> list[str]:
    """Return the mark of an incomplete run, which every output shows."""
    if run.state == "complete":
        return []
    if run.state == "running":
        return ["PARTIAL: the run is still going on, or it ended without a report"]
    mark = f"PARTIAL ({run.state}): {run.state_reason}"
    if of_watch(run):
        return [mark]
    done = Counter(outcome.case.backend for outcome in run.outcomes)
    done.update(examination.backend for examination in run.examinations)
    what = "examinations" if of_doctor(run) else "cases"
    missing = []
    for name in run.backends:
        planned = sum(launch.cases for launch in run.launches if launch.backend == name)
        count = f"{done[name]} of {planned} {what}" if planned else "not started"
        missing.append(f"{name} {count}")
    return [f"{mark}; {', '.join(missing)}" if missing else mark]


# --- the section of a page


def build_environment(run: ReportRun) -> Iterator[Section]:
    """Yield the section on the first launch, if there is one."""
    if not run.run.launches:
        return
    launch = run.run.launches[0]
    machine = make_table("", ("", ""), _name_facts(launch.facts).items(), left=("",))
    variables = make_table("", ("", ""), _list_variables(launch).items(), left=("",))
    ranks = [{"rank": rank, **_name_facts(facts)} for rank, facts in enumerate(launch.ranks)]
    caption = "Those that affect collectives, without secrets; with the ranks, where they differ."
    charts = (
        Chart("machine", "Machine and versions", "As rank 0 sees them.", machine),
        Chart("variables", "Environment variables", caption, variables),
        Chart("ranks", "Ranks", "In the first launch.", tabulate_rows("", ranks)),
    )
    rows = tuple((chart,) for chart in charts if chart.table.rows)
    yield Section("environment", "Environment", rows=rows)


def _name_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the known facts under names for people."""
    texts = {
        name: _format_fact(name, value) for name, value in facts.items() if name not in NOT_SHOWN
    }
    return {
        name.removesuffix("_nbytes").replace("_", " "): text for name, text in texts.items() if text
    }


def _format_fact(name: str, value: Any) -> str:
    """Format a fact; "" if it is unknown."""
    if value is None or value == {}:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text}" for key, text in _name_facts(value).items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if name.endswith("_nbytes"):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else readable(int(value))
    return str(value)


def _list_variables(launch: Launch) -> dict[str, str]:
    """Return each variable's value; where ranks differ, each value with its ranks."""
    values: dict[str, dict[str, list[int]]] = {}
    for rank, facts in enumerate(launch.ranks):
        for name, value in (facts.get("variables") or {}).items():
            values.setdefault(name, {}).setdefault(str(value), []).append(rank)
    return {
        name: "; ".join(
            value if len(ranks) == len(launch.ranks) else f"{value} (rank {spans(ranks)})"
            for value, ranks in ranks_of.items()
        )
        for name, ranks_of in sorted(values.items())
    }
