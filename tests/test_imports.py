"""What the source promises: who imports what, and who touches a header word."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from launch import ROOT, python
from walks import FEATURES

PACKAGE = ROOT / "mpips"

# Lowest first. A room imports rooms of its own line or of a line above; types of what it is handed
# may come from above.
ROOMS = """
errors
config extras kernels
layout codecs
datasets optim
problems checkpoint
mpi health
planning launch
transport
snapshot
ps tables failover rounds
strategies
session
library
jax torch
lightning
train
__main__ tools
"""
LAYER = {name: n for n, line in enumerate(ROOMS.strip().splitlines()) for name in line.split()}

# Imported where a job asks for them, by all ranks or some.
ASKED_FOR = (
    *("codecs.", "planning.table_rules", "planning.explain", "planning.choice", "planning.traffic"),
    *("kernels.row", "layout.tables", "optim.row_rules", "transport.rows", "checkpoint.exchange"),
    *("problems.sparse", "problems.mlp", "transport.acknowledged", "transport.single_flight"),
    *("session.probe", "session.tensorboard", "session.tracing", "session.evaluator"),
    *("health.trace_file", "snapshot.evaluations", "rounds.powersgd", "rounds.survivable"),
    *("rounds.crossing", "rounds.recovery"),
    "kernels.compiler",
)

# What MPI's communicators and others have: MPI's where it is called of a communicator.
SHARED_NAMES = {"Barrier", "barrier", "free", "gather", "recv", "reduce", "scatter", "send"}
COMMUNICATORS = {"comm", "world", "node", "leaders", "owners", "workers", "servers"}

LOGIN_NODE = """
errors layout layout.roles config config.validation config.jobfile optim
kernels.atomics kernels.vectors kernels.rule_loops problems
problems.evaluation problems.gradient_check datasets datasets.loader datasets.order
datasets.ledger checkpoint checkpoint.__main__ mpi.segments mpi.signals planning.needs
launch.mpirun launch.job launch.supervise session.metrics train __main__
tools.results launch.sbatch tools.report.__main__ tools.watch tools.trace
tools.plan planning.simulator.search tools.bench.__main__ tools.bench.jobs
tools.doctor.__main__ tools.doctor.machine tools.doctor.storage
tools.doctor.network tools.guide.__main__ tools.replay.__main__
"""
LIGHT = """
errors layout layout.roles config config.jobfile optim launch.mpirun launch.__main__ launch.rank
__main__ tools.bench.__main__ tools.doctor.__main__ tools.guide.__main__ tools.replay.__main__
datasets datasets.loader
"""


PATHS = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of each module, by its name without ``mpips.``."""
    return {name: ast.parse(path.read_text(), str(path)) for name, path in PATHS.items()}


def statements(node: ast.AST, late: bool) -> Iterator[ast.stmt]:
    """Yield the import statements that run; with `late`, those inside functions as well."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif late or not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from statements(child, late)


def imported(name: str, late: bool = True) -> set[str]:
    """Return the full names of the modules that a module of mpips imports."""
    found = set()
    for statement in statements(sources()[name], late):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        else:
            assert isinstance(statement, ast.ImportFrom)
            assert statement.level == 0, f"relative import in {name}"
            source = statement.module or ""
            for alias in statement.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner.removeprefix("mpips.") in sources() else source)
                if alias.name == "MPI":
                    found.add("mpi4py")
    return found


def inner(name: str, late: bool = True) -> set[str]:
    """Return the modules of mpips that a module imports, without ``mpips.``."""
    return {m.removeprefix("mpips.") for m in imported(name, late) if m.startswith("mpips.")}


def layer(name: str) -> int:
    return LAYER[name.partition(".")[0]]


def test_every_room_has_a_layer() -> None:
    names = {name.partition(".")[0] for name in sources()} - {"__init__"}
    assert names - set(LAYER) == set(), "give new rooms their line in ROOMS"
    assert set(LAYER) - names == set(), "no longer there"


def test_imports_point_down() -> None:
    assert inner("__init__") == {"mpi.excepthook"}, "which starts nothing"
    names = set(sources()) - {"__init__"}
    up = {name: {m for m in inner(name) if layer(m) > layer(name)} for name in names}
    assert not {name: above for name, above in up.items() if above}


def test_no_import_goes_round() -> None:
    """Within a layer too; what a package imports of itself apart."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in inner(name, late=False) & set(sources()):
                visit(other, (*path, name))
            done.add(name)

    for name in sources():
        visit(name, ())


NEVER_WITH = {"sync_sgd": "ps.", "local_sgd": "ps.", "async_sgd": "rounds.", "easgd": "rounds."}


@pytest.mark.parametrize("mode", NEVER_WITH)
def test_a_plain_job_imports_no_features(mode: str) -> None:
    """These are imported where a job asks for them; `tests/mpi/test_walks.py` runs one."""
    features = {name for name in sources() if name.startswith((*FEATURES, *ASKED_FOR))}
    found, new = set[str](), {"session.run", f"strategies.{mode}"}
    while new:
        found |= new
        new = {m for name in new for m in inner(name, late=False) & set(sources())} - found
    assert not found & features
    assert not {name for name in found if name.startswith(NEVER_WITH[mode])}


