"""A program without a run."""
