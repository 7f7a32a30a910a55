"""Compiled loops as CPython functions, with a cache on disk.

numba compiles a loop (`mpips.kernels.compiler`) once for each type of processor. Later runs load
the machine code from the cache (`mpips.kernels.cache`) by LLVM's linker. numba is imported only to
compile: the import takes a rank half a second and 50 MB.

A `Kernel` is called like the Python function that it was made of. It has one compiled **variant**
for each combination of dtypes: a C function of CPython's convention METH_FASTCALL, which reads the
fields of its arrays itself. If the arrays of a call do not match a variant, it passes the call on
to the variant that was loaded before it. The first variant passes the call on to Python, which
loads or compiles another one.
"""

import ctypes
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from mpips.kernels import cache

F = TypeVar("F", bound=Callable[..., Any])
Vector = np.ndarray  # of one dimension
Matrix = np.ndarray  # of two, or more

# numpy/ndarraytypes.h
CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400
METH_FASTCALL = 0x80  # methodobject.h
HERE = Path(__file__).parent
CONSTANTS = (int, float, str, slice, tuple, np.generic)  # types whose repr determines the value
ENTRY, LINKS, N_LINKS = "mpips_entry", "mpips_links", 3  # symbols in a variant's machine code


class Array(NamedTuple):
    """Type of an array argument that a variant expects.

    Attributes:
        dtype: String of the dtype, such as ``<f4``.
        ndim: Number of dimensions.
        writeable: Whether the array is writeable.
        contiguous: Whether the array is C-contiguous; if not, the variant reads its strides.
    """

    dtype: str
    ndim: int
    writeable: bool
    contiguous: bool

    @property
    def flags(self) -> int:
        """NumPy's flags of such an array."""
        return ALIGNED | CONTIGUOUS * self.contiguous | WRITEABLE * self.writeable


Key = tuple[Array | type, ...]


class _MethodDef(ctypes.Structure):
    """``PyMethodDef``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_make_function = ctypes.pythonapi.PyCFunction_NewEx
_make_function.restype = ctypes.py_object
_make_function.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)


class Kernel:
    """A loop, compiled at the first call with arguments of each combination of dtypes.

    Args:
        function: The loop, in the subset of Python that numba compiles. Its parameters are
            annotated: arrays, `int`, `float` or `numpy.uint64`. It may raise only before it writes.
        fastmath: LLVM's fast-math flags.
        quick: Whether the loop is so short that it keeps the GIL.
        inlined: Whether the loop is compiled into each loop that calls it.
    """

    def __new__(cls, *_: object, **__: object) -> "Kernel":
        """Make a subclass for each loop; its `__call__` is machine code, so calls run no Python."""
        return object.__new__(type(cls.__name__, (cls,), {}))

    def __init__(
        self, function: FunctionType, fastmath: frozenset[str], quick: bool, inlined: bool = False
    ) -> None:
        functools.update_wrapper(self, function)
        self.name, self.function = function.__name__, function
        self.fastmath, self.quick, self.inlined = fastmath, quick, inlined
        self.kinds = [v for k, v in function.__annotations__.items() if k != "return"]
        self.variants: dict[Key, Any] = {}
        self._entry: Callable[..., Any] = self.__call__
        self._explainer = self._explain
        self._kept: list[object] = []

    def __repr__(self) -> str:
        return f"<kernel {self.function.__module__}.{self.function.__name__}>"

    @property
    def _numba_type_(self) -> Any:
        """The loop's type for numba, in a function that numba compiles."""
        from numba import types

        return types.Dispatcher(self.dispatcher)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """The loop as a function of numba's; imports the compiler."""
        from mpips.kernels import compiler

        return compiler.dispatcher(self)

    def key(self, args: tuple[Any, ...]) -> Key:
        """Return the key of the variant for these arguments.

        Raises:
            TypeError: If their number or types are wrong.
        """
        if len(args) != len(self.kinds):
            raise TypeError(f"{self.name} of {len(args)} arguments, expected {len(self.kinds)}")
        return tuple(self._kind(*pair) for pair in zip(args, self.kinds, strict=True))

    def _kind(self, arg: object, kind: type) -> Array | type:
        if kind is not np.ndarray:
            return kind
        if not isinstance(arg, np.ndarray):
            raise TypeError(f"{self.name} of {type(arg).__name__}, expected an array")
        if not arg.dtype.isnative or not arg.flags.aligned:
            raise TypeError(f"{self.name} of {arg.dtype}, expected an aligned native array")
        return Array(arg.dtype.str, arg.ndim, arg.flags.writeable, arg.flags.c_contiguous)

    def __call__(self, *args: Any) -> Any:
        """Load or compile the variant for these arguments, and call it."""
        args = tuple(map(_plain, args))
        key = self.key(args)
        if key not in self.variants:
            self._entry = self.variants[key] = self._load(key)
            type(self).__call__ = self._entry  # type: ignore[method-assign]
        return self.variants[key](*args)

    def _compiled(self, key: Key) -> bytes:
        from mpips.kernels import compiler

        return compiler.compiled(self, key)

    def _explain(self, *args: Any) -> Any:
        """Run the loop in Python, which raises the error that the compiled loop only signals."""
        self.function(*args)
        raise RuntimeError(f"{self.name}: the compiled loop failed, and the same in Python not")

    def _load(self, key: Key) -> Any:
        """Return a variant as a function, which passes calls on to the entry that it replaces."""
        code = cache.machine_code(_file(self, key), lambda: self._compiled(key))
        symbols = _link(code, f"{self.name}.{next(_numbers)}")
        links = (ctypes.c_ssize_t * N_LINKS).from_address(symbols[LINKS])
        links[:] = [id(np.ndarray), id(self._explainer), id(None)]
        definition = _MethodDef(self.name.encode(), symbols[ENTRY], METH_FASTCALL, None)
        self._kept.append((symbols, definition))
        return _make_function(ctypes.addressof(definition), self._entry, None)


