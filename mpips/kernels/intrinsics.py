"""Intrinsics that compiled loops may call; imported where one is compiled."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

I8, I32, I64, F64 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.DoubleType()
CLOCK_MONOTONIC = 1  # time.h of Linux

# Some versions of numba declare an intrinsic as called with its typing context; it is not.
intrinsic_of_any: Any = intrinsic
intrinsic_of_literals: Any = intrinsic(prefer_literal=True)


def _word(context: Any, builder: Any, words_type: Any, words: Any, index: Any) -> Any:
    """Emit the address of ``words[index]``."""
    array = context.make_array(words_type)(context, builder, words)
    return cgutils.get_item_pointer(context, builder, words_type, array, [index])


def _check_words(words: Any) -> None:
    """Refuse all but a vector of int64 when a header function is compiled."""
    if not isinstance(words, types.Array) or words.dtype != types.int64 or words.ndim != 1:
        raise TypingError(f"header words of type {words}, expected a vector of int64")


@intrinsic_of_any
def store_release(typing: Any, words: Any, index: Any, value: Any) -> Any:
    """Store atomically with release order, then a sequentially consistent fence."""
    _check_words(words)
    if not words.mutable:
        raise TypingError("a read-only header, expected one that this rank owns")

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], pointer, "release", 8)
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), emit


@intrinsic_of_any
def load_acquire(typing: Any, words: Any, index: Any) -> Any:
    """Fence with acquire order, then load atomically with acquire order."""
    _check_words(words)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], args[1])
        builder.fence("acquire")
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(words, types.int64), emit


@intrinsic_of_any
def store_ordered(typing: Any, words: Any, index: Any, value: Any) -> Any:
    """Store atomically: seen after all earlier stores, and before all later ones.

    Unlike `store_release` it does not wait for any of them, and says nothing about loads.
    """
    _check_words(words)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], pointer, "release", 8)
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), emit


def _prefetch(array: Any, write: int) -> Any:
    """Return what an intrinsic does that has a line of the cache on its way."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        indices = [args[1], *[I64(0)] * (kind.ndim - 1)]
        found = context.make_array(kind)(context, builder, args[0])
        pointer = cgutils.get_item_pointer(context, builder, kind, found, indices)
        line = builder.gep(builder.bitcast(pointer, I8.as_pointer()), [args[2]])
        signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [line.type], signature)
        builder.call(function, [line, I32(write), I32(2), I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), emit


@intrinsic_of_any
def prefetch(typing: Any, array: Any, row: Any, skip: Any) -> Any:
    """Have the cache line that is `skip` bytes behind the beginning of a row on its way.

    It comes as far as the second-level cache: of the first level's lines on their way there are
    so few that rows would wait for one another.
    """
    return _prefetch(array, 0)


@intrinsic_of_any
def prefetch_write(typing: Any, array: Any, row: Any, skip: Any) -> Any:
    """Do as `prefetch` for a line that is to be written: other cores let go of it at once."""
    return _prefetch(array, 1)


@intrinsic_of_any
def array_at(typing: Any, address: Any, like: Any, size: Any) -> Any:
    """Return a vector of that many elements at an address in bytes, of the dtype of `like`."""
    vector = types.Array(like.dtype, 1, "C")

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = builder.inttoptr(args[0], context.get_data_type(like.dtype).as_pointer())
        return vector_over(context, builder, vector, data, args[2])

    return vector(types.int64, like, types.int64), emit


@intrinsic_of_literals
def scratch(typing: Any, count: Any) -> Any:
    """Return a vector of float64 on the stack, not initialised, of a literal length."""
    vector = types.Array(types.float64, 1, "C")

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = cgutils.alloca_once(builder, F64, size=count.literal_value)
        return vector_over(context, builder, vector, data, I64(count.literal_value))

    return vector(count), emit


@intrinsic_of_any
def copy_bytes(typing: Any, out: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes from an address to the beginning of a vector, as C's memcpy does."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = context.make_array(signature.args[0])(context, builder, args[0])
        target = builder.bitcast(found.data, I8.as_pointer())
        cgutils.raw_memcpy(builder, target, builder.inttoptr(args[1], target.type), args[2], 1)
        return context.get_dummy_value()

    return types.void(out, types.int64, types.int64), emit


@intrinsic_of_any
def now_ns(typing: Any) -> Any:
    """Return the time of `time.perf_counter_ns`: that of the monotonic clock (clock_gettime(2))."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        time = cgutils.alloca_once(builder, I64, size=2)
        kind = ir.FunctionType(I32, [I32, time.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [I32(CLOCK_MONOTONIC), time])
        seconds, rest = (builder.load(builder.gep(time, [I32(k)])) for k in range(2))
        return builder.add(builder.mul(seconds, I64(10**9)), rest)

    return types.int64(), emit


sched_yield = types.ExternalFunction("sched_yield", types.int32())

NAMES = {
    f.__name__: f
    for f in (
        store_release, store_ordered, load_acquire, prefetch, prefetch_write, array_at, scratch,
        copy_bytes, now_ns,
    )
}  # fmt: skip
NAMES["sched_yield"] = sched_yield


def array_over(context: Any, builder: Any, kind: Any, data: Any, shape: Any, strides: Any) -> Any:
    """Emit an array over memory that somebody else keeps."""
    array = context.make_array(kind)(context, builder)
    size = I64(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


def vector_over(context: Any, builder: Any, kind: Any, data: Any, size: Any) -> Any:
    """Emit a vector over memory that somebody else keeps."""
    stride = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    return array_over(context, builder, kind, data, [size], [I64(stride)])
