"""The examinations of the doctor: one entry of EXAMINATIONS adds one.

An entry needs a name, a help text and a function that every rank calls. The function takes a
`Context` and returns an `Outcome`: findings, and tables as data. A module of your own can add an
entry; name it with --import:

    EXAMINATIONS["disk"] = Examiner("disk", "write speed of the local disk", examine)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddpbench.doctor.capabilities import measure as capabilities
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.links import measure as links
from ddpbench.doctor.preflight import measure as preflight
from ddpbench.doctor.stragglers import measure as stragglers


@dataclass(frozen=True)
class Examiner:
    """An examination that the doctor can run."""

    name: str
    help: str
    examine: Callable[[Context], Outcome]


EXAMINATIONS: dict[str, Examiner] = {
    examiner.name: examiner
    for examiner in (
        Examiner("preflight", "compare versions, variables and limits", preflight.examine),
        Examiner("stragglers", "find slow ranks and the cause", stragglers.examine),
        Examiner("links", "measure every pair, find slow links and hosts", links.examine),
        Examiner("capabilities", "try what the backend supports", capabilities.examine),
    )
}
