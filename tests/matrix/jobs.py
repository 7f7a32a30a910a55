"""Jobs of all modes, codecs and worlds, in a table by the oracle that judges them.

A job is a line: its name, its ranks, and its options. `add` makes the runs of one, which all share
a world (`runs.Plan`).
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
    cases,
    counting,
    few_digits,
    samples_file,
    thinned,
)

from mpips.codecs import CODECS


def parts(text: str) -> list[tuple[int, str]]:
    """Return the ranks and options of the parts of a run, from ``ranks options | ...``."""
    found = (part.split(maxsplit=1) for part in " ".join(text.split()).split("|"))
    return [(int(ranks), options) for ranks, options in found]


N, EPOCHS, STEPS = 230, 2, 5  # N: divisible by no batch size below
LONG = {6: 80, N: 24}  # epochs: of 3 and 29 batches, and more than all stops of a run take
FEW = 301  # digits of a serial run
CLOCK_BATCHES, LINES = 64, 24
CLOCKS = f"{HERE / 'problems' / 'clocks.py'}"
ORIGINS, ORIGIN_STEPS = f"{HERE / 'problems' / 'origins.py'}:Origins", 40
FAULTY = f"{HERE / 'problems' / 'faulty.py'}"
TOPK = "--codec topk --topk-ratio 0.1"
LOCK = "--mode ssp --staleness-bound 0 --optimizer sgd --hidden 600"  # of one worker: nothing races
SGD = "--optimizer sgd --lr 0.3"  # error feedback goes with a linear rule
SUMS = f"--hidden 320,160 --schedule constant {SGD} --node-size 2"  # of slices that are packed
LOW_RANK = "--hidden 320,160 --optimizer adam --schedule constant --codec powersgd --node-size 2"
OUTER = "--outer-momentum 0.9 --outer-nesterov --outer-lr 0.7"
KEEP = f"--local-slots keep {OUTER}"

COUNTS = cases(f"""
  smallest world: 2 --servers 1
  several servers: 5 --servers 3 --batch-size 7
  default servers: 8 --batch-size 16
  nodes of two: 6 --servers 3 --batch-size 16 --node-size 2
  unequal nodes: 5 --servers 2 --batch-size 9 --node-size 2
  nodes of servers only: 6 --server-ranks 0,1 --batch-size 16 --node-size 2
  private windows: 4 --servers 2 --batch-size 16 --window private
  consistent reads from other nodes: 5 --servers 2 --batch-size 16 --read consistent --node-size 2
  pulls ahead by reply: 6 --servers 2 --batch-size 8 --node-size 2 --prefetch --far-read reply
  pulls ahead by get: 5 --servers 2 --batch-size 8 --node-size 1 --prefetch --far-read get
  means of nodes: 6 --servers 2 --batch-size 4 --node-size 3 --node-aggregation
  means ahead: 8 --server-ranks 0,1 --batch-size 4 --node-size 2 --node-aggregation --prefetch
  in lock step on nodes: 5 --servers 2 --batch-size 8 --mode ssp --staleness-bound 0 --node-size 2
  with a bound on nodes: 6 --servers 2 --batch-size 4 --mode ssp --staleness-bound 2 --node-size 1
  two batches in lock step: 8 --servers 1 --batch-size 115 --mode ssp --staleness-bound 0
  one batch: 8 --servers 2 --batch-size 230
  more servers than cache lines: 6 --servers 3 --batch-size 2 --hidden 1
  remote servers without a line: 6 --servers 3 --batch-size 2 --hidden 1 --node-size 1
  stalling checkpoints: 5 --servers 2 --batch-size 8 --snapshot stall
  steps on nodes: 6 --servers 2 --steps {STEPS} --node-size 2
