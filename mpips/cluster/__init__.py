"""The only room that knows MPI: ranks, nodes, windows, waiting, the end of a job."""
