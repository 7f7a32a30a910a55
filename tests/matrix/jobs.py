"""Jobs of all modes, codecs and worlds, in a table by the oracle that judges them.

A line is a job: its name, its ranks, and its options; of a run in parts there are those of each.
``!`` is before quick jobs that both MPIs run, ``+`` before those that one runs; others are long.
`add` makes the runs of a job, which all share a world (`runs.Plan`).
"""

from collections.abc import Callable
from typing import Any

from launch import ROOT
from runs import (
    COUNT,
    ENDLESS,
    HERE,
    MODELS,
    SAVED,
    Plan,
    counting,
    few_digits,
    samples_file,
    thinned,
)

from mpips.codecs import CODECS


def parts(text: str) -> list[tuple[int, str]]:
    """Return the ranks and options of the parts of a run, from ``ranks options | ... | again``."""
    found = list[tuple[int, str]]()
    for part in " ".join(text.split()).split(" | "):
        ranks, _, options = part.partition(" ")
        found.append(found[-1] if part == "again" else (int(ranks), options))
    return found


N, EPOCHS, STEPS = 230, 2, 5  # N: divisible by no batch size below
TINY, TINY_EPOCHS = "--hidden 1 --batch-size 2", 80  # fewer samples and lines than owners
SAMPLES = {"hybrid": 128, "delayed": 512}
FEW = 301  # digits of a serial run
CLOCK_BATCHES, LINES = 64, 24
CLOCKS = f"{HERE / 'problems' / 'clocks.py'}"
ORIGINS, ORIGIN_STEPS = f"{HERE / 'problems' / 'origins.py'}:Origins", 40
FAULTY = f"{HERE / 'problems' / 'faulty.py'}"
CLICKS = str(ROOT / "jobs" / "clicks.svm")
TOPK = "--codec topk --topk-ratio 0.1"
LOCK = "--mode ssp --staleness-bound 0 --optimizer sgd --hidden 600"  # of one worker: nothing races
SGD = "--optimizer sgd --lr 0.3"  # error feedback goes with a linear rule
SUMS = f"--hidden 320,160 --schedule constant {SGD} --node-size 2"  # of slices that are packed
LOCAL = "--mode local_sgd --batch-size 8"
LOW_RANK = "--hidden 320,160 --optimizer adam --schedule constant --codec powersgd --node-size 2"
MOMENTUM = "--optimizer momentum --lr 0.02"
KEEP = "--local-slots keep --outer-momentum 0.9 --outer-nesterov --outer-lr 0.7"
PAUSE_S, FACTOR = 2e-3, 20.0  # what a gradient takes at least, and a slow worker's in its place
ROUND_WORDS = "--mode sync --batch-size 8 --checkpoint-every 5steps --keep 1000"
OFTEN = "--keep 100 --checkpoint-every 4steps"
# In double precision three shards of 26,000 parameters are large enough to be packed.
WIDE = "--hidden 26000 --keep 100 --checkpoint-every 6steps --batch-size 8"
ONCE = "--eval-every 0 --checkpoint-every 0"
DIGITS = f"{ROOT}/jobs/digits.toml --servers 1 --node-size 1 --checkpoint-every 0"
SUMMED_DIGITS = f"{ROOT}/jobs/digits-sync.toml --node-size 2 --hidden 400,200 --checkpoint-every 0"
COUNTED = {  # of jobs that count: the problem, options, and the epochs of a run in parts
    "counts": ("Counting", OFTEN, 0),
    "stops": ("Counting", f"--batch-size 8 {OFTEN}", 24),
    "backup": ("Counting", ROUND_WORDS, 20),
    "hybrid": (
        "TableMeanCounting",
        "--mode hybrid --batch-size 8 --keep 1000 --checkpoint-every 3steps",
        12,
    ),
    "residuals": ("SlowCounting", f"{WIDE} {TOPK}", 4),
    "replicas": ("Counting", f"--mode easgd {WIDE} --tau 2", 4),
    "means": ("MeanCounting", "--lr 32 --batch-size 8 --accumulate 4", 0),
    "delayed": ("SlowCounting", "--batch-size 8 --epochs 1", 0),
}
FIRST = {  # options of other jobs
    "rounds": f"--mode sync --optimizer momentum --lr 0.05 --hidden 24 --epochs 2 {ONCE}",
    "local": f"--mode local_sgd --hidden 24 --epochs 2 {ONCE} --optimizer adam --local-steps 6 "
    "--batch-size 8 --dtype float64",
    "elastic": f"--mode easgd --hidden 24 {ONCE}",
    "rows": f"--problem logistic_sparse --dataset {CLICKS} --mode sync --batch-size 23 --epochs 2",
    "codec": DIGITS,
    "summed": SUMMED_DIGITS,
}
WORKERS_OWN = "topk", "onebit"  # codecs of which each worker keeps a residual

