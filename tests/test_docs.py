"""The README, CONTRIBUTING and the pages of ``docs/``: each code block runs and prints what the page says.

The blocks of a page run in order, in one empty folder, and in a virtual environment with what the page says to install
and nothing else. Every provider is a small server on loopback that says hello.

- ``python NAME.py`` is a file; it exists before the first block runs.
- ``python`` is run; a ``text`` block directly after it is exactly what it prints.
- ``console`` holds commands; the lines after each are part of what it prints, with ``...`` for what is left out.
- ``sh`` holds commands for setting up, which are not run; what they name must exist.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from agentfsm import LOOP, AgentfsmError, AgentGuardrails, SqliteStore
from agentfsm.cli.app import app
from agentfsm.journal.records import read_records
from tests.helpers.fake_model_server import fake_model_server, text_output
from tests.helpers.fresh_environment import build, install
from tests.helpers.generated_docs import README, readme_table, split_readme

ROOT = Path(__file__).parents[1]
QUICK_START = ROOT / "docs" / "quickstart.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS]
TEXTS = [*PAGES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "RELEASING", "SECURITY"))]
FENCE = re.compile(r"^```([\w{}]*) ?([\w./]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    "agentfsm": ("-m", "agentfsm"),
    "pytest": ("-m", "pytest", "-p", "no:cacheprovider", "--rootdir=."),
    "python": (),
}

MY_TOOLS = "def add(a: int, b: int) -> int:\n    'Add.'\n    return a + b\n"
"""The file ``my_tools.py`` of the reader, for pages that do not show one."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The page's name.
        language: The word after the fence.
        name: The file that it is, or an empty string.
        text: Its content.
        line: Its line in the page.
    """

    page: str
    language: str
    name: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    return [
        Block(page.name, *block.groups(), source.count("\n", 0, block.start()) + 1) for block in FENCE.finditer(source)
    ]


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def is_shown(expected: str, output: str) -> bool:
    """Whether an output holds the parts of an expected one in their order."""
    start = 0
    for part in re.split(r"\.\.\.\n?", expected):
        start = output.find(part, start)
        if start < 0:
            return False
        start += len(part)
    return True


@dataclass(frozen=True)
class Reader:
    """Somebody who does what a page says.

    Attributes:
        folder: Where.
        python: With which Python.
        exported: The environment variables that the page has set by then.
    """

    folder: Path
    python: Path
    exported: Mapping[str, str]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python with arguments."""
        with fake_model_server(text_output("Hello.")) as server:
            environment = {
                "OPENAI_BASE_URL": server.url,
                "OPENAI_API_KEY": "sk-test",
                "ANTHROPIC_BASE_URL": server.host,
                "ANTHROPIC_API_KEY": "sk-test",
                "OLLAMA_HOST": server.host,
                "XDG_DATA_HOME": str(self.folder / "data"),  # not the data folder of the developer
                **self.exported,
            }
            return subprocess.run(
                [self.python, *words],
                cwd=self.folder,
                env={name: value for name, value in os.environ.items() if name not in UNSET} | environment,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )

    def run_python(self, block: Block, program: str) -> str:
        done = self.run("-W", "error", "-c", program)
        assert done.returncode == 0, f"{block}: {done.stderr}"
        return done.stdout

    def run_console(self, block: Block) -> None:
        for command, expected in commands(block.text):
            program, *words = shlex.split(command)
            done = self.run(*PROGRAMS[program], *words)
            assert done.returncode <= bool(expected), f"{block}: {command}: {done.stdout}{done.stderr}"
            assert is_shown(expected, done.stdout), f"{block}: {command}: {done.stdout}"


def check_setup(block: Block) -> None:
    """Make targets and our own files are there; other programs are not ours."""
    for line in block.text.splitlines():
        program, *words = shlex.split(line, comments=True) or ["#"]
        if program == "make":
            assert words[0] in make_targets(), f"{block}: {line}"
        elif program.startswith(".venv/bin/"):
            assert all((ROOT / word).exists() for word in words if word.endswith(".py")), f"{block}: {line}"
        else:
            assert program in {"#", "export", "git", "ollama", "openssl", "pip"}, f"{block}: nothing tests {line!r}"


UNSET = ("AGENTFSM_SECRET", "AGENTFSM_STORE", "PYTHONPATH")
"""The environment variables that a reader has only if the page says so."""


