"""What the leaders of hosts leave in the job's store for rank 0: one key a host, overwritten."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ddpbench.hang.status_board import (
    STORE_TIMEOUT,
    Address,
    StoreClient,
    await_server,
    find_store,
    unwrap,
)
from ddpbench.watch.window import Window, decode, encode

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
STORE_SECONDS = 0.5  # for an answer of the store
REACH_SECONDS = 0.3  # for its host to accept a connection
RETRY_SECONDS = 60.0  # after it could not be reached
POLL_SECONDS = 0.02
CHUNK = 32  # hosts that rank 0 reads at a time: a larger answer would hold the interpreter
HOSTS = 512  # that report in one round; more hosts report in every other round, or fewer
FILE_ROUNDS = 12  # rounds from one report to the next in a FileStore, which only ever grows
REPORT = struct.Struct("!q?")  # round, last


class Job(msgspec.Struct, frozen=True):
    """What rank 0 publishes: the job's token, and where it answers questions about its clock.

    folder: of the stored run, "" for none.
    """

    token: bytes
    addresses: list[str] = []
    port: int = 0  # 0: nowhere yet
    folder: str = ""


class HostReports:
    """The reports in a store, as rank 0 or a leader uses them. No call takes much over 0.5 s."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        import torch.distributed as dist

        self._prefix, self._is_file = prefix, isinstance(unwrap(store), dist.FileStore)
        self._place = find_store(store)
        if isinstance(self._place, Address):  # a watch waits for less than the job itself
            self._place = self._place._replace(timeout=STORE_TIMEOUT)
        self._client: StoreClient | None = None
        self._retry_at = 0.0
        self._folder = ""  # of the keys of the job with this token
        self._keys: dict[int, str] = {}  # of reports that exist, by their hosts' numbers
        self._ended: dict[str, int] = {}  # keys of last reports that were read → their rounds
        self.slot = -1  # this host's number
        self.hosts = 0  # that have reported: all but rank 0's

    @property
    def rounds(self) -> int:
        """Return how many rounds there are from one report of a host to its next."""
        return FILE_ROUNDS if self._is_file else -(-max(self.hosts, 1) // HOSTS)

    def publish_job(self, job: Job) -> None:
        """Publish the job, which others may now join."""
        self._folder = f"{self._prefix}/{job.token.hex()}"
        data = msgspec.msgpack.encode(job)
        self._request(lambda store: store.set(f"{self._prefix}/job", data))

    def read_job(self) -> Job | None:
        """Return the job, None as long as rank 0 has not published it."""
        key = f"{self._prefix}/job"
        data = self._request(lambda store: _read(store, key))
        if not data:
            return None
        job = msgspec.msgpack.decode(data, type=Job)
        self._folder = f"{self._prefix}/{job.token.hex()}"
        return job

    def publish(self, host: str, number: int, window: Window, ranks: int) -> None:
        """Replace this host's report.

        host: a name of it that no other host has; ranks: how many it has had, dead ones included.
        """
        data = REPORT.pack(number, window.last) + encode(window)

        def put(store: Any) -> tuple[int, int]:
            slot = self.slot if self.slot >= 0 else self._find_slot(store, host)
            store.set(f"{self._folder}/report/{slot}", data)
            if window.last:
                store.add(f"{self._folder}/ended", ranks)
            return slot, int(_read(store, f"{self._folder}/hosts") or 0)

        answer = self._request(put)
        if answer is not None:
            self.slot, self.hosts = answer

    def read(self, number: int, seconds: float) -> list[Window]:
        """Return the reports of this round, and those of hosts that have ended.

        The latter are empty when they are read again.
        """
        until = time.monotonic() + seconds
        self._request(self._find_keys)
        windows: list[Window] = []
        all_keys = list(self._keys.values())
        for first in range(0, len(all_keys), CHUNK):
            keys = all_keys[first : first + CHUNK]
            values = self._request(lambda store, keys=keys: store.multi_get(keys))  # type: ignore[misc]
            for key, data in zip(keys, values or (), strict=False):
                sent, last = REPORT.unpack_from(data)
                if sent == number or last:
                    window = decode(data[REPORT.size :])
                    known = self._ended.get(key) == sent
                    windows.append(window.without_news() if known else window)
                if last:
                    self._ended[key] = sent
            if time.monotonic() > until:
                break
        return windows

    def await_ended(self, ranks: int, seconds: float) -> None:
        """Return when so many ranks of other hosts have ended, or after this time."""
        until = time.monotonic() + seconds

        def wait(store: dist.Store) -> None:
            key = f"{self._folder}/ended"
            while int(_read(store, key) or 0) < ranks and time.monotonic() < until:
                time.sleep(POLL_SECONDS)

        self._request(wait, seconds + STORE_SECONDS)

    def count_hosts(self) -> int:
        """Return how many hosts have reported."""
        self._request(self._find_keys)
        return self.hosts

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _request(self, function: Callable[[Any], T], seconds: float = STORE_SECONDS) -> T | None:
        if self._client is not None and self._client.gone:
            self.close()
            self._retry_at = time.monotonic() + RETRY_SECONDS
        if self._client is None and time.monotonic() >= self._retry_at:
            try:
                if isinstance(self._place, Address):
                    await_server(self._place, REACH_SECONDS)
                self._client = StoreClient(self._place)
            except RuntimeError:  # the store may have ended with its process group
                self._retry_at = time.monotonic() + RETRY_SECONDS
        return None if self._client is None else self._client.request(seconds, function)

    def _find_slot(self, store: dist.Store, host: str) -> int:
        """This host's number: that of an earlier leader, or the next one."""
        key = f"{self._folder}/slot/{host}"
        if (known := _read(store, key)) is not None:
            return int(known)
        slot = store.add(f"{self._folder}/hosts", 1) - 1
        store.set(key, str(slot))
        return slot

    def _find_keys(self, store: dist.Store) -> None:
        """Find the reports that have come since the last time."""
        self.hosts = int(_read(store, f"{self._folder}/hosts") or 0)
        for slot in range(self.hosts):
            key = f"{self._folder}/report/{slot}"
            if slot not in self._keys and store.check([key]):
                self._keys[slot] = key


def _read(store: dist.Store, key: str) -> bytes | None:
    """The value of a key, None if it does not exist: `get` would wait for it."""
    return store.get(key) if store.check([key]) else None
