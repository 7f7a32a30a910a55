"""An asynchronous run made again on one rank, from its record, to the same bits."""
