"""Entries and status as torch's nccl writes them into the flight recorder, without a GPU.

They follow the sources of torch 2.9 to 2.13. A collective and an unbatched send get one entry. A
batch gets one entry per operation, which never changes, and one that ends it; for sends and
receives, it has the number of the previous collective. The status has one field for both counts.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from typing import Any

from ddpbench.hang.flight_recorder import Recorder

PG_ID, GROUP = 3, "0"


@dataclass
class NcclRecorder:
    """The recorder of one rank with one group."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    collectives: int = 0
    sends: int = 0
    operations: int = 0
    enqueued: int = -1
    completed: int = -1

    def collective(self, name: str = "all_reduce", *, ends: bool = True) -> None:
        """Call a collective."""
        self.collectives += 1
        self._operate(f"nccl:{name}", is_p2p=False)
        self._enqueue(self.collectives, ends)

    def send(self, *, ends: bool = True) -> None:
        """Call send outside a batch."""
        self.sends += 1
        self._operate("nccl:send 0->1", is_p2p=True)
        self._enqueue(self.sends, ends)

    def batch(self, *, ends: bool = True) -> None:
        """Call batch_isend_irecv with a send and a receive."""
        self.sends += 1
        for name in ("nccl:send 0->1", "nccl:recv 0<-1"):
            self._operate(name, is_p2p=True)
        self._record("nccl:coalesced", is_p2p=False, sizes=[])
        self._enqueue(self.sends, ends)

    def collective_batch(self, *names: str, ends: bool = True) -> None:
        """Call collectives in a batch, which has one number."""
        self.collectives += 1
        for name in names:
            self._operate(f"nccl:{name}", is_p2p=False)
        self._record("nccl:coalesced", is_p2p=False, sizes=[])
        self._enqueue(self.collectives, ends)

    def captured_batch(self, *names: str) -> None:
        """Capture such a batch into a CUDA graph: nothing is enqueued, and no entry ends it."""
        self.collectives += 1
        for name in names:
            self._operate(f"nccl:{name}", is_p2p=False)

    def _operate(self, name: str, *, is_p2p: bool) -> None:
        self.operations += 1
        self._record(name, is_p2p=is_p2p, sizes=[[4]])

    def _record(self, name: str, *, is_p2p: bool, sizes: list[list[int]]) -> None:
        dtypes = ["Float"] * len(sizes)
        self.entries.append({
            "record_id": len(self.entries), "pg_id": PG_ID, "process_group": [GROUP, "default_pg"],
            "collective_seq_id": self.collectives, "p2p_seq_id": self.sends,
            "op_id": self.operations, "profiling_name": name,
            "time_created_ns": 1_000_000 + len(self.entries), "input_sizes": sizes,
            "input_dtypes": dtypes, "output_sizes": sizes, "output_dtypes": dtypes,
            "state": "scheduled", "retired": False, "is_p2p": is_p2p, "timeout_ms": 600000,
        })  # fmt: skip

    def _enqueue(self, number: int, ends: bool) -> None:
        self.enqueued = number
        if ends:
            self.completed = number
            self.entries[-1] |= {"state": "completed", "retired": True}

    def end(self, *numbers: int) -> None:
        """Let collectives end now."""
        for entry in self.entries:
            if entry["collective_seq_id"] in numbers and not entry["is_p2p"]:
                entry |= {"state": "completed", "retired": True}
                self.completed = entry["collective_seq_id"]

    @property
    def status(self) -> dict[str, dict[str, str]]:
        names = {"enqueued": self.enqueued, "started": -1, "completed": self.completed}
        numbers = {f"last_{name}_collective": str(number) for name, number in names.items()}
        return {str(PG_ID): numbers} if self.entries else {}

    def dump_json(self) -> bytes:
        """As _dump_nccl_trace_json."""
        return json.dumps({"pg_status": self.status, "entries": self.entries}).encode()

    @property
    def functions(self) -> Recorder:
        """The functions of torch that dump this."""

        def dump(includeStackTraces: bool = True) -> bytes:  # noqa: N803
            return pickle.dumps({"pg_status": self.status, "entries": self.entries})

        def read_status(includeCollectives: bool = True) -> bytes:  # noqa: N803
            return json.dumps({"pg_config": {GROUP: {}}, "pg_status": self.status}).encode()

        return Recorder(read_status, dump)
