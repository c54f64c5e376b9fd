"""The proof of replicas on meshes: false alarms, planted faults, cost, and bytes on the wire.

    ./run_bench.sh python tests/perf/mesh_proofs.py [healthy] [faults] [cost] [bytes]

healthy: more than 100 training runs over gloo, verified before the first step and after each.
faults: those of tests/replicas/test_mesh_scenarios.py. cost: a verification as a share of a step,
for the workload transformer in 4 ranks; both take turns, each behind a barrier, and a time is the
slowest rank's. bytes: what a healthy verification sends, by the kernel's counters of each TCP
connection, for two sizes of the model. Without words all four run.

Exits with 1 on an alarm, on a fault that is missed or taken for another, on a verification of more
than 3 % of a step, and if the bytes depend on the model's size.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules
sys.path.insert(0, str(Path(__file__).parents[1] / "replicas"))

import mesh_training
import torch
import torch.distributed as dist
from mesh_training import Setting, Training
from tabulate import tabulate
from torch import nn

from ddpbench import Verifier, verify_replicas

STEPS = 4  # of a healthy run
PLACES = (
    ("ddp", (4,)), ("fsdp", (4,)), ("hsdp", (2, 2)), ("hsdp", (2, 4)), ("tp", (4,)),
    ("fsdp+tp", (2, 2)),
)  # fmt: skip
VARIANTS: tuple[dict[str, Any], ...] = (
    {}, {"accumulate": 3}, {"bf16": True}, {"bf16": True, "accumulate": 2}, {"tied": True},
    {"frozen": True}, {"average": True}, {"layers": 3, "tied": True, "average": True},
)  # fmt: skip
SHARDED: tuple[dict[str, Any], ...] = (
    {"reshard": False}, {"reshard": False, "accumulate": 2}, {"offload": True},
)  # fmt: skip
LIMIT = 0.03  # of a step
ROUNDS = 12


# --- healthy runs


def list_settings(ranks: int) -> Iterator[Setting]:
    """Yield the healthy runs of this number of ranks, each with a seed of its own."""
    seed = 0
    for (way, sizes), optimizer in itertools.product(PLACES, ("sgd", "adamw")):
        own = SHARDED if way in ("fsdp", "hsdp", "fsdp+tp") else ()
        own = ({"zero": True},) if way == "ddp" else own
        for options in (*VARIANTS, *own):
            seed += 1
            if torch.Size(sizes).numel() == ranks:
                yield Setting(way, sizes, optimizer, seed=seed, **options)


def run_healthy(setting: Setting) -> dict[str, Any]:
    """Train, verify the model and its average; return the steps verified, and the alarms."""
    training = Training(setting)
    verifiers = [Verifier(training.model, training.optimizer)]
    if training.average is not None:
        verifiers.append(Verifier(training.average))
    alarms = []
    for number in range(STEPS + 1):
        if number:
            training.step(number)
        for verifier in verifiers:
            report = verifier.check(number)
            answer = report.nothing_to_compare if setting.way == "fsdp" else report.ok
            if report.failed or not answer:
                alarms.append(str(report))
    return {"steps": (STEPS + 1) * len(verifiers), "alarms": alarms}


def play_healthy(folder: Path, rank: int, size: int) -> None:
    """Play all healthy runs in this rank."""
    plays = {str(s): (lambda s=s: run_healthy(s)) for s in list_settings(size)}
    mesh_training.play_all(folder, rank, plays)


def report_healthy() -> bool:
    """Print the table of healthy runs; return whether there was no alarm."""
    began, rows, total, wrong = time.perf_counter(), [], [0, 0], []
    results: dict[str, Any] = {}
    for size in (4, 8):
        ranks = run("healthy", size)
        for name in ranks[0]:
            results[name] = ranks[0][name]
            if any(each.get(name) != ranks[0][name] for each in ranks):
                results[name] = {"error": f"the ranks disagree: {[r.get(name) for r in ranks]}"}
    settings = [*list_settings(4), *list_settings(8)]
    for (way, sizes), optimizer in itertools.product(PLACES, ("sgd", "adamw")):
        chosen = [s for s in settings if (s.way, s.sizes, s.optimizer) == (way, sizes, optimizer)]
        found = {str(s): results.get(str(s), {"error": "did not run"}) for s in chosen}
        bad = {name: r for name, r in found.items() if "error" in r or r["alarms"]}
        steps = sum(r.get("steps", 0) for r in found.values())
        wrong += [f"{name}: {r.get('error') or r['alarms'][0]}" for name, r in bad.items()]
        total = [total[0] + len(found), total[1] + steps]
        shape = "x".join(map(str, sizes))
        rows.append([way, shape, optimizer, len(found), steps, len(bad)])
    print(tabulate(rows, ["parallel", "mesh", "optimizer", "runs", "steps verified", "alarms"]))
    print(*wrong, sep="\n")
    took = time.perf_counter() - began
    print(f"{total[0]} runs, {total[1]} steps verified: {len(wrong)} alarms, {took:.0f} s\n")
    return not wrong


# --- planted faults


def play_faults(folder: Path, rank: int, size: int) -> None:
    """Play all planted faults in this rank."""
    import test_mesh_scenarios as scenarios

    mesh_training.play_all(folder, rank, scenarios.PLAYS[size])


def report_faults() -> bool:
    """Print what was found of each fault; return whether all of it is right."""
    import test_mesh_scenarios as scenarios

    rows, missed = [], 0
    for size in (4, 8):
        reports = run("faults", size)[0]
        for name, expected in scenarios.EXPECTED[size].items():
            report = reports.get(name, {"error": "did not run"})
            wrong = report.get("error") or scenarios.find_mistakes(report, expected)
            missed += bool(wrong)
            if wrong:
                print(name, wrong, report.get("text", ""), sep="\n")
            rows.append([size, name, *scenarios.describe(report), "WRONG" if wrong else "found"])
    head = ["ranks", "fault", "step", "where", "tensor", "shard", "element", "cause", ""]
    print(tabulate(rows, head))
    print(f"{len(rows)} planted faults: {missed} missed\n")
    return not missed


# --- cost


def build_transformer(way: str, sizes: tuple[int, ...], batch: int, **shape: int) -> Any:
    """Return a function that takes a step, the module and the optimizer, of this way."""
    from ddpbench.catalog.task import RankSetup
    from ddpbench.catalog.workloads import WORKLOADS

    workload = WORKLOADS["transformer"]
    settings = {name: by_device["cpu"] for name, by_device in workload.settings.items()} | shape
    share = sizes[-1] if "tp" in way else 1  # ranks along tp share a batch
    setup = RankSetup(
        dist.get_rank() // share,
        dist.get_world_size() // share,
        batch,
        torch.device("cpu"),
        0,
        None,
    )
    task = workload.build(settings, setup)
    model: Any = divide(task.model, workload, way, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = itertools.cycle([task.batch(number) for number in range(4)])

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()
        optimizer.step()

    return step, model, optimizer


def divide(model: nn.Module, workload: Any, way: str, sizes: tuple[int, ...]) -> nn.Module:
    """Divide a workload's model by its own plan."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel
    from torch.nn.parallel import DistributedDataParallel

    if way == "ddp":
        return DistributedDataParallel(model)
    mesh = mesh_training.make_mesh(way, sizes)
    styles = {"column": parallel.ColwiseParallel, "row": parallel.RowwiseParallel}
    layers = workload.plan.layers(model)
    if "tp" in way:
        plan = {name: styles[style]() for name, style in workload.plan.splits(model).items()}
        parallel.parallelize_module(model, mesh["tp"], plan)
    axes = tuple(name for name in mesh_training.WAYS[way] if name != "tp")
    for module in (*layers, model) if axes else ():
        fully_shard(module, mesh=mesh[axes if len(axes) > 1 else axes[0]])
    return model


