"""What every test and doctest runs under; at the root so that doctests of the package see it too.

Torch as the oracle: mark a test ``@pytest.mark.torch`` and import torch inside, or ask for the
fixture ``torch``, which does both; a file whose tests all need it imports it at the top as usual.
Where torch is not installed these are skipped, and the summary counts the tests and the files.

How much to generate: ``@given`` alone follows the profile, and loops of programs use
``from conftest import PROGRAMS``. ``FUNCGRAD_DEEP=1`` (``make test-deep``) raises both.
"""

import importlib.util
import os
import shutil
import subprocess

# Read when the first backend starts, and by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Of machine code, which is ready sooner; programs, their figures and their bits hardly differ.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis
import jax
import pytest

DEEP = os.environ.get("FUNCGRAD_DEEP", "0") not in ("", "0")
PROGRAMS = 1000 if DEEP else 20
TORCH = importlib.util.find_spec("torch") is not None
NO_TORCH = "torch is not installed"

_health = [
    hypothesis.HealthCheck.too_slow,  # the first example compiles
    hypothesis.HealthCheck.function_scoped_fixture,  # `torch` and `x64` hold no state to reset
]
hypothesis.settings.register_profile(
    "fast", max_examples=10, deadline=None, derandomize=True, suppress_health_check=_health
)
hypothesis.settings.register_profile(
    "deep", max_examples=500, deadline=None, print_blob=True, suppress_health_check=_health
)
hypothesis.settings.load_profile("deep" if DEEP else "fast")


@pytest.fixture
def torch():
    """The module, imported by the tests that ask for it and no others."""
    return importlib.import_module("torch")


@pytest.fixture
def x64():
    """Run the whole test with 64-bit types."""
    with jax.enable_x64(True):
        yield


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync --dump-dom"
)


@pytest.fixture(scope="session")
def browse(tmp_path_factory):
    """``browse(page, *flags)`` opens the text of a page and gives its document when it is done."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")

    def open_page(page, *flags):
        folder = tmp_path_factory.mktemp("browser")
        file = folder / "page.html"
        file.write_text(page, encoding="utf-8")
        given = [*_FLAGS.split(), f"--user-data-dir={folder / 'profile'}", *flags, file.as_uri()]
        done = subprocess.run([browser, *given], capture_output=True, text=True, timeout=240)
        assert done.stdout, done.stderr[-2000:]
        return done.stdout

    return open_page


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace):
    import funcgrad  # here, since the type-checking import hook must come first

    doctest_namespace.update(fg=funcgrad, jax=jax, jnp=jax.numpy)


def _memory_maps():
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:  # not Linux
        return MOST_MAPS


# Each compiled program takes some for its code. A process may hold 65530; so many go with about
# two gigabytes of memory.
MOST_MAPS = 5_000


def let_go_of_compiled_code():
    """Once there is much of it: after each file, and before each generated program."""
    if _memory_maps() >= MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _compiled_code_is_let_go():
    yield
    let_go_of_compiled_code()


def pytest_configure(config):
    if not TORCH and os.environ.get("FUNCGRAD_REQUIRE_TORCH", "0") not in ("", "0"):
        raise pytest.UsageError(f"{NO_TORCH}, and FUNCGRAD_REQUIRE_TORCH is set")


def _is_torch_example(item):
    doctest = getattr(item, "dtest", None)
    return doctest and any("import torch" in example.source for example in doctest.examples)


def pytest_collection_modifyitems(items):
    for item in items:
        if "torch" in getattr(item, "fixturenames", ()) or _is_torch_example(item):
            item.add_marker("torch")
        if not TORCH and item.get_closest_marker("torch"):
            item.add_marker(pytest.mark.skip(reason=NO_TORCH))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if not TORCH and report.failed and "No module named 'torch'" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, NO_TORCH)
    return report


def pytest_terminal_summary(terminalreporter):
    if TORCH:
        return
    reports = [r for r in terminalreporter.stats.get("skipped", []) if NO_TORCH in str(r.longrepr)]
    tests = sum(isinstance(r, pytest.TestReport) for r in reports)
    files = len({r.nodeid for r in reports if isinstance(r, pytest.CollectReport)})
    terminalreporter.write_line(f"{NO_TORCH}: skipped {tests} tests, and {files} whole files")
