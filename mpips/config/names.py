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
PROBLEMS = ("linear", "softmax", "mlp", *SPARSE_PROBLEMS)
CODECS = ("none", "auto", "fp16", "bf16", "int8", "int4", "topk", "onebit", "powersgd")
PULL_CODECS = ("none", "auto", "fp16", "bf16", "int8")
SCHEDULES = ("constant", "warmup", "cosine", "step")
