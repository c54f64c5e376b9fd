"""Real jobs on four hosts: a slow link, a host that sends slowly, and a clock that is wrong."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from frozen import Frozen, finding_facts
from simulated_hosts import PORT, Hosts, payload

from ddpbench.records import store
from ddpbench.records.schema import Run

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(40):
    loss = model(torch.randn(16, 512)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
dist.destroy_process_group()
"""
# Every rank sends to every other, as mixtures of experts do; a ring would use one link of a host.
EXCHANGE = """
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
sent = torch.randn(4 * 500_000)
received = torch.empty_like(sent)
for call in range(16):
    dist.all_to_all_single(received, sent)
dist.destroy_process_group()
"""
SENDS = 7e7  # bits per second
AHEAD_SECONDS, DRIFT_PPM = 0.4, 400
WRONG = 2  # the host with this clock
pytestmark = pytest.mark.measures_time


def watch(
    bench: Hosts, folder: Path, text: str, environs: Mapping[int, Sequence[str]] | None = None
) -> Run:
    """Watch a script with one rank on each host, some in an environment; return the stored run."""
    script, results = folder / "train.py", folder / "results"
    script.write_text(text)
    job = [sys.executable, "-m", "ddpbench.watch", "--output", str(results), str(script)]
    commands = {
        rank: ["env", f"RANK={rank}", *(environs or {}).get(rank, ()), *job]
        for rank in range(len(bench))
    }
    outcomes = bench.run(
        commands,
        folder,
        MASTER_ADDR=bench[0].address,
        MASTER_PORT=str(PORT),
        WORLD_SIZE=str(len(bench)),
        LOCAL_RANK="0",
        GLOO_SOCKET_IFNAME="eth0",
    )
    assert [done.returncode for done in outcomes] == [0] * len(bench), outcomes
    return store.read(next(results.iterdir()))


def test_a_slow_link_is_blamed_and_no_rank(
    frozen: Frozen, hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    """Links carry 1 Gbit/s, but between host2 and host3 100 Mbit/s. The finding names both hosts,
    in the direction in which the ring sends, and the interface.

    Arrivals are compared by one clock: though that of host3 is 0.4 s ahead, and gains 0.4 ms every
    second, its rank does not look late, and no call seems to have waited that long.
    """
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    clock, source = tmp_path / "clock.so", Path(__file__).parent / "shifted_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", clock, "-ldl"], check=True)
    shifted = [f"LD_PRELOAD={clock}", f"AHEAD_NS={AHEAD_SECONDS * 1e9:.0f}"]
    shifted += [f"DRIFT_PPM={DRIFT_PPM}", f"SINCE_NS={time.monotonic_ns()}"]
    bench = hosts(4, rate=1e9, pairs={(1, 2): 1e8})
    run = watch(bench, tmp_path, SCRIPT, {WRONG: shifted})
    blamed = [finding for finding in run.findings if finding.severity != "note"]
    (link,) = [finding for finding in blamed if finding.code.startswith("slow-")]
    frozen.facts(finding_facts(link))
    assert not [finding for finding in blamed if "straggler" in finding.code]
    watched = run.steps[0].watched
    assert watched is not None
    # Of a step's calls, one that ends with a report is missing now and then.
    often = [each for each in watched.collectives if each.calls >= 0.5]
    waits = {each.operation: each.wait_seconds for each in often}
    assert set(waits) == {"all_reduce", "broadcast"}
    assert max(waits.values()) < AHEAD_SECONDS / 2, waits
    assert not [finding for finding in run.findings if finding.place.get("rank") == WRONG]


@pytest.mark.nightly
def test_only_the_slow_direction_of_a_host_is_named(
    hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    """All links of host3 carry 70 Mbit/s together in the direction in which it sends. The finding
    names this direction, this host alone, and a rate near the planted one."""
    run = watch(hosts(4, rate=1e9, sends={2: SENDS}), tmp_path, EXCHANGE)
    (slow,) = [finding for finding in run.findings if finding.code.startswith("slow-")]
    assert (slow.code, slow.place["hosts"]) == ("slow-host", ["host3"])
    assert slow.place["bytes_per_second"] == {"sends": pytest.approx(payload(SENDS), rel=0.25)}
