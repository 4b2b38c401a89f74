"""The rules of the house: what may import what, what every module says first, what stays cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "autotune"

# The flow: a folder imports only from those above it.
ROWS = """
    outside
    errors paths
    values
    space
    model
    families
    code
    simulator
    measure
    search
    records
    sharing
    sweep
    tuning
    kernel
    torch
    report
    cli
    __main__
"""
ORDER = {name: row for row, names in enumerate(ROWS.strip().splitlines()) for name in names.split()}
IN_THE_WORKER = {  # may import CuPy
    f"measure.{name}"
    for name in (
        *("cuda", "site", "cublas", "cublaslt"),
        *("stand", "checker", "inputs", "places", "rotation", "verify_kernels"),
    )
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def of_pytorch(name: str) -> bool:
    """Whether a module needs PyTorch, which is no dependency."""
    return name.partition(".")[0] == "torch"


TREES = {module_name(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
MODULES = sorted(name for name in TREES if name)


def imported(tree: ast.AST) -> set[str]:
    """Modules of this package that are imported anywhere in a module, inside functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in inside if name.removeprefix("autotune.") in TREES} or {node.module}
    return {name.removeprefix("autotune.") for name in found if name.startswith("autotune.")}


def test_every_module_has_its_row():
    assert {name.partition(".")[0] for name in MODULES} == set(ORDER)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_rows_above_it(name):
    part = name.partition(".")[0]
    for other in imported(TREES[name]):
        above = other.partition(".")[0]
        assert above == part or ORDER[above] < ORDER[part], f"{name} imports {other}"


@pytest.mark.parametrize("package", sorted({name.partition(".")[0] for name in MODULES if "." in name}))
def test_the_modules_of_a_package_import_each_other_in_one_direction(package):
    inside = {
        name: {other for other in imported(TREES[name]) if other.startswith(f"{package}.")}
        for name in MODULES
        if name.startswith(f"{package}.")
    }
    TopologicalSorter(inside).prepare()  # raises CycleError


@pytest.mark.parametrize("name", ["", *MODULES])
def test_a_module_opens_with_a_sentence(name):
    text = ast.get_docstring(TREES[name])
    assert text, "a module says first what it is or does"
    assert text.split("\n\n")[0].rstrip().endswith((".", "?", ":"))


FAMILIES = {path.stem for path in (PACKAGE.parent / "search_spaces").glob("*.toml")}


def said(tree: ast.AST) -> set[str]:
    """Texts in a module's code: not what documents it."""
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents
    }


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("families")])
def test_only_families_names_families(name):
    assert not said(TREES[name]) & FAMILIES
    assert not {each for each in imported(TREES[name]) if each.removeprefix("families.") in FAMILIES}


def test_every_family_with_code_is_one_file_beside_its_space_and_template():
    modules = {name.removeprefix("families.") for name in MODULES if name.startswith("families.")} - {
        "estimate"
    }
    assert modules <= FAMILIES


def at_import(tree: ast.Module) -> set[str]:
    """Top-level packages imported when the module is."""
    found = set()
    nodes: list[ast.AST] = [*tree.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        nodes.extend(ast.iter_child_nodes(node))
    return found


@pytest.mark.parametrize("name", ["", *MODULES])
def test_cupy_and_optuna_are_imported_where_they_are_used(name):
    heavy = at_import(TREES[name]) & {"cupy", "cupy_backends", "optuna", "jinja2", "rich", "pynvml"}
    allowed = {"cupy", "cupy_backends"} if name in IN_THE_WORKER else set()
    allowed |= {"optuna"} if name.startswith("sharing.") else set()  # imported where there is a storage
    assert heavy <= allowed


def loaded_by(program: str, *words: str) -> set[str]:
    """Top-level packages that are loaded after a program ran in a fresh interpreter."""
    program += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


RUN = """
import sys
from autotune.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def test_import_loads_neither_numpy_nor_anything_heavier():
    assert not loaded_by("import autotune") & {"cupy", "optuna", "numpy", "jinja2", "rich", "click"}


def test_help_loads_neither_numpy_nor_anything_heavier():
    assert not loaded_by(RUN, "--help") & {"cupy", "optuna", "numpy", "jinja2", "rich"}


@pytest.mark.parametrize("command", [["space"], ["emit", "--preset", "square_block"]])
def test_listing_and_rendering_need_no_cupy_and_no_optuna(command):
    words = [*command, *["--m", "4096", "--n", "4096", "--k", "4096", "--target", "h200"]]
    loaded = loaded_by(RUN, *words)
    assert "numpy" in loaded
    assert not loaded & {"cupy", "optuna"}


def test_whatever_does_not_run_in_the_worker_imports_without_cupy_and_optuna():
    names = [name for name in MODULES if name not in {*IN_THE_WORKER, "__main__"} and not of_pytorch(name)]
    program = "\n".join(f"import autotune.{name}" for name in names if not name.startswith("sharing"))
    assert not loaded_by(program) & {"cupy", "optuna"}


def test_every_public_name_exists():
    import autotune

    for name in autotune.__all__:
        assert getattr(autotune, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        autotune.nothing  # noqa: B018


def test_importing_every_module_leaves_every_public_name_what_it_was():
    """A folder named like a public function would take its place once it is imported."""
    program = "\n".join(
        [
            "import autotune, importlib",
            "public = {name: getattr(autotune, name) for name in autotune.__all__}",
            f"for name in {[each for each in MODULES if each not in {*IN_THE_WORKER, '__main__'}]}:",
            "    if name.startswith('torch'): continue",
            "    importlib.import_module('autotune.' + name)",
            "assert all(getattr(autotune, name) is public[name] for name in public)",
        ]
    )
    loaded_by(program)


def test_the_code_that_renders_is_hashed_whole():
    """Every module that rendering imports, but those that decide no text."""
    from autotune.code.sources import _RENDERING

    needed, left = set(), ["code.render"]
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += imported(TREES[name])
    needed -= {"outside", "errors", "paths", "values.faults", "values.lazy", "code.depot"}
    assert {name.replace(".", "/") + ".py" for name in needed} == set(_RENDERING)


def test_every_test_on_a_gpu_is_in_one_part_of_make_gpu():
    makefile = (PACKAGE.parent / "Makefile").read_text()
    named = re.findall(r"tests/gpu/(test_\w+\.py)", makefile)
    assert sorted(named) == sorted(path.name for path in (PACKAGE.parent / "tests" / "gpu").glob("test_*.py"))
    parts = re.findall(r"^gpu_(\w+) :=", makefile, re.MULTILINE)
    (listed,) = re.findall(r"^GPU_PARTS := (.*)", makefile, re.MULTILINE)
    assert listed.split() == [f"gpu-{part}" for part in parts]
