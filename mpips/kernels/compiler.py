"""Compilation of loops by numba to machine code that CPython calls.

Imported only to compile a loop.
"""

import sys
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.np.numpy_support import from_dtype

from mpips.kernels.compiled import ENTRY, LINKS, N_LINKS, Array, Kernel, Key
from mpips.kernels.intrinsics import F64, I8, I32, I64, NAMES, array_over
from mpips.kernels.intrinsics import intrinsic_of_any as intrinsic

# Offsets of fields: PyObject (object.h), PyArrayObject and PyArray_Descr (numpy/ndarraytypes.h).
TYPE, DATA, NDIM, SHAPE, STRIDES, DESCR, FLAGS = 8, 16, 24, 32, 40, 56, 64
BYTE_ORDER, TYPE_NUM = 26, 28
FOREIGN = ">" if sys.byteorder == "little" else "<"  # byte order that loops do not support

OPTIMIZED = 3


def dispatcher(loop: Kernel) -> Any:
    """Return a loop as a function of numba's, which compiles it for each combination of types."""
    function = loop.function
    rebound = FunctionType(function.__code__, {**function.__globals__, **NAMES}, function.__name__)
    return _jit(loop)(rebound)


def _jit(loop: Kernel) -> Any:
    # Python's error model tests every divisor for zero, which prevents vectorisation. Without
    # numba's runtime there is no reference counting, and code can be loaded without numba.
    options: Any = {"error_model": "numpy", "_nrt": False, "fastmath": set(loop.fastmath)}
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    options["forceinline"] = loop.inlined
    return njit(**options)


# A variant --------------------------------------------------------------------------------------


def compiled(loop: Kernel, key: Key) -> bytes:
    """Compile a variant of a loop; return its machine code.

    Raises:
        TypingError: If numba cannot compile the loop for such arguments.
    """
    inner = _jit(loop)(_from_scalars(loop, key))
    inner.compile(tuple(kind for arg in key for kind in _scalars(arg)))
    (overload,) = inner.overloads.values()
    module = llvm.parse_assembly(overload.library.get_llvm_str())
    outer = _Outer(loop, key, overload.fndesc.llvm_func_name, overload.signature.return_type)
    module.link_in(llvm.parse_assembly(str(outer.module)))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), OPTIMIZED,
        reloc="pic", codemodel="default",
    )  # fmt: skip
    return machine.emit_object(module)


def _scalars(arg: Array | type) -> list[Any]:
    """Return numba's types of the scalars that replace an argument: address, shape, strides."""
    if isinstance(arg, Array):
        return [types.int64] * (1 + arg.ndim * (1 if arg.contiguous else 2))
    return [{int: types.int64, float: types.float64, np.uint64: types.uint64}[arg]]


def _from_scalars(loop: Kernel, key: Key) -> FunctionType:
    """Make a function that takes scalars in place of arrays, and calls the loop with arrays."""
    names: dict[str, Any] = {"loop": loop.dispatcher}
    params, given = [], []
    for k, arg in enumerate(key):
        mine = [f"a{k}_{i}" for i in range(len(_scalars(arg)))]
        params += mine
        if isinstance(arg, Array):
            names[f"view{k}"] = _view(arg)
            given.append(f"view{k}({mine[0]}, ({''.join(f'{n}, ' for n in mine[1:])}))")
        else:
            given += mine
    text = f"def from_scalars({', '.join(params)}):\n    return loop({', '.join(given)})\n"
    exec(text, names)
    return names["from_scalars"]