TABLES = {
    "counts": f"""
      smallest world: 2 --servers 1
      consistent reads: 5 --servers 2 --batch-size 16 --read consistent --node-size 2
    ! pulls ahead by reply: 6 --servers 2 --batch-size 8 --node-size 2 --prefetch --far-read reply
      pulls ahead by get: 5 --servers 2 --batch-size 8 --node-size 1 --prefetch --far-read get
    ! means ahead: 8 --server-ranks 0,1 --batch-size 4 --node-size 2 --node-aggregation --prefetch
      with a bound: 6 --servers 2 --batch-size 4 --mode ssp --staleness-bound 2 --node-size 1
      in lock step: 8 --servers 1 --batch-size 115 --mode ssp --staleness-bound 0
    + one batch: 8 --servers 2 --batch-size 230
    + remote servers without a line: 6 --servers 3 --batch-size 2 --hidden 1 --node-size 1
      stalling checkpoints: 5 --servers 2 --batch-size 8 --snapshot stall
    + steps on nodes: 6 --servers 2 --steps {STEPS} --node-size 2
    """,
    "stops": f"""
      anywhere: 4 --servers 1 | 6 --servers 3 | 2 --servers 1 | 8 --servers 1 | 5 --servers 3
    ! on nodes: 6 --servers 3 --node-size 2 | 3 --servers 2 --node-size 1 | \
        6 --servers 1 --node-size 2 | 4 --servers 1 --window private
      with means of nodes: 6 --servers 2 --node-size 3 --node-aggregation | 5 --servers 2 | \
        6 --server-ranks 0,1 --node-size 2 --node-aggregation --read consistent | \
        8 --servers 2 --node-size 2 --node-aggregation
      in lock step: 6 --servers 3 --mode ssp --staleness-bound 0 --node-size 2 | \
        3 --servers 1 --mode async | 8 --servers 2 --mode ssp --staleness-bound 0 | \
        5 --servers 2 --mode ssp --staleness-bound 2 --node-size 1 --node-aggregation
      with more servers than lines: 6 --servers 4 {TINY} | 6 --servers 3 --node-size 1 {TINY} | \
        3 --servers 1 {TINY}
    """,
    "backup": """
    ! nodes of two: 6 --servers 2 --backup-workers 2 --node-size 2 --trace
      accumulated: 5 --servers 2 --backup-workers 1 --accumulate 2 --node-size 2
      fewer batches than a round needs: 8 --servers 1 --backup-workers 1 --batch-size 115
      steps: 5 --servers 2 --backup-workers 1 --steps 9
    + stops: 5 --servers 2 --backup-workers 1 | 6 --servers 3 --backup-workers 1 --node-size 2 | \
        4 --servers 1 --backup-workers 2 --node-size 1 | 4 --servers 2 --backup-workers 0 | \
        6 --servers 2 --backup-workers 2
    """,
    # Each rate is the samples of a round, so that a round adds one for each of them.
    "hybrid": """
    ! stops: 5 --servers 1 --lr 32 --checkpoint-rows changed | 6 --servers 2 --node-size 2 --lr 32 \
        | 4 --servers 2 --node-size 1 --lr 16 --staleness-bound 0 | \
        4 --servers 2 --window private --lr 16 --snapshot stall | 2 --servers 1 --lr 8
    """,
    # Of three workers or more on two nodes or more.
    "residuals": """
      ssp: 5 --servers 2 --node-size 2 --mode ssp --staleness-bound 1
      ahead: 6 --servers 2 --node-size 2 --prefetch --far-read reply
      ahead by get: 5 --servers 2 --node-size 1 --prefetch --far-read get
      stalling: 5 --servers 2 --node-size 2 --snapshot stall
      carried, bounded: 6 --servers 2 --node-size 3 --node-aggregation --mode ssp \
--staleness-bound 1
      stopped ssp: 5 --servers 2 --node-size 2 --mode ssp --staleness-bound 1 | again
    + stopped, carried: 6 --servers 1 --node-size 3 --node-aggregation | again
    """,
    # What is done about stale gradients, checked by the problem: by one worker, the last rank.
    "compensated": """
    ! local and remote: 4 --server-ranks 0,1,2 --node-size 2
      by get: 2 --server-ranks 0 --node-size 1 --far-read get
    + adaptive and remote: 3 --server-ranks 0,1 --delay-adaptive --node-size 1
      with a bound: 3 --server-ranks 0,1 --node-size 1 --mode ssp --staleness-bound 1
    """,
    "means": """
    + remote: 5 --servers 2 --node-size 2
      one worker: 2 --servers 1 --checkpoint-every 3steps
    """,
    # The worker that is slowed is named first.
    "delayed": """
    + async: 4 --inject-delay 1:20 --servers 1
      sync with servers: 4 --inject-delay 0:20 --mode sync --servers 1 --reduce allreduce
      by reply: 4 --inject-delay 0:20 --servers 2 --node-size 2 --node-aggregation --far-read reply
    """,
    "replicas": """
      remote: 5 --servers 2 --tau 3 --node-size 2 | again
    + carried: 6 --servers 2 --node-size 3 --node-aggregation | again
      private: 3 --servers 1 --tau 4 --window private | again
      other worlds: 4 --servers 1 | 6 --servers 3 | 5 --servers 2
    """,
    "twins": f"""
      adam: 5 --optimizer adam --servers 2 --schedule step --step-every 20
    ! nodes of two: 5 --optimizer nesterov --clip 0.1 --node-size 2 --epochs 3
      allreduce: 4 --optimizer adamw --reduce allreduce --weight-decay 0.1
    + accumulated: 3 --hidden 8 --batch-size 8 --accumulate 4 --epochs 3
      double: 1 --optimizer rmsprop --dtype float64 --batch-size 64
      stalled: 4 --optimizer adam --snapshot stall --checkpoint-every 5steps --epochs 3
    + dgc: 3 {LOCK} --codec topk --topk-momentum 0.9 --topk-warmup 90 --servers 2 --node-size 1
      onebit: 3 {LOCK} --codec onebit --servers 2 --node-size 2 --dtype float64
      easgd adam: 3 --mode easgd --hidden 600 --optimizer adam --tau 3 --servers 2 \
--schedule step --step-every 9
      easgd single: 2 --mode easgd --hidden 600 --optimizer momentum --tau 2 --snapshot stall
    ! rounds by dgc: 4 {SUMS} --codec topk --topk-momentum 0.9 --topk-warmup 30 --snapshot stall
      rounds by onebit: 5 {SUMS} --codec onebit --servers 1
    + rounds of uneven nodes: 5 {LOW_RANK} --servers 1 --clip 1
    + rounds by int8: 4 {SUMS} --codec int8 --pull-codec int8
      local, kept: 4 {LOCAL} --optimizer adam --local-steps 3 --local-slots keep
    + local fragments, kept: 4 {LOCAL} --optimizer adam --local-steps 6 --fragments 3 \
        --overlap-steps 1 --local-slots keep --outer-momentum 0.5 --node-size 2
      local, kept, packed: 2 {LOCAL} --optimizer adam --hidden 1024 --local-steps 4 \
        --fragments 2 --overlap-steps 1 --local-slots keep --codec int4 --node-size 1
      local, kept, stall: 4 {LOCAL} --optimizer momentum --local-steps 3 --outer-momentum 0.5 \
        --local-slots keep --servers 1 --snapshot stall --checkpoint-every 2steps
      local, servers: 5 {LOCAL} --optimizer momentum --local-steps 4 --servers 2 --node-size 2
    """,
    # A schedule that ends with the run: its parts.
    "schedules": """
      fewer ranks: 6 --mode sync --epochs 2 | 2 --epochs 4
      and again: 4 --mode async --epochs 2 | 4 --mode sync --servers 0 --epochs 4 | 6 --epochs 6
      more ranks, steps: 2 --mode sync --steps 20 | 6 --steps 30
    + servers, steps: 4 --mode async --steps 20 | 5 --mode sync --servers 0 --steps 40
    """,
    # With every number of servers in every world: tests/mpi/test_rounds.py.
    "rounds": """
    ! one rank: 1 --servers 0 --batch-size 60 --dtype float64
      one worker: 2 --servers 1 --node-size 1 --batch-size 60 --dtype float64
      nodes of one: 3 --servers 0 --node-size 1 --batch-size 23 --dtype float64 --clip 0.2
    + nodes of two: 4 --servers 0 --node-size 2 --batch-size 23 --dtype float32
    ! servers: 4 --servers 2 --node-size 2 --batch-size 23 --dtype float64 --clip 0.2
      allreduce on nodes: 4 --servers 0 --node-size 2 --reduce allreduce --batch-size 23
      eight: 8 --servers 2 --node-size 2 --batch-size 23 --dtype float64
    ! accumulated, nodes: 4 --batch-size 10 --accumulate 3 --node-size 2 --dtype float64 --clip 0.2
      accumulated, allreduce: 2 --batch-size 5 --accumulate 9 --reduce allreduce --dtype float32
    """,
    "local": f"""
      sgd: 2 --optimizer sgd --lr 0.1 --local-steps 4 --batch-size 16
      alone: 1 --local-steps 7 --batch-size 16
    + nodes: 5 {MOMENTUM} --local-steps 4 --node-size 2 --servers 1 --outer-momentum 0.3 --clip 0.5
      allreduce: 3 --outer-momentum 0.5 --reduce allreduce --accumulate 2 --schedule cosine
    + kept: 3 --local-slots keep --outer-momentum 0.4 --outer-nesterov --outer-lr 0.7
    ! fragments, overlap: 4 --local-steps 8 --fragments 2 --overlap-steps 3 --mixing 0.6 {KEEP} \
        --node-size 2 --schedule cosine --warmup-steps 2
      fragments on nodes: 5 {MOMENTUM} --fragments 3 --overlap-steps 2 --local-slots keep \
        --node-size 2 --servers 1 --outer-momentum 0.3 --clip 0.5 --dtype float32
      fragments, packed: 2 --hidden 512 --fragments 2 --overlap-steps 1 --batch-size 16 {KEEP} \
        --codec fp16 --node-size 1
      tiny: 4 --optimizer sgd --local-steps 3 --batch-size 100
    """,
    "elastic": f"""
      adam: 3 --optimizer adam --tau 5 --servers 2 --elastic-rate 0.3 --dtype float64 --epochs 2
      accumulated: 2 {MOMENTUM} --tau 3 --accumulate 2 --schedule cosine --dtype float64 --epochs 2
    + resumed: 2 --optimizer adam --tau 6 --batch-size 8 --dtype float64 --epochs 1 | \
        2 --optimizer adam --tau 6 --batch-size 8 --dtype float64 --epochs 3
    """,
    # A last batch of an epoch is smaller than the others.
    "rows": """
    + one node: 4 --servers 0 --dtype float64 --optimizer adagrad --lr 0.1 --clip 0.05
    ! servers: 4 --servers 2 --dtype float32 --optimizer sgd --lr 0.5 --eval-every 1
    + nodes of one: 3 --servers 0 --dtype float64 --optimizer adagrad --lr 0.1 --node-size 1
    ! nodes of two: 4 --servers 1 --dtype float64 --optimizer sgd --lr 0.5 --node-size 2 --clip 0.05
    + a codec: 4 --servers 0 --dtype float32 --optimizer sgd --lr 0.5 --node-size 2 --codec fp16
    + hybrid: 3 --mode hybrid --servers 2 --staleness-bound 0 --dtype float64 --optimizer adagrad \
--lr 0.1 --node-size 1
    """,
    "codec": "\n".join(
        f"{'+' if name == 'int8' else ''} {name}: 3 --codec {name} "
        + (f"{SGD} " if name in WORKERS_OWN else "")
        + f"--epochs {5 if name != 'topk' else 20}"
        for name in CODECS
    )
    + """
      none: 3 --codec none --epochs 5
      pull fp16: 3 --pull-codec fp16 --epochs 5
      pull int8: 3 --pull-codec int8 --epochs 5
    ! both ways: 6 --codec int8 --pull-codec int8 --prefetch --node-size 2 --epochs 20
      dgc: 3 --codec topk --topk-momentum 0.9 --topk-warmup 150 --optimizer sgd --lr 0.05 \
--epochs 20
      float64: 3 --codec int8 --dtype float64 --epochs 5
    + auto: 3 --codec auto --pull-codec auto --epochs 5
      aggregated: 6 --codec onebit --optimizer sgd --lr 0.3 --node-size 2 --node-aggregation \
--epochs 20
    """,
    "summed": f"""
    ! auto: 4 --codec auto --pull-codec auto --epochs 4
      signs: 4 --codec onebit {SGD} --epochs 6
      wide: 4 --hidden 256,256 --epochs 8
      low rank: 4 --hidden 256,256 --epochs 8 --codec powersgd
      low rank, three nodes: 4 --hidden 256,256 --epochs 3 --codec powersgd | \
        6 --hidden 256,256 --epochs 8 --codec powersgd
      low rank, servers: 5 --hidden 256,256 --epochs 8 --codec powersgd --servers 1 --clip 1
      backup: 4 --codec int8 --pull-codec fp16 --servers 1 --backup-workers 1 --epochs 4
    """,
    "nan": f"""
    + pushed: 3 {DIGITS} --codec int8
    ! summed: 4 {SUMMED_DIGITS} --epochs 4 --codec int8
    """,
    # The number of servers, which are the first ranks, and the worker that is slow, are first.
    "clocked": """
    + near: 5 2 2 --staleness-bound 2
      nodes of two: 6 2 3 --staleness-bound 2 --node-size 2
      consistent: 6 2 5 --staleness-bound 1 --node-size 2 --read consistent
    + means of nodes: 6 2 4 --staleness-bound 1 --node-size 3 --node-aggregation
      private: 4 1 2 --staleness-bound 2 --window private
      nobody slow: 5 1 9 --staleness-bound 3
    ! rows: 6 2 3 --staleness-bound 2 --node-size 2
      rows in lock step: 4 1 2 --staleness-bound 0 --node-size 1
    ! hybrid: 6 2 9 --mode hybrid --staleness-bound 1 --node-size 2 --lr 4
      hybrid in lock step: 5 1 3 --mode hybrid --staleness-bound 0 --node-size 3 --lr 4
    """,
}


