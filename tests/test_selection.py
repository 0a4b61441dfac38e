"""Which cases of the tests run: see the options of `conftest.py`."""

import collections
from pathlib import Path
from types import SimpleNamespace

import pytest

CONFTEST = str(Path(__file__).with_name("conftest.py"))


@pytest.fixture
def selected(pytestconfig):
    """Names the cases that run of 40 tests with 30 cases each; half of the tests are of kernels."""

    def selected(every, tests_every=1, turn=0):
        def item(file, number, case):
            name = f"tests/{file}.py::test_{number}[{case}]"
            module = SimpleNamespace(__name__=file)
            return SimpleNamespace(nodeid=name, path=Path(f"{file}.py"), module=module)

        files = "test_kernels", "test_stream"
        items = [item(file, n, case) for file in files for n in range(20) for case in range(30)]
        option = SimpleNamespace(every=every, tests_every=tests_every, turn=turn)
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        plugin = pytestconfig.pluginmanager.get_plugin(CONFTEST)
        plugin.pytest_collection_modifyitems(SimpleNamespace(option=option, hook=hook), items)
        return [item.nodeid for item in items]

    return selected


def test_every_test_runs_in_its_first_case_and_a_share_of_the_others(selected):
    assert len(selected(1)) == 40 * 30
    cases = collections.defaultdict(list)
    for name in selected(8):
        cases[name.partition("[")[0]].append(name)
    assert len(cases) == 40
    assert all(found[0].endswith("[0]") for found in cases.values())
    assert sum(map(len, cases.values())) == pytest.approx(40 * (1 + 29 / 8), rel=0.2)


def test_every_case_has_its_turn(selected):
    turns = [set(selected(8, tests_every=8, turn=871 + n)) for n in range(8)]
    assert len(set.union(*turns)) == 40 * 30
    assert len(set.union(*turns[1:])) < 40 * 30


def test_what_does_not_depend_on_jax_may_be_left_out(selected):
    kernels = lambda names: [name for name in names if "kernels" in name]
    some = selected(8, tests_every=8)
    assert kernels(some) == kernels(selected(8))
    assert len(some) - len(kernels(some)) == pytest.approx(20 * 30 / 8, rel=0.3)
