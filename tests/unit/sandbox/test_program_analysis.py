"""What a program is said to reach for, and what ordinary solutions may use without it."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.sandbox import program_analysis


def find(program: str, tests: str = "assert f(1) == 1") -> list[str]:
    return program_analysis.find_reaches(ast.parse(program), tests)


@pytest.mark.parametrize(
    "program",
    [
        "import os.path\nprint(os.path.join('a', 'b'), os.environ.get('A'))",
        "import sys\nfor line in sys.stdin: print(line)\nsys.setrecursionlimit(9999)",
        "from collections.abc import Iterable\nimport collections\nx = collections.deque()",
        "import concurrent.futures\nwith concurrent.futures.ThreadPoolExecutor() as p: p.submit(print)",
        "import numbers, decimal\ndecimal.getcontext().prec = 9",
        "import random\nrandom.seed(1)\nrandom.shuffle([1])",
        "class A:\n def __init__(self, f_score): self.f_score = f_score\n"
        " def __repr__(self): return self.__class__.__name__",
        "class A:\n def __eq__(self, other): return NotImplemented\n def __lt__(self, other): raise TypeError",
        "class A:\n def __setattr__(self, name, value): super().__setattr__(name, value)",
        "class A:\n __slots__ = ('x',)\n def __init__(self): object.__setattr__(self, 'x', 1)",
        "from functools import wraps\ndef d(f):\n @wraps(f)\n def g(): return f()\n return g",
        "match [1]:\n case [int(x)]: print(x)\n case {'a': str()}: pass",
        "class P:\n def __init__(self, x): self.x = x\nmatch P(1):\n case P(x=1): pass",
        "def f(it): return next(iter(it), None)\nprint('{0.real} {1}'.format(1, 2))",
        "import ast\nast.literal_eval('1')\nfrom types import SimpleNamespace",
        "with open('out.txt', 'w') as file: file.write('x')",
    ],
)
def test_ordinary_programs_reach_for_nothing(program: str) -> None:
    assert find(program) == []


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("import gc", "the module gc (line 1)"),
        ("import random\nx = random._os", "random._os (line 2)"),
        ("import random\nx = [random]", "the module random as a value (line 2)"),
        ("import math\nmath.pi = 3", "a change of math.pi (line 2)"),
        ("class A:\n import math", "a module as an attribute (line 2)"),
        ("from operator import attrgetter", "operator.attrgetter (line 1)"),
        ("from operator import *\nattrgetter('a')", "attrgetter (line 2)"),
        ("from . import x", "None.x (line 1)"),
        ("f.__globals__", ".__globals__ (line 1)"),
        ("f.gi_frame", ".gi_frame (line 1)"),
        ("A.__eq__ = f", "a change of .__eq__ (line 1)"),
        ("x = '{0.__code__}'.format(f)", ".format of a text that is not in the source (line 1)"),
        ("x = t.format(f)", ".format of a text that is not in the source (line 1)"),
        ("open('/proc/self/mem')", "open of a file that is not its own (line 1)"),
        ("class A:\n __eq__ = lambda s, o: True", "__eq__ that does not look at its operand (line 2)"),
        ("object.__setattr__(f, '__code__', c)", ".__setattr__ of a name that is not in the source (line 1)"),
        ("import functools\nw = functools.wraps", "functools.wraps as a value (line 2)"),
        ("import functools\n@functools.wraps(f, ['a'])\ndef g(): pass", "functools.wraps with a choice of attributes"),
        ("C = make()\nmatch f:\n case C(g): pass", "a pattern of a class whose fields are not in the source (line 3)"),
        ("class C:\n __match_args__ = x\nmatch f:\n case C(g): pass", "a pattern of a class whose fields"),
        ("match f:\n case object(__globals__=g): pass", ".__globals__ (line 2)"),
        ("__builtins__['print']", "__builtins__ (line 1)"),
    ],
)
def test_reaches_are_named_with_their_lines(program: str, named: str) -> None:
    assert any(named in one for one in find(program)), find(program)


def test_state_that_the_tests_share_counts_only_there() -> None:
    assert find("import random\nrandom.seed(1)", "import random\nassert f(random.random())") != []
    assert find("def f(it): return next(it)", "assert all(map(f, x))") != []
    assert find("def f(it): return next(it)", "assert f(x)") == []


@given(st.text(max_size=40))
@settings(max_examples=200)
def test_any_source_is_read(text: str) -> None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    assert len(program_analysis.find_reaches(tree, text)) <= 5


def test_guards_do_what_pythons_do() -> None:
    guard = program_analysis.AttributeGuard()
    names = guard.make_builtins()

    class A:
        x = 1

    assert names["getattr"](A(), "x") == 1 and names["getattr"](A(), "y", 2) == 2
    instance = A()
    names["setattr"](instance, "z", 3)
    assert names["vars"](instance) == {"z": 3} and guard.reaches == []
    assert names["getattr"](guard.make_builtins, "__func__").__name__ == "make_builtins"
    names["vars"](int)
    assert guard.reaches == [".__func__", "a namespace that is not its own"]