def exports(page: Path, line: int) -> dict[str, str]:
    """The environment variables that a page has set before a line, with our values where a reader has others."""
    setups = [block.text for block in blocks(page) if block.language == "sh" and block.line < line]
    words = [shlex.split(each, comments=True) for text in setups for each in text.splitlines()]
    found = dict(pair.split("=", 1) for name, *pairs in filter(None, words) if name == "export" for pair in pairs)
    stands_for = {"...": "the secret of the documentation", "postgresql://db.example.org/shop": "sqlite:///agentfsm.db"}
    return {name: stands_for.get(value, value) for name, value in found.items()}


REPEATED = "$ agentfsm mutate"
"""What a block has that runs a test suite again and again."""


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def installs(text: str) -> set[str]:
    """What is named after ``pip install``; the path to a checkout is left out."""
    lines = re.findall(r"pip install ([^`\n]+)", text)
    return {word.rpartition("/")[2] for line in lines for word in shlex.split(line, comments=True) if word[0] != "-"}


def wanted(page: Path, line: int) -> tuple[str, ...]:
    """What a reader has installed at a line of a page: what it has said so far.

    A page without a block that installs anything comes after the quick start.
    """
    stands_alone = any(installs(block.text) for block in blocks(page))
    read = "\n".join(page.read_text(encoding="utf-8").splitlines()[: line - 1])
    named = installs(read if stands_alone else f"{QUICK_START.read_text(encoding='utf-8')}\n{read}")
    extras, others = set[str](), set[str]()
    for each in map(Requirement, named):
        if each.name == "agentfsm":
            extras |= each.extras
        else:
            others.add(str(each))
    return (f"agentfsm[{','.join(sorted(extras))}]" if extras else "agentfsm", *sorted(others))


PythonAt = Callable[[Path, int], Path]