def read(tables: dict[str, str]) -> tuple[dict[str, list[tuple[int, str]]], set[str], set[str]]:
    """Return the parts of each job, and the names of those that are quick, and with both MPIs."""
    jobs, quick, both = dict[str, list[tuple[int, str]]](), set[str](), set[str]()
    for kind, text in tables.items():
        for line in filter(None, map(str.strip, text.split("\n"))):
            name, _, options = line.partition(":")
            full = f"{kind}, {name.lstrip('!+ ')}"
            jobs[full] = parts(options)
            quick |= {full} if name[0] in "!+" else set()
            both |= {full} if name[0] == "!" else set()
    return jobs, quick, both


JOBS, QUICK, BOTH = read(TABLES)


def text_of(name: str) -> str:
    """Return the options of a job, of the first part of its run."""
    return JOBS[name][0][1]


def samples_of(name: str) -> int:
    """Return the training samples of a job: fewer than a cache line where it is so tiny."""
    return 6 if "--hidden 1 " in f"{text_of(name)} " else SAMPLES.get(name.partition(",")[0], N)


def epochs_of(name: str) -> int:
    """Return the epochs of a job that counts: of one in parts more than its stops take."""
    if len(JOBS[name]) == 1:
        return EPOCHS
    return TINY_EPOCHS if samples_of(name) < 100 else COUNTED[name.partition(",")[0]][2]


