"""The public names of `twinbus`: Python imports the module of a name when it is first used."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pdoc.doc
import pytest

import twinbus
from twinbus.extras import EXTRAS

SOURCE = Path(twinbus.__file__)
NEVER = {
    "asyncio",
    "http",
    "multiprocessing",
    *(name for names in EXTRAS.values() for name in names),
}
NOT_FOR_CLIENTS = {"importlib.metadata", "pyarrow.parquet", "sqlglot"}  # the broker needs them


def run_python(program: str) -> str:
    """Run a program in a new interpreter; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(program: str) -> set[str]:
    """Run a program in a new interpreter; return the modules that it loaded."""
    return set(run_python(f"{program}\nimport sys; print(*sys.modules)").split())


def rooms(loaded: set[str]) -> set[str]:
    """Return the packages of Twinbus that modules are from, without those of values."""
    parts = [name.split(".") for name in loaded]
    found = {names[1] for names in parts if names[0] == "twinbus" and len(names) > 2}
    return found - {"connection", "message"}


def imports_for_type_checkers() -> dict[str, str]:
    """Return the names under TYPE_CHECKING and the module of each."""
    (block,) = (
        node
        for node in ast.parse(SOURCE.read_text()).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Attribute)
    )
    return {
        alias.name: (node.module or "").removeprefix("twinbus.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_a_type_checker_and_python_know_the_same_names_from_the_same_modules() -> None:
    imports = imports_for_type_checkers()
    assert sorted(imports) == sorted(twinbus.__all__)
    for name, module in imports.items():
        assert getattr(twinbus, name) is getattr(import_module(f"twinbus.{module}"), name)


@pytest.mark.parametrize("name", twinbus.__all__)
def test_every_public_name_is_found_listed_and_remembered(name: str) -> None:
    value = getattr(twinbus, name)
    assert vars(twinbus)[name] is value
    assert name in dir(twinbus)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'twinbus' has no attribute 'Nonsense'"):
        _ = twinbus.Nonsense  # type: ignore[attr-defined]


def test_importing_the_package_or_its_command_line_imports_nothing_heavy() -> None:
    loaded = imported("import twinbus, twinbus.cli")
    assert loaded.isdisjoint({"dataclasses", "logging", "msgspec", "numpy", "pyarrow", "xxhash"})
    assert loaded.isdisjoint(NEVER | NOT_FOR_CLIENTS)
    assert sorted(name for name in loaded if name.startswith("twinbus.")) == [
        "twinbus.cli",
        "twinbus.cli.main",
        "twinbus.errors",
        "twinbus.extras",
    ]


OPEN_AND_SEND = """
from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager
connection = "Endpoint=embedded://{folder}/shop"
with (
    NamespaceManager.from_connection_string(connection) as manager,
    MessagingFactory.from_connection_string(connection) as factory,
):
    manager.create_queue("orders")
    factory.create_queue_client("orders").send(BrokeredMessage(b"tea"))
"""


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager",
            {"client", "namespace", "protocol"},
        ),
        ("from twinbus import *", {"client", "namespace", "pairing", "protocol"}),
    ],
)
def test_importing_names_loads_neither_a_broker_nor_a_connection(
    statement: str, expected: set[str]
) -> None:
    loaded = imported(statement)
    assert rooms(loaded) == expected
    assert loaded.isdisjoint({*NEVER, *NOT_FOR_CLIENTS, "hashlib", "msgspec", "ssl"})
    assert "pyarrow.compute" not in loaded


def test_the_connection_to_a_server_loads_no_broker() -> None:
    loaded = imported("import twinbus, twinbus.namespace.server")
    assert rooms(loaded) == {"namespace", "protocol"}
    assert loaded.isdisjoint({*NEVER, *NOT_FOR_CLIENTS, "pyarrow.compute"})


def test_an_embedded_namespace_without_rules_loads_no_sql_parser(tmp_path: Path) -> None:
    loaded = imported(OPEN_AND_SEND.format(folder=tmp_path))
    assert rooms(loaded) == {"broker", "client", "namespace", "protocol"}
    assert loaded.isdisjoint({*NEVER, "sqlglot"})


def test_every_public_module_can_be_the_first_to_be_imported() -> None:
    program = f"""
import sys
from importlib import import_module
import numpy, pyarrow, sqlglot
for module in {sorted(set(imports_for_type_checkers().values()))}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "twinbus"]:
        del sys.modules[name]
    import_module(f"twinbus.{{module}}")
"""
    run_python(program)


def test_a_star_import_and_submodules_work() -> None:
    program = "from twinbus import *; from twinbus import aio, testing; print(len(dir()))"
    assert int(run_python(program)) >= len(twinbus.__all__)


def test_the_reference_lists_every_public_name() -> None:
    assert set(twinbus.__all__) <= set(pdoc.doc.Module(twinbus).members)
