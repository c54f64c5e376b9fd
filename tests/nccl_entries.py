"""Entries as torch's nccl writes them into the flight recorder, without a GPU.

They follow the sources of torch 2.9 to 2.13. A collective and an unbatched send get one entry. A
batch gets one entry per operation, which never changes, and one that ends it; for sends and
receives, it has the number of the previous collective.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

PG_ID, GROUP = 3, "0"


@dataclass
class NcclRecorder:
    """The recorder of one rank with one group."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    collectives: int = 0
    sends: int = 0

    def collective(self, name: str = "all_reduce", *, ends: bool = True) -> None:
        """Call a collective."""
        self.collectives += 1
        self._record(f"nccl:{name}", ends=ends)

    def send(self) -> None:
        """Call send outside a batch."""
        self.sends += 1
        self._record("nccl:send 0->1", is_p2p=True, ends=True)

    def batch(self, *, ends: bool = True) -> None:
        """Call batch_isend_irecv with a send and a receive."""
        self.sends += 1
        for name in ("nccl:send 0->1", "nccl:recv 0<-1"):
            self._record(name, is_p2p=True)
        self._record("nccl:coalesced", sizes=[], ends=ends)

    def collective_batch(self, *names: str, ends: bool = True) -> None:
        """Call collectives in a batch, which has one number."""
        self.captured_batch(*names)
        self._record("nccl:coalesced", sizes=[], ends=ends)

    def captured_batch(self, *names: str) -> None:
        """Capture such a batch into a CUDA graph: no entry ends it."""
        self.collectives += 1
        for name in names:
            self._record(f"nccl:{name}")

    def _record(
        self, name: str, *, is_p2p: bool = False, sizes: Any = ([4],), ends: bool = False
    ) -> None:
        dtypes = ["Float"] * len(sizes)
        self.entries.append({
            "record_id": len(self.entries), "pg_id": PG_ID, "process_group": [GROUP, "default_pg"],
            "collective_seq_id": self.collectives, "p2p_seq_id": self.sends, "profiling_name": name,
            "time_created_ns": 1_000_000 + len(self.entries), "input_sizes": sizes,
            "input_dtypes": dtypes, "output_sizes": sizes, "output_dtypes": dtypes,
            "state": "completed" if ends else "scheduled", "retired": ends, "is_p2p": is_p2p,
        })  # fmt: skip

    def end(self, *numbers: int) -> None:
        """Let collectives end now."""
        for entry in self.entries:
            if entry["collective_seq_id"] in numbers and not entry["is_p2p"]:
                entry |= {"state": "completed", "retired": True}

    def dump(self, includeCollectives: bool = True, includeStackTraces: bool = True) -> bytes:  # noqa: N803
        """As _dump_nccl_trace."""
        entries = self.entries if includeCollectives else []
        return pickle.dumps({"pg_config": {GROUP: {}}, "entries": entries})
