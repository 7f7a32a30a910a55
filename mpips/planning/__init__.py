"""What is known before the first step: the job, its memory, its traffic."""