""")
# The parts of a run; all but the last are stopped at a random step.
STOPS = {
    "anywhere": parts(
        "4 --servers 1 | 6 --servers 3 | 2 --servers 1 | 8 --servers 1 | 5 --servers 3"
    ),
    "on nodes": parts("""6 --servers 3 --node-size 2 | 3 --servers 2 --node-size 1 |
      6 --servers 1 --node-size 2 | 4 --servers 1 --window private"""),
    "with means of nodes": parts("""6 --servers 2 --node-size 3 --node-aggregation | 5 --servers 2 |
      6 --servers 2 --server-ranks 0,1 --node-size 2 --node-aggregation --read consistent |
      8 --servers 2 --node-size 2 --node-aggregation"""),
    "in lock step": parts("""6 --servers 3 --mode ssp --staleness-bound 0 --node-size 2 |
      3 --servers 1 --mode async | 8 --servers 2 --mode ssp --staleness-bound 0 |
      5 --servers 2 --mode ssp --staleness-bound 2 --node-size 1 --node-aggregation"""),
    "with more servers than lines": parts("""6 --servers 4 --hidden 1 |
      6 --servers 3 --node-size 1 | 3 --servers 1"""),
}
BACKUP = cases("""
  one backup: 6 --servers 2 --backup-workers 1
  nodes of one: 5 --servers 2 --backup-workers 1 --node-size 1
  nodes of two: 6 --servers 2 --backup-workers 2 --node-size 2 --trace
  all but one: 5 --servers 1 --backup-workers 3
  private: 4 --servers 1 --backup-workers 1 --window private
  accumulated: 5 --servers 2 --backup-workers 1 --accumulate 2 --node-size 2
  fewer batches than a round needs: 8 --servers 1 --backup-workers 1 --batch-size 115
  steps: 5 --servers 2 --backup-workers 1 --steps 9
""")
BACKUP_STOPS = parts("""5 --servers 2 --backup-workers 1 |
  6 --servers 3 --backup-workers 1 --node-size 2 | 4 --servers 1 --backup-workers 2 --node-size 1 |
  4 --servers 2 --backup-workers 0 | 6 --servers 2 --backup-workers 2""")
# Each rate is the samples of a round, so that a round adds one for each of them.
HYBRID_STOPS = parts("""5 --servers 1 --lr 32 --checkpoint-rows changed |
  6 --servers 2 --node-size 2 --lr 32 | 4 --servers 2 --node-size 1 --lr 16 --staleness-bound 0 |
  4 --servers 2 --window private --lr 16 --snapshot stall | 2 --servers 1 --lr 8""")
# By `TOPK`, of three workers or more on two nodes or more.
RESIDUALS = cases("""
  ssp: 5 --servers 2 --node-size 2 --mode ssp --staleness-bound 1
  ahead: 6 --servers 2 --node-size 2 --prefetch --far-read reply
  ahead by get: 5 --servers 2 --node-size 1 --prefetch --far-read get
  stalling: 5 --servers 2 --node-size 2 --snapshot stall
  consistent: 5 --servers 2 --node-size 2 --read consistent
  a straggler: 4 --servers 1 --node-size 2 --inject-delay 1:30
  carried: 6 --servers 1 --node-size 3 --node-aggregation
  carried, bounded: 6 --servers 2 --node-size 3 --node-aggregation --mode ssp --staleness-bound 1
  stopped ssp: 5 --servers 2 --node-size 2 --mode ssp --staleness-bound 1
  stopped carried: 6 --servers 1 --node-size 3 --node-aggregation
""")
# What is done about stale gradients, and in `COMPENSATED` checked by the problem: by one worker.
COMPENSATED = cases("""
  near: 3 --servers 2
  remote: 3 --servers 2 --node-size 1
  local and remote: 4 --servers 3 --node-size 2
  by get: 2 --servers 1 --node-size 1 --far-read get
  adaptive: 3 --servers 2 --delay-adaptive
  adaptive and remote: 3 --servers 2 --delay-adaptive --node-size 1
  with a bound: 3 --servers 2 --node-size 1 --mode ssp --staleness-bound 1
""")
MEANS = cases("""
  near: 4 --servers 2
  remote: 5 --servers 2 --node-size 2
  one worker: 2 --servers 1 --checkpoint-every 3steps
""")
PAUSE_S, FACTOR = 2e-3, 20.0  # what a gradient takes at least, and a slow worker's in its place
DELAYED = {  # ranks, the worker that is slowed, options
    "async": (4, 1, "--servers 1"),
    "sync": (4, 3, "--mode sync"),
    "sync with servers": (4, 0, "--mode sync --servers 1 --reduce allreduce"),
    "by get": (4, 2, "--servers 1 --node-size 2 --prefetch --far-read get"),
    "by reply": (4, 0, "--servers 2 --node-size 2 --node-aggregation --far-read reply"),
}
REPLICAS = cases("""
  near: 5 --servers 2 --tau 2
  remote: 5 --servers 2 --tau 3 --node-size 2
  carried: 6 --servers 2 --tau 2 --node-size 3 --node-aggregation
  consistent: 4 --servers 1 --tau 4 --read consistent --node-size 2
  private: 3 --servers 1 --tau 4 --window private