def play_cost(folder: Path, rank: int, size: int) -> None:
    """Measure steps and verifications of the transformer in turns."""
    from verify_cost import slowest

    def measure(way: str, sizes: tuple[int, ...]) -> dict[str, Any]:
        step, model, optimizer = build_transformer(way, sizes, COST_BATCH, **COST_SHAPE)
        took: dict[str, list[float]] = {"step": [], "verify": []}
        ways = {"step": step, "verify": lambda: verify_replicas(model, optimizer)}
        for _ in range(ROUNDS + 2):
            for name, call in ways.items():
                took[name].append(slowest(call))
        report = verify_replicas(model, optimizer)
        steps, checks = (values[2:] for values in took.values())
        shares = [check / step for check, step in zip(checks, steps, strict=True)]
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "nbytes": report.nbytes,
            "step": statistics.median(steps),
            "verify": statistics.median(checks),
            "share": statistics.median(shares),
            "failed": report.failed,
        }

    plays = {
        f"{way} {'x'.join(map(str, sizes))}": lambda way=way, sizes=sizes: measure(way, sizes)
        for way, sizes in PLACES
        if torch.Size(sizes).numel() == size
    }
    mesh_training.play_all(folder, rank, plays)


COST_BATCH, COST_SHAPE = 4, {"layers": 4, "width": 256, "sequence": 64, "vocabulary": 4096}