def test_only_the_mpi_room_imports_mpi() -> None:
    """Also not through another module that has it."""
    having = {name for name in sources() if "mpi4py" in imported(name)}
    assert {name.partition(".")[0] for name in having} == {"mpi"}, having


@cache
def methods_of_communicators() -> set[str]:
    """Return the names, without starting MPI."""
    spec = importlib.util.find_spec("mpi4py")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("MPI.pyi").read_text())
    classes = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name.endswith("comm")]
    classes += [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == "Comm"]
    methods = {f.name for c in classes for f in c.body if isinstance(f, ast.FunctionDef)}
    return {name for name in methods if not name.startswith("_")}


def calls_of_mpi(tree: ast.Module) -> list[str]:
    """Return the calls of a communicator's methods by name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, of = node.func.attr, identifier(node.func.value).lstrip("_")
            theirs = name not in SHARED_NAMES or of in COMMUNICATORS
            if name in methods_of_communicators() and theirs:
                found.append(ast.unparse(node))
    return found


def test_only_the_mpi_room_calls_communicators() -> None:
    found = {n: calls_of_mpi(t) for n, t in sources().items() if not n.startswith("mpi.")}
    assert not {name: calls for name, calls in found.items() if calls}


def test_tags_are_in_one_table() -> None:
    for name in set(sources()) - {"mpi.start"}:
        nodes = (node for node in ast.walk(sources()[name]) if isinstance(node, ast.Name))
        stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        assert not {tag for tag in stored if tag.startswith("TAG_")}, name


def test_no_module_reads_another_s_private_names() -> None:
    wrong = [
        f"{name}: {alias.name}"
        for name in sources()
        for statement in statements(sources()[name], late=True)
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("mpips")
        for alias in statement.names
        if alias.name.startswith("_") and alias.name != "__version__"
    ]
    assert not wrong


def loaded_by(modules: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after importing `modules`."""
    lines = [f"import mpips.{name}" for name in modules.split()]
    done = python("-c", "\n".join([*lines, "import sys", "print(*sys.modules)"]))
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_a_login_node_starts_no_mpi() -> None:
    assert "mpi4py" not in loaded_by(LOGIN_NODE)


def test_light_modules_load_nothing_heavy() -> None:
    """Those that answer --help or a mistake on the command line."""
    assert not loaded_by(LIGHT) & {"mpi4py", "numba", "h5py", "tqdm", "scipy", "sklearn"}


# Header words --------------------------------------------------------------------------------
#
# A field whose words are published is known by these names. Where a value of such a field might
# be read or written, the name stands in the first argument of publish or observe; it may be bound
# to another of these names, put into a container, or handed to one of RECEIVERS; and its address
# may be taken, for loops that publish and observe. All else is an error, but for DATA. No such
# field goes by another name: where a view of it is taken, it is bound to one of these.

WORDS = {
    "transport.channel": {"words", "_applied", "applied", "ledgers", "carried"},
    "transport.remote_reads": {"_header", "header"},
    "ps.consistency": {"_header", "header", "_applied", "applied"},
    "ps.dispatch": {"_grants", "_ring", "ring", "_taken", "taken"},
    "transport.push_receiver": {"_applied", "applied"},
    "transport.acknowledged": {"_applied", "applied"},
    "transport.push_sender": {"words", "_carried", "carried"},
    "ps.first_n": {"header", "applied"},
    "ps.shard": {"header", "applied"},
    "transport.single_flight": {"words"},
    "kernels.rule_loops": {"words"},
    "tables.hybrid": {"words"},
    "failover.resending": {"words"},
    "rounds.node": {"headers"},
    "rounds.survivable": {"words", "_words", "turns"},
    "rounds.survivable_nodes": {"_mine", "_led"},
    "rounds.recovery": {"_words", "turns"},
    "snapshot.agreement": {"_applied"},
    "ps.assemble": {"applied", "local"},
    "ps.client": {
        *("header", "granted", "_granted", "_wants", "_reads", "wants", "reads", "g"),
        *("_headers", "_readers"),
    },
    "failover.undo_log": {"header", "applied", "undo_log"},
    "failover.coordinator_log": {"_noted", "_grants", "ring"},
}
FIELDS = {"header", "applied", "granted_reads", "wants", "reads", "taken", "carried", "grants"}
RECEIVERS = {
    *("addresses_of", "enumerate", "len", "append", "has_arrived", "find_ahead", "kind"),
    *("SnapshotAgreement", "Receiver", "PushReceiver", "AcknowledgedPushReceiver", "Puller"),
    *("ClockController", "RoundController", "NodeMember", "NodeAggregator", "Replies", "Undo"),
    *("VectorClock", "_Reply", "SliceUpdate"),
}
DATA = {  # words behind a number, which is published after them and observed before
    ("ps.dispatch", "ring[at:at + 4]"),
    ("ps.dispatch", "self._ring[at:at + 4]"),
    ("failover.coordinator_log", "ring[at:at + 4]"),
}


def parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def identifier(node: ast.AST) -> str:
    return getattr(node, "id", None) or getattr(node, "attr", None) or ""


def is_words(module: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and identifier(node) in WORDS[module]


def binds_words(module: str, statement: ast.AST) -> bool:
    """Whether a statement binds one of a module's names of words, or several in a tuple."""
    targets = getattr(statement, "targets", [])
    return any(is_words(module, t) for target in targets for t in getattr(target, "elts", [target]))


def is_named(module: str, view: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether a view of words is bound to one of their names, or handed to a receiver."""
    user = above[view]
    while not isinstance(user, ast.stmt):
        if isinstance(user, ast.Call) and identifier(user.func) in RECEIVERS:
            return True
        user = above[user]
    return module in WORDS and binds_words(module, user)


def test_views_of_header_words_go_by_known_names() -> None:
    found = set()
    for module, tree in sources().items():
        above = parents(tree)
        for node in above:
            if isinstance(node, ast.Call) and identifier(node.func) == "view":
                field = {arg.value for arg in node.args if isinstance(arg, ast.Constant)} & FIELDS
                if field and not is_named(module, node, above):
                    found.add((module, ast.unparse(above[node])))
    assert not found


def touches(module: str, node: ast.expr, above: dict[ast.AST, ast.AST]) -> str | None:
    """Return the expression in which a view's words are touched by anything else, or None."""
    outer = above[node]
    selects = isinstance(outer, ast.Subscript) and outer.value is node
    whole = outer if selects else node  # an element of a container of views, or a row
    user = above[whole]
    match user:
        case ast.Call(args=args) if whole in args:
            atomic = identifier(user.func) in ("publish", "observe") and args[0] is whole
            fine = atomic or (identifier(user.func) in RECEIVERS and not selects)
        case ast.Assign(value=value) if value is whole:
            fine = binds_words(module, user)
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):  # whether there is such a view
            fine = True
        case ast.Attribute():
            fine = user.attr == "size" and not selects
        case ast.comprehension():
            fine = any(is_words(module, name) for name in ast.walk(user.target))
        case ast.GeneratorExp():
            fine = identifier(above[user].func) == "addresses_of" and not selects
        case ast.Call() | ast.Tuple() | ast.List() | ast.arguments():  # a method, or a container
            fine = not selects
        case _:
            fine = isinstance(getattr(whole, "ctx", None), ast.Store) and not selects
    return None if fine else ast.unparse(whole if selects else user)


def test_header_words_are_published_and_observed_only() -> None:
    found = set[tuple[str, str]]()
    for module in WORDS:
        above = parents(sources()[module])
        texts = (touches(module, node, above) for node in above if is_words(module, node))
        found |= {(module, text) for text in texts if text is not None}
    assert found - DATA == set(), "touched by something else than publish and observe"
    assert DATA - found == set(), "exceptions that are no longer needed"


def test_only_these_modules_publish_and_observe() -> None:
    atomic = ("publish", "observe", "find_ahead", "meet", "meet_and_add")
    nodes = ((name, node) for name, tree in sources().items() for node in ast.walk(tree))
    using = {name for name, node in nodes if identifier(node) in atomic}
    below = {"optim.making", "kernels.atomics", "kernels.exchange"}
    assert using - below == set(WORDS) - {"ps.assemble"}


def touched(line: str) -> bool:
    above = parents(ast.parse(line))
    words = [node for node in above if is_words("ps.client", node)]
    return any(touches("ps.client", node, above) is not None for node in words)


def test_the_checks_bite() -> None:
    for check, bad, good in (
        (touched,
         ("x = header[0]", "header[0] = 1", "header[0] += 1", "self.header[:] = 0",
          "np.copyto(out, header)", "header.fill(0)", "v = header.tolist()", "reads.sum()",
          "if header[0] > 1: pass", "total = header + 1", "observe(other, header[0])",
          "other = header", "x = self._granted[k][0]", "[word[0] for word in self._headers]"),
         ("publish(header, BEGUN, 1)", "x = observe(self._granted[k], w)", "n = header.size",
          "self._near = [(k, header, other) for k in y]", "reads = self._reads[k]",
          "for k, header in self._near: pass")),
        (lambda line: calls_of_mpi(ast.parse(line)),
         ("cluster.comm.Isend(part, rank, 3)", "self._servers.Free()", "two.comm.bcast(times)",
          "world.Barrier()", "comm.gather(parts)", "found = comms[k].Improbe()"),
         ("cluster.send(rank, 'more')", "table.gather(ids)", "comm.rank")),
    ):  # fmt: skip
        assert all(map(check, bad)), [line for line in bad if not check(line)]
        assert not any(map(check, good)), [line for line in good if check(line)]
