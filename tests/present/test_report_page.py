"""The page as text: what it holds of any run, how small it is, and that names stay text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from stored_runs import a_case, a_result, a_run
from stored_steps import a_step_result, a_step_run

from ddpbench.present.document import ReportRun
from ddpbench.present.summary import summarise
from ddpbench.present.writers.page_file import json_in_html, make
from ddpbench.records.schema import Run

# --- what the page holds --------------------------------------------------------------------------


def test_a_page_allows_only_its_own_scripts() -> None:
    """Its policy names the hash of every script that it holds and nothing from elsewhere."""
    page = make([ReportRun("this", a_run(a_result()))])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy.group(1)).split("; "))
    assert rules["default-src"] == "'none'"
    scripts = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert len(re.findall(r"<script", page.replace("".join(scripts), ""))) > len(scripts)
    assert not re.search(r"<(link|img|iframe)\b|<script[^>]*src=", page.replace(scripts[0], ""))


@pytest.mark.parametrize(
    "run",
    [
        a_run(),
        a_run(a_result(summary=None, reason="not supported")),
        a_run(a_result(), state="interrupted", state_reason="Ctrl-C"),
        a_step_run(a_step_result(summary=None, replicas=None, reason="no memory")),
        a_step_run(a_step_result()),
        a_run(command="doctor"),
        a_run(command="watch", started=""),
        a_run(a_result(a_case(operation="barrier", nbytes=0, count=0))),
    ],
    ids=lambda run: f"{run.command}-{run.state}-{len(run.everything)}",
)
def test_any_run_has_a_page(run: Run) -> None:
    """Empty, skipped, interrupted and old runs have a page with a summary, alone and beside
    another; what is not complete says so."""
    alone = make([ReportRun("this", run)])
    assert summarise(ReportRun(run.id, run)) in html.unescape(alone).replace("\u00a0", " ")
    assert ("PARTIAL" in alone) == (run.state != "complete")
    beside = make([ReportRun("this", run), ReportRun("that", a_run(a_result()))])
    assert "this and that" in beside


# --- what scripts read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456789e-7, "1.2346e-07"),
        (67108864.0, "67108864"),
        (math.nan, "null"),
        (np.float64(2 / 3), "0.66667"),
        (np.int64(7), "7"),
        ((True, None, "µ", [1.0]), '[true,null,"µ",[1]]'),
        ({"</script>&": "\u2028"}, '{"\\u003c/script\\u003e\\u0026":"\\u2028"}'),
    ],
)
def test_values_are_short_and_safe(value: Any, text: str) -> None:
    """Floats have five digits, whole ones all of theirs; what JSON lacks is null; no character
    can end the element."""
    assert json_in_html(value) == text
    json.loads(text)


# --- the summary ----------------------------------------------------------------------------------