""")
OTHER_WORLDS = parts("4 --servers 1 | 6 --servers 3 | 5 --servers 2")  # replicas begin anew
TWINS = cases(f"""
  momentum: 4 --optimizer momentum
  adam: 5 --optimizer adam --servers 2 --schedule step --step-every 20
  nodes of two: 5 --optimizer nesterov --clip 0.1 --node-size 2 --epochs 3
  nodes of one: 3 --optimizer adagrad --node-size 1 --servers 1
  allreduce: 4 --optimizer adamw --reduce allreduce --weight-decay 0.1
  accumulated: 3 --hidden 8 --batch-size 8 --accumulate 4 --epochs 3
  double: 1 --optimizer rmsprop --dtype float64 --batch-size 64
  stalled: 4 --optimizer adam --snapshot stall --checkpoint-every 5steps --epochs 3
  topk: 2 {LOCK} --codec topk --topk-ratio 0.1 --node-size 1
  dgc: 3 {LOCK} --codec topk --topk-momentum 0.9 --topk-warmup 90 --servers 2 --node-size 1
  onebit: 3 {LOCK} --codec onebit --servers 2 --node-size 2 --dtype float64
  easgd: 2 --mode easgd --hidden 600 --tau 2
  easgd adam: 3 --mode easgd --hidden 600 --optimizer adam --tau 3 --servers 2 --schedule step \
--step-every 9
  easgd single: 2 --mode easgd --hidden 600 --optimizer momentum --tau 2 --snapshot stall
  rounds by topk: 4 {SUMS} --codec topk
  rounds by dgc: 4 {SUMS} --codec topk --topk-momentum 0.9 --topk-warmup 30 --snapshot stall
  rounds by onebit: 5 {SUMS} --codec onebit --servers 1
  rounds by powersgd: 4 {LOW_RANK}
  rounds of uneven nodes: 5 {LOW_RANK} --servers 1 --clip 1
  rounds by int8: 4 {SUMS} --codec int8 --pull-codec int8
  local: 4 --mode local_sgd --optimizer adam --local-steps 3 --outer-momentum 0.5
  local, kept: 4 --mode local_sgd --optimizer adam --local-steps 3 --local-slots keep
  local fragments, kept: 4 --mode local_sgd --optimizer adam --local-steps 6 --fragments 3 \
--overlap-steps 1 --local-slots keep --outer-momentum 0.5 --node-size 2
  local, kept, packed: 2 --mode local_sgd --optimizer adam --hidden 1024 --local-steps 4 \
--fragments 2 --overlap-steps 1 --local-slots keep --codec int4 --node-size 1
  local, kept, stall: 4 --mode local_sgd --optimizer momentum --local-steps 3 --local-slots keep \
--servers 1 --snapshot stall --checkpoint-every 2steps --outer-momentum 0.5
  local, servers: 5 --mode local_sgd --optimizer momentum --local-steps 4 --servers 2 --node-size 2
""")
# A schedule that ends with the run: its parts.
SCHEDULES = {
    "fewer ranks": parts("6 --mode sync --epochs 2 | 2 --epochs 4"),
    "and again": parts("""4 --mode async --epochs 2 | 4 --mode sync --servers 0 --epochs 4 |
      6 --epochs 6"""),
    "more ranks, steps": parts("2 --mode sync --steps 20 | 6 --steps 30"),
    "servers, steps": parts("4 --mode async --steps 20 | 5 --mode sync --servers 0 --steps 40"),
}
LOCAL = cases(f"""
  sgd: 2 --optimizer sgd --lr 0.1 --local-steps 4 --batch-size 16 --dtype float64
  adam: 3 --optimizer adam --local-steps 5 --batch-size 8 --dtype float64
  single: 3 --optimizer momentum --lr 0.02 --local-steps 3 --batch-size 32
  alone: 1 --optimizer adam --local-steps 7 --batch-size 16 --dtype float64
  nodes: 5 --optimizer momentum --lr 0.02 --local-steps 4 --batch-size 8 --node-size 2 --servers 1 \
