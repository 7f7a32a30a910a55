"""Compiled loops over flat vectors and header words, one module an idea.

Every array is one-dimensional; float32 and float64 both work, and all arrays of one call share
the dtype. Loops are compiled without fast-math: each element is computed operation by operation
as IEEE 754 says, so NaN and infinity propagate, results equal NumPy's bit for bit, and a vector
cut into blocks gives the same bits as the whole. Contraction was measured and gains nothing,
since the loops wait for memory. Those that take any time
run without the GIL; all are kept on the disk (`mpips.kernels.compiled`).
"""
