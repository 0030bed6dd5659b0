"""What a program is said to reach for, and what ordinary solutions may use without it."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.sandbox import attribute_guard, program_analysis


def find(program: str, tests: str = "assert f(1) == 1") -> list[str]:
    return program_analysis.find_reaches(ast.parse(program), tests)


@pytest.mark.parametrize(
    "program",
    [
        "import os.path\nprint(os.path.join('a', 'b'), os.getcwd())",
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
        "import string\ndef f(string): return string.upper()",
        "import datetime\nfrom datetime import datetime\nprint(datetime.now())",
        "class M(type):\n made = {}\n def __call__(cls): return cls.made.setdefault(cls, type.__call__(cls))\n"
        "class A(metaclass=M): pass",
        "from abc import ABC\nfrom dataclasses import dataclass\n@dataclass\nclass P(ABC):\n x: int\n"
        "match p:\n case P(x): pass",
        "from collections import namedtuple\nP = namedtuple('P', 'x')\nprint(P(1)._asdict(), P(1)._replace(x=2))",
        "class A:\n count = 0\n def __init__(self):\n  self.__class__.count += 1\n  type(self).count += 1",
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
        ("import sys\nsys += G()", "the module sys as a value (line 2)"),
        ("g.gi_frame += G()", ".gi_frame (line 1)"),
        ("import timeit as m\nm.repeat(c)\nimport itertools as m", "timeit.repeat (line 2)"),
        ("from uuid import *\nos._exit(0)", "os (line 2)"),
        ("class C:\n if True:\n  import sys as s", "a module as an attribute (line 3)"),
        ("C = M('C', (), n)\nmatch f:\n case C(g): pass", "a pattern of a class whose fields"),
        ("class M(type): pass\nC = M('C', (), {})", "a class that is not in the source (line 2)"),
        ("t = type\nt('C', (), {})", "type as a value (line 1)"),
        ("match f:\n case object(__dict__=d): pass", ".__dict__ (line 2)"),
        ("put = object.__setattr__", ".__setattr__ (line 1)"),
        ("import enum\nenum.Enum._convert_('E', 'sys', f)", "._convert_, which it does not define (line 2)"),
        ("import contextlib\nclass R(contextlib.redirect_stdout): pass", "redirect_stdout as a value (line 2)"),
        ("@f.register\ndef _(x: 'leak()'): pass", "an annotation that is evaluated (line 1)"),
        ("class C:\n def __reduce_ex__(self, p): pass", "__reduce_ex__ (line 2)"),
        ("from collections import Counter\nCounter.most_common = f", "a change of Counter.most_common (line 2)"),
        ("import random\nrandom.Random.getrandbits = f", "a change of .Random.getrandbits (line 2)"),
        ("type(x).value = f", "a change of .value of a class that is not in the source (line 1)"),
        ("x.__class__ = C", "a change of .__class__ (line 1)"),
        ("import asyncio\nasyncio.set_event_loop_policy(p)", "asyncio.set_event_loop_policy (line 2)"),
        ("class E:\n __module__ = 'builtins'", "a change of __module__ (line 2)"),
        ("open('../x')", "open of a file that is not its own (line 1)"),
    ],
)
def test_reaches_are_named_with_their_lines(program: str, named: str) -> None:
    assert any(named in one for one in find(program)), find(program)


def test_state_that_the_tests_share_counts_only_there() -> None:
    assert find("import random\nrandom.seed(1)", "import random\nassert f(random.random())") != []
    assert find("def f(it): return next(it)", "import itertools\nassert all(itertools.starmap(f, x))") != []
    assert find("def f(it): return next(it)", "assert all(map(f, x))") == [], "the tests' own map is guarded"
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
    guard = attribute_guard.AttributeGuard()
    names = guard.make_names()

    class A:
        x = 1

    A.__module__ = "__main__"

    assert names["getattr"](A(), "x") == 1 and names["getattr"](A(), "y", 2) == 2
    instance = A()
    names["setattr"](instance, "z", 3)
    assert names["vars"](instance) == {"z": 3} and guard.reaches == []
    assert names["getattr"](guard.make_names, "__func__").__name__ == "make_names"
    names["vars"](int)
    assert guard.reaches == [".__func__", "a namespace that is not its own"]