--outer-momentum 0.3 --clip 0.5 --dtype float64
  allreduce: 3 --optimizer adam --local-steps 6 --batch-size 8 --outer-momentum 0.5 \
--reduce allreduce --accumulate 2 --schedule cosine --dtype float64
  kept: 3 --optimizer adam --local-steps 6 --batch-size 8 --local-slots keep --outer-momentum 0.4 \
--outer-nesterov --outer-lr 0.7 --dtype float64
  packed: 3 --optimizer adam --hidden 512 --local-steps 6 --batch-size 16 {KEEP} --codec fp16 \
--node-size 1 --dtype float64
  fragments: 3 --optimizer adam --local-steps 6 --fragments 3 --batch-size 8 {KEEP} --dtype float64
  fragments, overlap: 4 --optimizer adam --local-steps 8 --fragments 2 --overlap-steps 3 \
--mixing 0.6 --batch-size 8 {KEEP} --node-size 2 --schedule cosine --warmup-steps 2 --dtype float64
  fragments on nodes: 5 --optimizer momentum --lr 0.02 --local-steps 6 --fragments 3 \
--overlap-steps 2 --batch-size 8 --local-slots keep --node-size 2 --servers 1 \
--outer-momentum 0.3 --clip 0.5
  fragments, packed: 2 --optimizer adam --hidden 512 --local-steps 6 --fragments 2 \
--overlap-steps 1 --batch-size 16 {KEEP} --codec fp16 --node-size 1 --dtype float64
  tiny: 4 --optimizer sgd --local-steps 3 --batch-size 100 --dtype float64
""")
ELASTIC = cases("""
  sgd: 2 --optimizer sgd --tau 4 --batch-size 16 --dtype float64 --epochs 2
  adam: 3 --optimizer adam --tau 5 --servers 2 --elastic-rate 0.3 --dtype float64 --epochs 2
  single: 2 --optimizer momentum --lr 0.02 --tau 3 --clip 0.5 --epochs 2
  accumulated: 2 --optimizer momentum --lr 0.02 --tau 3 --accumulate 2 --schedule cosine \
--dtype float64 --epochs 2
  resumed: 2 --optimizer adam --tau 6 --batch-size 8 --dtype float64 --epochs 3
""")
CLICKS = str(ROOT / "jobs" / "clicks.svm")
# A last batch of an epoch is smaller than the others.
ROWS = cases("""
  one rank: 1 --servers 0 --dtype float64 --optimizer adagrad --lr 0.1
  one node: 4 --servers 0 --dtype float64 --optimizer adagrad --lr 0.1 --clip 0.05
  servers: 4 --servers 2 --dtype float32 --optimizer sgd --lr 0.5 --eval-every 1
  nodes of one: 3 --servers 0 --dtype float64 --optimizer adagrad --lr 0.1 --node-size 1
  nodes of two: 4 --servers 1 --dtype float64 --optimizer sgd --lr 0.5 --node-size 2 --clip 0.05
  a codec: 4 --servers 0 --dtype float32 --optimizer sgd --lr 0.5 --node-size 2 --codec fp16
  hybrid: 3 --mode hybrid --servers 2 --staleness-bound 0 --dtype float64 --optimizer adagrad \
--lr 0.1 --node-size 1
""")


# With every number of servers in every world: tests/mpi/test_rounds.py.
ROUNDS = cases("""
  one rank: 1 --servers 0 --batch-size 60 --dtype float64
  one node: 3 --servers 0 --batch-size 23 --dtype float32 --clip 0.2
  one worker: 2 --servers 1 --node-size 1 --batch-size 60 --dtype float64
  nodes of one: 3 --servers 0 --node-size 1 --batch-size 23 --dtype float64 --clip 0.2
  nodes of two: 4 --servers 0 --node-size 2 --batch-size 23 --dtype float32
  servers: 4 --servers 2 --node-size 2 --reduce shared --batch-size 23 --dtype float64 --clip 0.2
  allreduce: 3 --servers 1 --reduce allreduce --batch-size 23 --dtype float64
  allreduce on nodes: 4 --servers 0 --node-size 2 --reduce allreduce --batch-size 23
  eight: 8 --servers 2 --node-size 2 --batch-size 23 --dtype float64
  accumulated: 3 --batch-size 8 --accumulate 4 --dtype float64
  accumulated, servers: 4 --batch-size 23 --accumulate 2 --servers 1 --dtype float32
  accumulated, nodes: 4 --batch-size 10 --accumulate 3 --node-size 2 --dtype float64 --clip 0.2
  accumulated, allreduce: 2 --batch-size 5 --accumulate 9 --reduce allreduce --dtype float32
