"""README and docs/: every example runs, every link leads somewhere."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from doc_examples import PAGES, ROOT, Block, blocks, lessened, write_files

import autotune
from autotune.cli import cli

MARKS = {
    "sh": {"", "setup", "gpu", "gpu postgres"},
    "console": {"", "gpu"},
    "python": {"", "gpu"},
    "c": {""},
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_how_it_is_run(page):
    for block in blocks(page):
        if block.language in ("toml", "jinja"):
            assert len(block.marks) == 1, f"{block}: name the file that this is"
        else:
            assert " ".join(block.marks) in MARKS.get(block.language, ()), f"{block}: {block.language}?"
    assert page.read_text().count("\n```") == 2 * len(blocks(page))  # none is left open


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One folder of records for all pages, so that none compiles what another did."""
    return tmp_path_factory.mktemp("records")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_run(page, tmp_path, records):
    """In the order of the page, in one folder."""
    write_files(page, tmp_path)
    environment = {**os.environ, "AUTOTUNE_CACHE_DIR": str(records), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    programs: list[str] = []
    for block in blocks(page):
        if "gpu" in block.marks or "setup" in block.marks:
            continue
        if block.language in ("sh", "console"):
            for words in block.commands:
                run_command(block, words, tmp_path, environment)
        elif block.language == "python":
            programs.append(block.text)
        elif block.language == "c":
            compile_c(block, tmp_path)
    if programs:
        run([sys.executable, "-c", "\n".join(programs)], page, tmp_path, environment)


def run_command(block: Block, words: list[str], folder: Path, environment: dict[str, str]) -> None:
    if words[0] == "autotune":
        command = [sys.executable, "-m", *lessened(words)]
        told = run(command, block, folder, environment, allowed=(0, 1) if words[1] == "doctor" else (0,))
        assert told.strip(), f"{block}: {words} printed nothing"
    elif words[0] == "nvcc":
        if shutil.which("nvcc"):
            run(["bash", "-c", " ".join(words)], block, folder, environment)
    else:
        check_setup(block, words)


def run(command, place, folder, environment, allowed=(0,)) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode in allowed, f"{place}: {command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def compile_c(block: Block, folder: Path) -> None:
    """Compile statements as the body of a function, which has what they take."""
    lines = block.text.splitlines(keepends=True)
    head = "".join(line for line in lines if line.startswith("#"))
    body = "".join(line for line in lines if not line.startswith("#"))
    given = "const float* A, const float* B, float* C, void* workspace, cudaStream_t stream"
    (folder / "example.cu").write_text(
        f"{head}int example({given})\n{{\n{body}return status + int(bytes);\n}}\n"
    )
    if shutil.which("nvcc"):
        run(
            ["nvcc", "-std=c++17", "-arch=sm_90", "-Ikernels", "-c", "example.cu", "-o", os.devnull],
            block, folder, dict(os.environ),
        )  # fmt: skip


# -- what is not run here ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_not_run_here_would_be_understood(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    for block in blocks(page):
        if "gpu" not in block.marks and "setup" not in block.marks:
            continue
        if block.language == "python":
            check_python(block)
        for words in block.commands if block.language in ("sh", "console") else ():
            check_setup(block, words)


def check_setup(block: Block, words: list[str]) -> None:
    name = words[0].removeprefix(".venv/bin/")
    if name == "autotune":
        check_options(block, words[1:])
    elif name == "pip":
        (extra,) = re.findall(r"^\.\[(\w+)\]$", words[-1])
        assert extra in PROJECT["optional-dependencies"], block
    else:
        assert name in ("python3", "pytest", "echo", "chmod"), f"{block}: {words[0]} is a command of nobody"


def check_options(block: Block, words: list[str]) -> None:
    command: click.Command | None = cli
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words[0])
        assert command is not None, f"{block}: no command {words[0]}"
        words = words[1:]
    assert command is not None
    try:
        command.make_context("autotune", list(words))
    except click.UsageError as error:
        pytest.fail(f"{block}: {error.format_message()}")


def check_python(block: Block) -> None:
    """What it takes from the package exists, and takes these arguments."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "autotune" and node.attr != "torch":
            assert hasattr(autotune, node.attr), f"{block}: autotune.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("autotune."):
            name = ast.unparse(node.func).removeprefix("autotune.")
            names = {word.arg: None for word in node.keywords if word.arg}
            if name.startswith("torch."):
                taken = of_pytorch(name.removeprefix("torch."))
                assert len(node.args) <= len(taken), block
                assert set(names) <= set(taken), block
            else:
                inspect.signature(getattr(autotune, name)).bind(*node.args, **names)


def of_pytorch(name: str) -> list[str]:
    """The parameters of a public function of autotune.torch, read without PyTorch, which may be missing."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "autotune" / "torch").glob("*.py")]
    (found,) = (
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return [each.arg for each in (*found.args.args, *found.args.kwonlyargs)]


def test_the_test_command_is_that_of_ci():
    commands = [
        line
        for block in blocks(PAGES[0])
        for line in block.text.splitlines()
        if "setup" in block.marks and "pytest" in line
    ]
    assert commands == [(ROOT / ".ci" / "run").read_text().splitlines()[-1]]


# -- the pages -----------------------------------------------------------------------------------------------


def test_the_readme_is_short():
    text = "\n".join(line for line in PAGES[0].read_text().splitlines() if not line.startswith("|"))
    assert len(text.split()) <= 1300


TEXTS = [
    *PAGES,
    *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "EXPERIMENTS")),
]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        place = page.parent / path if path else page
        assert place.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_the_readme_names_every_page():
    text = PAGES[0].read_text()
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in text, page.name
