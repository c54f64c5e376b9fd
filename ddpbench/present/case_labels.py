"""Labels of cases and texts of times, for comparisons and lists."""

from __future__ import annotations

from ddpbench.catalog.parallel import format_mesh
from ddpbench.catalog.sizes import readable
from ddpbench.present.columns import format_number, format_subgroups
from ddpbench.records.schema import StepCase
from ddpbench.records.wording import counted
from ddpbench.verdicts.matching import AnyCase


def name_case(case: AnyCase) -> str:
    """Return the name of a case, in which --only searches."""
    return " ".join(filter(None, label_parts(case)))


def label_parts(case: AnyCase) -> list[str]:
    """Return the parts of a label. A position always has the same meaning; "" is left out."""
    ranks = counted(case.world_size, "rank")
    device = "" if case.device == "cpu" else case.device
    if isinstance(case, StepCase):
        batch = f"batch {case.batch}" if case.batch else ""
        model = [case.workload, " ".join(case.settings), batch, case.optimizer]
        way = f"{case.parallel} {format_mesh(case.mesh)}" if case.mesh else ""
        return [*model, way, case.backend, device, ranks]
    place = "in place" if case.in_place else "out of place"
    return [
        case.operation,
        *((readable(case.nbytes), case.dtype) if case.nbytes else ("", "")),
        case.reduce_op or "",
        "" if case.root is None else f"root {case.root}",
        "" if case.form == "tensor" else "list",
        place if case.nbytes else "",
        case.backend,
        device,
        ranks,
        format_subgroups(case),
    ]


def format_time(case: AnyCase, seconds: float) -> str:
    """Format a time with its unit: ms for a DDP step, else µs."""
    scale, unit = (1e3, "ms") if isinstance(case, StepCase) else (1e6, "µs")
    return f"{format_number(seconds * scale)} {unit}"
