"""Read torch's Flight Recorder without holding the interpreter lock.

torch's own Python function holds the lock while it formats all entries: 35 ms for 2000 of them.
Here ctypes calls the C++ function below it, and releases the lock. That function returns a
std::string by value, for ctypes a structure of 32 bytes. It is called on x86-64 only, where this
has been tried. Elsewhere, and where a torch lacks the symbol, torch's Python function serves, if
the recorder is short enough.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec

from ddpbench.hang import torch_settings
from ddpbench.hang.cuda import open_library, relaxed_capture
from ddpbench.hang.flight_recorder import BATCH, NATIVE, find_missing_setting

SHORT = 250  # entries that torch's Python function formats in less than 5 ms
KEPT_INSIDE = 15  # bytes that a std::string holds in itself
Read = Callable[[], bytes]

STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE"
DESTROY = f"_Z{STRING}D1Ev"
GENERAL = "_ZN4c10d18dump_fr_trace_jsonB5cxx11Ebb"
NAMED = f"_ZN4c10d18dump_fr_trace_jsonEbbRK{STRING}E"  # since torch 2.15: of a backend by its name
OF_NCCL = "_ZN4c10d20dump_nccl_trace_jsonB5cxx11Ebb"


class Entry(msgspec.Struct, gc=False):
    """A recorded call. Its lists stay undecoded, because most calls repeat earlier ones."""

    record_id: int
    pg_id: int
    process_group: msgspec.Raw
    collective_seq_id: int
    profiling_name: str
    time_created_ns: int
    is_p2p: bool
    input_sizes: msgspec.Raw
    input_dtypes: msgspec.Raw
    output_sizes: msgspec.Raw
    output_dtypes: msgspec.Raw
    duration_ms: float = -1.0


class _Dump(msgspec.Struct, gc=False):
    entries: list[msgspec.Raw] = []


class _String(ctypes.Structure):
    """libstdc++'s std::string. A short one lies inside it, and has moved since `start` was set."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("inside", ctypes.c_char * (KEPT_INSIDE + 1)),
    )


class RecorderDump:
    """The recorders of the backends in use, and what was read of them.

    unavailable: a sentence that states why nothing can be read of a backend, and what to do; "" if
    all can be read. entries: how many the recorders held at the last read.
    """

    def __init__(self) -> None:
        self.unavailable = ""
        self.entries = 0
        self._reads: dict[str, Read] = {}
        self._backends: frozenset[str] = frozenset()
        self._last: dict[str, int] = {}  # the newest entry that was read
        self._decoder = msgspec.json.Decoder(_Dump)
        self._entry_decoder = msgspec.json.Decoder(Entry)

    def read_new(self, backends: Collection[str], until_ns: int, limit: int) -> list[Entry]:
        """Return the collectives since the last read, at most `limit` a recorder, oldest first.

        backends: of this rank's groups; until_ns: leave later entries for the next read.
        Raises ValueError if torch's format has changed.
        """
        if self._backends != frozenset(backends):
            self._backends = frozenset(backends)
            self._reads, self.unavailable = _find_reads(self._backends)
        new: list[Entry] = []
        self.entries = 0
        for name, read in self._reads.items():
            with relaxed_capture():
                data = read()
            entries = self._decode_newest(data, self._last.get(name, -1), until_ns, limit)
            if entries:
                self._last[name] = entries[-1].record_id
            new += entries
        return new

    def _decode_newest(self, data: bytes, last: int, until_ns: int, limit: int) -> list[Entry]:
        """Decode from the end: most entries of a long recorder are old or too many."""
        entries: list[Entry] = []
        recorded = self._decoder.decode(data).entries
        self.entries += len(recorded)
        for raw in reversed(recorded):
            entry = self._entry_decoder.decode(raw)
            if entry.record_id <= last or len(entries) == limit:
                break
            # nccl ends a batch with an entry of its own, which is no call.
            is_collective = not entry.is_p2p and not entry.profiling_name.endswith(BATCH)
            if entry.time_created_ns <= until_ns and is_collective:
                entries.append(entry)
        return entries[::-1]


def _find_reads(backends: Collection[str]) -> tuple[dict[str, Read], str]:
    """Return a function for each recorder in use, and a sentence on those that cannot be read."""
    from torch._C import _distributed_c10d as c10d

    reads: dict[str, Read] = {}
    sentence = ""
    for backend in sorted(set(backends) - {"mpi4py"}):
        name = "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json"
        own = "gloo" if backend in NATIVE and backend != "nccl" else backend
        if not hasattr(c10d, name):
            sentence = f"this torch does not record the calls of {backend}: use a newer torch"
            continue
        unlocked = _without_lock(own)
        read = unlocked or _with_lock(getattr(c10d, name), own)
        if find_missing_setting(backend) or read is None:
            entries = torch_settings.ENTRIES if unlocked else SHORT
            sentence = (
                f"calls of {backend} cannot be read, so the collectives below lack them: set "
                f"{torch_settings.find_buffer_size()}={entries} before init_process_group"
            )
        else:
            reads[own] = read
    return reads, sentence


def _without_lock(backend: str) -> Read | None:
    """Return a function that reads a recorder without the lock, if there is a way."""
    if platform.machine() != "x86_64" or len(backend) > KEPT_INSIDE:
        return None
    try:
        cpu = open_library("cpu")
        general = getattr(cpu, GENERAL, None)
        named = None if general else getattr(cpu, NAMED)
        destroy = getattr(cpu, DESTROY)
        if backend == "nccl":
            # Only a torch that has the functions above catches errors of CUDA in this one. Thrown
            # through ctypes, they would end the process.
            return partial(_read_general, getattr(open_library("cuda"), OF_NCCL), destroy)
    except (OSError, AttributeError):
        return None
    if general:
        return partial(_read_general, general, destroy)
    return partial(_read_named, named, destroy, backend.encode())


def _with_lock(read: Callable[..., bytes], backend: str) -> Read | None:
    """Return torch's own function if the recorder keeps few entries."""
    sizes = filter(None, map(os.environ.get, torch_settings.BUFFER_SIZES))
    size = next(sizes, torch_settings.ENTRIES)
    if not size.isdecimal() or int(size) > SHORT:
        return None
    is_named = "backend" in (read.__doc__ or "")
    return partial(read, backend=backend) if is_named else read


def _read_general(function: Any, destroy: Any) -> bytes:
    function.argtypes, function.restype = (ctypes.c_bool, ctypes.c_bool), _String
    return _take(function(True, False), destroy)


def _read_named(function: Any, destroy: Any, backend: bytes) -> bytes:
    name = _String(None, len(backend), backend)
    name.start = ctypes.addressof(name) + _String.inside.offset
    function.argtypes = (ctypes.c_bool, ctypes.c_bool, ctypes.c_void_p)
    function.restype = _String
    return _take(function(True, False, ctypes.byref(name)), destroy)


def _take(string: _String, destroy: Any) -> bytes:
    """Return the content of a std::string that was returned by value, and free it."""
    if string.size <= KEPT_INSIDE:
        return bytes(string)[_String.inside.offset :][: string.size]
    content = ctypes.string_at(string.start, string.size)
    destroy.argtypes, destroy.restype = (ctypes.c_void_p,), None
    destroy(ctypes.byref(string))
    return content
