"""Names and forms that options accept."""

import re

EMA = "ema"  # name of the slot with the average of the parameters
SERVED = ("async", "ssp", "easgd")  # modes in which servers apply each push as it arrives
ROUND_MODES = ("sync", "local_sgd")  # modes with rounds and without servers
IN_ROUNDS = (*ROUND_MODES, "hybrid")  # rounds of gradients, or of averages

_RULES = {  # class of each rule in Python, and its default learning rate
    "SGD": 0.1, "Momentum": 0.05, "Nesterov": 0.05, "Adagrad": 0.02, "RMSprop": 0.001,
    "Adadelta": 1.0, "Adam": 0.002, "AdamW": 0.001, "AMSGrad": 0.002, "NAdam": 0.002,
    "RAdam": 0.002, "Lion": 0.0003,
}  # fmt: skip
RULES = {name.lower(): name for name in _RULES}
LEARNING_RATES = {name.lower(): lr for name, lr in _RULES.items()}
OPTIMIZERS = tuple(RULES)
# Problems with few features in each sample.
SPARSE_PROBLEMS = ("logistic_sparse", "factorization_machine", "wide_deep")
PROBLEMS = ("linear", "softmax", "mlp", *SPARSE_PROBLEMS)
CODECS = ("none", "auto", "fp16", "bf16", "int8", "int4", "topk", "onebit", "powersgd")
PULL_CODECS = ("none", "auto", "fp16", "bf16", "int8")
SCHEDULES = ("constant", "warmup", "cosine", "step")
UNITS_S = {"s": 1, "min": 60, "h": 3600}
PERIOD = re.compile(
    r"(?P<time>[0-9]{1,12}(\.[0-9]{1,12})?)(?P<unit>s|min|h)?|(?P<steps>[0-9]{1,12})steps"
)
USER_PROBLEM = re.compile(r".*[^/]\.py:[^\W\d]\w*")
# Options that determine the shapes, the slots or the order of the samples.
LAYOUT_FIELDS = (
    *("problem", "hidden", "activation", "factors", "dtype", "optimizer"),
    *("dataset", "test_dataset", "test_fraction", "classes", "batch_size"),
    *("accumulate", "shuffle", "seed"),
)
# Options of a single start: a resumed run does not take them from the saved one.
SESSION_FIELDS = (
    *("out", "resume", "quiet", "eval_only", "timeout", "inject_delay", "tensorboard", "trace"),
)