def add_parts(plan: Plan, name: str, words: list[str]) -> None:
    """Add the parts of a run, each of which resumes the one before."""
    for k, (ranks, text) in enumerate(JOBS[name]):
        plan.add(name, ranks, [*words, *text.split(), *["--resume"] * (k > 0)])


def add_counted(plan: Plan, name: str) -> None:
    """Add a run of a problem that counts, and stops it at random in all parts but the last."""
    kind, words, _ = COUNTED[name.partition(",")[0]]
    if len(JOBS[name]) > 1:
        kind = f"Stopping{kind.removeprefix('Slow')}"
    elif "--mode sync" in text_of(name):  # of a round it is the mean that counts
        kind = "MeanCounting"
    first = [*counting(samples_file(plan.folder, samples_of(name)), kind=kind), *words.split()]
    for k, (ranks, text) in enumerate(JOBS[name]):
        last = k + 1 == len(JOBS[name])
        length = ["--epochs", str(epochs_of(name) if last else ENDLESS)]
        more = [] if "--steps" in text or "--epochs" in words else length
        more += ["--resume"] * (k > 0)
        plan.add(name, ranks, [*first, *text.split(), *more], 0 if last else SAVED)


def files_of(data: str) -> list[str]:
    """Return the options that name files of `samples_file`."""
    return ["--dataset", data, "--test-dataset", data.replace("train-", "test-")]


