"""What a job says at its start of ranks that die: who goes on, or why it starts again."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpips.config.command_line import load
from mpips.errors import UserError
from mpips.failover.policy import announcement, keeps, refuse_shrink, survivable
from mpips.launch import heartbeat
from mpips.launch.heartbeat import Terms
from mpips.layout import Layout
from mpips.layout.roles import assign, shares, with_spares
from mpips.layout.tables import Table, Zeros
from mpips.optim.staleness import Staleness

RANKS, PARAMETERS = 6, 100_000
AGAIN, ENDS = "this job starts again from its newest checkpoint", "this job ends"
ALL = f"if a rank dies, {AGAIN}"
WORKER = "if a worker dies, the others go on without it"
BESIDE = "if a worker beside another rank dies, the others go on without it"
TAKEN_OVER = "if a server dies, another one takes its shard over"


def job_of(words: str, on: bool, tables: bool = False, n: int = RANKS) -> Any:
    """Return what is asked of a job of `n` ranks, which train, on nodes of ``--node-size``."""
    config = load(words.split())
    size = config.node_size or n
    node_of = [rank // size for rank in range(n)]
    hosts = ["here"] * n
    roles = assign(config.mode, hosts, node_of, config.servers, config.server_ranks)
    roles = with_spares(roles, config.spares, node_of)
    failures = SimpleNamespace(on=on)
    cluster = SimpleNamespace(
        failures=failures, roles=roles, node_of=node_of, nodes=len(set(node_of))
    )
    given = {"t": Table(9, 2, Zeros())} if tables else {}
    problem = SimpleNamespace(layout=Layout.of({"w": (PARAMETERS,)}, given))
    return SimpleNamespace(
        config=config, cluster=cluster, problem=problem, staleness=Staleness.of(config),
        shards=shares(PARAMETERS, roles, 8), dtype=SimpleNamespace(itemsize=8), rate=lambda rate: 0,
        rule=SimpleNamespace(whole=False),
    )  # fmt: skip


SERVER = f"if a server dies, {AGAIN}"
SEVERAL = "needs all ranks of several nodes"
SHRINK = "--on-death shrink --batch-size 4"
SLICE = f"{WORKER}: another one takes its slice over, and a round has"
FIRST = f"dies, {AGAIN}: it acts on the deaths of the others"
ROUND = f"{WORKER}: a round has"
EVALUATOR = "if an evaluator or a worker dies, the others go on without it"
GOES_ON = {  # where MPI lets jobs go on: options, and what is said
    "--servers 1": f"{WORKER}; if the server dies, {AGAIN}: it is the only one",
    "--servers 2": f"{WORKER}; {TAKEN_OVER}",
    "--mode ssp --servers 1 --spares 1": f"{WORKER}; {TAKEN_OVER}",
    "--servers 2 --record --read consistent": f"{WORKER}; {SERVER}: each writes its own --record",
    "--servers 2 --node-size 3": f"{WORKER}; {SERVER}: each is alone on its node",
    "--servers 4 --node-size 3": f"{WORKER}; {TAKEN_OVER}",
    "--servers 2 --server-ranks 0,1 --node-size 5": f"{BESIDE}; {TAKEN_OVER}",
    "--servers 3 --node-size 3": f"{WORKER}; if a server beside another dies, another one takes",
    "--servers 2 --node-size 1": f"{ALL}: each worker is alone on its node",
    "--servers 2 --spares 2 --node-size 3": f"{WORKER}; {TAKEN_OVER}",
    "--codec fp16 --node-size 2 --servers 1": f"{WORKER}; if the server dies, {AGAIN}: it is",
    "--codec topk --node-size 2": f"{ALL}: codec topk keeps a state between nodes",
    "--codec topk --servers 2": f"{WORKER}; {TAKEN_OVER}",  # nothing crosses nodes
    "--record --read consistent --node-size 2": f"{ALL}: --record {SEVERAL}",
    "--node-aggregation --node-size 2": f"{ALL}: --node-aggregation {SEVERAL}",
    "--far-read get --node-size 2": f"{ALL}: --far-read get {SEVERAL}",
    "--delay-compensation 0.1 --node-size 2": f"{ALL}: --delay-compensation {SEVERAL}",
    "a table --node-size 2": f"{ALL}: a table {SEVERAL}",
    "a table --servers 2": f"{WORKER}; {TAKEN_OVER}",
    "--mode sync": f"{ALL}: mode sync needs all ranks",
    f"--mode sync {SHRINK}": f"{SLICE} 20 samples in place of 24, 4 a worker; if rank 0 dies, ",
    f"--mode sync {SHRINK} --scale-lr": f"{SLICE} 20 samples in place of 24, 4 a worker, at a rate",
    f"--mode sync {SHRINK} --node-size 3": (
        f"{SLICE} 20 samples in place of 24, 4 a worker; if the first rank of a node (0, 3) {FIRST}"
    ),
    f"--mode local_sgd --local-steps 2 {SHRINK} --node-size 2": (
        f"{SLICE} 40 samples in place of 48, 8 a worker; if the first rank of a node (0, 2, 4)"
    ),
    f"a table --mode hybrid {SHRINK} --servers 2": (
        f"{ROUND} 12 samples in place of 16, 4 a worker; {SERVER}: no other can replace it"
    ),
    f"a table --mode hybrid {SHRINK} --servers 1 --server-ranks 4": (
        f"{ROUND} 16 samples in place of 20, 4 a worker; if the server or rank 0 dies, {AGAIN}"
    ),
    f"a table --mode hybrid {SHRINK} --node-size 3 --server-ranks 1,4": (
        f"{ROUND} 12 samples in place of 16, 4 a worker; if a server or the first rank of a node "
        "(0, 3) dies"
    ),
    "--mode sync --backup-workers 1 --servers 1": f"{ALL}: --backup-workers needs all ranks",
    "--mode easgd --codec none": f"{ALL}: mode easgd needs all ranks",
    "--evaluators 1 --servers 2": f"{EVALUATOR}; if a server but server 0 dies, another one takes",
    "--evaluators 1 --mode sync": (
        f"if an evaluator dies, the others go on without it; if another rank dies, {AGAIN}: mode"
    ),
}


MPI = "this MPI ends all ranks"
ENDED = Terms(restarts=1, all_end=MPI)
PROGRAM = ENDED._replace(program=True, all_end="it is a program without --ft")
UNSAID = 'as the program does not say resume="auto"'


@pytest.mark.parametrize(
    ("words", "on", "terms", "said"),
    [
        *((words, True, Terms(restarts=5), said) for words, said in GOES_ON.items()),
        ("--mode sync", True, None, f"if a rank dies, {ENDS}: mode sync needs all ranks"),
        ("--servers 2", False, ENDED, f"{ALL}: {MPI}"),
        ("--servers 2", False, Terms(all_end=MPI), f"if a rank dies, {ENDS}: {MPI}"),
        ("--mode sync", False, ENDED, f"{ALL}: mode sync needs all ranks"),
        ("--spares 1", False, ENDED, f"--spares 1 has no effect here; {ALL}: {MPI}"),
        ("--resume auto", False, PROGRAM, f"{ALL}: {PROGRAM.all_end}"),
        ("", False, ENDED._replace(program=True), f"if a rank dies, {ENDS}, {UNSAID}: {MPI}"),
        ("--spares 1", False, None, "--spares 1 has no effect but under mpips.launch, by Open MPI"),
    ],
)
def test_what_is_said_of_deaths(
    words: str, on: bool, terms: Terms | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where MPI lets jobs go on, and where it does not."""
    monkeypatch.setattr(heartbeat, "terms", lambda: terms)
    options = words.removeprefix("a table ")
    job = job_of(options, on, options != words)
    assert announcement(job).startswith(said)
    assert on or survivable(job) == ()


