"""Names that options accept, and what other libraries call options."""

SERVED = ("async", "ssp", "easgd")  # modes in which servers apply what comes, as it comes
ROUND_MODES = ("sync", "local_sgd")  # in which all ranks go in rounds; these do without servers

LEARNING_RATES = {
    "sgd": 0.1,
    "momentum": 0.05,
    "nesterov": 0.05,
    "adagrad": 0.02,
    "rmsprop": 0.001,
    "adadelta": 1.0,
    "adam": 0.002,
    "adamw": 0.001,
    "amsgrad": 0.002,
    "nadam": 0.002,
    "radam": 0.002,
    "lion": 0.0003,
}
OPTIMIZERS = tuple(LEARNING_RATES)
# What a program calls them.
RULES = {
    "sgd": "SGD",
    "momentum": "Momentum",
    "nesterov": "Nesterov",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "adadelta": "Adadelta",
    "adam": "Adam",
    "adamw": "AdamW",
    "amsgrad": "AMSGrad",
    "nadam": "NAdam",
    "radam": "RAdam",
    "lion": "Lion",
}
# Of few features a sample.
SPARSE_PROBLEMS = ("logistic_sparse", "factorization_machine", "wide_deep")
PROBLEMS = ("linear", "softmax", "mlp", *SPARSE_PROBLEMS)
CODECS = ("none", "auto", "fp16", "bf16", "int8", "int4", "topk", "onebit", "powersgd")
PULL_CODECS = ("none", "auto", "fp16", "bf16", "int8")
SCHEDULES = ("constant", "warmup", "cosine", "step")
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
# Face, Horovod and scikit-learn. ELSEWHERE has those without an option here, by what to do instead.
ELSEWHERE = {
    "mpirun -n N starts N ranks, of which all but the servers are workers": "workers num_workers "
    "n_workers dataloader_num_workers world_size num_processes num_proc nproc nproc_per_node np "
    "n_procs num_nodes nnodes num_machines num_ranks",
    "worker.to(device) moves a PyTorch model": "device devices gpu gpus num_gpus accelerator cuda "
    "use_gpu use_cuda no_cuda use_cpu",
}
CALLED = {
    "lr": "learning_rate base_lr initial_lr init_lr eta eta0 alpha step_length rate",
    "steps": "max_steps num_steps n_steps total_steps train_steps num_train_steps "
    "num_training_steps max_train_steps training_steps iterations max_iterations num_iterations "
    "iters max_iters max_iter n_iter num_updates max_updates",
    "epochs": "num_epochs n_epochs nb_epoch nb_epochs max_epochs epoch num_train_epochs "
    "total_epochs train_epochs nepochs num_epoch max_epoch passes",
    "out": "output_dir output outdir out_dir output_path output_folder log_dir logdir logging_dir "
    "save_dir save_path save_to default_root_dir root_dir model_dir run_dir work_dir workdir "
    "checkpoint_dir ckpt_dir checkpoint_path checkpoints_dir dirpath job_dir directory folder dir",
    "accumulate": "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches "
    "accumulation_steps grad_accumulation_steps grad_accum_steps grad_accum accumulation "
    "accumulate_steps accumulate_gradients backward_passes_per_step num_microbatches micro_batches "
    "update_freq iter_size",
    "batch_size": "batch bs batchsize train_batch_size per_device_train_batch_size "
    "per_gpu_train_batch_size per_device_batch_size per_replica_batch_size local_batch_size "
    "micro_batch_size train_micro_batch_size_per_gpu minibatch_size mini_batch_size minibatch",
    "clip": "max_grad_norm gradient_clip_val gradient_clipping gradient_clip grad_clip clip_grad "
    "clip_grad_norm clip_norm clipnorm global_clipnorm clip_gradients clip_value clipvalue "
    "max_norm grad_norm",
    "optimizer": "optim opt optimiser optimizer_name optimizer_type update_rule",
    "weight_decay": "wd decay_rate l2 l2_reg l2_regularization weight_decay_rate regularization "
    "adam_weight_decay",
    "beta1": "adam_beta1 beta_1 b1 adam_b1",
    "beta2": "adam_beta2 beta_2 b2 adam_b2",
    "eps": "epsilon adam_epsilon adam_eps",
    "decay": "rho rms_decay smoothing",
    "schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler learning_rate_schedule "
    "lr_policy decay_style lr_decay_style",
    "warmup_steps": "warmup num_warmup_steps lr_warmup_steps warmup_iters warmup_updates lr_warmup",
    "step_every": "step_size lr_step_size decay_steps lr_decay_steps lr_step",
    "step_factor": "gamma lr_gamma lr_decay lr_decay_rate",
    "groups": "param_groups parameter_groups params_groups layer_lrs lr_multipliers",
    "seed": "random_seed random_state manual_seed rng_seed rng global_seed",
    "shuffle": "shuffle_data reshuffle shuffle_buffer_size",
    "resume": "resume_from_checkpoint resume_from ckpt_path load_checkpoint restore continue "
    "auto_resume",
    "init_from": "pretrained pretrained_model pretrained_path init_checkpoint load_from "
    "load_weights weights warm_start_from model_name_or_path restore_from",
    "eval_every": "eval_steps evaluation_strategy eval_strategy eval_interval eval_freq "
    "eval_period evaluate_every val_check_interval check_val_every_n_epoch validation_freq "
    "val_every val_interval test_every",
    "log_every": "logging_steps log_every_n_steps log_interval log_freq log_steps logging_interval "
    "print_freq print_every report_every verbose_interval",
    "checkpoint_every": "save_steps save_freq save_every save_interval save_strategy save_period "
    "checkpoint_freq checkpoint_interval checkpoint_period checkpoint_steps save_checkpoint_steps "
    "save_checkpoints_steps save_checkpoints_secs every_n_train_steps every_n_epochs",
    "keep": "save_total_limit save_top_k max_to_keep keep_checkpoint_max keep_last keep_last_n "
    "max_checkpoints num_checkpoints",
    "keep_best": "save_best_only save_best load_best_model_at_end",
    "patience": "early_stopping_patience early_stopping early_stop n_iter_no_change",
    "target_accuracy": "target_metric stop_accuracy target_acc",
    "quiet": "silent verbose disable_tqdm progress_bar enable_progress_bar",
    "tensorboard": "report_to logger loggers tensor_board",
    "trace": "profile profiler timeline timeline_filename",
    "threads": "num_threads n_jobs omp_num_threads nthreads cpu_threads",
    "dtype": "precision data_type param_dtype torch_dtype float_type",
    "codec": "compression compressor compress gradient_compression fp16_allreduce quantization "
    "comm_hook",
    "mode": "strategy distribution_strategy distributed_strategy synchronous sync_mode algorithm "
    "consistency sync_replicas",
    "servers": "num_servers n_servers num_ps n_ps ps parameter_servers num_parameter_servers "
    "server_count ps_count num_shards",
    "server_hosts": "ps_hosts server_nodes ps_nodes",
    "backup_workers": "replicas_to_aggregate num_backup_workers backups",
    "staleness_bound": "staleness max_delay stale_limit slack",
    "local_steps": "sync_every sync_frequency averaging_period local_updates inner_steps",
    "evaluators": "num_evaluators eval_workers",
    "timeout": "timeout_s timeout_seconds ddp_timeout wait_timeout max_wait",
    "hidden": "hidden_layer_sizes hidden_size hidden_sizes hidden_units hidden_dim hidden_dims "
    "layers n_hidden",
    "activation": "activation_fn nonlinearity act",
    "classes": "num_classes n_classes num_labels nclasses",
    "problem": "model model_name model_type arch architecture net network task",
    "dataset": "data data_path data_dir data_file dataset_name dataset_path input input_file "
    "train_data train_dataset train_file training_data data_root",
    "held_out": "validation_data val_data val_dataset eval_dataset eval_data valid_data test_data "
    "val_loader val_dataloaders validation_set holdout test_dataset",
    "test_dataset": "validation_data val_data val_dataset eval_dataset eval_data valid_data "
    "test_data validation_file val_file test_file validation_set",
    "test_fraction": "validation_split val_fraction val_split test_size validation_fraction",
    "flip": "horizontal_flip random_flip hflip",
    "scale": "rescale normalize_factor",
    "evaluate": "metrics compute_metrics metric eval_fn evaluate_fn eval_function validate",
    "callbacks": "callback hooks",
    "tables": "embeddings embedding_tables",
    "comm": "communicator process_group mpi_comm",
}