def add_compensated(plan: Plan, name: str) -> None:
    words = ["--problem", ORIGINS, *COUNT, *files_of(samples_file(plan.folder, N))]
    words += f"--hidden 67 --steps {ORIGIN_STEPS} --delay-compensation 0.7 --eval-every 0".split()
    add_parts(plan, name, words)


def add_twins(plan: Plan, name: str) -> None:
    """Add a whole run, and one that is stopped at random, twice where steps are local."""
    ((ranks, text),) = JOBS[name]
    words = f"--problem {MODELS}:StoppingMLP --mode sync --hidden 16 --batch-size 24 --keep 100 "
    words += f"--eval-every 0 --epochs 2 {text}"
    plan.add(f"{name} whole", ranks, words.split())
    for k in range(1 + ("local" in name)):
        more = ["--epochs", str(ENDLESS), *["--resume"] * k]
        plan.add(f"{name} parts", ranks, [*words.split(), *more], SAVED)
    plan.add(f"{name} parts", ranks, [*words.split(), "--resume"])


def add_schedules(plan: Plan, name: str) -> None:
    words = f"{ROOT}/jobs/digits-sync.toml --schedule cosine --eval-every 0 --keep 9"
    for k, (ranks, text) in enumerate(JOBS[name]):
        first = [*words.split(), "--checkpoint-every", "0"]
        plan.add(name, ranks, [*(["--resume"] if k else first), *text.split()])