@pytest.mark.parametrize("terms", [None, Terms(restarts=5, all_end=MPI)])
def test_rounds_need_all_ranks_where_mpi_ends_them(
    terms: Terms | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "terms", lambda: terms)
    with pytest.raises(UserError, match=r"^on_death 'shrink' where .* ends all ranks") as refused:
        refuse_shrink(job_of("--mode sync --on-death shrink", on=False))
    assert str(refused.value).endswith("start it by mpips.launch with Open MPI, or leave it out")


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("", (1, 2, 3, 4, 5)),
        ("--mode local_sgd --local-steps 2 --optimizer adam", (1, 2, 3, 4, 5)),
        ("--node-size 4", (1, 2, 3, 5)),
        ("--mode local_sgd --local-steps 2 --optimizer adam --node-size 4", (1, 2, 3, 5)),
        ("a table --mode hybrid --node-size 3 --server-ranks 0,3", (1, 2, 4, 5)),
        ("a table --mode hybrid --node-size 3 --server-ranks 1,4", (2, 5)),
        ("--node-size 1", "one worker a node"),
        ("--node-size 2 --codec fp16", "--codec fp16 between nodes"),
        ("--node-size 2 --pull-codec fp16", "--pull-codec fp16 between nodes"),
        ("--window private", "--window private"),
        ("--reduce allreduce", "--reduce allreduce"),
        ("--servers 1", "--servers"),
        ("--servers 5", "--servers"),
        ("--evaluators 1", "--evaluators"),
        ("--clip 1", "--clip"),
        ("--schedule cosine --epochs 2", "--schedule cosine, which ends with the last round,"),
        ("--mode local_sgd --local-slots keep", "--local-slots keep"),
        (
            "--mode local_sgd --overlap-steps 1 --local-slots keep",
            "--fragments, --overlap-steps or --mixing",
        ),
        ("a table", "a table"),
        ("a table --mode hybrid --node-size 2 --server-ranks 1,3,5", "one worker a node"),
        ("a table --mode hybrid --evict-after 2", "--evict-after"),
        ("a table --mode hybrid --servers 5", "a run of one worker"),
        ("one rank", "a run of one worker"),
    ],
)
def test_which_rounds_go_on_without_a_worker(words: str, known: str | tuple[int, ...]) -> None:
    """Which ranks may die, none of them a server or the first of a node, or why none may."""
    options = words.removeprefix("a table").removeprefix("one rank")
    n = 1 if words == "one rank" else RANKS
    job = job_of(f"--mode sync --on-death shrink {options}", True, words.startswith("a table"), n)
    if isinstance(known, tuple):
        refuse_shrink(job)
        assert survivable(job) == known
        assert keeps(job) == ("--node-size" in words)
        return
    with pytest.raises(UserError) as refused:
        refuse_shrink(job)
    told = f"on_death 'shrink' where {known} needs all ranks of a round, expected 'restart'; "
    assert str(refused.value).startswith(told)