""")
CODEC_JOBS = {
    **{name: f"--codec {name} {SGD if name in ('topk', 'onebit') else ''}" for name in CODECS},
    "none": "--codec none",
    **{f"pull {name}": f"--pull-codec {name}" for name in ("fp16", "bf16", "int8")},
    "both ways": "--codec int8 --pull-codec int8 --prefetch --node-size 2",
    "dgc": "--codec topk --topk-momentum 0.9 --topk-warmup 150 --optimizer sgd --lr 0.05",
    "float64": "--codec int8 --dtype float64",
    "auto": "--codec auto --pull-codec auto",
    "aggregated": f"--codec onebit {SGD} --node-size 2 --node-aggregation",
}
SHORT = {*CODECS, "none", "float64", "auto", *(n for n in CODEC_JOBS if "pull" in n)} - {"topk"}
SUMMED = cases(f"""
  auto: 4 --codec auto --pull-codec auto
  signs: 4 --codec onebit {SGD} --epochs 6
  wide: 4 --hidden 256,256 --epochs 8
  low rank: 4 --hidden 256,256 --epochs 8 --codec powersgd
  low rank, servers: 5 --hidden 256,256 --epochs 8 --codec powersgd --servers 1 --clip 1
  backup: 4 --codec int8 --pull-codec fp16 --servers 1 --backup-workers 1