def report_cost() -> bool:
    """Print what a verification costs; return whether it is cheap enough everywhere."""
    results = run("cost", 4)[0]
    rows, fine = [], True
    for name, result in results.items():
        if "error" in result:
            print(result["error"])
            return False
        fine &= result["share"] <= LIMIT and not result["failed"]
        row = [name, result["parameters"] / 1e6, result["nbytes"] / 1e6, result["step"] * 1e3]
        rows.append([*row, result["verify"] * 1e3, result["share"] * 100])
    shape = ", ".join(f"{name} {value}" for name, value in COST_SHAPE.items())
    print(f"transformer, {shape}, batch {COST_BATCH} per rank, AdamW, 4 ranks of gloo")
    head = ["parallel", "M parameters", "MB compared", "step ms", "verification ms", "% of a step"]
    print(tabulate(rows, head, floatfmt=".1f"), "\n")
    return fine


# --- bytes on the wire


def count_sent() -> int:
    """Return the bytes that the peers of this process's TCP connections have acknowledged."""
    from ddpbench.launch import sockets
    from ddpbench.watch.observe.links import ACKED_NBYTES, TCP_INFO_NBYTES

    total, (kind, offset) = 0, ACKED_NBYTES
    for entry in Path("/proc/self/fd").iterdir():
        try:
            connection = sockets.wrap_file(int(entry.name))
        except OSError:
            continue
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_NBYTES)
            total += kind.unpack_from(info, offset)[0]
        except OSError:
            continue
        finally:
            connection.detach()
    return total


def play_bytes(folder: Path, rank: int, size: int) -> None:
    """Count the bytes of a healthy verification for two sizes of the model."""

    def count(way: str, sizes: tuple[int, ...], layers: int) -> dict[str, int]:
        training = Training(Setting(way, sizes, layers=layers))
        training.step(1)
        verify_replicas(training.model, training.optimizer)  # which may make groups
        time.sleep(0.2)  # until everything is acknowledged
        dist.barrier()
        time.sleep(0.2)
        before = count_sent()
        report = verify_replicas(training.model, training.optimizer)
        time.sleep(0.2)
        return {"nbytes": count_sent() - before, "replica": report.nbytes}

    plays = {
        f"{way} {'x'.join(map(str, sizes))} {layers}": (
            lambda way=way, sizes=sizes, layers=layers: count(way, sizes, layers)
        )
        for (way, sizes), layers in itertools.product(PLACES, (2, 8))
        if torch.Size(sizes).numel() == size
    }
    mesh_training.play_all(folder, rank, plays)


def report_bytes() -> bool:
    """Print the bytes that all ranks sent; return whether the model's size does not matter."""
    rows, fine = [], True
    for size in (4, 8):
        ranks = run("bytes", size)
        for way, sizes in PLACES:
            if torch.Size(sizes).numel() == size:
                name = f"{way} {'x'.join(map(str, sizes))}"
                pair = [[each[f"{name} {layers}"] for each in ranks] for layers in (2, 8)]
                small, large = ([each["nbytes"] for each in results] for results in pair)
                same = small == large
                fine &= same
                compared = [results[0]["replica"] / 1e3 for results in pair]
                rows.append([name, *compared, sum(small), sum(large), "" if same else "DIFFER"])
    head = ["parallel", "kB compared", "kB compared, larger", "bytes sent", "bytes sent, larger"]
    print(tabulate(rows, [*head, ""], floatfmt=".1f"), "\n")
    return fine


# --- ranks

PARTS = {
    "healthy": (play_healthy, report_healthy),
    "faults": (play_faults, report_faults),
    "cost": (play_cost, report_cost),
    "bytes": (play_bytes, report_bytes),
}


def run(part: str, size: int) -> list[dict[str, Any]]:
    """Play a part in so many ranks; return the results of each."""
    with tempfile.TemporaryDirectory() as name:
        return mesh_training.run_ranks([sys.executable, __file__, part], size, Path(name), 1800)


def main(words: Sequence[str]) -> int:
    """Run the parts; 1 if any of them is not fine."""
    if len(words) == 4:  # a rank
        folder, rank, size = Path(words[1]), int(words[2]), int(words[3])
        mesh_training.start_group(folder, rank, size)
        PARTS[words[0]][0](folder, rank, size)
        dist.destroy_process_group()
        return 0
    fine = [PARTS[word][1]() for word in words or PARTS]
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
