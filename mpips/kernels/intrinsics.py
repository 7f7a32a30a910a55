"""Intrinsics for compiled loops; imported only to compile a loop."""

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
LINE, MOST_FETCHED = 64, 512  # bytes of a cache line, and most bytes that a prefetch covers

# Some versions of numba annotate an intrinsic as if callers passed its typing context.
intrinsic_of_any: Any = intrinsic
intrinsic_of_literals: Any = intrinsic(prefer_literal=True)


def _word(context: Any, builder: Any, words_type: Any, words: Any, index: Any) -> Any:
    """Emit the address of ``words[index]``."""
    array = context.make_array(words_type)(context, builder, words)
    return cgutils.get_item_pointer(context, builder, words_type, array, [index])


def _check_words(words: Any) -> None:
    """Raise TypingError unless header words are a vector of int64."""
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
    """Store atomically, ordered after all earlier stores and before all later ones.

    Unlike `store_release` it does not wait for the earlier stores, and does not order loads.
    """
    _check_words(words)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], pointer, "release", 8)
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), emit


def _prefetch(nbytes: Any, write: int) -> Any:
    """Return the code generator of a prefetch."""

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
        for skip in range(3):  # LLVM would unroll a loop; fetching a line twice costs little
            fetch(least(builder.add(line, I64(skip * LINE)), last))
        others = builder.add(line, I64(3 * LINE))
        with cgutils.for_range_slice(builder, others, end, I64(LINE)) as (at, _):
            fetch(at)
        return context.get_dummy_value()

    return types.void(types.int64, nbytes), emit


@intrinsic_of_literals
def prefetch(typing: Any, address: Any, nbytes: Any) -> Any:
    """Prefetch at most `MOST_FETCHED` bytes at an address into the cache.

    If `nbytes` is a literal, one cache line is prefetched.
    """
    return _prefetch(nbytes, 0)


@intrinsic_of_literals
def prefetch_write(typing: Any, address: Any, nbytes: Any) -> Any:
    """Prefetch as `prefetch` does, for a write: the line is taken from other cores' caches."""
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
    """Return an uninitialised vector of float64 on the stack; its length is a literal."""
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

    LLVM's own loops take larger steps, and handle the rest, such as a row of 32 numbers, one by
    one.

    Args:
        context: numba's target context.
        builder: LLVM's IR builder.
        kind: numba's type of the vector.
        out: The vector.
        make: Function that emits the new elements. It gets a function that loads elements at a
            pointer and an index, and the index of the first element.
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
    """Copy the beginning of another vector of the same dtype; the two must not overlap."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[1])(context, builder, args[1]).data
        _by_vectors(context, builder, signature.args[0], args[0], lambda load, at: load(data, at))
        return context.get_dummy_value()

    return types.void(out, source), emit


@intrinsic_of_any
def sum_numbers(typing: Any, out: Any, rows: Any, order: Any, begin: Any, end: Any) -> Any:
    """Set a vector to the sum of ``rows[order[begin:end]]``, added in this order."""

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
    """Emit an array over existing memory."""
    array = context.make_array(kind)(context, builder)
    size = I64(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


def vector_over(context: Any, builder: Any, kind: Any, data: Any, size: Any) -> Any:
    """Emit a vector over existing memory."""
    stride = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    return array_over(context, builder, kind, data, [size], [I64(stride)])
