"""Compiled loops as CPython functions, in a cache on the disk (`mpips.kernels.cache`).

numba compiles a loop (`mpips.kernels.compiler`) once for each type of processor. LLVM's linker
loads it again. Only to compile is numba imported, which takes a rank half a second and 50 MB.

A `Kernel` is called like the function that it was made of. For each combination of dtypes it has
one compiled **variant**: a function of C's calling convention for CPython (METH_FASTCALL), which
reads the fields of its arrays itself and hands on a call whose arrays are not its own: to the
variant before it, and from the last one to Python, which compiles or loads another.
"""

import ctypes
import functools
import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
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
CONSTANTS = (int, float, str, slice, tuple, np.generic)  # types whose text says all of a value
ENTRY, LINKS, N_LINKS = "mpips_entry", "mpips_links", 3  # in the machine code of a variant


class Array(NamedTuple):
    """What a variant expects of an argument that is an array.

    Attributes:
        dtype: Its dtype's string, such as ``<f4``.
        ndim: Number of dimensions.
        writeable: Whether it may be written.
        contiguous: Whether it is C-contiguous; if not, its strides are looked at.
    """

    dtype: str
    ndim: int
    writeable: bool
    contiguous: bool

    @property
    def flags(self) -> int:
        """Flags of NumPy's that it has."""
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
    """A loop that is compiled when it is first called with arrays of some dtypes.

    Args:
        function: The loop, in the part of Python that numba compiles. Its parameters are annotated:
            arrays, `int`, `float` or `numpy.uint64`. It may raise before it writes anything.
        fastmath: LLVM's flags for its arithmetic.
        quick: Whether it takes less time than to let the GIL go.
        inlined: Whether it is compiled into each loop that calls it.
    """

    def __new__(cls, *_: object, **__: object) -> "Kernel":
        """Make a class for each loop, whose `__call__` is its entry: a call enters no Python."""
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
        """What numba takes it for in a function that it compiles."""
        from numba import types

        return types.Dispatcher(self.dispatcher)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """The loop as numba's own function; imports the compiler."""
        from mpips.kernels import compiler

        return compiler.dispatcher(self)

    def key(self, args: tuple[Any, ...]) -> Key:
        """Return the variant that takes such arguments.

        Raises:
            TypeError: If there can be none.
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
        """Raise what the compiled loop only says that it raised: as Python, it raises the same."""
        self.function(*args)
        raise RuntimeError(f"{self.name}: the compiled loop failed, and the same in Python not")

    def _load(self, key: Key) -> Any:
        """Return a variant as a function; calls that are not its own go to the entry so far."""
        code = cache.machine_code(_file(self, key), lambda: self._compiled(key))
        symbols = _link(code, f"{self.name}.{next(_numbers)}")
        links = (ctypes.c_ssize_t * N_LINKS).from_address(symbols[LINKS])
        links[:] = [id(np.ndarray), id(self._explainer), id(None)]
        definition = _MethodDef(self.name.encode(), symbols[ENTRY], METH_FASTCALL, None)
        self._kept.append((symbols, definition))
        return _make_function(ctypes.addressof(definition), self._entry, None)


def _plain(arg: object) -> object:
    """Return an array of a class of its own, such as a `numpy.memmap`, as a plain one."""
    if isinstance(arg, np.ndarray) and type(arg) is not np.ndarray:
        return arg.view(np.ndarray)
    return arg


def kernel(*fastmath: str, quick: bool = False, inlined: bool = False) -> Callable[[F], F]:
    """Make the decorator that makes a `Kernel` of a loop.

    Args:
        fastmath: Names of LLVM's fast-math flags.
        quick: Whether the loop takes less time than to let the GIL go.
        inlined: Whether it is compiled into each loop that calls it.
    """

    def decorate(function: F) -> F:
        return cast(F, Kernel(cast(FunctionType, function), frozenset(fastmath), quick, inlined))

    return decorate


# What machine code depends on -----------------------------------------------------------------


@functools.cache
def _source(name: str) -> bytes:
    """Return the text of a module with loops outside this room: it may have what `_code` misses."""
    return Path(name).read_bytes() if os.path.exists(name) and Path(name).parent != HERE else b""


@functools.cache
def _code(loop: Kernel) -> bytes:
    """Return what the machine code of all variants of a loop depends on, and of what it calls."""
    code, known = loop.function.__code__, loop.function.__globals__
    modules = [vars(m) for m in map(known.get, code.co_names) if isinstance(m, ModuleType)]
    values = [(n, names[n]) for names in (known, *modules) for n in code.co_names if n in names]
    called = [value for _, value in values if isinstance(value, Kernel)]
    written = code.co_consts, code.co_names, [v for v in values if isinstance(v[1], CONSTANTS)]
    options = str((sorted(loop.fastmath), loop.quick, loop.inlined, written)).encode()
    parts = _source(code.co_filename), code.co_code, options, *map(_code, called)
    return hashlib.blake2b(b"".join(parts)).digest()


def _file(loop: Kernel, key: Key) -> str:
    """Return the name of a variant's file in the cache."""
    code = cache.machine() + _code(loop) + str(key).encode()
    return f"{loop.name}-{cache.digest(code).hex()}.o"


# In memory ------------------------------------------------------------------------------------

_numbers = itertools.count()  # of libraries: no name comes twice


@functools.cache
def _linker() -> Any:
    """Return LLVM's linker: JITLink, which puts the sections of a library side by side.

    LLVM's older one aborts the process where two are further apart than a jump reaches.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(use_jit_link=True)


def _link(data: bytes, name: str) -> Any:
    """Load machine code; returns its symbols, which live as long as what is returned."""
    import llvmlite.binding as llvm

    library = llvm.JITLibraryBuilder().add_object_img(data).add_current_process()
    return library.export_symbol(ENTRY).export_symbol(LINKS).link(_linker(), name)