@pytest.fixture(scope="session")
def python_at(tmp_path_factory: pytest.TempPathFactory) -> PythonAt:
    """The Python at a line of a page. Where the same is installed, it is the same."""

    @cache
    def wheel() -> Path:
        folder = tmp_path_factory.mktemp("dist")
        build(folder)
        return next(folder.glob("*.whl"))

    @cache
    def python(wanted: tuple[str, ...]) -> Path:
        return install(wheel(), wanted, tmp_path_factory.mktemp("environment"))

    def python_at(page: Path, line: int) -> Path:
        try:
            return python(wanted(page, line))
        except PackageNotFoundError as error:
            pytest.skip(f"{error.name} is not installed")

    return python_at


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_and_print_what_it_says(page: Path, python_at: PythonAt, tmp_path: Path) -> None:
    """All but the repeated ones, for which see ``tests/cli/test_mutate_command.py``."""
    run_page(page, [block for block in blocks(page) if REPEATED not in block.text], python_at, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_calls_on_a_page_fit_the_types_of_what_they_call(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What a reader pastes is no error in a typed program, but that a result may be None, or another ending."""
    programs = [block for block in blocks(page) if block.language == "python"]
    if not programs:
        pytest.skip("the page has no program")
    for number, block in enumerate(programs):
        (tmp_path / (block.name or f"block_{number}.py")).write_text(block.text)
    leave_out = ("--disable-error-code=union-attr", "--disable-error-code=attr-defined", "--ignore-missing-imports")
    cache = f"--cache-dir={tmp_path_factory.getbasetemp() / 'mypy'}"  # that of all pages
    command = (sys.executable, "-m", "mypy", "--config-file=", "--check-untyped-defs", cache, *leave_out, ".")
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if REPEATED in page.read_text()], ids=lambda page: page.stem)
def test_every_block_of_a_page_runs_and_prints_what_it_says(page: Path, python_at: PythonAt, tmp_path: Path) -> None:
    run_page(page, blocks(page), python_at, tmp_path)


def run_page(page: Path, chosen: list[Block], python_at: PythonAt, folder: Path) -> None:
    """Run these blocks of a page, in an empty folder."""
    if "os.fork" in page.read_text(encoding="utf-8") and not hasattr(os, "fork"):
        pytest.skip("there is no fork")
    (folder / "my_tools.py").write_text(MY_TOOLS)
    for block in chosen:
        if block.name:
            (folder / block.name).write_text(block.text)
    printed: str | None = None
    for block in chosen:
        reader = Reader(folder, python_at(page, block.line), exports(page, block.line))
        match block.language:
            case "python" if block.name:
                reader.run_python(block, imports(block))
                continue
            case _ if block.name:
                continue
            case "python":
                printed = reader.run_python(block, block.text)
                continue
            case "text":
                assert printed is not None, f"{block}: no python block directly before it"
                assert printed == block.text, f"{block}: {printed}"
            case "console":
                reader.run_console(block)
            case "sh":
                check_setup(block)
            case "{toctree}" | "{include}":
                pass  # of the site, not of its reader
            case _:
                raise AssertionError(f"{block}: nothing tests a block of {block.language!r}")
        printed = None


def imports(block: Block) -> str:
    """What a block imports, as a program: a file may need a server."""
    body = ast.parse(block.text).body
    return ast.unparse([node for node in body if isinstance(node, ast.Import | ast.ImportFrom)])


HELP = """
import sys
from agentfsm.cli import main
sys.exit(max(main([name, "--help"]) for name in sys.argv[1:]))
"""


@pytest.fixture(scope="session")
def helped() -> dict[Path, set[str]]:
    """The commands for whose help each Python was asked."""
    return defaultdict(set)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_have_help_or_name_the_extra_that_they_need(
    page: Path, python_at: PythonAt, helped: dict[Path, set[str]], tmp_path: Path
) -> None:
    source = page.read_text(encoding="utf-8")
    named = app.commands.keys() & set(re.findall(r"(?:`|^\$ )agentfsm (\w+)", source, re.MULTILINE))
    if not named:
        return
    python = python_at(page, source.count("\n"))
    if names := sorted(named - helped[python]):
        helped[python].update(names)
        done = Reader(tmp_path, python, {}).run("-c", HELP, *names)
        lacks = r"(agentfsm: .* needs an optional package: pip install 'agentfsm\[[\w-]+\]'\n)+"
        assert re.fullmatch("" if done.returncode == 0 else lacks, done.stderr), done.stderr


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_links_commands_and_make_targets_exist(page: Path) -> None:
    source = page.read_text(encoding="utf-8")
    for link in re.findall(r'(?:\]\(|src=")([^)"#:]+)[)"#]', source):
        assert (page.parent / link).exists(), link
    prose = FENCE.sub("", source)
    assert set(re.findall(r"`agentfsm (\w+)", prose)) <= set(app.commands)
    assert set(re.findall(r"`make (\w+)", prose)) <= make_targets()


@pytest.mark.parametrize("page", [p for p in TEXTS if p.stem != "CONTRIBUTING"], ids=lambda page: page.stem)
def test_files_of_the_code_that_are_named_exist(page: Path) -> None:
    source = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:agentfsm|tests|examples|docs|diagrams)/[\w/.]*)`", source):
        assert (ROOT / path).exists(), path


def test_names_in_the_map_of_the_code_are_in_their_files() -> None:
    """A row of the map is ``| question | `file`: `name`, `name` |``."""
    rows = re.findall(r"^\|.*\| `([\w/.]+\.py)`: (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert rows
    for path, names in rows:
        source = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)(?:\(\))?`", names):
            assert re.search(rf"\b{name}\b", source), f"{path}: {name}"


# -- the README ---------------------------------------------------------------------------------------


def test_the_site_has_every_page_in_its_contents_and_the_readme_leads_to_it() -> None:
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^[\w-]+$", index.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in DOCS if page != index)
    assert "(docs/index.md)" in README.read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 250


def test_the_first_example_is_short() -> None:
    first = next(block for block in blocks(README) if block.language == "python")
    assert len(first.text.splitlines()) <= 10


def test_the_table_is_that_of_the_loop() -> None:
    _, table, _ = split_readme(README.read_text(encoding="utf-8"))
    assert table == readme_table(LOOP), "write it again with: make diagrams"


def test_the_table_holds_every_row_in_its_order() -> None:
    _, table, _ = split_readme(README.read_text(encoding="utf-8"))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    rows = [(name.strip("`*"), target) for _, _, names, target in cells if names for name in names.split(", ")]
    assert rows == [(row.name, str(row.target)) for row in LOOP]


# -- crash recovery -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_run_that_is_killed_is_in_the_store_once_and_complete(python_at: PythonAt, tmp_path: Path) -> None:
    (block,) = [block for block in blocks(README) if "SIGKILL" in block.text]
    Reader(tmp_path, python_at(README, block.line), {}).run_python(block, block.text)
    store = SqliteStore(tmp_path / "runs.db")
    (head,) = asyncio.run(store.heads())
    kinds = [record.kind for record in read_records(asyncio.run(store.records(head.run_id)), head.run_id)]
    assert (head.status, kinds.count("run.created"), kinds.count("run.resumed")) == ("finished", 1, 1)
    bodies = [json.loads(record.body) for record in asyncio.run(store.records(head.run_id))]
    started = [body["eid"] for body in bodies if body["kind"] == "effect.intent"]
    assert started == ["1", "1.0", "1.0", "2"]  # the tool started twice, the model was called once for each reply
    store.close()


# -- what is documented -------------------------------------------------------------------------------


def test_every_error_is_listed() -> None:
    named = set(re.findall(r"`(\w+)[`(]", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")))
    assert {each.__name__ for each in subclasses(AgentfsmError) if each.__module__ == "agentfsm.errors"} <= named


def subclasses(error: type[Exception]) -> Iterator[type[Exception]]:
    """The classes of errors below one."""
    for each in error.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_guardrail_is_listed_with_its_default() -> None:
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    defaults = {name: getattr(AgentGuardrails(), name) for name in AgentGuardrails.model_fields}
    assert rows.keys() == defaults.keys()
    assert {name: rows[name].strip("`") for name in rows if name != "max_steps"} == {
        name: str(default) for name, default in defaults.items() if name != "max_steps"
    }


def reference() -> ModuleType:
    """The module that writes the reference of the site."""
    spec = spec_from_file_location("reference_pages", ROOT / "docs" / "reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = reference()
GUIDES = [*DOCS, README, *(ROOT / "examples").rglob("*.py")]


def words_in_code(page: Path) -> set[str]:
    """The words of a program, or of the code of a page: its blocks, and what stands between backticks."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        prose = FENCE.sub("", text)
        text = "\n".join([*(block.text for block in blocks(page)), *re.findall(r"`([^`]+)`", prose)])
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("package", REFERENCE.PACKAGES)
def test_every_public_name_is_in_a_guide_or_an_example(package: str) -> None:
    """All are in the reference, which is written from the same list."""
    words = set[str]().union(*map(words_in_code, GUIDES))
    assert [name for name in REFERENCE.public_names(package) if name not in words] == []


def test_the_packages_of_the_reference_are_those_that_are_stable() -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    stable = page[page.index("## Stable") : page.index("## Not stable")]
    for package in REFERENCE.PACKAGES:
        name = package if f"`{package}`" in stable else package.rpartition(".")[2]
        assert re.search(rf"`(?:from_)?{re.escape(name)}`", stable), package


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_guides_and_examples_import_only_public_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    sources = [text] if page.suffix == ".py" else [b.text for b in blocks(page) if b.language == "python"]
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "agentfsm":
            assert node.module in REFERENCE.PACKAGES, f"{node.module} is not public"
            names = {alias.name for alias in node.names} - {"invariants", "strategies"}  # modules of agentfsm.testing
            assert names <= set(REFERENCE.public_names(node.module))


def test_the_index_for_language_models_has_a_line_for_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    index = import_module("llms_index").llms_index(ROOT / "docs")
    lines = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\): (.+)$", index, re.MULTILINE)
    pages = [page.stem for page in DOCS if page.stem != "index"]
    expected = [f"_sources/{page}.md.txt" for page in pages]
    expected += ["reference/examples.html", *(f"reference/{package}.html" for package in REFERENCE.PACKAGES)]
    assert sorted(link for _, link, _ in lines) == sorted(expected)
    assert (
        "Quick start",
        "_sources/quickstart.md.txt",
        "On this page you build an agent that buys things for an office, and that waits for a person before it orders.",
    ) in lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_that_is_a_file_says_so_in_its_first_line(page: Path) -> None:
    """Neither the site nor a browser of the repository shows what stands behind the language of a block."""
    for block in blocks(page):
        if block.language == "python" and block.name:
            assert block.text.splitlines()[0] == f"# {block.name}", str(block)
