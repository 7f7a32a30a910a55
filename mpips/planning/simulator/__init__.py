"""A job as it would go: by events, with jitter, slow workers, queues and failures."""