""")
NAN = {"pushed int8": (3, "int8"), "summed int8": (4, "int8"), "summed powersgd": (4, "powersgd")}
NOBODY = 9
CLOCKED = {  # ranks, servers, slow rank, options
    "near": (5, 2, 2, "--staleness-bound 2"),
    "lock step": (5, 1, 4, "--staleness-bound 0"),
    "nodes of one": (5, 2, 4, "--staleness-bound 1 --node-size 1"),
    "nodes of two": (6, 2, 3, "--staleness-bound 2 --node-size 2"),
    "lock step on nodes": (6, 2, 2, "--staleness-bound 0 --node-size 2"),
    "consistent": (6, 2, 5, "--staleness-bound 1 --node-size 2 --read consistent"),
    "means of nodes": (6, 2, 4, "--staleness-bound 1 --node-size 3 --node-aggregation"),
    "private": (4, 1, 2, "--staleness-bound 2 --window private"),
    "nobody slow": (5, 1, NOBODY, "--staleness-bound 3"),
    "rows": (6, 2, 3, "--staleness-bound 2 --node-size 2"),
    "rows, nobody slow": (5, 2, NOBODY, "--staleness-bound 1 --node-size 1"),
    "rows in lock step": (4, 1, 2, "--staleness-bound 0 --node-size 1"),
    "hybrid": (6, 2, NOBODY, "--mode hybrid --staleness-bound 1 --node-size 2 --lr 4"),
    "hybrid in lock step": (5, 1, 3, "--mode hybrid --staleness-bound 0 --node-size 3 --lr 4"),
}


def samples_of(options: str) -> int:
    """Return the training samples of a job: fewer than a cache line where it is so tiny."""
    return 6 if "--hidden 1" in options.replace("--hidden 10", "") else N


def add_parts(plan: Plan, name: str, parts: list[tuple[int, str]], words: list[str]) -> None:
    """Add the parts of a run, each of which resumes the one before."""
    for k, (ranks, text) in enumerate(parts):
        plan.add(name, ranks, [*words, *text.split(), *["--resume"] * (k > 0)])


def add_stopped(
    plan: Plan, name: str, parts: list[tuple[int, str]], words: list[str], epochs: int
) -> None:
    """Add a run of a problem that stops it at random, in all parts but the last."""
    for k, (ranks, text) in enumerate(parts):
        last = k + 1 == len(parts)
        more = ["--epochs", str(epochs if last else ENDLESS), *["--resume"] * (k > 0)]
        plan.add(name, ranks, [*words, *text.split(), *more], 0 if last else SAVED)


def add_counts(plan: Plan, name: str, job: str) -> None:
    ranks, text = COUNTS[job]
    length = [] if "--steps" in text else ["--epochs", str(EPOCHS)]
    words = [*counting(samples_file(plan.folder, samples_of(text))), "--keep", "100"]
    plan.add(name, ranks, [*words, "--checkpoint-every", "4steps", *length, *text.split()])


def add_stops(plan: Plan, name: str, job: str) -> None:
    parts = STOPS[job]
    n = samples_of(parts[0][1])
    words = counting(samples_file(plan.folder, n), kind="StoppingCounting")
    words += ["--batch-size", "2", "--hidden", "1"] if n < N else ["--batch-size", "8"]
    words += ["--checkpoint-every", "4steps", "--keep", "100"]
    add_stopped(plan, name, parts, words, LONG[n])


ROUND_WORDS = "--mode sync --batch-size 8 --checkpoint-every 5steps --keep 1000"


def add_backup(plan: Plan, name: str, job: str) -> None:
    data = samples_file(plan.folder, N)
    if job == "stops":
        words = [*counting(data, kind="StoppingCounting"), *ROUND_WORDS.split()]
        add_stopped(plan, name, BACKUP_STOPS, words, 20)
        return
    ranks, text = BACKUP[job]
    length = [] if "--steps" in text else ["--epochs", str(EPOCHS)]
    plan.add(name, ranks, [*counting(data), *ROUND_WORDS.split(), *length, *text.split()])


def add_hybrid(plan: Plan, name: str, job: str) -> None:
    words = counting(samples_file(plan.folder, 128), kind="StoppingTableMeanCounting")
    words += ["--mode", "hybrid", "--batch-size", "8", "--keep", "1000"]
    words += ["--checkpoint-every", "3steps"]
    add_stopped(plan, name, HYBRID_STOPS, words, 12)


# In double precision three shards of 26,000 parameters are large enough to be packed.
WIDE = "--hidden 26000 --keep 100 --checkpoint-every 6steps --batch-size 8"


def add_residuals(plan: Plan, name: str, job: str) -> None:
    ranks, text = RESIDUALS[job]
    stopped = job.startswith("stopped")
    kind = "StoppingCounting" if stopped else "SlowCounting"
    words = [*counting(samples_file(plan.folder, N), kind=kind), *WIDE.split(), *TOPK.split()]
    if stopped:
        add_stopped(plan, name, [(ranks, text)] * 2, words, 2 * EPOCHS)
    else:
        plan.add(name, ranks, [*words, *text.split(), "--epochs", str(EPOCHS)])


def add_replicas(plan: Plan, name: str, job: str) -> None:
    words = counting(samples_file(plan.folder, N), kind="StoppingCounting")
    words += ["--mode", "easgd", *WIDE.split()]
    if job == "other worlds":
        add_stopped(plan, name, OTHER_WORLDS, [*words, "--tau", "2"], 2 * EPOCHS)
    else:
        add_stopped(plan, name, [REPLICAS[job]] * 2, words, 2 * EPOCHS)


def files_of(data: str) -> list[str]:
    """Return the options that name files of `samples_file`."""
    return ["--dataset", data, "--test-dataset", data.replace("train-", "test-")]


def add_compensated(plan: Plan, name: str, job: str) -> None:
    ranks, text = COMPENSATED[job]
    words = ["--problem", ORIGINS, *COUNT, *files_of(samples_file(plan.folder, N))]
    words += ["--server-ranks", ",".join(map(str, range(ranks - 1))), "--hidden", "67"]
    words += f"--steps {ORIGIN_STEPS} --delay-compensation 0.7 --eval-every 0 {text}".split()
    plan.add(name, ranks, words)


def add_means(plan: Plan, name: str, job: str) -> None:
    """Add a job of steps of four batches, of which the last of an epoch has one and a part."""
    ranks, text = MEANS[job]
    words = counting(samples_file(plan.folder, N), kind="MeanCounting")
    text += f" --lr 32 --batch-size 8 --accumulate 4 --epochs {EPOCHS}"
    plan.add(name, ranks, [*words, *text.split()])


def add_delayed(plan: Plan, name: str, job: str) -> None:
    ranks, slow, text = DELAYED[job]
    kind = "MeanCounting" if "sync" in job.split() else "SlowCounting"
    words = counting(samples_file(plan.folder, 512), kind=kind)
    text += f" --epochs 1 --batch-size 8 --inject-delay {slow}:{FACTOR:g}"
    plan.add(name, ranks, [*words, *text.split()])


def add_twins(plan: Plan, name: str, job: str) -> None:
    """Add a whole run, and one that is stopped at random, twice where steps are local."""
    ranks, text = TWINS[job]
    words = f"--problem {MODELS}:StoppingMLP --mode sync --hidden 16 --batch-size 24 --keep 100 "
    words += "--eval-every 0 --epochs 2 " + ("--batch-size 8 " if "local" in job else "") + text
    plan.add(f"{name} whole", ranks, words.split())
    for k in range(1 + ("local" in job)):
        more = ["--epochs", str(ENDLESS), *["--resume"] * k]
        plan.add(f"{name} parts", ranks, [*words.split(), *more], SAVED)
    plan.add(f"{name} parts", ranks, [*words.split(), "--resume"])


def add_schedules(plan: Plan, name: str, job: str) -> None:
    words = f"{ROOT}/jobs/digits-sync.toml --schedule cosine --eval-every 0 --keep 9"
    for k, (ranks, text) in enumerate(SCHEDULES[job]):
        first = [*words.split(), "--checkpoint-every", "0"]
        plan.add(name, ranks, [*(["--resume"] if k else first), *text.split()])


ONCE = "--eval-every 0 --checkpoint-every 0"
ROUNDS_JOB = f"--mode sync --optimizer momentum --lr 0.05 --hidden 24 --epochs 2 {ONCE}"
LOCAL_JOB = f"--mode local_sgd --hidden 24 --epochs 2 {ONCE}"
ELASTIC_JOB = f"--mode easgd --hidden 24 {ONCE}"
ROWS_JOB = f"--problem logistic_sparse --dataset {CLICKS} --mode sync --batch-size 23 --epochs 2"


def words_of(plan: Plan, kind: str, job: str) -> tuple[int, list[str]]:
    """Return the ranks and the options of a job that has a serial equal."""
    table, first = {
        "rounds": (ROUNDS, ROUNDS_JOB), "local": (LOCAL, LOCAL_JOB),
        "elastic": (ELASTIC, ELASTIC_JOB), "rows": (ROWS, ROWS_JOB),
    }[kind]  # fmt: skip
    ranks, text = table[job]
    data = few_digits(plan.folder, FEW) if kind == "rounds" else []
    return ranks, [*first.split(), *data, *text.split()]


def add_serial(plan: Plan, name: str, job: str) -> None:
    kind = name.partition(",")[0]
    ranks, words = words_of(plan, kind, job)
    if "resumed" in job:
        plan.add(name, ranks, [*words, "--epochs", "1"])
        words = [*words, "--resume"]
    plan.add(name, ranks, words)


DIGITS = f"{ROOT}/jobs/digits.toml --servers 1 --node-size 1 --checkpoint-every 0"
SUMMED_DIGITS = f"{ROOT}/jobs/digits-sync.toml --node-size 2 --hidden 400,200 --checkpoint-every 0"


def add_codec(plan: Plan, name: str, job: str) -> None:
    options = CODEC_JOBS[job]
    ranks = 6 if "--node-size 2" in options else 3
    length = ["--epochs", "5" if job in SHORT else "20"]
    plan.add(name, ranks, [*DIGITS.split(), *options.split(), *length])


def add_summed(plan: Plan, name: str, job: str) -> None:
    ranks, options = SUMMED[job]
    plan.add(name, ranks, [*SUMMED_DIGITS.split(), "--epochs", "4", *options.split()])


def add_nan(plan: Plan, name: str, job: str) -> None:
    ranks, codec = NAN[job]
    words = DIGITS if job.startswith("pushed") else f"{SUMMED_DIGITS} --epochs 4"
    problem = ["--problem", f"{FAULTY}:NanGradientOfMlp"]
    plan.add(name, ranks, [*words.split(), *problem, "--codec", codec], code=1)


def clocks(data: str, job: tuple[int, int, int, str], kind: str = "Clocks") -> list[str]:
    """Return a job of counted clocks; servers are the first ranks."""
    ranks, servers, slow, text = job
    where = ["--servers", str(servers), "--server-ranks", ",".join(map(str, range(servers)))]
    files = files_of(data)
    size = ["--hidden", f"{LINES},{ranks - servers},{slow}", "--batch-size", "1"]
    problem = f"{CLOCKS}:{kind}"
    once = ["--epochs", "1", "--no-shuffle"]
    return ["--problem", problem, *COUNT, *files, *where, *size, *once, *text.split()]


def add_clocked(plan: Plan, name: str, job: str) -> None:
    data = samples_file(plan.folder, CLOCK_BATCHES)
    kind = "HybridRows" if "hybrid" in job else "ClockRows" if "rows" in job else "Clocks"
    words = ["--mode", "ssp", *clocks(data, CLOCKED[job], kind), "--checkpoint-every", "7steps"]
    plan.add(name, CLOCKED[job][0], words)


Add = Callable[[Plan, str, str], None]
ADD: dict[str, tuple[Add, list[str]]] = {
    "counts": (add_counts, [*COUNTS]),
    "stops": (add_stops, [*STOPS]),
    "backup": (add_backup, [*BACKUP, "stops"]),
    "hybrid": (add_hybrid, ["stops"]),
    "residuals": (add_residuals, [*RESIDUALS]),
    "replicas": (add_replicas, [*REPLICAS, "other worlds"]),
    "compensated": (add_compensated, [*COMPENSATED]),
    "means": (add_means, [*MEANS]),
    "delayed": (add_delayed, [*DELAYED]),
    "twins": (add_twins, [*TWINS]),
    "schedules": (add_schedules, [*SCHEDULES]),
    "rounds": (add_serial, [*ROUNDS]),
    "local": (add_serial, [*LOCAL]),
    "elastic": (add_serial, [*ELASTIC]),
    "rows": (add_serial, [*ROWS]),
    "codec": (add_codec, [*CODEC_JOBS]),
    "summed": (add_summed, [*SUMMED]),
    "nan": (add_nan, [*NAN]),
    "clocked": (add_clocked, [*CLOCKED]),
}
# Those that are no long tests: of each oracle the jobs that meet most of the code.
QUICK = {
    *("counts, pulls ahead by reply", "counts, means ahead", "counts, one batch"),
    *("counts, remote servers without a line", "counts, steps on nodes", "stops, on nodes"),
    *("backup, nodes of two", "backup, stops", "hybrid, stops"),
    *("residuals, stopped carried", "replicas, carried"),
    *("twins, nodes of two", "twins, dgc", "twins, rounds by dgc", "twins, rounds of uneven nodes"),
    *("twins, local fragments, kept", "schedules, servers, steps"),
    *("local, nodes", "local, kept", "local, fragments, overlap", "elastic, resumed"),
    *("codec, int8", "codec, both ways", "codec, auto", "summed, auto", "nan, pushed int8"),
    *("nan, summed int8", "clocked, near", "clocked, means of nodes", "clocked, rows"),
    *("clocked, hybrid", "compensated, local and remote", "compensated, adaptive and remote"),
    *("means, remote", "delayed, async", "twins, accumulated"),
    *("rounds, one rank", "rounds, nodes of two", "rounds, servers", "rounds, accumulated, nodes"),
    *(f"rows, {name}" for name in ROWS),
}
# Of them those that each MPI runs; of the others each has some, and of the long ones its share.
BOTH = {
    *("counts, pulls ahead by reply", "counts, means ahead", "stops, on nodes"),
    *("backup, nodes of two", "residuals, stopped carried", "twins, nodes of two"),
    *("twins, rounds by dgc", "local, fragments, overlap", "codec, both ways", "summed, auto"),
    *("clocked, rows", "rows, servers", "rows, nodes of two", "nan, summed int8"),
    *("hybrid, stops", "clocked, hybrid", "compensated, local and remote"),
    *("rounds, one rank", "rounds, servers", "rounds, accumulated, nodes"),
}
EVERY = [f"{kind}, {job}" for kind, (_, names) in ADD.items() for job in names]


def add(plan: Plan, name: str) -> None:
    """Add the runs of a job that is in `EVERY`."""
    kind, _, job = name.partition(", ")
    ADD[kind][0](plan, name, job)


def of_matrix(*kinds: str) -> list[Any]:
    """Return the jobs of some oracles as parameters of a test; most are long."""
    names = [name for name in EVERY if name.partition(", ")[0] in kinds]
    return thinned(names, QUICK.intersection(names), BOTH.intersection(names))