def _plain(arg: object) -> object:
    """Return an array of a subclass, such as `numpy.memmap`, as a plain `numpy.ndarray`."""
    if isinstance(arg, np.ndarray) and type(arg) is not np.ndarray:
        return arg.view(np.ndarray)
    return arg


def kernel(*fastmath: str, quick: bool = False, inlined: bool = False) -> Callable[[F], F]:
    """Return a decorator that makes a `Kernel` of a loop.

    Args:
        fastmath: Names of LLVM's fast-math flags.
        quick: Whether the loop is so short that it keeps the GIL.
        inlined: Whether the loop is compiled into each loop that calls it.
    """

    def decorate(function: F) -> F:
        return cast(F, Kernel(cast(FunctionType, function), frozenset(fastmath), quick, inlined))

    return decorate


# Dependencies of machine code -----------------------------------------------------------------


@functools.cache
def _source(name: str) -> bytes:
    """Return a module's text if it is outside this package: `_code` may miss dependencies there."""
    return Path(name).read_bytes() if os.path.exists(name) and Path(name).parent != HERE else b""


@functools.cache
def _code(loop: Kernel) -> bytes:
    """Return a digest of a loop's code, of its constants, and of all loops that it calls."""
    codes, known = list(_nested(loop.function.__code__)), loop.function.__globals__
    used = tuple(name for code in codes for name in code.co_names)
    consts = tuple(v for code in codes for v in code.co_consts if not isinstance(v, CodeType))
    modules = [vars(m) for m in map(known.get, used) if isinstance(m, ModuleType)]
    values = [(n, names[n]) for names in (known, *modules) for n in used if n in names]
    called = [value for _, value in values if isinstance(value, Kernel)]
    written = consts, used, [v for v in values if isinstance(v[1], CONSTANTS)]
    options = str((sorted(loop.fastmath), loop.quick, loop.inlined, written)).encode()
    text = b"".join(code.co_code for code in codes)
    parts = _source(codes[0].co_filename), text, options, *map(_code, called)
    return hashlib.blake2b(b"".join(parts)).digest()


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of all functions defined in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _nested(value)


def _file(loop: Kernel, key: Key) -> str:
    """Return the name of a variant's file in the cache, which contains a digest."""
    code = cache.machine() + _code(loop) + str(key).encode()
    return f"{loop.name}-{cache.digest(code).hex()}.o"


# Machine code in memory -----------------------------------------------------------------------

_numbers = itertools.count()  # makes names of libraries unique


@functools.cache
def _linker() -> Any:
    """Return LLVM's linker JITLink, which places the sections of a library side by side.

    LLVM's older linker aborts the process if two sections are further apart than a jump reaches.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(use_jit_link=True)


def _link(data: bytes, name: str) -> Any:
    """Load machine code. Returns its symbols, valid as long as the returned object lives."""
    import llvmlite.binding as llvm

    library = llvm.JITLibraryBuilder().add_object_img(data).add_current_process()
    return library.export_symbol(ENTRY).export_symbol(LINKS).link(_linker(), name)
