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
        "async", "async: servers apply each gradient as it arrives; ssp: async with a bound on "
        "staleness; easgd: elastic averaging with a centre on the servers; sync: rounds of "
        "gradients; hybrid: sync, but rows as in async; local_sgd: averages after local steps",
        legal=("async", "ssp", "sync", "hybrid", "local_sgd", "easgd"),
    )  # fmt: skip
    out: str = _run("", "folder of the run", metavar="DIR", unset="runs/<problem>-<mode>-<time>")
    resume: str = _run(
        "", "continue the run in --out; auto: continue it, or start it if there is none",
        legal=("", "yes", "auto"), bare="yes", metavar="[yes|auto]", unset="start a new run",
    )  # fmt: skip
    seed: int = _run(0, "seed of initial parameters and sample order", ">= 0")
    quiet: bool = _run(False, "print errors only")
    eval_only: bool = _run(
        False, "only evaluate the checkpoint of --resume or --init-from; result in evaluation.json",
    )  # fmt: skip
    init_from: str = _run(
        "", "start with the parameters of this checkpoint, .npz or .safetensors file; ignored on "
        "--resume", metavar="CHECKPOINT", unset="random parameters",
    )  # fmt: skip
    threads: int = _run(0, "BLAS threads per rank; 0: cores of a node / its ranks", ">= 0")
    timeout: float = _run(
        300.0, "end the job if no rank has made progress for so many seconds; 0: never. Under "
        "mpips.launch, use its --timeout", ">= 0",
    )  # fmt: skip
    inject_delay: str = _run(
        "", "make workers FACTOR times slower, by sleeping after each gradient", pattern=DELAYS,
        form=FORM, metavar="WORKER:FACTOR,..", unset="none",
    )  # fmt: skip

    servers: int | None = _cluster(
        None, "number of servers; 0: every rank is a worker (sync and local_sgd)", ">= 0",
        unset="max(1, ranks // 4); sync and local_sgd: 0", only={0: names.ROUND_MODES},
    )  # fmt: skip
    server_ranks: tuple[int, ...] = _cluster(
        (), "ranks of the servers", ">= 0", unset="spread over the nodes",
    )  # fmt: skip
    server_hosts: str = _cluster(
        "", "put the servers on hosts that match these names", metavar="GLOB,...", unset="any host",
    )  # fmt: skip
    spares: int = _cluster(
        0, "additional servers without a shard, each of which replaces a dead server of its node; "
        "needs an MPI with ULFM", ">= 0", modes=("async", "ssp"),
    )  # fmt: skip
    on_death: str = _cluster(
        "restart", "when a worker dies: mpips.launch restarts the job, or the others continue "
        "without it (shrink; needs Open MPI, and several nodes exclude a codec)",
        legal=("restart", "shrink"), modes=names.IN_ROUNDS,
    )  # fmt: skip
    scale_lr: bool = _cluster(False, "scale lr with the batch after deaths", modes=names.IN_ROUNDS)
    node_size: int = _cluster(0, "treat so many consecutive ranks as a node; 0: real nodes", ">= 0")
    evaluators: int = _cluster(
        0, "number of ranks, the last ones, that evaluate checkpoints in place of a worker; one is "
        "saved every --eval-every epochs", ">= 0",
    )  # fmt: skip
    window: str = _cluster(
        "shared", "memory of shards; private: not shared, so all ranks use the remote path",
        legal=("shared", "private"),
    )  # fmt: skip
    reduce: str = _cluster(
        "auto", "sum of a round: in node-shared memory, or by MPI_Allreduce",
        legal=("auto", "shared", "allreduce"), modes=names.ROUND_MODES,
    )  # fmt: skip
    inbox: int = _cluster(
        2, "remote pushes that a server receives at a time, each as large as a shard", ">= 1",
        modes=(*names.SERVED, "hybrid"),
    )  # fmt: skip
    read: str = _cluster(
        "relaxed", "relaxed: pulls may overlap updates; consistent: one version of each shard",
        legal=("relaxed", "consistent"), modes=(*names.SERVED, "hybrid"),
    )  # fmt: skip
    far_read: str = _cluster(
        "auto", "pulls from other nodes: by one-sided Get, or by a reply of the server; auto: the "
        "faster one at the start", legal=("auto", "get", "reply"), modes=names.SERVED,
        only={"get": ("async", "easgd")},
    )  # fmt: skip
    prefetch: bool = _cluster(
        False, "pull remote shards one step early; costs a replica and staleness",
        modes=("async",),
    )  # fmt: skip
    node_aggregation: bool = _cluster(
        False, "send remote servers one mean gradient for all workers of a node",
        modes=names.SERVED,
    )  # fmt: skip
    share_pulls: bool = _cluster(
        True, "workers of a node share pulls of remote shards",
        modes=("async", "easgd"),
    )  # fmt: skip

    staleness_bound: int | None = _consistency(
        None, "largest lead of a worker in clocks; hybrid: age of rows in rounds", ">= 0",
        unset=f"{STALENESS_BOUND}; hybrid: {ROWS_BOUND}", modes=("ssp", "hybrid"),
    )  # fmt: skip
    backup_workers: int = _consistency(
        0, "number of slowest workers whose gradients a round ignores", ">= 0", modes=("sync",),
    )  # fmt: skip
    max_staleness: int | None = _consistency(
        None, "drop pushes of a larger staleness", ">= 0", unset="no limit",
        modes=("async", "ssp"),
    )  # fmt: skip
    staleness_lr: bool = _consistency(
        False, "divide the learning rate of a push by its staleness", modes=("async", "ssp"),
    )  # fmt: skip
    delay_compensation: float = _consistency(
        0.0, "factor c of DC-ASGD: g + c g^2 (w - w_read) in place of g; 0: off", ">= 0",
        modes=("async", "ssp"),
    )  # fmt: skip
    delay_adaptive: bool = _consistency(
        False, "divide c by the root mean square of g; needs one more slot",
        modes=("async", "ssp"),
    )  # fmt: skip
    codec: str = _messages(
        "none", "compression of pushes to other nodes, or of sums in rounds; auto: the fastest of "
        "none, fp16, bf16 and int8 on the measured links (the other codecs change how training "
        "converges)", legal=names.CODECS,
        modes=("async", "ssp", "sync", "hybrid", "local_sgd"),
        only=dict.fromkeys(("auto", "topk", "onebit"), ("async", "ssp", "sync", "hybrid"))
        | {"powersgd": ("sync",)},
    )  # fmt: skip
    pull_codec: str = _messages(
        "none", "compression of pulls from other nodes; auto: as with --codec",
        legal=names.PULL_CODECS, modes=(*names.SERVED, "sync", "hybrid"),
    )  # fmt: skip
    topk_ratio: float = _messages(0.01, "share of elements that codec topk sends", "in (0, 1)")
    topk_momentum: float = _messages(
        0.0, "momentum correction of codec topk; needs optimizer sgd", "in [0, 1)",
    )  # fmt: skip
    topk_warmup: int = _messages(0, "pushes in which topk's share falls from 0.25", ">= 0")
    powersgd_rank: int = _messages(
        4, "rank of codec powersgd's factors", ">= 1", modes=("sync",),
    )  # fmt: skip

    problem: str = _model(
        "mlp", "model and loss: by name, or your own class or function", legal=names.PROBLEMS,
        metavar="NAME", pattern=names.USER_PROBLEM, form="path/file.py:Class",
    )  # fmt: skip
    hidden: tuple[int, ...] = _model((128, 64), "widths of the hidden layers", ">= 1")
    activation: str = _model("relu", "activation of the hidden layers", legal=("relu", "tanh"))
    factors: int = _model(8, "latent factors of a feature", ">= 1")
    dtype: str = _model("float32", "dtype of the parameters", legal=("float32", "float64"))

    dataset: str = _data(
        "digits", "digits, spirals, a file, or many ('train-*.h5'): .h5[::x,y], .npz, x.npy,y.npy, "
        "IDX (.gz), .svm", metavar="NAME_OR_PATH",
    )  # fmt: skip
    test_dataset: str = _data(
        "", "file or files of held-out samples", metavar="PATH",
        unset="a part of --dataset",
    )  # fmt: skip
    test_fraction: float = _data(0.2, "share of --dataset that is held out", "in (0, 1)")
    classes: int = _data(0, "number of classes; 0: inferred from the labels", "0 or >= 2")
    scale: float = _data(1.0, "factor of all inputs", "> 0")
    batch_size: int = _data(32, "samples in a step of one worker", ">= 1")
    accumulate: int = _data(
        1, "batches whose gradients are accumulated for one push or round, as one batch", ">= 1",
    )  # fmt: skip
    shuffle: bool = _data(True, "shuffle the samples in each epoch")
    flip: bool = _data(False, "mirror a random half of the training images")
    shift: int = _data(0, "largest random shift of training images, in pixels", ">= 0")

    optimizer: str = _optimisation(
        "adam", "update rule: by name, or your own class, such as path/file.py:Class:beta=0.9",
        legal=names.OPTIMIZERS, metavar="NAME", pattern=OWN_OPTIMIZER, form=OWN_FORM,
    )  # fmt: skip
    lr: float | None = _optimisation(
        None, "learning rate", "> 0",
        unset=", ".join(f"{name} {lr:g}" for name, lr in names.LEARNING_RATES.items()),
    )  # fmt: skip
    momentum: float = _optimisation(0.9, "momentum of rules momentum and nesterov", "in [0, 1)")
    beta1: float = _optimisation(
        0.9, "decay of the mean, rules like adam; share of it, lion", "in [0, 1)"
    )
    beta2: float = _optimisation(
        0.999, "decay of the square, rules like adam; of the mean, lion", "in [0, 1)"
    )
    eps: float = _optimisation(1e-8, "number added to the divisor (adaptive rules)", "> 0")
    decay: float = _optimisation(0.9, "decay of the square, rmsprop and adadelta", "in [0, 1)")
    weight_decay: float | None = _optimisation(
        None, "L2 term of the gradient; decoupled in adamw, lion", ">= 0", unset="0, or your rule's"
    )
    groups: str = _optimisation(
        "", "groups of arrays, by patterns of names, with another lr or decay", pattern=GROUPS,
        form=GROUPS_FORM, metavar="PATTERN:lr=X,..;..", unset="none",
    )  # fmt: skip
    row_optimizer: str = _optimisation(
        "", "update rule of rows: sgd, adagrad, row_adagrad, rmsprop, adam or ftrl",
        pattern=ROW_OPTIMIZER, form=ROW_FORM, metavar="NAME:lr=X,..", unset="as --optimizer",
    )  # fmt: skip
    evict_after: int = _optimisation(
        0, "reset a row to its initial values after so many epochs unused; 0: never", ">= 0",
    )  # fmt: skip
    ema: float = _optimisation(
        0.0, "decay of an exponential moving average of the parameters, kept by the servers; 0: "
        "none", "in [0, 1)", modes=("async", "ssp", "sync", "hybrid"),
    )  # fmt: skip
    clip: float = _optimisation(0.0, "clip gradients to this norm; 0: no limit", ">= 0")
    schedule: str = _optimisation("constant", "learning rate schedule", legal=names.SCHEDULES)
    warmup_steps: int = _optimisation(0, "updates of the linear warm-up", ">= 0")
    step_every: int = _optimisation(0, "updates between two steps of schedule step", ">= 0")
    step_factor: float = _optimisation(0.1, "factor of lr in each step of schedule step", "> 0")
    local_steps: int = _optimisation(
        8, "local steps of each worker between two averages", ">= 1",
        modes=("local_sgd",),
    )  # fmt: skip
    local_slots: str = _optimisation(
        "average", "optimizer state in a round: averaged as well, or kept by each worker",
        legal=("average", "keep"), modes=("local_sgd",),
    )  # fmt: skip
    outer_momentum: float = _optimisation(
        0.0, "momentum of the outer step", "in [0, 1)", modes=("local_sgd",),
    )  # fmt: skip
    outer_lr: float = _optimisation(
        1.0, "learning rate of the outer step from the old average to the new one", "> 0",
        modes=("local_sgd",),
    )  # fmt: skip
    outer_nesterov: bool = _optimisation(
        False, "Nesterov momentum in the outer step, as in DiLoCo (0.9, outer_lr 0.7)",
        modes=("local_sgd",),
    )  # fmt: skip
    fragments: int = _optimisation(
        1, "parts of the model, of which a round averages one every local_steps / fragments steps "
        "(Streaming DiLoCo)", ">= 1", modes=("local_sgd",),
    )  # fmt: skip
    overlap_steps: int = _optimisation(
        0, "local steps during an exchange, before its result is applied",
        ">= 0", modes=("local_sgd",),
    )  # fmt: skip
    mixing: float | None = _optimisation(
        None, "share of the average in a worker's new parameters; the rest is its own",
        "in (0, 1]", unset="1, with overlap_steps 0.5", modes=("local_sgd",),
    )  # fmt: skip
    tau: int = _optimisation(
        8, "local steps of each worker between two exchanges with the centre", ">= 1",
        modes=("easgd",),
    )  # fmt: skip
    elastic_rate: float | None = _optimisation(
        None, "share of the distance by which replica and centre move together", "in (0, 1)",
        unset="0.9 / workers", modes=("easgd",),
    )  # fmt: skip
    epochs: int = _optimisation(40, "epochs of the whole run, with those before a resume", ">= 0")
    steps: int = _optimisation(
        0, "steps of each worker (local_sgd: rounds, easgd: exchanges), in place of --epochs; 0: "
        "not set", ">= 0",
    )  # fmt: skip
    target_accuracy: float = _optimisation(
        0.0, "stop at this accuracy on held-out samples; 0: never", "in [0, 1]",
    )  # fmt: skip
    patience: int = _optimisation(
        0, "stop after so many evaluations without a lower loss (with --evaluators); 0: never",
        ">= 0",
    )  # fmt: skip

    eval_every: float = _output(1.0, "epochs between two evaluations; 0: at the end", ">= 0")
    eval_ema: bool = _output(
        False, "evaluate the average of --ema (with --evaluators or --eval-only)",
    )  # fmt: skip
    log_every: float | None = _output(
        None, "seconds between two progress lines", ">= 0",
        unset=f"{LOG_EVERY_S:g}; in a log file at least 2",
    )  # fmt: skip
    trace: bool = _output(False, "record a timeline of all ranks, for mpips trace")
    record: bool = _output(
        False, "record the run for mpips replay; needs --read consistent",
        modes=("async", "ssp", "hybrid"),
    )  # fmt: skip
    tensorboard: bool = _output(False, "write TensorBoard files to <out>/tensorboard")

    checkpoint_every: str = _checkpoints(
        "60", "time or steps between checkpoints; 0: only first and last", pattern=names.PERIOD,
        form="SECONDS (such as 60), Nmin (5min), Nh (1h) or Nsteps (500steps)", metavar="PERIOD",
        numeric=True,
    )  # fmt: skip
    keep: int = _checkpoints(3, "number of checkpoints to keep", ">= 1")
    keep_best: bool = _checkpoints(
        False, "also keep the best checkpoint by evaluation in <out>/best",
    )  # fmt: skip
    snapshot: str = _checkpoints(
        "copy", "during a write: train on from a copy, or stall", legal=("copy", "stall"),
    )  # fmt: skip
    checkpoint_rows: str = _checkpoints(
        "all", "rows of tables in a checkpoint: all touched ones, or those changed since the last",
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
