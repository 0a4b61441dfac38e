"""The import structure of the library and its limits: `python tests/structure.py`.

A room is a package folder directly below `emsjax/`, or a module that lies there by itself. A room
on floor 1 imports no other room; a room on floor n imports rooms of floor n - 1 and below. Imports
inside functions count, imports under `if TYPE_CHECKING` do not. The exit code is 1 if a limit is
exceeded.
"""

import ast
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

PACKAGE, KERNELS = "emsjax", "pallas_kernels"
MAX_FLOORS, MAX_DECODE_LINES, MAX_FILE_LINES, MAX_PARAMETERS = 10, 2000, 350, 8
LINE_LIMITED = (PACKAGE, KERNELS, "docs")  # folders whose files have a limit
# Public entries may take more parameters, by the name under which users import them.
PUBLIC_ENTRIES = (
    "emsjax.Engine",
    "emsjax.generate",
    "emsjax.stream",
    "emsjax.init_state",
    "emsjax.ray.completer.Completer",
    "emsjax.vanilla.generate",
    "emsjax.step",
    "emsjax.testing.assert_invariant",
    "emsjax.testing.assert_lossless",
    "emsjax.testing.assert_same_distribution",
)
KERNEL_HELPERS = "pallas_kernels.benchmark"  # holds no kernels: the limits apply
Graph = Mapping[str, Set[str]]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed source file and its dotted name, which is the folder's for an `__init__.py`."""

    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def package(self) -> str:
        """The package that relative imports of this module start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def read_modules(root: Path, package: str) -> dict[str, Module]:
    """The modules of a package below `root`, by dotted name."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        modules[name] = Module(name, path, ast.parse(text), len(text.splitlines()))
    return modules


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below this one, except what runs under `if TYPE_CHECKING` only."""
    children: Sequence[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
        children = node.orelse
    for child in children:
        yield child
        yield from run_time_nodes(child)


def imports_of(module: Module, known: Set[str]) -> Iterator[tuple[str, int]]:
    """The known modules that this one imports, each with its line number.

    `from package import name` imports the module `package.name` where there is one, and the
    package otherwise.
    """
    for node in run_time_nodes(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known:
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.package.split(".")
                start = parts[: len(parts) - node.level + 1]
                base = ".".join([*start, *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in known:
                    yield inner, node.lineno
                elif base in known:
                    yield base, node.lineno


def module_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    return {
        name: {found for found, _ in imports_of(module, modules.keys()) if found != name}
        for name, module in modules.items()
    }


def room_of(name: str) -> str:
    """`emsjax.decode.step` lies in `decode`; the package's own `__init__.py` is its own room."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


def room_graph(graph: Graph) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {room_of(name): set() for name in graph}
    for name, imported in graph.items():
        rooms[room_of(name)] |= {room_of(other) for other in imported} - {room_of(name)}
    return rooms


def reachable(graph: Graph, start: str) -> set[str]:
    """What `start` imports, directly or through others; itself only if it lies on a cycle."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += graph[name]
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """The groups of nodes that import each other, directly or through others."""
    below = {name: reachable(graph, name) for name in graph}
    groups = {
        tuple(sorted(other for other in below[name] if name in below[other]))
        for name in graph
        if name in below[name]
    }
    return [list(group) for group in sorted(groups)]


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each node; the nodes of a cycle share one."""
    cycle_of = {name: set(group) for group in cycles(graph) for name in group}
    found: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in found:
            group = cycle_of.get(name, {name})
            below = set().union(*(graph[member] for member in group)) - group
            level = 1 + max(map(floor, below), default=0)
            found.update(dict.fromkeys(group, level))
        return found[name]

    for name in graph:
        floor(name)
    return found


def own_package_imports(modules: Mapping[str, Module]) -> list[str]:
    """Places inside the package that import the package itself for its public names."""
    return [
        f"{module.path}:{line}"
        for module in modules.values()
        for name, line in imports_of(module, modules.keys())
        if name == PACKAGE
    ]


def resolve(entry: str, modules: Mapping[str, Module]) -> str:
    """The dotted name of the definition behind a public name, followed through re-exports."""
    package, _, name = entry.rpartition(".")
    module = modules.get(package)
    if module is None:
        return entry
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name and f"{node.module}.{name}" not in modules:
                    return resolve(f"{node.module}.{alias.name}", modules)
    return entry


