"""The package as a whole: what importing it costs, and that every public name is explained."""

import inspect
import subprocess
import sys
import typing

import pytest

import funcgrad as fg
from funcgrad import _cli

PUBLIC = {
    name: thing
    for name, thing in vars(fg).items()
    if not name.startswith("_") and not inspect.ismodule(thing)
}


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)


def test_importing_the_package_imports_no_extra():
    extras = {"torch", "typer", "matplotlib", "sklearn", "dp_accounting"}
    done = run_python(f"import sys, funcgrad; print(sorted({extras} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_a_docstring_with_every_parameter_and_an_example(name):
    thing = PUBLIC[name]
    text = inspect.getdoc(thing) or ""
    assert text.partition("\n")[0].endswith("."), "the first line is one sentence"
    if inspect.isfunction(thing):
        absent = [p for p in inspect.signature(thing).parameters if f"{p}:" not in text]
        assert not absent, f"not explained under Args: {absent}"
        assert ">>>" in text, "no example"


def classes(hint):
    """Those that an annotation names, at any depth."""
    inner = hint if isinstance(hint, (list, tuple)) else typing.get_args(hint)
    return {hint} if isinstance(hint, type) else set().union(*map(classes, inner))


def test_classes_that_public_functions_take_or_return_are_public():
    functions = filter(inspect.isfunction, PUBLIC.values())
    named = set().union(*(classes(tuple(typing.get_type_hints(f).values())) for f in functions))
    ours = {c for c in named if c.__module__.partition(".")[0] == "funcgrad"}
    assert len(ours) > 10
    assert ours <= set(filter(inspect.isclass, PUBLIC.values()))


@pytest.mark.parametrize("package, extra", _cli._EXTRA_OF.items())
def test_command_without_its_extra_says_what_to_install(package, extra, monkeypatch):
    def app():
        raise ModuleNotFoundError(f"No module named '{package}.part'", name=f"{package}.part")

    monkeypatch.setattr(_cli, "_app", lambda: app)
    with pytest.raises(SystemExit, match=rf"needs {package}.*pip install 'funcgrad\[{extra}\]'"):
        _cli.main()


def test_command_does_not_hide_another_missing_module(monkeypatch):
    def app():
        raise ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere")

    monkeypatch.setattr(_cli, "_app", lambda: app)
    with pytest.raises(ModuleNotFoundError, match="elsewhere"):
        _cli.main()
