"""Intrinsics that compiled loops may call; imported where one is compiled."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

I8, I32, I64, F64 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.DoubleType()
CLOCK_MONOTONIC = 1  # time.h of Linux
LINE, MOST_FETCHED = 64, 512  # bytes of a line of the cache, and the most of a row

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


def _prefetch(nbytes: Any, write: int) -> Any:
    """Return what an intrinsic does that has lines of the cache on their way."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [I8.as_pointer()], kind)

        def fetch(address: Any) -> None:
            line = builder.inttoptr(address, I8.as_pointer())
            builder.call(function, [line, I32(write), I32(3), I32(1)])

        def least(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed("<", a, b), a, b)

        if isinstance(nbytes, types.Literal):
            fetch(args[0])
            return context.get_dummy_value()
        end = builder.add(args[0], least(args[1], I64(MOST_FETCHED)))
        line, last = builder.and_(args[0], I64(-LINE)), builder.sub(end, I64(1))
        for skip in range(3):  # no loop of LLVM's, which unrolls it; to ask twice costs little
            fetch(least(builder.add(line, I64(skip * LINE)), last))
        others = builder.add(line, I64(3 * LINE))
        with cgutils.for_range_slice(builder, others, end, I64(LINE)) as (at, _):
            fetch(at)
        return context.get_dummy_value()

    return types.void(types.int64, nbytes), emit


@intrinsic_of_literals
def prefetch(typing: Any, address: Any, nbytes: Any) -> Any:
    """Have so many bytes at an address on their way to the cache, `MOST_FETCHED` of them at most.

    If their number is a literal, they are in one line of the cache.
    """
    return _prefetch(nbytes, 0)


@intrinsic_of_literals
def prefetch_write(typing: Any, address: Any, nbytes: Any) -> Any:
    """Do as `prefetch` for memory that is to be written: other cores let go of it at once."""
    return _prefetch(nbytes, 1)


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


def _by_vectors(context: Any, builder: Any, kind: Any, out: Any, make: Callable[..., Any]) -> None:
    """Emit loops that write a vector, in steps of 64 bytes, then of 16, then of one element.

    LLVM's own take more at once, so that rows of 32 numbers go through what it does with the rest.

    Args:
        context: numba's.
        builder: The same.
        kind: Type of the vector.
        out: The vector.
        make: Emits the new elements, of a function that loads those at a pointer's place, and of
            the index of the first.
    """
    out = context.make_array(kind)(context, builder, out)
    number, begin = context.get_data_type(kind.dtype), I64(0)
    nbytes = context.get_abi_sizeof(number)
    for lanes in (64 // nbytes, 16 // nbytes, 1):
        end = builder.and_(out.nitems, I64(-lanes))
        pointer = (ir.VectorType(number, lanes) if lanes > 1 else number).as_pointer()

        def load(data: Any, at: Any, pointer: Any = pointer) -> Any:
            return builder.load(builder.bitcast(builder.gep(data, [at]), pointer), align=nbytes)

        with cgutils.for_range_slice(builder, begin, end, I64(lanes)) as (at, _):
            target = builder.bitcast(builder.gep(out.data, [at]), pointer)
            builder.store(make(load, at), target, align=nbytes)
        begin = end


@intrinsic_of_any
def copy_numbers(typing: Any, out: Any, source: Any) -> Any:
    """Set a vector to the beginning of another one of the same dtype, which lies elsewhere."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[1])(context, builder, args[1]).data
        _by_vectors(context, builder, signature.args[0], args[0], lambda load, at: load(data, at))
        return context.get_dummy_value()

    return types.void(out, source), emit


@intrinsic_of_any
def sum_numbers(typing: Any, out: Any, rows: Any, order: Any, begin: Any, end: Any) -> Any:
    """Set a vector to a sum of rows, from ``rows[order[begin]]`` on, each added to those before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        made, order = (context.make_array(kinds[k])(context, builder, args[k]) for k in (1, 2))
        stride = cgutils.unpack_tuple(builder, made.shape)[1]

        def element(k: Any, at: Any) -> Any:
            row = builder.load(builder.gep(order.data, [k]))
            return builder.add(builder.mul(row, stride), at)

        def make(load: Any, at: Any) -> Any:
            first = load(made.data, element(args[3], at))
            total = cgutils.alloca_once_value(builder, first)
            second = builder.add(args[3], I64(1))
            with cgutils.for_range_slice(builder, second, args[4], I64(1)) as (k, _):
                added = load(made.data, element(k, at))
                builder.store(builder.fadd(builder.load(total), added), total)
            return builder.load(total)

        _by_vectors(context, builder, kinds[0], args[0], make)
        return context.get_dummy_value()

    return types.void(out, rows, order, types.int64, types.int64), emit


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
        copy_bytes, copy_numbers, sum_numbers, now_ns,
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