def num_parameters(arguments: ast.arguments, is_method: bool) -> int:
    """Parameters that a caller can give: `*args` and `**kwargs` count once, `self` does not."""
    positional = [*arguments.posonlyargs, *arguments.args]
    if is_method and positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    variable = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return len(positional) + len(arguments.kwonlyargs) + len(variable)


def functions(module: Module) -> Iterator[tuple[str, int, int]]:
    """Dotted name, line and number of parameters of every function, nested ones included."""

    def visit(node: ast.AST, prefix: str, in_class: bool) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            name, is_class = prefix, in_class
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name, is_class = f"{prefix}.{child.name}", False
                yield name, child.lineno, num_parameters(child.args, in_class)
            elif isinstance(child, ast.Lambda):
                yield f"{prefix}.<lambda>", child.lineno, num_parameters(child.args, False)
            elif isinstance(child, ast.ClassDef):
                name, is_class = f"{prefix}.{child.name}", True
            yield from visit(child, name, is_class)

    yield from visit(module.tree, module.name, False)


def wide_functions(modules: Mapping[str, Module]) -> list[str]:
    """Functions with too many parameters that are neither public entries nor kernels."""
    allowed = {resolve(entry, modules) for entry in PUBLIC_ENTRIES}
    wide = []
    for module in modules.values():
        if module.name.startswith(KERNELS) and not module.name.startswith(KERNEL_HELPERS):
            continue
        for name, line, count in functions(module):
            entry = name.removesuffix(".__init__")  # a class is entered there
            if count > MAX_PARAMETERS and entry not in allowed:
                wide.append(f"{module.path}:{line} {name.rpartition('.')[2]} has {count}")
    return wide


def long_files(root: Path) -> list[str]:
    paths = [path for folder in LINE_LIMITED for path in sorted((root / folder).rglob("*.py"))]
    counts = {path: len(path.read_text().splitlines()) for path in paths}
    return [f"{path} has {count}" for path, count in counts.items() if count > MAX_FILE_LINES]


def floor_table(modules: Mapping[str, Module], rooms: Graph) -> list[str]:
    """The floors from the top down: their rooms with numbers of lines."""
    lines: dict[str, int] = dict.fromkeys(rooms, 0)
    for module in modules.values():
        lines[room_of(module.name)] += module.num_lines
    levels = floors(rooms)
    return [
        f"{level:>3}  "
        + ", ".join(f"{room} ({lines[room]})" for room in sorted(rooms) if levels[room] == level)
        for level in range(max(levels.values(), default=0), 0, -1)
    ]


def decode_lines(modules: Mapping[str, Module]) -> int:
    return sum(module.num_lines for module in modules.values() if room_of(module.name) == "decode")


def check(root: Path, say: Callable[[str], None] = print) -> list[str]:
    """Print the structure of the repository at `root`; the limits that it exceeds."""
    modules = read_modules(root, PACKAGE)
    graph = module_graph(modules)
    rooms = room_graph(graph)
    say("Floors: rooms (lines)")
    for line in floor_table(modules, rooms):
        say(line)
    say(f"Lines of {PACKAGE}/decode: {decode_lines(modules)} of at most {MAX_DECODE_LINES}")
    exceeded = []
    if (count := max(floors(rooms).values(), default=0)) > MAX_FLOORS:
        exceeded.append(f"floors: {count}, at most {MAX_FLOORS}")
    exceeded += [f"cycle of rooms: {', '.join(group)}" for group in cycles(rooms)]
    exceeded += [f"cycle of modules: {', '.join(group)}" for group in cycles(graph)]
    if decode_lines(modules) > MAX_DECODE_LINES:
        exceeded.append(f"{PACKAGE}/decode: more than {MAX_DECODE_LINES} lines")
    everything = modules | read_modules(root, KERNELS)
    exceeded += [f"over {MAX_FILE_LINES} lines: {found}" for found in long_files(root)]
    exceeded += [
        f"over {MAX_PARAMETERS} parameters: {found}" for found in wide_functions(everything)
    ]
    exceeded += [f"imports {PACKAGE} itself: {place}" for place in own_package_imports(modules)]
    return [line.replace(f"{root}/", "") for line in exceeded]


def main(arguments: Sequence[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    exceeded = check(root.resolve())
    for line in exceeded:
        print(f"LIMIT EXCEEDED: {line}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
