"""What a page costs: of a default sweep, and of a run of 64 ranks and 1,000 cases.

    python tests/perf/report_scale.py [RUN …]

Without RUN: results/reference/cpu-2-ranks, and a run made up in a temporary folder: 64 ranks on 8
hosts, 10 operations × 5 dtypes × 10 sizes × 2 backends, 100 calls each, some of them slow, one rank
late. Each page is made by a fresh `python -m ddpbench report`; seconds and memory are of that
process and include its imports. opened: from the navigation of a headless Chromium until the page
is loaded, and until the first chart is drawn; chosen: until the chart of calls shows another case.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
from tabulate import tabulate

from ddpbench.analysis import stats
from ddpbench.records import store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Case, Plan, Result, Run
from ddpbench.session.summary import operation_columns

RANKS, HOSTS, CALLS, WARM_UPS, LATE_RANK = 64, 8, 100, 20, 13
OPERATIONS = (
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather",
    "scatter", "sendrecv", "ping_pong",
)  # fmt: skip
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64")
SIZES = tuple(4**power for power in range(4, 14))
BACKENDS = {"gloo": 3e-9, "mpi": 1e-9}  # seconds for a byte
REFERENCE = Path(__file__).parents[2] / "results/reference/cpu-2-ranks"


def make_run(folder: Path) -> None:
    """Store a complete run of made-up stamps."""
    draw = np.random.default_rng(0)
    results = []
    for part, (launch, operation, dtype, nbytes) in enumerate(
        product(range(len(BACKENDS)), OPERATIONS, DTYPES, SIZES)
    ):
        backend = list(BACKENDS)[launch]
        case = Case(
            operation, "tensor", backend, "native", "cpu", dtype, None, None, nbytes, nbytes // 4,
            in_place=True, async_op=False, issue="isolated", start="barrier", depth=1,
            world_size=RANKS, ranks_per_host=(RANKS // HOSTS,) * HOSTS,
        )  # fmt: skip
        stamps = make_stamps(draw, 2e4 + 1e9 * BACKENDS[backend] * nbytes)
        timed = stamps[:, 1 + WARM_UPS :]
        summary = stats.summary(stats.over_ranks(timed), 1, common_clock=True)
        store.add_samples(
            folder, part, operation_columns(
                case.key, launch, cold=as_rows(stamps[:, :1]), timed=as_rows(timed),
                warm_up=as_rows(stamps[:, 1 : 1 + WARM_UPS]), warm_ups=WARM_UPS,
            ),
        )  # fmt: skip
        cold_seconds = float(stats.over_ranks(stamps[:, :1]).times(1)[0])
        results.append(
            Result(
                case, launch, 1.0, nbytes, nbytes, cold_seconds=cold_seconds, warm_up=WARM_UPS,
                summary=summary, checks=3, clock_off_seconds=1e-6,
            )
        )  # fmt: skip
    store.join_samples(folder)
    ranks = tuple({"hostname": f"node{rank * HOSTS // RANKS}"} for rank in range(RANKS))
    launches = tuple(
        Launch(index, backend, "native", backend, "torchrun", RANKS, ranks=ranks)
        for index, backend in enumerate(BACKENDS)
    )
    store.write(
        folder,
        Run(
            folder.name, "collectives", ("ddpbench", "collectives"), Plan(), store.format_now(),
            state="complete", exit_code=0, operations=OPERATIONS, backends=tuple(BACKENDS),
            launches=launches, results=tuple(results),
        ),
    )  # fmt: skip


def make_stamps(draw: np.random.Generator, nanoseconds: float) -> stats.Stamps:
    """Return int64[rank, repetition, 3]: one call in five takes four times as long."""
    count = 1 + WARM_UPS + CALLS
    begin = 10**9 + np.arange(count) * int(10 * nanoseconds)
    late = draw.exponential(nanoseconds / 50, (RANKS, count))
    late[LATE_RANK] += nanoseconds / 2
    ends = late.max(axis=0) + nanoseconds * np.where(draw.random(count) < 0.2, 4, 1)
    ends = ends + draw.normal(0, nanoseconds / 50, (RANKS, count))
    stamps = np.full((RANKS, count, 3), -1, dtype=np.int64)
    stamps[:, :, 0], stamps[:, :, 1] = begin + late, begin + ends
    return stamps


def as_rows(stamps: stats.Stamps) -> stats.Stamps:
    """Return int64[row, 5]: repetition, rank, entry, exit, device time."""
    ranks, count, _ = stamps.shape
    rank, repetition = np.divmod(np.arange(ranks * count), count)
    return np.column_stack([repetition, rank, stamps.reshape(-1, 3)])


def time_page(run: Path, page: Path) -> list[object]:
    """Make a page; return its size in MB, seconds, CPU seconds, and the most memory in MiB."""
    before = time.monotonic()
    command = [sys.executable, "-m", "ddpbench", "report", str(run), "--output", str(page)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    seconds, cpu = time.monotonic() - before, usage.ru_utime + usage.ru_stime
    return [page.stat().st_size / 1e6, seconds, cpu, usage.ru_maxrss / 1024]


def time_browser(page: Path) -> list[object]:
    """Return the seconds until the page is loaded, has a chart, and shows another case."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return [None] * 3
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 1200, "height": 900})
        before = time.monotonic()
        tab.goto(page.as_uri())
        loaded = time.monotonic() - before
        tab.wait_for_selector("figure svg")
        drawn = time.monotonic() - before
        figure = tab.locator("#chart-cases")
        figure.scroll_into_view_if_needed()
        figure.locator("svg").wait_for()
        old = figure.locator("svg").element_handle()
        before = time.monotonic()
        figure.locator("select").select_option(index=1)
        tab.wait_for_function("old => !old.isConnected", arg=old)
        figure.locator("svg").wait_for()
        chosen = time.monotonic() - before
        browser.close()
    return [loaded, drawn, chosen]


def main() -> None:
    """Print a line per run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [Path(word) for word in sys.argv[1:]]
        if not runs:
            runs = [REFERENCE, folder / "64-ranks-1000-cases"]
            runs[1].mkdir()
            make_run(runs[1])
        rows = []
        for run in runs:
            page = folder / f"{run.name}.html"
            rows.append([run.name, *time_page(run, page), *time_browser(page)])
    made = ["MB", "made s", "CPU s", "memory MiB"]
    headings = ["run", *made, "loaded s", "first chart s", "chosen s"]
    print(tabulate(rows, headings, floatfmt=".2f"))


if __name__ == "__main__":
    main()
