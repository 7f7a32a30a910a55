"""Compiled loops as CPython functions, in a cache on the disk.

numba compiles a loop (`mpips.kernels.compiler`) once for each type of processor. LLVM's linker
loads it again. Only to compile is numba imported, which takes a rank half a second and 50 MB.

A `Kernel` is called like the function that it was made of. For each combination of dtypes it has
one compiled **variant**: a function of C's calling convention for CPython (METH_FASTCALL), which
reads the fields of its arrays itself and hands on a call whose arrays are not its own: to the
variant before it, and from the last one to Python, which compiles or loads another.

Environment:
    XDG_CACHE_HOME: Folder for compiled loops, in ``mpips``. Default: ``~/.cache``.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
Vector = np.ndarray  # of one dimension

# numpy/ndarraytypes.h
CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400
METH_FASTCALL = 0x80  # methodobject.h
DIGEST_BYTES = 16
LOCKED_S = 0.02
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

    def _explain(self, *args: Any) -> Any:
        """Raise what the compiled loop only says that it raised: as Python, it raises the same."""
        self.function(*args)
        raise RuntimeError(f"{self.name}: the compiled loop failed, and the same in Python not")

    def _load(self, key: Key) -> Any:
        """Return a variant as a function; calls that are not its own go to the entry so far."""
        symbols = _link(_object(self, key), f"{self.name}.{next(_numbers)}")
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


def kernel(*fastmath: str, quick: bool = False) -> Callable[[F], F]:
    """Make the decorator that makes a `Kernel` of a loop.

    Args:
        fastmath: Names of LLVM's fast-math flags.
        quick: Whether the loop takes less time than to let the GIL go.
    """

    def decorate(function: F) -> F:
        return cast(F, Kernel(cast(FunctionType, function), frozenset(fastmath), quick))

    return decorate


# Who compiles -----------------------------------------------------------------------------------


class _Compilation:
    """One process compiles what all lack, and the others wait for it: a lock beside the code.

    Args:
        tell: As in `compiling`.
        keeps: Whether to keep the lock until `release`. Whoever may wait for another rank before
            that must not: the other one may wait for the lock.
    """

    def __init__(self, tell: Callable[[], object], keeps: bool) -> None:
        self.tell, self._keeps = tell, keeps
        self._lock: BinaryIO | None = None

    @contextlib.contextmanager
    def alone(self, path: Path) -> Iterator[None]:
        """Hold the lock within this block; where the file system has none, go on without."""
        if self._lock is None:
            self._lock = self._wait(path)
        try:
            yield
        finally:
            if not self._keeps:
                self.release()

    def _wait(self, path: Path) -> BinaryIO:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("ab"))
            while not _locked(file):
                self.tell()
                time.sleep(LOCKED_S)
            stack.pop_all()
        return file

    def release(self) -> None:
        """Let others compile."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _locked(file: BinaryIO) -> bool:
    """Lock a file if nobody else has; returns whether to go on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: each process compiles for itself
        return True
    return True


_compilation = _Compilation(lambda: None, keeps=False)


@contextlib.contextmanager
def compiling(tell: Callable[[], object]) -> Iterator[None]:
    """Load loops within this block; if any must be compiled, this process or another does it all.

    Args:
        tell: Called before each loop that is compiled, and while another process compiles. What it
            raises ends that.

    Collective: no, and nothing in the block may be. Blocks: while another process compiles.
    """
    global _compilation
    before, _compilation = _compilation, _Compilation(tell, keeps=True)
    try:
        yield
    finally:
        _compilation.release()
        _compilation = before


# On the disk ----------------------------------------------------------------------------------


def _object(loop: Kernel, key: Key) -> bytes:
    """Return the machine code of a variant, from the disk or compiled."""
    folder = _folder()
    path = folder and folder / f"{loop.name}-{_digest(loop, key)}.o"
    if path is None:
        return _compiled(loop, key)
    found = _read(path)
    if found is None:
        with _compilation.alone(path.with_name("lock")):
            found = _read(path)
            if found is None:
                found = _compiled(loop, key)
                _write(path, found)
    return found


def _compiled(loop: Kernel, key: Key) -> bytes:
    from mpips.kernels import compiler

    _compilation.tell()
    return compiler.compiled(loop, key)


@functools.cache
def _folder() -> Path | None:
    """Return the folder for this type of processor, or None where none can be written.

    It is in the user's cache folder; where there is none, in the folder for temporary files.
    """
    import llvmlite.binding as llvm

    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = (Path(home, "mpips"), Path(tempfile.gettempdir(), f"mpips-{os.geteuid()}"))
    for place in filter(Path.is_absolute, places):
        folder = place / llvm.get_host_cpu_name()
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(place) and _is_ours(folder) and os.access(folder, os.W_OK):
                return folder
    return None


def _is_ours(folder: Path) -> bool:
    """Return whether nobody else can put machine code into a folder."""
    found = folder.lstat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


@functools.cache
def _machine() -> bytes:
    """Return what all machine code depends on: LLVM, Python, the processor, the compiler."""
    import llvmlite
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    words = [llvmlite.__version__, sys.implementation.cache_tag, llvm.get_host_cpu_name(), features]
    sources = [(HERE / f"{n}.py").read_bytes() for n in ("compiled", "compiler", "intrinsics")]
    return hashlib.blake2b(b"".join([" ".join(words).encode(), *sources])).digest()


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


def _digest(loop: Kernel, key: Key) -> str:
    return _sum(_machine() + _code(loop) + str(key).encode()).hex()


def _read(path: Path) -> bytes | None:
    """Return what `_write` wrote, or None: not there, or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[DIGEST_BYTES:] if _sum(data[DIGEST_BYTES:]) == data[:DIGEST_BYTES] else None


def _write(path: Path, data: bytes) -> None:
    """Keep machine code; a disk that is full costs the next start its time and nothing else."""
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(_sum(data) + data)
        os.replace(file.name, path)


def _sum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


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
