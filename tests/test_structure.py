"""The structure script: on small made-up packages, and on this repository."""

import subprocess
import sys
import textwrap
from pathlib import Path

import structure


def write(root, files):
    """A made-up repository with these sources by path; every folder on the way is a package."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.relative_to(root).parents:
            if folder.name:
                (root / folder / "__init__.py").touch()
        path.write_text(textwrap.dedent(text))
    return root


def exceeded(root, files):
    return structure.check(write(root, files), say=lambda line: None)


def found_floors(root, files):
    modules = structure.read_modules(write(root, files), "emsjax")
    return structure.floors(structure.room_graph(structure.module_graph(modules)))


def parameters(count):
    return ", ".join(f"p{i}" for i in range(count))


def test_a_room_lies_one_floor_above_the_highest_room_it_imports(tmp_path):
    files = {
        "emsjax/checks.py": "import numpy",
        "emsjax/models/config.py": "from emsjax import checks",
        "emsjax/models/opt.py": "from emsjax.models.config import Config",
        "emsjax/decode/step.py": "import emsjax.models.opt",
        "emsjax/decode/pack.py": "from ..checks import check",
        "emsjax/near/__init__.py": "from ..decode.pack import f",
        "emsjax/nearer.py": "from .near import f",
        "emsjax/generate.py": "from emsjax.decode import pack",
        "emsjax/__init__.py": "from emsjax.generate import generate",
    }
    assert found_floors(tmp_path, files) == {
        "checks": 1,
        "models": 2,
        "decode": 3,
        "near": 4,
        "nearer": 5,
        "generate": 4,
        "emsjax": 5,
    }
    assert exceeded(tmp_path, files) == []


def test_imports_inside_functions_count_and_those_for_type_checkers_do_not(tmp_path):
    files = {
        "emsjax/low.py": """
            import typing
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from emsjax import high
            if typing.TYPE_CHECKING:
                from emsjax import high
            """,
        "emsjax/high.py": """
            def late():
                from emsjax import low
            """,
    }
    levels = found_floors(tmp_path, files)
    assert (levels["low"], levels["high"]) == (1, 2)


def test_the_other_branch_of_type_checking_counts(tmp_path):
    files = {
        "emsjax/low.py": "",
        "emsjax/high.py": "if TYPE_CHECKING:\n    pass\nelse:\n    from emsjax import low\n",
    }
    assert found_floors(tmp_path, files)["high"] == 2


def test_a_cycle_of_rooms_is_named(tmp_path):
    files = {
        "emsjax/one.py": "from emsjax.two import a",
        "emsjax/two/a.py": "",
        "emsjax/two/b.py": "from emsjax import three",
        "emsjax/three.py": "from emsjax import one",
        "emsjax/above.py": "from emsjax import one",
    }
    assert exceeded(tmp_path, files) == ["cycle of rooms: one, three, two"]
    levels = found_floors(tmp_path, files)
    assert (levels["one"], levels["above"]) == (1, 2)


def test_a_cycle_inside_a_folder_is_named(tmp_path):
    files = {
        "emsjax/room/a.py": "from emsjax.room.b import f",
        "emsjax/room/b.py": "def f():\n    from emsjax.room import a",
    }
    assert exceeded(tmp_path, files) == ["cycle of modules: emsjax.room.a, emsjax.room.b"]


def test_a_package_and_its_module_make_a_cycle(tmp_path):
    files = {
        "emsjax/room/__init__.py": "from emsjax.room.a import f",
        "emsjax/room/a.py": "from emsjax.room import g",
    }
    assert exceeded(tmp_path, files) == ["cycle of modules: emsjax.room, emsjax.room.a"]


def test_ten_floors_are_allowed_and_eleven_are_not(tmp_path):
    files = {"emsjax/m0.py": ""}
    files |= {f"emsjax/m{i}.py": f"import emsjax.m{i - 1}" for i in range(1, 10)}
    assert exceeded(tmp_path, files) == []
    files["emsjax/m10.py"] = "import emsjax.m9"
    assert exceeded(tmp_path, files) == ["floors: 11, at most 10"]


def test_the_package_is_not_imported_inside_itself(tmp_path):
    files = {
        "emsjax/a.py": "import emsjax.b",
        "emsjax/b.py": "def late():\n    import emsjax as library",
        "emsjax/c.py": "from emsjax import OPT",
        "tests/test_a.py": "import emsjax",
    }
    assert exceeded(tmp_path, files) == [
        "imports emsjax itself: emsjax/b.py:2",
        "imports emsjax itself: emsjax/c.py:1",
    ]


def test_eight_parameters_are_allowed_and_nine_are_not(tmp_path):
    files = {
        "emsjax/a.py": f"""
            def fits({parameters(6)}, *args, option): ...

            def wide({parameters(7)}, *, option, **rest):
                def inner({parameters(9)}): ...

            class Thing:
                def method(self, {parameters(8)}): ...
                def other(self, {parameters(9)}): ...
            """
    }
    assert exceeded(tmp_path, files) == [
        "over 8 parameters: emsjax/a.py:4 wide has 9",
        "over 8 parameters: emsjax/a.py:5 inner has 9",
        "over 8 parameters: emsjax/a.py:9 other has 9",
    ]


def test_public_entries_and_kernels_may_take_more_parameters(tmp_path):
    files = {
        "emsjax/__init__.py": "from emsjax.generate import generate\nfrom emsjax import vanilla",
        "emsjax/generate.py": f"""
            def generate({parameters(12)}): ...
            def helper({parameters(9)}): ...
            """,
        "emsjax/vanilla.py": f"def generate({parameters(9)}): ...",
        "pallas_kernels/linear.py": f"def kernel({parameters(9)}): ...",
        "pallas_kernels/benchmark/run.py": f"def run({parameters(9)}): ...",
    }
    assert exceeded(tmp_path, files) == [
        "over 8 parameters: emsjax/generate.py:3 helper has 9",
        "over 8 parameters: pallas_kernels/benchmark/run.py:1 run has 9",
    ]


def test_long_files_and_a_long_decode_folder_are_named(tmp_path):
    lines = lambda count: "x = 1\n" * count
    files = {
        "emsjax/a.py": lines(350),
        "emsjax/b.py": lines(351),
        "pallas_kernels/c.py": lines(351),
        "tests/test_d.py": lines(351),
    }
    files |= {f"emsjax/decode/{i}.py": lines(300) for i in range(7)}
    assert exceeded(tmp_path, files) == [
        "emsjax/decode: more than 2000 lines",
        "over 350 lines: emsjax/b.py has 351",
        "over 350 lines: pallas_kernels/c.py has 351",
    ]


def test_the_table_lists_rooms_with_their_lines_from_the_top_down(tmp_path):
    files = {
        "emsjax/room/a.py": "\n\n",
        "emsjax/room/b.py": "from emsjax.room import a\n",
        "emsjax/top.py": "import emsjax.room.a\n",
    }
    said = []
    assert structure.check(write(tmp_path, files), said.append) == []
    assert said[1:] == [
        "  2  top (1)",
        "  1  emsjax (0), room (3)",
        "Lines of emsjax/decode: 0 of at most 2000",
    ]


def test_the_exit_code_tells_whether_a_limit_is_exceeded(tmp_path):
    run = lambda: subprocess.run(
        [sys.executable, structure.__file__, str(tmp_path)], capture_output=True, text=True
    )
    write(tmp_path, {"emsjax/a.py": ""})
    assert run().returncode == 0
    write(tmp_path, {"emsjax/a.py": "import emsjax"})
    found = run()
    assert found.returncode == 1
    assert "LIMIT EXCEEDED: imports emsjax itself: emsjax/a.py:1" in found.stdout


def test_public_entries_need_the_exemption():
    modules = structure.read_modules(Path(structure.__file__).parents[1], structure.PACKAGE)
    found = [one for module in modules.values() for one in structure.functions(module)]
    counts = {name.removesuffix(".__init__"): count for name, _, count in found}
    for entry in structure.PUBLIC_ENTRIES:
        assert counts[structure.resolve(entry, modules)] > structure.MAX_PARAMETERS, entry


def test_this_repository_keeps_to_the_limits():
    assert structure.main([]) == 0
