"""Nodes with unequal numbers of ranks: their list, their agreement, and that all of them end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import assert_refused, ddpbench_command
from simulated_hosts import Hosts

from ddpbench.launch import nodes, placement, processes
from ddpbench.launch.nodes import Announcement, Nodes
from ddpbench.launch.placement import Placement, Refused
from ddpbench.records import store

UNEQUAL = Nodes((4, 4, 2, 2))


# --- the list -------------------------------------------------------------------------------------


def test_ranks_are_numbered_through_unequal_nodes() -> None:
    """Ranks count on from node to node, local ranks from 0 on each; every rank is a place that a
    launcher may tell."""
    places = [
        placement.read_placement(environ)
        for index in range(4)
        for environ in UNEQUAL.environ(index, "10.0.0.1", 29500)
    ]
    assert places == [
        Placement("torchrun", rank, 12, local, size)
        for rank, (local, size) in enumerate(
            (local, size) for size in UNEQUAL.ranks for local in range(size)
        )
    ]
    (first, second) = UNEQUAL.environ(2, "10.0.0.1", 29500)
    assert (first["RANK"], second["RANK"]) == ("8", "9")
    assert first["GROUP_RANK"] == "2"
    assert first["MASTER_ADDR"], first["MASTER_PORT"] == ("10.0.0.1", "29500")


def test_a_hosts_file_has_a_line_a_node(tmp_path: Path) -> None:
    """Names or addresses, the number with or without `slots=`, comments and empty lines."""
    path = tmp_path / "hosts.txt"
    path.write_text("# mine\nvm1 slots=4\n\n  10.0.0.2   2 # second\nvm3.lan slots=1")
    assert nodes.read_hosts(path) == Nodes((4, 2, 1), ("vm1", "10.0.0.2", "vm3.lan"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("vm1 slots=1\nvm2\n", "line 2: 'vm2' is not a node: write NAME slots=N"),
        ("vm1 slots=0", "line 1: 'vm1 slots=0' is not a node"),
        ("vm1 max_slots=2", "line 1: "),
        ("# nothing\n", "names no node"),
        (None, r"cannot be read: No such file or directory$"),
    ],
)
def test_a_line_that_is_no_node_is_named(tmp_path: Path, text: str | None, sentence: str) -> None:
    """The file, the line and what to write."""
    path = tmp_path / "hosts.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Refused, match=f"^--hosts {re.escape(str(path))}.*{sentence}"):
        nodes.read_hosts(path)


def test_a_node_finds_itself_by_name_or_address() -> None:
    """This machine's name, or an address of its own; another's are not it."""
    assert nodes.find_local_nodes(
        Nodes((1, 1), ("no-such-name.invalid", socket.gethostname()))
    ) == [1]
    assert nodes.find_local_nodes(Nodes((1, 1), ("127.0.0.1", "192.0.2.1"))) == [0]
    assert nodes.find_local_nodes(Nodes((1,), ("192.0.2.1",))) == []


# --- agreement ------------------------------------------------------------------------------------


def said(
    node: int, ranks: tuple[int, ...], names: tuple[str, ...] = (), pid: int = 7
) -> Announcement:
    """What a node says."""
    return Announcement(node, f"vm{node}", pid, ranks, names)


def test_the_node_that_disagrees_is_named() -> None:
    """Other counts and other names are told with who says what; whoever gives no names agrees with
    any; in whatever order they came."""
    same = [said(node, (2, 1, 1)) for node in (2, 0)]
    assert nodes.find_objection([*same, said(1, (2, 1, 1), ("a", "b", "c"))]) is None
    other = nodes.find_objection([*same, said(1, (2, 2, 1))])
    assert other is not None
    assert "nodes 0 (vm0), 2 (vm2) with 2,1,1; node 1 (vm1) with 2,2,1; start all" in other
    named = [said(0, (1, 1), ("a", "b")), said(1, (1, 1), ("a", "c"))]
    assert "node 0 (vm0) with a:1,b:1; node 1 (vm1) with a:1,c:1" in str(
        nodes.find_objection(named)
    )
    longer = nodes.find_objection([said(0, (2, 1)), said(1, (2, 1)), said(2, (2, 1, 1))])
    assert "node 2 (vm2) with 2,1,1" in str(longer)


def test_two_that_are_the_same_node_are_named() -> None:
    """With host and pid of both."""
    twice = [said(0, (1, 1)), said(1, (1, 1), pid=5), said(1, (1, 1), pid=6)]
    assert "node 1 was started twice, on vm1 (pid 5) and on vm1 (pid 6)" in str(
        nodes.find_objection(twice)
    )


def meeting(lists: dict[int, Nodes], seconds: float) -> dict[int, str | None]:
    """All these nodes meet in threads of this process; what each was refused with."""
    port, told = placement.free_port(), dict[int, str | None]()
    met: list[nodes.Meeting] = []

    def one(index: int) -> None:
        try:
            met.append(nodes.meet(lists[index], index, "127.0.0.1", port, seconds))
            told[index] = None
        except Refused as error:
            told[index] = str(error)

    threads = [threading.Thread(target=one, args=[index]) for index in lists]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


def test_nodes_that_agree_meet_and_others_are_all_refused() -> None:
    """All nodes hear the same sentence, the one that disagrees too; where one does not come, the
    others hear which."""
    one, other = Nodes((2, 1, 1)), Nodes((2, 1, 2))
    assert meeting({0: one, 1: one, 2: one}, 10) == {0: None, 1: None, 2: None}
    told = meeting({0: one, 1: one, 2: other}, 10)
    assert set(told) == {0, 1, 2}
    (sentence,) = set(told.values())
    assert "node 2 (" in str(sentence)
    assert ") with 2,1,2" in str(sentence)
    named = Nodes((2, 1, 1), ("127.0.0.1", "vm2", "vm3"))
    told = meeting({0: named, 2: named}, 0.5)
    (sentence,) = set(told.values())
    assert "1 of 3 nodes did not join within 0.5 s (--timeout): 1 (vm2);" in str(sentence)


def test_without_node_0_the_others_say_where_they_looked() -> None:
    """Nobody listens: node 1 names the address; a name that is none is told at once, and so is a
    node 0 on another machine than the address'."""
    nobody = meeting({1: Nodes((1, 1))}, 0.3)[1]
    assert re.match(r"node 1 could not reach node 0 at 127\.0\.0\.1:\d+ within 0\.3 s", str(nobody))
    with pytest.raises(Refused, match=r"cannot resolve the name of node 0, no-such\.invalid"):
        nodes.meet(Nodes((1, 1)), 1, "no-such.invalid", 1, 5)
    with pytest.raises(Refused, match=r"^192\.0\.2\.1 is not an address of this host"):
        nodes.meet(Nodes((1, 1)), 0, "192.0.2.1", 29500, 5)


