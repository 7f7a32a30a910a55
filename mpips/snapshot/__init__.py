"""A consistent cut of a running job, and how it comes into a checkpoint."""
