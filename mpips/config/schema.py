"""Configuration of a run: one frozen dataclass.

Every field of `Config` is ``--option-name`` on the command line and ``option_name`` in the job file
(`mpips.config.jobfile`). The metadata of a field are its group, its help and its legal values.
``--help``, job files and error messages use them. `mpips.config.validation` compares fields.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

from mpips.config import names
from mpips.config.delay import DELAYS, FORM, parse_delays
from mpips.config.groups import (
    GROUPS,
    GROUPS_FORM,
    OWN_FORM,
    OWN_OPTIMIZER,
    ROW_FORM,
    ROW_OPTIMIZER,
)
from mpips.config.option import Option, setting
from mpips.errors import UserError

STALENESS_BOUND, ROWS_BOUND = 3, 1  # in clocks, and in rounds of mode hybrid
LOG_EVERY_S = 0.25

# Groups of options, in their order in --help.
_run = partial(setting, "run")
_cluster = partial(setting, "cluster")
_consistency = partial(setting, "consistency")
_messages = partial(setting, "messages")
_model = partial(setting, "model")
_data = partial(setting, "data")
_optimisation = partial(setting, "optimisation")
_output = partial(setting, "output")
_checkpoints = partial(setting, "checkpoints")


@dataclass(frozen=True)
class Config:
    """A resolved job. ``--help`` describes each field. `resolve` returns only valid jobs."""

    mode: str = _run(
        "async", "servers apply gradients as they come (async), the same with a bound on clocks "
        "(ssp), or hold a centre that replicas are drawn to (easgd); or all ranks go in rounds, of "
        "gradients (sync, hybrid: rows as they come) or of averages after local steps (local_sgd)",
        legal=("async", "ssp", "sync", "hybrid", "local_sgd", "easgd"),
    )  # fmt: skip
    out: str = _run("", "folder of the run", metavar="DIR", unset="runs/<problem>-<mode>-<time>")
    resume: str = _run(
        "", "continue the run in --out; auto: continue it, or start one if there is none",
        legal=("", "yes", "auto"), bare="yes", metavar="[yes|auto]", unset="start a new run",
    )  # fmt: skip
    seed: int = _run(0, "seed of the initial parameters and of the order", ">= 0")
    quiet: bool = _run(False, "print errors only")
    eval_only: bool = _run(
        False, "evaluate what --resume or --init-from reads; with --out also write evaluation.json",
    )  # fmt: skip
    init_from: str = _run(
        "", "start a run from the parameters alone of this checkpoint, .npz or .safetensors file; "
        "unused on --resume", metavar="CHECKPOINT", unset="a random start",
    )  # fmt: skip
    threads: int = _run(0, "BLAS threads a rank; 0: cores over ranks of a node", ">= 0")
    timeout: float = _run(
        300.0, "end a job in which ranks have waited for so many seconds and nobody has got on; 0: "
        "never. Under mpips.launch its own holds", ">= 0",
    )  # fmt: skip
    inject_delay: str = _run(
        "", "have workers take FACTOR times as long for a gradient, by sleeping", pattern=DELAYS,
        form=FORM, metavar="WORKER:FACTOR,..", unset="none",
    )  # fmt: skip

    servers: int | None = _cluster(
        None, "number of servers; 0 (sync, local_sgd): every rank is a worker", ">= 0",
        unset="max(1, ranks // 4); sync and local_sgd: 0", only={0: names.ROUND_MODES},
    )  # fmt: skip
    server_ranks: tuple[int, ...] = _cluster(
        (), "the ranks that are servers", ">= 0", unset="spread over the nodes",
    )  # fmt: skip
    server_hosts: str = _cluster(
        "", "place the servers on the hosts that match", metavar="GLOB,...", unset="any host",
    )  # fmt: skip
    spares: int = _cluster(
        0, "servers beside the others that own nothing: one goes on for a server of its node if it "
        "dies, where the MPI lets ranks go on", ">= 0", modes=("async", "ssp"),
    )  # fmt: skip
    on_death: str = _cluster(
        "restart", "when a worker dies, mpips.launch restarts the job; shrink: by Open MPI, on "
        "several nodes without codec, the others go on without it",
        legal=("restart", "shrink"), modes=names.IN_ROUNDS,
    )  # fmt: skip
    scale_lr: bool = _cluster(False, "lr falls with the batch on a death", modes=names.IN_ROUNDS)
    node_size: int = _cluster(0, "consecutive ranks of a node; 0: the real nodes", ">= 0")
    evaluators: int = _cluster(
        0, "how many of the ranks, the last ones, evaluate checkpoints of this job in place of its "
        "workers: one is saved every --eval-every epochs", ">= 0",
    )  # fmt: skip
    window: str = _cluster(
        "shared", "memory of the shards; private: no shared memory, remote path only",
        legal=("shared", "private"),
    )  # fmt: skip
    reduce: str = _cluster(
        "auto", "how a round sums: in node-shared memory or by MPI_Allreduce",
        legal=("auto", "shared", "allreduce"), modes=names.ROUND_MODES,
    )  # fmt: skip
    inbox: int = _cluster(
        2, "remote pushes that a server receives at a time; each takes a shard", ">= 1",
        modes=(*names.SERVED, "hybrid"),
    )  # fmt: skip
    read: str = _cluster(
        "relaxed", "what a pull may see; consistent: one version a shard",
        legal=("relaxed", "consistent"), modes=(*names.SERVED, "hybrid"),
    )  # fmt: skip
    far_read: str = _cluster(
        "auto", "how shards of other nodes are read: by one-sided Get or the owner's reply; auto: "
        "what is faster at the start", legal=("auto", "get", "reply"), modes=names.SERVED,
        only={"get": ("async", "easgd")},
    )  # fmt: skip
    prefetch: bool = _cluster(
        False, "pull remote shards during the gradient before; costs a replica, staler",
        modes=("async",),
    )  # fmt: skip
    node_aggregation: bool = _cluster(
        False, "workers of a node send remote servers the mean of their gradients",
        modes=names.SERVED,
    )  # fmt: skip
    share_pulls: bool = _cluster(
        True, "workers of a node join each other's reads of remote shards",
        modes=("async", "easgd"),
    )  # fmt: skip

    staleness_bound: int | None = _consistency(
        None, "clocks that a worker may be ahead, or rounds whose rows a read may lack", ">= 0",
        unset=f"{STALENESS_BOUND}; hybrid: {ROWS_BOUND}", modes=("ssp", "hybrid"),
    )  # fmt: skip
    backup_workers: int = _consistency(
        0, "of N workers, a round takes the first N - this many gradients", ">= 0", modes=("sync",),
    )  # fmt: skip
    max_staleness: int | None = _consistency(
        None, "drop and count a push that is more updates old", ">= 0", unset="no limit",
        modes=("async", "ssp"),
    )  # fmt: skip
    staleness_lr: bool = _consistency(
        False, "divide the rate of a push by its staleness", modes=("async", "ssp"),
    )  # fmt: skip
    delay_compensation: float = _consistency(
        0.0, "factor c of DC-ASGD: g + c g^2 (w - w_read) in place of g; 0: off", ">= 0",
        modes=("async", "ssp"),
    )  # fmt: skip
    delay_adaptive: bool = _consistency(
        False, "divide c by the root of the mean square of g; one more slot",
        modes=("async", "ssp"),
    )  # fmt: skip
    codec: str = _messages(
        "none", "what pushes, in rounds sums, to other nodes are packed by; auto: by what is "
        "predicted to be fastest when links and codecs are measured at the start, of none, fp16, "
        "bf16 and int8 (the others change how training converges)", legal=names.CODECS,
        modes=("async", "ssp", "sync", "hybrid", "local_sgd"),
        only=dict.fromkeys(("auto", "topk", "onebit"), ("async", "ssp", "sync", "hybrid"))
        | {"powersgd": ("sync",)},
    )  # fmt: skip
    pull_codec: str = _messages(
        "none", "what shards of other nodes are packed by on their way; auto: as with --codec",
        legal=names.PULL_CODECS, modes=(*names.SERVED, "sync", "hybrid"),
    )  # fmt: skip
    topk_ratio: float = _messages(0.01, "part that codec topk sends", "in (0, 1)")
    topk_momentum: float = _messages(
        0.0, "momentum that codec topk corrects for; the optimizer is sgd then", "in [0, 1)",
    )  # fmt: skip
    topk_warmup: int = _messages(0, "pushes in which the part comes down from a quarter", ">= 0")
    powersgd_rank: int = _messages(
        4, "columns of the factors that codec powersgd sends", ">= 1", modes=("sync",),
    )  # fmt: skip

    problem: str = _model(
        "mlp", "model and loss, or your own class or function", legal=names.PROBLEMS,
        metavar="NAME", pattern=names.USER_PROBLEM, form="path/file.py:Class",
    )  # fmt: skip
    hidden: tuple[int, ...] = _model((128, 64), "widths of hidden layers", ">= 1")
    activation: str = _model("relu", "their activation", legal=("relu", "tanh"))
    factors: int = _model(8, "numbers of a feature beside its weight", ">= 1")
    dtype: str = _model("float32", "type of parameters and gradients", legal=("float32", "float64"))

    dataset: str = _data(
        "digits", "digits, spirals, a file, or many ('train-*.h5'): .h5[::x,y], .npz, x.npy,y.npy, "
        "IDX (.gz), .svm", metavar="NAME_OR_PATH",
    )  # fmt: skip
    test_dataset: str = _data(
        "", "held-out samples in a file of their own, or in many", metavar="PATH",
        unset="a part of --dataset",
    )  # fmt: skip
    test_fraction: float = _data(0.2, "part of --dataset that is held out", "in (0, 1)")
    classes: int = _data(0, "number of classes; 0: inferred from the labels", "0 or >= 2")
    scale: float = _data(1.0, "factor on every input", "> 0")
    batch_size: int = _data(32, "samples in one step of one worker", ">= 1")
    accumulate: int = _data(
        1, "batches whose gradients are added before one push or round; as one batch of all of "
        "them, in the memory of one", ">= 1",
    )  # fmt: skip
    shuffle: bool = _data(True, "a new order of the samples in each epoch")
    flip: bool = _data(False, "half of the training images, drawn anew, are mirrored")
    shift: int = _data(0, "pixels that training images move at most, drawn too", ">= 0")

    optimizer: str = _optimisation(
        "adam", "update rule, or your own class, with numbers of it: path/file.py:Class:beta=0.9",
        legal=names.OPTIMIZERS, metavar="NAME", pattern=OWN_OPTIMIZER, form=OWN_FORM,
    )  # fmt: skip
    lr: float | None = _optimisation(
        None, "learning rate", "> 0",
        unset=", ".join(f"{name} {lr:g}" for name, lr in names.LEARNING_RATES.items()),
    )  # fmt: skip
    momentum: float = _optimisation(0.9, "of momentum and nesterov", "in [0, 1)")
    beta1: float = _optimisation(
        0.9, "decay of the mean, rules like adam; share of it, lion", "in [0, 1)"
    )
    beta2: float = _optimisation(
        0.999, "decay of the square, rules like adam; of the mean, lion", "in [0, 1)"
    )
    eps: float = _optimisation(1e-8, "added to a divisor (adaptive rules)", "> 0")
    decay: float = _optimisation(0.9, "decay of the square, rmsprop and adadelta", "in [0, 1)")
    weight_decay: float = _optimisation(
        0.0, "L2 term of the gradient; decoupled in adamw and lion", ">= 0"
    )
    groups: str = _optimisation(
        "", "arrays with a rate or weight decay of their own, by patterns of names", pattern=GROUPS,
        form=GROUPS_FORM, metavar="PATTERN:lr=X,..;..", unset="none",
    )  # fmt: skip
    row_optimizer: str = _optimisation(
        "", "update rule of tables' rows: sgd, adagrad, row_adagrad, rmsprop, adam or ftrl",
        pattern=ROW_OPTIMIZER, form=ROW_FORM, metavar="NAME:lr=X,..", unset="as --optimizer",
    )  # fmt: skip
    evict_after: int = _optimisation(
        0, "epochs without a push after which a table's row is as at first; 0: never", ">= 0",
    )  # fmt: skip
    ema: float = _optimisation(
        0.0, "share that each update keeps of an average of the parameters, which servers hold; "
        "0: none", "in [0, 1)", modes=("async", "ssp", "sync", "hybrid"),
    )  # fmt: skip
    clip: float = _optimisation(0.0, "largest norm of a gradient; 0: no limit", ">= 0")
    schedule: str = _optimisation("constant", "course of the learning rate", legal=names.SCHEDULES)
    warmup_steps: int = _optimisation(0, "updates of linear warm-up", ">= 0")
    step_every: int = _optimisation(0, "updates between steps of schedule step", ">= 0")
    step_factor: float = _optimisation(0.1, "factor of each step of the schedule", "> 0")
    local_steps: int = _optimisation(
        8, "steps of each worker by itself before the replicas are averaged", ">= 1",
        modes=("local_sgd",),
    )  # fmt: skip
    local_slots: str = _optimisation(
        "average", "what a round does with the slots of the update rule: average them too, or each "
        "worker keeps its own", legal=("average", "keep"), modes=("local_sgd",),
    )  # fmt: skip
    outer_momentum: float = _optimisation(
        0.0, "momentum of what a round changes", "in [0, 1)", modes=("local_sgd",),
    )  # fmt: skip
    outer_lr: float = _optimisation(
        1.0, "share of what a round changes that is taken, or of its momentum", "> 0",
        modes=("local_sgd",),
    )  # fmt: skip
    outer_nesterov: bool = _optimisation(
        False, "the outer momentum is Nesterov's, as DiLoCo's (0.9, rate 0.7)",
        modes=("local_sgd",),
    )  # fmt: skip
    fragments: int = _optimisation(
        1, "parts of the model of which each round exchanges the next, local_steps / fragments "
        "steps after the last (Streaming DiLoCo)", ">= 1", modes=("local_sgd",),
    )  # fmt: skip
    overlap_steps: int = _optimisation(
        0, "local steps that go on while an exchange is under way, before its result is taken",
        ">= 0", modes=("local_sgd",),
    )  # fmt: skip
    mixing: float | None = _optimisation(
        None, "share of that result in what a worker goes on with; the rest is its own parameters",
        "in (0, 1]", unset="1, with overlap_steps 0.5", modes=("local_sgd",),
    )  # fmt: skip
    tau: int = _optimisation(
        8, "steps of each worker by itself between two exchanges with the centre", ">= 1",
        modes=("easgd",),
    )  # fmt: skip
    elastic_rate: float | None = _optimisation(
        None, "share of its distance from the centre that an exchange moves both", "in (0, 1)",
        unset="0.9 / workers", modes=("easgd",),
    )  # fmt: skip
    epochs: int = _optimisation(40, "passes over the data, resumed ones included", ">= 0")
    steps: int = _optimisation(
        0, "steps of each worker, in local_sgd its rounds, in easgd its exchanges; 0: as --epochs "
        "says", ">= 0",
    )  # fmt: skip
    target_accuracy: float = _optimisation(
        0.0, "stop at this held-out accuracy; 0: never", "in [0, 1]",
    )  # fmt: skip
    patience: int = _optimisation(
        0, "stop after so many evaluations without a lower held-out loss, with --evaluators; 0: "
        "never", ">= 0",
    )  # fmt: skip

    eval_every: float = _output(1.0, "epochs between evaluations; 0: at the end", ">= 0")
    eval_ema: bool = _output(
        False, "evaluators, and --eval-only, evaluate the average of --ema",
    )  # fmt: skip
    log_every: float | None = _output(
        None, "seconds between progress lines", ">= 0",
        unset=f"{LOG_EVERY_S:g}; in a log file at least 2",
    )  # fmt: skip
    trace: bool = _output(False, "keep what each rank does when, for mpips trace")
    record: bool = _output(
        False, "for mpips replay; wants --read consistent", modes=("async", "ssp", "hybrid"),
    )  # fmt: skip
    tensorboard: bool = _output(False, "also TensorBoard's files, in <out>/tensorboard")

    checkpoint_every: str = _checkpoints(
        "60", "period of the checkpoints; 0: the first and the last only", pattern=names.PERIOD,
        form="SECONDS (such as 60), Nmin (5min), Nh (1h) or Nsteps (500steps)", metavar="PERIOD",
        numeric=True,
    )  # fmt: skip
    keep: int = _checkpoints(3, "number of checkpoints that are kept", ">= 1")
    keep_best: bool = _checkpoints(
        False, "also keep the one that evaluators found best, in <out>/best",
    )  # fmt: skip
    snapshot: str = _checkpoints(
        "copy", "copy the shard and go on, or stall until it is written", legal=("copy", "stall"),
    )  # fmt: skip
    checkpoint_rows: str = _checkpoints(
        "all", "of tables, rows ever changed, or since the checkpoint before",
        legal=("all", "changed"),
    )  # fmt: skip

    @property
    def learning_rate(self) -> float:
        """Learning rate: `lr`, or the optimizer's default."""
        if self.lr is not None:
            return self.lr
        if self.optimizer not in names.LEARNING_RATES:  # see `mpips.optim.rated`
            raise UserError(f"no lr for optimizer {self.optimizer!r}", "a number", "give --lr")
        return names.LEARNING_RATES[self.optimizer]

    @property
    def step_size(self) -> int:
        """Samples in a step of a worker."""
        return self.batch_size * self.accumulate

    @property
    def bound(self) -> int:
        """Staleness bound of mode ssp, or of rows in mode hybrid."""
        unset = ROWS_BOUND if self.mode == "hybrid" else STALENESS_BOUND
        return unset if self.staleness_bound is None else self.staleness_bound

    @property
    def unit_size(self) -> int:
        """Samples that a worker is assigned at a time: for all its steps up to a push or round."""
        return self.step_size * {"local_sgd": self.round_steps, "easgd": self.tau}.get(self.mode, 1)

    @property
    def round_steps(self) -> int:
        """Local steps of a worker in a round of mode local_sgd."""
        return self.local_steps // self.fragments

    @property
    def mixed(self) -> float:
        """Weight of an exchange's result in a worker's new parameters."""
        return self.mixing or (0.5 if self.overlap_steps else 1.0)

    @property
    def streaming(self) -> bool:
        """Whether workers have different parameters after a round of local steps."""
        asked = self.fragments > 1 or self.overlap_steps > 0 or self.mixed < 1
        return self.mode == "local_sgd" and asked

    @property
    def outer_step(self) -> bool:
        """Whether rounds of local steps end with a step towards the mean, not with the mean."""
        stepping = self.outer_momentum > 0 or self.outer_lr != 1 or self.codec != "none"
        return self.mode == "local_sgd" and (stepping or self.streaming)

    @property
    def in_rounds(self) -> bool:
        """Whether the mode works in rounds, each with a contribution of every worker."""
        return self.mode in names.IN_ROUNDS and not self.backup_workers

    @property
    def reads_wait(self) -> bool:
        """Whether reads wait for other workers' pushes (`mpips.ps.consistency`)."""
        return self.mode == "ssp" or self.backup_workers > 0

    @property
    def checkpoint_period(self) -> tuple[float | None, int | None]:
        """Period of checkpoints, ``(seconds, steps)``; at most one is not None."""
        match = names.PERIOD.fullmatch(self.checkpoint_every)
        if match is None:
            raise OPTIONS["checkpoint_every"].error(self.checkpoint_every)
        seconds = float(match["time"] or 0) * names.UNITS_S[match["unit"] or "s"]
        return seconds or None, int(match["steps"] or 0) or None

    @property
    def delays(self) -> dict[int, float]:
        """Factor by which each worker of `inject_delay` is slowed."""
        return parse_delays(self.inject_delay)


OPTIONS = {field.name: Option.of(field) for field in dataclasses.fields(Config)}