# --- processes ------------------------------------------------------------------------------------


def shell(script: str) -> processes.Child:
    """A child that runs a shell script."""
    return processes.start_child(["sh", "-c", script], {"WORD": "7"})


def test_the_highest_exit_code_is_given_and_a_death_counts() -> None:
    """0 where all end well; else the highest code; killed by a signal counts as 5. The environment
    is passed on, and the handlers of signals are as before."""
    before = [signal.getsignal(number) for number in processes.PASSED_ON]
    assert processes.await_all([shell("exit 0"), shell("exit 0")]) == 0
    assert processes.await_all([shell("exit 1"), shell("exit $WORD"), shell("exit 2")]) == 7
    assert processes.await_all([shell("kill -9 $$"), shell("exit 2")]) == 5
    assert [signal.getsignal(number) for number in processes.PASSED_ON] == before


@pytest.mark.parametrize("why", ["one has failed", "others are lost"])
def test_none_stays_when_others_have_failed(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """One that ignores SIGTERM is killed, with what it has started; whether a neighbour failed, or
    a rank of another node."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.1)
    stuck = shell("trap '' TERM; sleep 100")
    other = shell("exit 3" if why == "one has failed" else "exit 0")
    assert processes.await_all([stuck, other], lambda: why == "others are lost") == 5
    assert stuck.process.returncode == -signal.SIGKILL


def test_signals_reach_all_children_and_they_may_end_by_themselves() -> None:
    """SIGTERM to this process goes to each; they end as they choose, in their time."""
    children = [shell("trap 'exit 130' TERM; while :; do sleep 0.05; done") for _ in range(2)]
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGTERM])
    timer.start()
    assert processes.await_all(children) == 130
    assert [child.process.returncode for child in children] == [130, 130]


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [],
            r"no command after --: choose collectives, ddp, doctor, watch, your script",
        ),
        (
            ["--", "compare"],
            r"unknown command 'compare' after --: choose collectives, ddp, doctor, watch, your",
        ),
        (["--", "ddp", "--workloat", "mlp"], r"unknown option --workloat"),
        (["--", "ddp"], r"--ranks-per-node 4,4,2,2 or --hosts FILE"),
        (["--ranks-per-node", "2,x", "--", "ddp"], r"'2,x' is not a list of numbers from 1 on"),
        (["--ranks-per-node", "2,1", "--", "ddp"], r"give the host name or address of node 0"),
        (["--ranks-per-node", "2,1", "--", "ddp", "-n", "3"], r"leave out -n: --ranks-per-node"),
        (
            ["--ranks-per-node", "2,1", "--", "ddp", "--master-port", "4"],
            r"give --master-port before the --",
        ),
        (["--ranks-per-node", "2,1", "--master-addr", "a", "--", "ddp"], r"--node-rank, 0 to 1$"),
        (
            ["--ranks-per-node", "2,1", "--init-method", "tcp://a:1", "--node-rank", "2", "ddp"],
            r"--node-rank 2 is not one of the 2 nodes: choose 0 to 1",
        ),
        (["--ranks-per-node", "1,1", "--ssh", "--", "ddp"], r"--ssh needs the names of the nodes"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(
    capfd: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    """Before anything starts, exit code 2."""
    from ddpbench import cli

    try:
        code = cli.main(["launch", *words])
    except SystemExit as end:
        code = int(str(end.code))
    said = capfd.readouterr()
    assert_refused(subprocess.CompletedProcess([], code, said.out, said.err), sentence)


def test_hosts_that_disagree_are_refused_by_name(
    tmp_path: Path, hosts: Callable[..., Hosts]
) -> None:
    """Three hosts, each with its own file, find themselves by their names; the third's says another
    number of ranks: exit code 2 and the same sentence on all, and no results."""
    bench = hosts(3)
    for index in range(3):
        last = 2 if index == 2 else 1
        text = f"host1 slots=2\nhost2 slots=1\nhost3 slots={last}\n"
        (tmp_path / f"{index}.txt").write_text(text)
    words = {
        i: ddpbench_command("launch", "--hosts", f"{i}.txt", "--", "collectives", "--op", "barrier")
        for i in range(3)
    }
    for done in bench.run(words, tmp_path):
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "ddpbench: the nodes were started with different numbers of ranks: nodes 0 (host1), 1 "
            "(host2) with host1:2,host2:1,host3:1; node 2 (host3) with host1:2,host2:1,host3:2; "
            "start all with the same --ranks-per-node or --hosts\n"
        )
    assert not (tmp_path / "results").exists()


SSH = """#!/bin/sh
# What ssh does, between namespaces: the host's name, then the command for its shell.
exec ip netns exec $(ip netns list | grep -o "$NAMESPACES${1#host}") \\
    unshare --uts sh -c 'hostname "$0"; eval "$1"' "$@"
"""


def test_unequal_hosts_measure_together_over_ssh(
    tmp_path: Path, hosts: Callable[..., Hosts]
) -> None:
    """Started on one host, which starts the two others by (what it takes for) ssh, hosts with 2, 1
    and 1 ranks measure an all_reduce of four; rank 0's table comes here, once."""
    bench = hosts(3)
    (tmp_path / "hosts.txt").write_text("host1 slots=2\nhost2 slots=1\nhost3 slots=1\n")
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    namespaces = bench[0].namespace.removesuffix("1")
    words = [
        "launch", "--hosts", "hosts.txt", "--ssh", "--ssh-command", str(ssh), "--",
        "collectives", "--op", "all_reduce", "--sizes", "4K", "--slice", "0.1", "--format", "json",
    ]  # fmt: skip
    (done,) = bench.run({0: ddpbench_command(*words)}, tmp_path, NAMESPACES=namespaces)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "complete"
    (folder,) = store.list_runs(tmp_path / "results")
    run = store.read(folder)
    (result,) = run.results
    assert result.case.ranks_per_host == (2, 1, 1)
    assert result.checks > 0
    assert not result.wrong
    assert "4 ranks on 3 hosts (2+1+1)" in (folder / "table.txt").read_text()
    assert [rank["hostname"] for rank in run.launches[0].ranks] == [
        "host1", "host1", "host2", "host3",
    ]  # fmt: skip
