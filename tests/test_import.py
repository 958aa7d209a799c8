"""What importing costs and offers: torch loads with the engine, not before; public names resolve, others do not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nanoserve

LIGHT = "nanoserve, nanoserve.cli, nanoserve.catalog, nanoserve.config, nanoserve.request, nanoserve.scheduler"


def test_everything_above_the_engine_imports_without_torch():
    code = f"import sys, {LIGHT}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_is_shown_without_torch():
    code = "import sys; from nanoserve.cli import app; app(['generate', '--help'], standalone_mode=False)"
    code += "; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", nanoserve.__all__)
def test_public_names_resolve(name):
    assert getattr(nanoserve, name) is not None


def test_public_names_are_what_type_checkers_see():
    tree = ast.parse(Path(nanoserve.__file__).read_text("utf-8"))
    imported = [node.names[0].asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert sorted(name for name in imported if name) == sorted(set(nanoserve.__all__) - {"__version__"})


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'nanoserve' has no attribute 'nonsense'"):
        _ = nanoserve.nonsense
    assert not hasattr(nanoserve, "nonsense")
