"""Compiled loops over flat vectors and header words.

Vectors are of float32 or float64, and all vectors of one call have the same dtype. Loops are
compiled without fast-math: they compute each element operation by operation, in IEEE arithmetic. So
NaN and infinity propagate, and results equal NumPy's bit for bit. A vector divided into blocks
gives the same bits as the whole vector. Contraction would gain nothing, since the loops wait for
memory. All but the shortest loops run without the GIL. Machine code is cached on disk
(`mpips.kernels.compiled`).
"""
