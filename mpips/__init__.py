"""mpips, a parameter server over MPI: servers hold the parameters, workers compute gradients."""

__version__ = "0.1.0"
