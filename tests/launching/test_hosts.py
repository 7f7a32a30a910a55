"""The hosts of a job as they are given, and its options where some of them are gone."""

from pathlib import Path
from typing import Any

import pytest

from mpips.config.command_line import parse_command_line
from mpips.errors import UserError
from mpips.launch.hosts import Host, find_hosts, launcher_words, placed
from mpips.launch.mpirun import is_open_mpi, mpirun
from mpips.launch.placement import changed_options, words_of
from mpips.layout.roles import assign


@pytest.mark.parametrize(
    ("text", "ranks", "found"),
    [
        ("a:4,b:2", 5, "a:4 b:2"),
        ("a,b,c", 7, "a:3 b:3 c:3"),
        ("a:1,b:2,a:3", None, "a:4 b:2"),
        ("10.0.0.1:2,", None, "10.0.0.1:2"),
    ],
)
def test_hosts(text: str, ranks: int | None, found: str) -> None:
    assert " ".join(map(str, find_hosts(text, ranks))) == found


def test_a_file_of_hosts(tmp_path: Path) -> None:
    """Of either MPI, with limits and interfaces, which MPICH is told of by a file again."""
    file, agent = tmp_path / "hosts", tmp_path / "agent"
    file.write_text("# mine\na:4\n\nb slots=2  # of 8\nc slots = 1\n")
    hosts = find_hosts(str(file), None)
    assert hosts == (Host("a", 4), Host("b", 2), Host("c", 1))
    words = launcher_words([mpirun(), "-v"], hosts[1:], agent)
    assert words[:2] == [mpirun(), "-v"]
    if is_open_mpi():
        assert words[-2:] == ["--host", "b:2,c:1"]
        assert f"--prtemca plm_ssh_agent {agent}" in " ".join(words)
    else:
        assert words[2:] == f"-launcher ssh -launcher-exec {agent} -f {file}".split()
    file.write_text("node1 slots=4 max_slots=8\nnode2 max-slots=2 slots=2\nnode3:1 ifname=eth1\n")
    hosts = find_hosts(str(file), None)
    assert " ".join(map(str, hosts)) == "node1:4 node2:2 node3:1"
    launcher_words([mpirun()], placed(hosts, 7), agent)
    told = "node1:4\nnode2:2\nnode3:1 ifname=eth1\n"
    assert is_open_mpi() or file.read_text() == told
    file.write_text("node1 slots=4 sluts=8\n")
    with pytest.raises(UserError, match="'node1 slots=4 sluts=8' in --hosts"):
        find_hosts(str(file), None)


@pytest.mark.parametrize(
    ("text", "ranks", "error"),
    [
        ("a,b", None, "--hosts a,b without numbers of ranks, expected names with numbers"),
        ("a:2,b", 3, "--hosts a:2,b with numbers on some, expected a number on each, or on none"),
        ("a:2,b:2", 5, "-n 5 on hosts of 4 ranks, expected -n <= 4"),
        ("a:0", None, "'a:0' in --hosts a:0, expected names with numbers"),
        (",", None, "--hosts ',' without a host"),
    ],
)
def test_hosts_that_cannot_be(text: str, ranks: int | None, error: str) -> None:
    with pytest.raises(UserError, match=error):
        find_hosts(text, ranks)


def test_hosts_are_filled_one_after_the_other() -> None:
    hosts = find_hosts("a:4,b:4,c:4", None)
    assert placed(hosts, 6) == [Host("a", 4), Host("b", 2)]
    assert placed(hosts[1:], 12) == [Host("b", 4), Host("c", 4)]
    assert placed([], 4) == []


NODES = ["a"] * 4 + ["b"] * 4  # what is left of 12 ranks


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ("--servers 3", "--servers=2"),
        ("--servers 1", ""),
        ("--servers 11", "--servers=7"),
        ("--mode sync --servers 0", ""),
        ("--mode sync --servers 3", "--servers=2"),
        ("--server-ranks 0,4,8", "--server-ranks=0,4"),
        ("--server-ranks 0,4,8 --servers 3", "--server-ranks=0,4 --servers=2"),
        ("--server-ranks 0,4", ""),
        ("--server-ranks 8,9,10", "--server-ranks= --servers=2"),
        ("--server-hosts a --servers 3", "--servers=2"),
        ("--server-hosts c", "--servers=2 --server-hosts="),
        ("--server-hosts a,c --servers 8", "--servers=4"),
        ("--mode sync --servers 3 --backup-workers 6", "--servers=2 --backup-workers=5"),
        ("--servers 2 --spares 1", "--servers=1 --spares=0"),
        ("--servers 3 --evaluators 4", "--servers=2"),  # 3 of 8 that train, 2 of 4
    ],
)
def test_options_of_fewer_ranks(given: str, changes: str) -> None:
    """They change as little as it takes, and are options still."""
    options = parse_command_line(given.split()).options
    assert changed_options(options, 8, NODES) == {}, "as many as it was asked for"
    words = words_of(changed_options(options, 12, NODES))
    assert " ".join(words) == changes
    again: dict[str, Any] = {**options, **parse_command_line(words).options}
    names = ("servers", "server_ranks", "server_hosts")
    placing = {name: again[name] for name in names if name in again}
    assert assign(again.get("mode", "async"), NODES, [0] * 8, **placing).workers
