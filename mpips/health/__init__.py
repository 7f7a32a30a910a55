"""Status board of the ranks, hang detection and trace files."""
