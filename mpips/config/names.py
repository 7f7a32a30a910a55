"""Names that options take: what there is of each kind, without importing any of it."""

LEARNING_RATES = {
    "sgd": 0.1,
    "momentum": 0.05,
    "nesterov": 0.05,
    "adagrad": 0.02,
    "rmsprop": 0.001,
    "adam": 0.002,
    "adamw": 0.001,
}
OPTIMIZERS = tuple(LEARNING_RATES)
# Of few features a sample.
SPARSE_PROBLEMS = ("logistic_sparse", "factorization_machine", "wide_deep")
TEXT_PROBLEMS = ("skipgram",)  # of words
PROBLEMS = ("linear", "softmax", "mlp", *SPARSE_PROBLEMS, *TEXT_PROBLEMS)
CODECS = ("none", "auto", "fp16", "bf16", "int8", "int4", "topk", "onebit", "powersgd")
PULL_CODECS = ("none", "auto", "fp16", "bf16", "int8")
SCHEDULES = ("constant", "warmup", "cosine", "step")
# What the shapes, the slots or the order of the samples depend on.
LAYOUT_FIELDS = (
    *("problem", "hidden", "activation", "factors", "dim", "dtype", "optimizer"),
    *("dataset", "test_dataset", "test_fraction", "classes", "min_count", "batch_size"),
    *("accumulate", "shuffle", "seed"),
)
# What is said anew at each start: a resumed run does not take these from the saved one.
SESSION_FIELDS = (
    *("out", "resume", "quiet", "eval_only", "timeout", "inject_delay", "tensorboard", "trace"),
)
