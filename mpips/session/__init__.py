"""One run from its command line to its summary."""
