"""The way of a watch's windows: from the ranks to their host's leader, from there to rank 0.

Rounds begin at multiples of the period, by rank 0's clock, so that the windows of all ranks have
steps in common. The leader of rank 0's host is rank 0.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ddpbench.hang import self_report
from ddpbench.launch import placement, sockets
from ddpbench.launch.placement import Refused
from ddpbench.watch.gather import offsets
from ddpbench.watch.gather.host_reports import POLL_SECONDS, HostReports, Job
from ddpbench.watch.gather.joining import join_ranks
from ddpbench.watch.gather.mailbox import CLOCK, Clock, Mailbox
from ddpbench.watch.gather.offsets import SAME, TOKEN_NBYTES, ClockServer, Line, Offset
from ddpbench.watch.window import LINKS, Window

if TYPE_CHECKING:
    import torch.distributed as dist

PERIOD = 5.0  # seconds from one round to the next
REPORT_SECONDS = 0.6  # from the start of a round until all hosts have reported
READ_SECONDS = 1.5  # for thousands of hosts; few take milliseconds
LAST_SECONDS = 3.0  # for the other hosts at the job's end
MEET_SECONDS = 0.5  # for rank 0 to publish the job, if it ends at once
COMPARISONS = 256  # hosts that ask rank 0 for its time in one round
MOST_BEHIND_NS = 10**8  # by which a host may send later than others
AFTER_SECONDS = 0.001  # the beginning of a round, so that no clock is before it
RETRY_SECONDS = 60.0  # after rank 0 could not be asked


class Transport:
    """One rank's part of it. Where something does not answer, windows are lost.

    prefix: of the keys in the store, the same in all ranks, another one for each watch of a job;
    period: seconds from one round to the next, the same in all ranks; clock: by which rounds begin
    and waits end.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        rank: int,
        world_size: int,
        *,
        period: float = PERIOD,
        clock: Clock = CLOCK,
    ) -> None:
        self._clock = clock
        self._rank, self._world_size, self._period_ns = rank, world_size, round(period * 1e9)
        prefix = f"{prefix}/{placement.read_restarts()}"
        self._reports = HostReports(store, prefix)
        self._identity = self_report.identify(rank)
        addresses = (address.partition("/")[0] for address in sockets.list_interfaces().values())
        self._addresses = [each for each in addresses if not sockets.is_loopback(each)][:LINKS]
        self._job: Job | None = None
        self._mailbox: Mailbox | None = None
        self._number = 0  # of the latest round
        self._had_leader = False
        self._offset, self._compare_at = Offset(), 0.0
        self._clock_server: ClockServer | None = None
        if rank == 0 and world_size > 1:
            self._job = Job(secrets.token_bytes(TOKEN_NBYTES), self._addresses)
            self._mailbox = Mailbox(self._job.token, self._guess_ranks(), clock)
            self._mailbox.lead()  # before any other rank knows the name
            self._reports.publish_job(self._job)
        elif world_size > 1:
            self._meet(0.0)  # connects now: a short job has ended its store before the first round

    def seconds_to_round(self) -> float:
        """Return the time until the next round begins, when `exchange` is to be called."""
        now = self._now_ns()
        number = -(-now // self._period_ns)
        number += number == self._number  # this clock was just set back
        # Ranks cut their windows by their own clock, which may be behind rank 0's.
        behind = max(0, -self._mailbox.ahead_ns) if self._mailbox is not None else 0
        return (number * self._period_ns - now + min(behind, MOST_BEHIND_NS)) * 1e-9 + AFTER_SECONDS

    def exchange(self, window: Window) -> list[Window]:
        """Hand over this rank's window; return all hosts' windows in rank 0, none in other ranks.

        Blocks up to about 1 s; for a last window 1.5 s in a host's leader and 5 s in rank 0, if
        other ranks do not end. Returns none in rounds in which the hosts do not report.
        """
        number = self._number = (self._now_ns() + self._period_ns // 2) // self._period_ns
        if self._world_size == 1:
            return self._join([window], SAME)
        mailbox = self._meet(MEET_SECONDS if window.last else 0.0)
        if mailbox is None:
            return []
        if not mailbox.leads:
            if mailbox.send(number, window):
                self._had_leader = True
                self._reports.close()  # a job's store need not serve all ranks twice
                return []
            if window.last and self._had_leader:  # the leader has ended before
                return []
            mailbox = self._take_lead(number, window)
            if mailbox is None:
                return []
        return self._lead(mailbox, number, window)

    def publish_folder(self, folder: str) -> None:
        """Let the other ranks know the folder of the stored run. Only rank 0 calls it."""
        self._republish(folder=folder)

    def find_folder(self) -> str:
        """Return the folder of the stored run; "" if there is none, or it cannot be known."""
        if self._meet(MEET_SECONDS) is not None and self._job is not None and not self._job.folder:
            self._job = self._reports.read_job() or self._job
        return self._job.folder if self._job is not None else ""

    def close(self) -> None:
        """Close all connections."""
        if self._mailbox is not None:
            self._mailbox.close()
        if self._clock_server is not None:
            self._clock_server.close()
        self._reports.close()

    def _now_ns(self) -> int:
        """This host's clock, corrected to rank 0's as far as all ranks of the host know it."""
        if self._mailbox is None:
            return self._clock.now_ns()
        self._mailbox.read_answers()
        return self._clock.now_ns() - self._mailbox.ahead_ns

    def _meet(self, seconds: float) -> Mailbox | None:
        """The mailbox of this job, None as long as rank 0 has not published the job."""
        until = self._clock.monotonic() + seconds
        while self._mailbox is None:
            self._job = self._reports.read_job()
            if self._job is not None:
                self._mailbox = Mailbox(self._job.token, self._guess_ranks(), self._clock)
            elif self._clock.monotonic() >= until:
                break
            else:
                self._clock.sleep(POLL_SECONDS)
        return self._mailbox

    def _guess_ranks(self) -> int:
        """How many ranks this host has, as far as the launcher says."""
        try:
            placed = placement.read_placement()
        except Refused:
            placed = None
        local = placed.local_world_size if placed is not None else None
        return min(local or self._world_size, self._world_size)

    def _take_lead(self, number: int, window: Window) -> Mailbox | None:
        """Become the leader, unless another rank was faster, which then gets the window."""
        known, self._mailbox = self._mailbox, None
        mailbox = self._meet(0.0)  # the token of an earlier job may have been in the store
        if mailbox is None:
            self._mailbox = known
            return None
        if known is not None:
            mailbox.ahead_ns = known.ahead_ns
            known.close()
        if mailbox.lead():
            return mailbox
        mailbox.send(number, window)
        return None

    def _lead(self, mailbox: Mailbox, number: int, window: Window) -> list[Window]:
        """Join this host's windows; report them to rank 0, or return all hosts' there."""
        began = self._clock.monotonic()
        if self._rank and not window.last:
            self._compare_clocks(number)
        line = self._offset.line if self._rank else SAME
        ahead_ns = int(line.ahead(np.array([self._clock.now_ns()]))[0])
        windows = mailbox.collect(number, window, ahead_ns)
        hosts = self._join(windows, line)
        if self._rank:
            if number % self._reports.rounds == 0 or self._reports.slot < 0 or window.last:
                name = f"{self._identity.boot_id}/{self._identity.network}"
                self._reports.publish(name, number, hosts[0], len(mailbox.ranks))
            return []
        if len(windows) >= self._world_size:
            return hosts
        if window.last:
            others = self._world_size - len(mailbox.ranks)
            self._reports.await_ended(others, LAST_SECONDS)
        elif self._reports.count_hosts() == 0:
            return hosts
        elif number % self._reports.rounds:
            return []
        else:
            if self._clock_server is None and self._job is not None:
                self._clock_server = ClockServer(self._job.token)
                self._republish(port=self._clock_server.port)
            self._clock.sleep(max(0.0, began + REPORT_SECONDS - self._clock.monotonic()))
        return hosts + self._reports.read(number, READ_SECONDS)

    def _join(self, windows: list[Window], line: Line) -> list[Window]:
        joined = join_ranks(windows, self._identity.host, self._addresses, line)
        return [joined] if joined is not None else []

    def _republish(self, **known: Any) -> None:
        if self._job is not None:
            self._job = msgspec.structs.replace(self._job, **known)
            self._reports.publish_job(self._job)

    def _compare_clocks(self, number: int) -> None:
        """Ask rank 0 for its time, if it is this host's turn."""
        turns = self._reports.hosts // COMPARISONS + 1
        if (number - self._reports.slot) % turns or self._clock.monotonic() < self._compare_at:
            return
        if self._job is None or not self._job.port:
            self._job = self._reports.read_job() or self._job
        if self._job is not None and self._job.port:
            exchanges = offsets.ping(self._job.addresses, self._job.port, self._job.token)
            if exchanges is None:
                self._compare_at = self._clock.monotonic() + RETRY_SECONDS
            else:
                self._offset.add(exchanges)
