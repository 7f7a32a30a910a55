"""Training modes: which have servers, and which go in rounds."""

SERVED = ("async", "ssp", "easgd")  # servers apply what comes, as it comes
ROUND_MODES = ("sync", "local_sgd")  # all ranks go in rounds; these do without servers