def _view(arg: Array) -> Any:
    """Make the intrinsic that returns an array, given its address, shape and strides."""
    dtype: Any = from_dtype(np.dtype(arg.dtype))
    layout: Any = "C" if arg.contiguous else "A"
    kind = types.Array(dtype, arg.ndim, layout, readonly=not arg.writeable)

    @intrinsic
    def view(typing: Any, address: Any, numbers: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = cgutils.unpack_tuple(builder, args[1])
            shape, strides = values[: arg.ndim], values[arg.ndim :]
            if arg.contiguous:
                strides = [I64(np.dtype(arg.dtype).itemsize)]
                for size in reversed(shape[1:]):
                    strides.insert(0, builder.mul(size, strides[0]))
            data = builder.inttoptr(args[0], context.get_data_type(kind.dtype).as_pointer())
            return array_over(context, builder, kind, data, shape, strides)

        return kind(types.int64, numbers), emit

    return view


class _Outer:
    """``PyObject *entry(PyObject *self, PyObject *const *args, Py_ssize_t nargs)`` of a variant.

    If an argument does not match the variant's key, this function passes the call on to `self`.
    Otherwise it reads arrays and numbers, releases the GIL, calls the loop, takes the GIL, and
    converts the result to an object. If the loop has raised, it calls `Kernel._explain` with the
    same arguments.

    Args:
        loop: The loop.
        key: Types that the variant expects.
        name: Symbol of the function of scalars.
        returned: numba's type of the loop's result.
    """

    def __init__(self, loop: Kernel, key: Key, name: str, returned: Any) -> None:
        self.module = ir.Module()
        self._links = ir.GlobalVariable(self.module, ir.ArrayType(I64, N_LINKS), LINKS)
        self._links.initializer = ir.Constant(self._links.value_type, None)
        function = ir.Function(self.module, ir.FunctionType(I64, [I64, I64, I64]), ENTRY)
        self._self, self._args, self._count = function.args
        self._function = function
        self._builder = b = ir.IRBuilder(function.append_basic_block())
        self._other, self._failed = (function.append_basic_block(n) for n in ("other", "failed"))
        self._require(b.icmp_signed("==", self._count, I64(len(key))))
        objects = [self._load(self._args, 8 * k) for k in range(len(key))]
        for address, arg in zip(objects, key, strict=True):
            if isinstance(arg, Array):
                self._check(address, arg)
        values: list[Any] = []
        for address, arg in zip(objects, key, strict=True):
            read = self._fields if isinstance(arg, Array) else self._number
            values += read(address, arg)
        self._call_loop(loop, name, values, returned)
        self._finish()

    def _load(self, address: Any, offset: int, kind: Any = I64) -> Any:
        b = self._builder
        return b.load(b.inttoptr(b.add(address, I64(offset)), kind.as_pointer()))

    def _python(self, name: str, result: Any, *args: Any) -> Any:
        """Emit a call of a function of CPython's C API."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self._builder.call(function, args)

    def _require(self, condition: Any) -> None:
        """Emit code that passes the call on unless a condition holds."""
        going_on = self._function.append_basic_block()
        self._builder.cbranch(condition, going_on, self._other)
        self._builder.position_at_end(going_on)

    def _link(self, index: int) -> Any:
        b = self._builder
        return b.load(b.gep(self._links, [I32(0), I32(index)]))

    def _check(self, address: Any, arg: Array) -> None:
        """Emit code that passes the call on unless an object is an array of the expected type."""
        b = self._builder
        self._require(b.icmp_signed("==", self._load(address, TYPE), self._link(0)))
        descr = self._load(address, DESCR)
        order = self._load(descr, BYTE_ORDER, I8)
        self._require(b.icmp_signed("!=", order, I8(ord(FOREIGN))))
        number = self._load(descr, TYPE_NUM, I32)
        same = [I32(np.dtype(c).num) for c in np.typecodes["All"] if np.dtype(c).str == arg.dtype]
        of_dtype = b.icmp_signed("==", number, same[0])
        for other in same[1:]:  # long and long long have one size, but two type numbers
            of_dtype = b.or_(of_dtype, b.icmp_signed("==", number, other))
        self._require(of_dtype)
        self._require(b.icmp_signed("==", self._load(address, NDIM, I32), I32(arg.ndim)))
        mask = Array("", 0, writeable=True, contiguous=True).flags
        flags = b.and_(self._load(address, FLAGS, I32), I32(mask))
        self._require(b.icmp_signed("==", flags, I32(arg.flags)))

    def _fields(self, address: Any, arg: Any) -> list[Any]:
        shape = self._load(address, SHAPE)
        values = [self._load(address, DATA)] + [self._load(shape, 8 * i) for i in range(arg.ndim)]
        if not arg.contiguous:
            strides = self._load(address, STRIDES)
            values += [self._load(strides, 8 * i) for i in range(arg.ndim)]
        return values

    def _number(self, address: Any, kind: Any) -> list[Any]:
        """Emit code that reads a number, or returns with CPython's error if it is not a number."""
        b = self._builder
        if kind is float:
            value = self._python("PyFloat_AsDouble", F64, address)
            failed = b.fcmp_ordered("==", value, F64(-1))
        else:
            name = "PyLong_AsLongLong" if kind is int else "PyLong_AsUnsignedLongLongMask"
            value = self._python(name, I64, address)
            failed = b.icmp_signed("==", value, I64(-1))
        with b.if_then(failed, likely=False):
            raised = b.icmp_unsigned("!=", self._python("PyErr_Occurred", I64), I64(0))
            with b.if_then(raised):
                b.ret(I64(0))
        return [value]

    def _call_loop(self, loop: Kernel, name: str, values: list[Any], returned: Any) -> None:
        b = self._builder
        kinds = {"none": I8.as_pointer(), "bool": I8, "float64": F64}
        kind = kinds.get(str(returned), I64)
        signature = [kind.as_pointer(), I8.as_pointer().as_pointer(), *(v.type for v in values)]
        inner = ir.Function(self.module, ir.FunctionType(I32, signature), name)
        result, raised = b.alloca(kind), b.alloca(I8.as_pointer())
        held = None if loop.quick else self._python("PyEval_SaveThread", I64)
        status = b.call(inner, [result, raised, *values])
        if held is not None:
            self._python("PyEval_RestoreThread", ir.VoidType(), held)
        fine = self._function.append_basic_block()
        b.cbranch(b.icmp_signed("==", status, I32(0)), fine, self._failed)
        b.position_at_end(fine)
        b.ret(self._object(b.load(result), str(returned)))

    def _object(self, value: Any, kind: str) -> Any:
        """Emit code that converts the result to an object of CPython's."""
        b = self._builder
        if kind == "none":
            none = self._link(2)
            self._python("Py_IncRef", ir.VoidType(), none)
            return none
        if kind == "bool":
            return self._python("PyBool_FromLong", I64, b.zext(value, I64))
        if kind == "float64":
            return self._python("PyFloat_FromDouble", I64, value)
        if kind == "int64":
            return self._python("PyLong_FromLongLong", I64, value)
        raise TypingError(f"a loop that returns {kind}, expected none, bool, int64 or float64")

    def _finish(self) -> None:
        """Emit the two other endings: pass the call on, or explain an error."""
        for block in (self._other, self._failed):
            self._builder.position_at_end(block)
            callee = self._self if block is self._other else self._link(1)
            args = (callee, self._args, self._count, I64(0))
            self._builder.ret(self._python("PyObject_Vectorcall", I64, *args))