def words_of(plan: Plan, name: str) -> tuple[int, list[str]]:
    """Return the ranks and the options of the last part of a job."""
    ranks, text = JOBS[name][-1]
    return ranks, [*first_of(plan, name), *text.split()]


def first_of(plan: Plan, name: str) -> list[str]:
    kind = name.partition(",")[0]
    return [*FIRST[kind].split(), *(few_digits(plan.folder, FEW) if kind == "rounds" else [])]


def add_first(plan: Plan, name: str) -> None:
    add_parts(plan, name, first_of(plan, name))


def add_nan(plan: Plan, name: str) -> None:
    ((ranks, text),) = JOBS[name]
    problem = ["--problem", f"{FAULTY}:NanGradientOfMlp"]
    plan.add(name, ranks, [*text.split(), *problem], code=1)


def clocks(data: str, ranks: int, text: str, kind: str = "Clocks") -> list[str]:
    """Return a job of counted clocks: servers, the slow worker and options are in `text`."""
    servers, slow, *more = text.split()
    where = ["--server-ranks", ",".join(map(str, range(int(servers))))]
    size = ["--hidden", f"{LINES},{ranks - int(servers)},{slow}", "--batch-size", "1"]
    once = ["--epochs", "1", "--no-shuffle"]
    return ["--problem", f"{CLOCKS}:{kind}", *COUNT, *files_of(data), *where, *size, *once, *more]


def add_clocked(plan: Plan, name: str) -> None:
    ((ranks, text),) = JOBS[name]
    data = samples_file(plan.folder, CLOCK_BATCHES)
    kind = "HybridRows" if "hybrid" in name else "ClockRows" if "rows" in name else "Clocks"
    words = ["--mode", "ssp", *clocks(data, ranks, text, kind), "--checkpoint-every", "7steps"]
    plan.add(name, ranks, words)


def add(plan: Plan, name: str) -> None:
    """Add the runs of a job that is in `JOBS`."""
    kind = name.partition(",")[0]
    how = "counted" if kind in COUNTED else "first" if kind in FIRST else kind
    adds: Callable[[Plan, str], None] = globals()[f"add_{how}"]
    adds(plan, name)


def of_matrix(*kinds: str) -> list[Any]:
    """Return the jobs of some oracles as parameters of a test; most are long."""
    names = [name for name in JOBS if name.partition(",")[0] in kinds]
    return thinned(names, QUICK.intersection(names), BOTH.intersection(names))
