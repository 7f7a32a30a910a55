"""Names and forms that options accept, and what other libraries call options."""

import re

EMA = "ema"  # the slot with an average of the parameters
SERVED = ("async", "ssp", "easgd")  # modes in which servers apply what comes, as it comes
ROUND_MODES = ("sync", "local_sgd")  # in which all ranks go in rounds; these do without servers
IN_ROUNDS = (*ROUND_MODES, "hybrid")  # of gradients, or of averages

_RULES = {  # what a program calls each rule, and the learning rate that it has by default
    "SGD": 0.1, "Momentum": 0.05, "Nesterov": 0.05, "Adagrad": 0.02, "RMSprop": 0.001,
    "Adadelta": 1.0, "Adam": 0.002, "AdamW": 0.001, "AMSGrad": 0.002, "NAdam": 0.002,
    "RAdam": 0.002, "Lion": 0.0003,
}  # fmt: skip
RULES = {name.lower(): name for name in _RULES}
LEARNING_RATES = {name.lower(): lr for name, lr in _RULES.items()}
OPTIMIZERS = tuple(RULES)
# Of few features a sample.
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
# What the shapes, the slots or the order of the samples depend on.
LAYOUT_FIELDS = (
    *("problem", "hidden", "activation", "factors", "dtype", "optimizer"),
    *("dataset", "test_dataset", "test_fraction", "classes", "batch_size"),
    *("accumulate", "shuffle", "seed"),
)
# What is said anew at each start: a resumed run does not take these from the saved one.
SESSION_FIELDS = (
    *("out", "resume", "quiet", "eval_only", "timeout", "inject_delay", "tensorboard", "trace"),
)
# What options, and arguments of a program's run, are called in PyTorch, Keras, Lightning, Hugging
# Face, Horovod and scikit-learn, where that is not the option's own words and others: so
# num_train_epochs is epochs by itself. ELSEWHERE has what has no option here, and what to do.
ELSEWHERE = {
    "mpirun -n N starts N ranks, of which all but the servers are workers": "workers num_workers "
    "n_workers dataloader_num_workers world_size num_processes num_proc nproc nproc_per_node np "
    "n_procs num_nodes nnodes num_machines num_ranks",
    "worker.to(device) moves a PyTorch model": "device devices gpu gpus num_gpus accelerator cuda "
    "use_gpu use_cuda no_cuda use_cpu",
}
CALLED = {
    "lr": "learning_rate step_length alpha eta0 rate eta",
    "steps": "num_updates max_updates iterations iters",
    "epochs": "passes",
    "out": "checkpoint_path save_path model_dir directory save_to workdir dirpath output outdir "
    "logdir folder dir",
    "accumulate": "backward_passes_per_step num_microbatches micro_batches accumulation "
    "update_freq grad_accum iter_size",
    "batch_size": "minibatch batch bs",
    "ema": "swa averaging",
    "clip": "gradient_clipping clipvalue grad_norm clipnorm max_norm",
    "optimizer": "update_rule optim opt",
    "weight_decay": "regularization decay_rate wd l2",
    "beta1": "b1",
    "beta2": "b2",
    "eps": "epsilon",
    "decay": "smoothing rho",
    "schedule": "decay_style scheduler lr_policy",
    "warmup_steps": "warmup",
    "step_every": "decay_steps step_size lr_step",
    "step_factor": "lr_decay_rate lr_decay gamma",
    "groups": "lr_multipliers layer_lrs",
    "seed": "random_state rng",
    "resume": "load_checkpoint ckpt_path continue restore",
    "init_from": "model_name_or_path init_checkpoint warm_start_from restore_from pretrained "
    "load_from weights",
    "eval_every": "check_val_every_n_epoch evaluation_strategy validation_freq eval_strategy "
    "eval_interval val_interval eval_period eval_steps test_every eval_freq",
    "log_every": "log_every_n_steps logging_interval verbose_interval logging_steps log_interval "
    "report_every print_every print_freq log_steps log_freq",
    "checkpoint_every": "save_checkpoints_secs checkpoint_interval every_n_train_steps "
    "checkpoint_period checkpoint_steps checkpoint_freq every_n_epochs save_interval "
    "save_strategy save_period save_steps save_every save_freq",
    "keep": "save_total_limit max_checkpoints num_checkpoints save_top_k",
    "keep_best": "load_best_model_at_end save_best",
    "patience": "n_iter_no_change early_stopping early_stop",
    "target_accuracy": "target_metric stop_accuracy",
    "quiet": "disable_tqdm progress_bar verbose silent",
    "tensorboard": "report_to logger",
    "trace": "profiler timeline profile",
    "threads": "n_jobs",
    "dtype": "float_type precision data_type",
    "codec": "fp16_allreduce quantization compression compressor comm_hook compress",
    "mode": "sync_replicas synchronous consistency algorithm strategy",
    "servers": "num_shards ps",
    "server_hosts": "server_nodes ps_hosts ps_nodes",
    "backup_workers": "replicas_to_aggregate backups",
    "staleness_bound": "stale_limit staleness max_delay slack",
    "local_steps": "averaging_period sync_frequency local_updates inner_steps sync_every",
    "evaluators": "eval_workers",
    "timeout": "max_wait",
    "hidden": "layers",
    "activation": "nonlinearity act",
    "classes": "num_labels",
    "problem": "architecture network model arch task net",
    "dataset": "train_file input data",
    "held_out": "validation_data val_dataloaders validation_set eval_dataset test_dataset "
    "val_dataset valid_data val_loader eval_data test_data val_data",
    "test_dataset": "validation_data validation_file validation_set eval_dataset val_dataset "
    "valid_data eval_data test_data test_file val_data val_file",
    "test_fraction": "validation_fraction validation_split val_fraction val_split test_size",
    "scale": "normalize_factor",
    "evaluate": "eval_function eval_fn metric",
    "callbacks": "hooks",
    "tables": "embeddings",
    "comm": "process_group communicator",
}
