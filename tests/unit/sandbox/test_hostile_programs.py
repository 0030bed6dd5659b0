"""Programs that want to pass without being right, and tests of every kind that right programs must pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import Failure
from anabatic.sandbox import remote_calls
from anabatic.sandbox.isolation.modes import CHROOT, LANDLOCK, NAMESPACES
from anabatic.sandbox.limits import ResourceLimits
from anabatic.sandbox.sandbox_runner import Sandbox

LIMIT = ResourceLimits(seconds=60, memory_mib=256, processes=8)
TEST = "assert abs(square(2.5) - 6.25) < 1e-6\nassert square(3) == 9\n"
FORGED = """
import os, sys, gc
def square(x):
    frame = sys._getframe()
    while frame:
        nonce = frame.f_locals.get("nonce")
        for handle in range(3, 64) if isinstance(nonce, bytes) else ():
            try:
                os.write(handle, nonce)
            except OSError:
                pass
        frame = frame.f_back
    os._exit(0)
"""
LIAR = """
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
    def __bool__(self): return True
    number_of = None
def square(x): return Liar()
"""
CHEATS = {
    "the report's secret": FORGED,
    "an object equal to everything": LIAR,
    "a number equal to everything": "class N(float):\n __eq__ = lambda s, o: True\n __sub__ = lambda s, o: 0.0\n"
    " __hash__ = float.__hash__\ndef square(x): return N(0)",
    "its own check": "def check(f): pass\ndef square(x): return 0",
    "other builtins": "import builtins\nbuiltins.abs = lambda x: 0\nabs = lambda x: 0\ndef square(x): return 0",
    "leaving at once": "raise SystemExit(0)",
    "leaving in the call": "def square(x): raise SystemExit(0)",
    "leaving without a word": "import os\ndef square(x): os._exit(0)",
    "words of its own to the judge": "import os, struct, json\ndata = json.dumps(['done', {'abs': 1}, []]).encode()\n"
    "def square(x):\n try: os.write(6, struct.pack('=Q', len(data)) + data + b'x' * 1000)\n except OSError:\n"
    "  return x * x\n return 0",
    "a length without end": "import os\ndef square(x):\n try: os.write(6, b'\\xff' * 8)\n except OSError: return x * x",
    "an exception that no test expects": "def square(x): raise KeyboardInterrupt",
    "closed handles": "import os\nos.closerange(0, 64)\ndef square(x): return 0",
}


@pytest.fixture(scope="module", params=[NAMESPACES, LANDLOCK, CHROOT])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        made = Sandbox(LIMIT, ways=[request.param])
    except Failure as error:
        pytest.skip(f"{request.param} cannot be had here: {error}")
    with made:
        yield made


@pytest.mark.process
@pytest.mark.parametrize("kind", CHEATS)
def test_cheats_do_not_pass(box: Sandbox, kind: str) -> None:
    assert not box.check_program(CHEATS[kind], TEST).passed
    assert box.check_program("def square(x): return x * x", TEST).passed


@pytest.mark.process
def test_a_program_does_not_end_the_loops_of_its_tests(box: Sandbox) -> None:
    test = "assert all(map(lambda one: square(one) == one * one, [2, 3]))"
    assert not box.check_program("def square(x): raise StopIteration", test).passed
    assert box.check_program("def square(x): return x * x", test).passed
    assert box.check_program("def walk(x): yield x", "assert list(walk(3)) == [3]").passed


@pytest.mark.process
def test_what_objects_hold_is_no_answer(box: Sandbox) -> None:
    """A program that looks for the tests in its own process finds them there, and not where it counts."""
    program = """
import gc
def square(x):
    secret = "-".join(["forty", "two"])
    return sum(isinstance(one, (dict, list, tuple)) and secret in str(one) for one in gc.get_objects())
"""
    assert box.check_program(program, "secret = 'forty-two'\nassert square(1) > 0").status == "unjudged"


RIGHT = [
    ("def f(x): return x", "for one in (1, -2**70, 1.5, 'é', b'x', None, True, [1, (2,)], {'a': {1}}):\n"
     " assert f(one) == one"),
    ("def f(x): return x", "assert type(f((1, 2))) is tuple and type(f({1})) is set and type(f(range(3))) is range"),
    ("def f(l): l.sort()", "l = [3, 1, 2]\nf(l)\nassert l == [1, 2, 3]"),
    ("def f(d): d['x'] = 1", "d = {}\nassert f(d) is None\nassert d == {'x': 1}"),
    ("def f(x): raise ValueError('bad ' + x)", "try:\n f('x')\n raise SystemExit(1)\n"
     "except ValueError as e:\n assert str(e) == 'bad x'"),
    ("class Odd(KeyError): pass\ndef f(): raise Odd('k')", "try:\n f()\n raise SystemExit(1)\nexcept Odd:\n pass"),
    ("class Odd(KeyError): pass\ndef f(): raise Odd('k')", "try:\n f()\n raise SystemExit(1)\nexcept KeyError:\n pass"),
    ("def f(g, n): return [g(i) for i in range(n)]", "assert f(lambda i: i * i, 3) == [0, 1, 4]"),
    ("def f(n):\n for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0"),
    ("class Stack:\n def __init__(self): self.rows = []\n def push(self, x): self.rows.append(x)\n"
     " def __len__(self): return len(self.rows)",
     "s = Stack()\ns.push(4)\nassert len(s) == 1 and s.rows == [4] and isinstance(s, Stack)"),
    ("class P:\n def __init__(self, x): self.x = x\n def __eq__(self, o): return self.x == o.x\n"
     " def __add__(self, o): return P(self.x + o.x)",
     "assert P(1) + P(2) == P(3)\nassert P(1) != P(2)"),
    ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2), 2 ** 0.5)"),
    ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
    ("N = 3\ndef f(): return N", "assert f() == N == 3"),
    ("def f(x):\n print('said', x)\n return x",
     "import random\nfor _ in range(50):\n n = random.random()\n assert f(n) == n"),
]  # fmt: skip


SHAPES = [
    ("import datetime\ndef f(d): return d + datetime.timedelta(days=1)",
     "from datetime import date\nassert f(date(2024, 2, 28)) == date(2024, 2, 29)"),
    ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
     "assert f().x == 1 and f() == (1, 2) and isinstance(f(), P) and f()._fields == ('x', 'y')"),
    ("class Node:\n def __init__(self, v, next=None): self.v, self.next = v, next\n"
     "def total(n):\n s = 0\n while n: s, n = s + n.v, n.next\n return s", "assert total(Node(1, Node(2))) == 3"),
    ("def total(items): return sum(i.v for i in items)",
     "class Item:\n def __init__(self, v): self.v = v\nassert total([Item(1), Item(2)]) == 3"),
    ("class Bad(Exception):\n def __init__(self, code): super().__init__('bad'); self.code = code\n"
     "def f(): raise Bad(7)", "try:\n f()\nexcept Bad as e:\n assert e.code == 7\nelse:\n assert False"),
    ("def hello(): print('hello')",
     "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out): hello()\n"
     "assert out.getvalue() == 'hello\\n'"),
    ("def hello(): print('hello')",
     "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nhello()\ntext = sys.stdout.getvalue()\n"
     "sys.stdout = old\nassert text == 'hello\\n'"),
    ("class Timer:\n def __enter__(self): self.on = True; return self\n def __exit__(self, *a): self.on = False",
     "with Timer() as t:\n assert t.on\nassert not t.on"),
    ("class S:\n one = None\n def __new__(cls):\n  cls.one = cls.one or super().__new__(cls)\n  return cls.one",
     "assert S() is S()"),
    ("count = 0\ndef f():\n global count\n count += 1", "f()\nf()\nassert count == 2"),
    ("def add(l, x):\n l.append(x)\n return l", "l = [[1]]\nassert add(l, 2) is l and l == [[1], 2]"),
    ("import functools\ndef deco(f):\n @functools.wraps(f)\n def g(*a): return f(*a) + 1\n return g",
     "@deco\ndef h(x):\n 'doc'\n return x\nassert h(1) == 2 and h.__name__ == 'h' and h.__doc__ == 'doc'"),
    ("import asyncio\nasync def f(x):\n await asyncio.sleep(0)\n return x",
     "import asyncio\nassert asyncio.run(f(3)) == 3"),
    ("from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n x: int\n y: int = 0",
     "assert P(1) == P(1, 0) < P(2) and repr(P(1)) == 'P(x=1, y=0)'"),
    ("class V:\n def __init__(self, **k):\n  for n, v in k.items(): setattr(self, n, v)\n"
     " def __getattr__(self, n): return 'no ' + n",
     "assert V(a=1).a == 1 and V().b == 'no b' and vars(V(a=1)) == {'a': 1}"),
    ("class T:\n def __eq__(self, o): return isinstance(o, T)\n __hash__ = None",
     "import unittest\nclass C(unittest.TestCase):\n def test(self): self.assertEqual(T(), T())\nunittest.main()"),
    ("def sum(xs):\n t = 0\n for x in xs: t += x\n return t", "assert sum([1, 2]) == 3"),
    ("import sys\nsys.setrecursionlimit(5000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
     "assert f(2000) == 2000"),
    ("from typing import *\ndef f(x: Optional[List[int]]) -> int: return len(x or [])", "assert f([1]) == 1"),
    ("def f(n): return '{:03d} {}'.format(n, 'x')\nif __name__ == '__main__':\n print(f(1))", "assert f(7) == '007 x'"),
]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("at", range(len(SHAPES)))
def test_right_programs_of_every_shape_pass(box: Sandbox, at: int) -> None:
    program, tests = SHAPES[at]
    done = box.check_program(program, tests)
    assert done.passed and not done.reaches, (done.status, done.reaches, done.stderr)
    assert not box.check_program(f"{program}\nraise ValueError", tests).passed


UNITTEST = (
    "import unittest\nclass C(unittest.TestCase):\n def test(self): self.assertEqual(square(3), 9)\nunittest.main()"
)
LEAVERS = {
    "an exit that hides where it came from": "class E(SystemExit):\n __traceback__ = None\n code = 0\n"
    "def square(x): raise E",
    "an exit out of C": "import functools, sys\nclass W:\n write = str\n flush = sys.exit\n"
    "square = functools.partial(print, file=W(), flush=True)",
    "tests of its own": "def load_tests(loader, tests, pattern): return type(tests)()\ndef square(x): return 0",
    "an end of map": "E = [StopIteration][0]\ndef square(x): raise E",
    "an end of map, unseen": "def square(x): return iter(()).__next__()",
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("kind", LEAVERS)
def test_an_end_before_the_last_test_is_none(box: Sandbox, kind: str) -> None:
    tests = "assert all(map(lambda one: square(one) == one * one, [2, 3]))"
    assert not box.check_program(LEAVERS[kind], tests).passed
    assert not box.check_program(LEAVERS[kind], UNITTEST).passed
    assert box.check_program("def square(x): return x * x", UNITTEST).passed


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "tests", "status"),
    [
        ("def f(): return input()", "import builtins\nbuiltins.input = lambda: 'a'\nassert f() == 'a'", "ok"),
        ("def f(): return input()", "def input(): return 'a'\nassert f() == 'a'", "ok"),
        ("import time\ndef f(): return time.time()", "import time\ntime.time = lambda: 5\nassert f() == 5", "ok"),
        ("n = 0\ndef f():\n global n\n n += 1", "n = 0\nf()\nassert n == 1\nn = 0\nf()\nassert n == 1", "ok"),
        ("def f(): return 1",
         "from unittest import mock\nwith mock.patch('__main__.f', lambda: 2): assert f() == 2", "ok"),
        ("class P: pass", "class Q:\n rows = [P()]\n def one(self, p: P): pass\nassert isinstance(Q.rows[0], P)", "ok"),
        ("def f(x): return x", "assert f(1) == 1\nexit()", "ok"),
        ("def sum(a, b): return a + b", "assert sum(10, 15) == 25", "ok"),
        ("def f(x): return x", "try: import msvcrt\nexcept ImportError: pass\nassert f(1) == 1", "ok"),
        ("def f(x): return k(x)", "def k(x): return x + 1\nassert f(1) == 2", "unjudged"),
        ("def f(x): return e", "e = 7\nassert f(1) == e", "unjudged"),
    ],
)  # fmt: skip
def test_what_tests_share_with_a_program(box: Sandbox, program: str, tests: str, status: str) -> None:
    done = box.check_program(program, tests)
    assert (done.status, done.passed) == (status, status == "ok"), (done.stderr, done.reaches)


@pytest.mark.process
def test_long_programs_are_read(box: Sandbox) -> None:
    chain = "def f(x):\n if x == 0: return 0\n" + "".join(f" elif x == {n}: return {n}\n" for n in range(1, 900))
    done = box.check_program(chain, "assert f(399) == 399")
    assert done.passed and done.reaches == []
    long = box.check_program(f"def f(x): return x.__{'a' * 400_000}__", "assert f(1) == 1")
    assert not long.passed and long.is_judged and max(map(len, long.reaches)) <= 200


KEY_TESTS = "def key(x): return -x\nexpected = [3, 2, 1]\nassert order([1, 2, 3], key) == expected\n"
READERS = {
    "a namespace by its name": "def order(l, k): return k.__globals__['expected']",
    "by a name put together": "def order(l, k): return getattr(k, '__glo' + 'bals__')['expected']",
    "by another function": "g = getattr\ndef order(l, k): return g(k, '__glo' + 'bals__')['expected']",
    "by a class's own": "def order(l, k): return object.__dict__['__getattribute__'](k, '__globals__')['expected']",
    "by a decorator": "import functools\nclass C: pass\ndef order(l, k):\n c = C()\n"
    " functools.update_wrapper(c, k, ['__globals__'], [])\n return vars(c)['__globals__']['expected']",
    "by a pattern": "class M(type):\n def __instancecheck__(c, o): return True\n"
    "C = M('C', (), {'__match' + '_args__': ('__glo' + 'bals__',)})\n"
    "def order(l, k):\n match k:\n  case C(g): return g['expected']",
    "by a text": "def order(l, k): return eval(('{0.__glo' + 'bals__[expected]}').format(k))",
    "by a frame": "import sys\ndef order(l, k): return sys._getframe(1).f_globals['expected']",
    "by an error": "def order(l, k):\n try: k('x')\n except TypeError as e: t = e.__traceback__\n"
    " return t.tb_next.tb_frame.f_globals['expected']",
    "by a text's own method": "import ast\nt = '{0.__glo' + 'bals__[expected]}'\n"
    "def order(l, k): return ast.literal_eval(getattr(t, 'form' + 'at')(k))",
    "by a name that lies": "class S(str):\n def __str__(self): return 'x'\n"
    "def order(l, k): return getattr(k, S('__glo' + 'bals__'))['expected']",
    "by a module that is added to": "import sys\nheld = []\nclass G:\n"
    " def __radd__(s, m):\n  held.append(m)\n  return s\nsys += G()\n"
    "def order(l, k): return getattr(held[0], '_get' + 'frame')(1).f_globals['expected']",
    "by operator": "from operator import attrgetter\ndef order(l, k): return attrgetter('__globals__')(k)['expected']",
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("kind", READERS)
def test_what_is_expected_cannot_be_read(box: Sandbox, kind: str) -> None:
    done = box.check_program(READERS[kind], KEY_TESTS)
    assert not done.passed and done.reaches


@pytest.mark.process
def test_modules_of_the_tests_cannot_be_changed(box: Sandbox) -> None:
    tests = "import math\nassert math.isclose(root(4.0), math.sqrt(4.0))"
    assert box.check_program("def root(x): return x ** 0.5", tests).passed
    for cheat in (
        "import math\nmath.isclose = lambda *a, **k: True\ndef root(x): return 0",
        "import math\ndef root(x):\n setattr(math, 'isclose', lambda *a: True)\n return 0",
    ):
        done = box.check_program(cheat, tests)
        assert not done.passed and done.reaches, done
    counted = "from collections import Counter\nassert most('aab') == Counter('aab').most_common(1)[0][0]"
    cheat = (
        "from collections import Counter\nC = Counter\nC.most_common = lambda s, n: [('z', 1)]\ndef most(t): return 'z'"
    )
    assert box.check_program(cheat, counted).status == "unjudged"


@pytest.mark.process
def test_a_right_program_that_reaches_is_judged_apart(box: Sandbox) -> None:
    done = box.check_program("def calc(text): return eval(text)", "assert calc('1 + 2') == 3")
    assert done.passed and done.reaches == ["eval (line 1)"]
    program = "class P:\n def __init__(self, x): self.x = eval(x)\n def __eq__(self, o): return self.x == o"
    done = box.check_program(program, "assert P('1') == 1")
    assert (done.status, done.passed, done.is_judged) == ("unjudged", False, False)
    assert done.describe_end(LIMIT) == "cannot be judged: eval (line 2)"


@pytest.mark.process
@pytest.mark.parametrize("words", ["nonce + b' failed: no memory'", "nonce + b' touched'", 'b\'{"failed": "no"}\''])
def test_a_program_cannot_end_the_job(box: Sandbox, words: str) -> None:
    """By the channels that tell how the start went, and that the tests have passed."""
    program = f"""
import sys, os
frame = sys._getframe()
while frame:
    nonce = frame.f_locals.get("nonce")
    for handle in range(3, 64) if isinstance(nonce, bytes) else ():
        try:
            os.write(handle, {words})
        except OSError:
            pass
    frame = frame.f_back
os._exit(0)
"""
    assert not box.check_program(program, "assert f() == 1").passed
    assert box.run(program).status == "ok"
    assert box.run("print(1)").stdout == "1\n"


@pytest.mark.process
@pytest.mark.parametrize("at", range(len(RIGHT)))
def test_right_programs_pass(box: Sandbox, at: int) -> None:
    done = box.check_program(*RIGHT[at])
    assert done.passed, (done.status, done.stderr, RIGHT[at])


@pytest.mark.process
def test_helpers_are_the_prompts_own(box: Sandbox) -> None:
    prompt = "def poly(x):\n    return x - 2\n\ndef root():\n    import math\n    '''Find x with poly(x) == 0.'''\n"
    test = "assert poly(root()) == 0"
    assert box.check_program(prompt + "    return 2\n", test, prompt).passed
    cheat = prompt + "    return 5\ndef poly(x): return 0\n"
    assert box.check_program(cheat, test).passed, "without the prompt the tests ask the program"
    assert not box.check_program(cheat, test, prompt).passed
    assert box.check_program(
        "def root(): return 2\ndef poly(x): return x - 2", test, "Find the root. Not (python"
    ).passed


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "test", "status", "said"),
    [
        ("def f(): return 1", "assert f() == 2, 'one is not two'", "error", "one is not two"),
        ("def f(): return 1", "def check(", "error", "SyntaxError"),
        ("def g(): return 1", "assert f() == 1", "error", "NameError"),
        ("while True: pass", "assert f() == 1", "timeout", ""),
        ("def f():\n while True: pass", "assert f() == 1", "timeout", ""),
        ("def f(): return [0] * 10**9", "f()", "memory", ""),
        ("def f():\n x = []\n x.append(x)\n return x", "assert f() == 1", "error", "AssertionError"),
    ],
)
def test_what_became_of_it(box: Sandbox, program: str, test: str, status: str, said: str) -> None:
    brief = ResourceLimits(seconds=1 if status == "timeout" else 60, memory_mib=256)
    with Sandbox(brief, ways=[box.protections.mode]) as other:
        done = other.check_program(program, test)
    assert (done.status, done.passed) == (status, False)
    assert said in done.stderr


@pytest.mark.process
def test_a_module_that_is_not_at_hand_is_no_fault_of_the_program(box: Sandbox) -> None:
    done = box.check_program("import sqlite3\ndef f(): return sqlite3.sqlite_version", "assert f()")
    if box.protections.mode == CHROOT:
        assert done.status == "unjudged" and "sqlite3" in done.reaches[0]
    else:
        assert done.passed
    assert box.check_program("import no_such_module\ndef f(): return 1", "assert f()").status == "error"


@pytest.mark.process
def test_memory_of_all_processes_is_bounded() -> None:
    """Also of pages that are shared, and resident in no process; files in memory are refused."""
    try:
        box = Sandbox(LIMIT, ways=[NAMESPACES])
    except Failure as error:
        pytest.skip(str(error))
    if "memory" not in box.protections.guards or "none" in box.protections.guards["processes"]:
        box.close()
        pytest.skip(f"a program may start no processes, or their memory is not counted: {box.protections.guards}")
    hold = "import os, time\nfor _ in range(3):\n if not os.fork(): break\nx = b'x' * (200 << 20)\ntime.sleep(60)"
    pages = (
        "import mmap, os, time\nfor _ in range(2): os.fork()\nkept = [mmap.mmap(-1, 4096) for _ in range(4000)]\n"
        "for one in kept:\n one[0] = 1\n one.madvise(mmap.MADV_DONTNEED)\ntime.sleep(60)"
    )
    with box:
        for source, limits in ((hold, LIMIT), (pages, replace(LIMIT, memory_mib=64))):
            done = box.run(source, limits=limits)
            assert (done.status, done.passed) == ("memory", False)
            assert done.seconds < 60
        denied = box.run("import os\nos.memfd_create('x')")
        assert "PermissionError" in denied.stderr
        assert box.run("print(1)").stdout == "1\n"


def refuse(*_: object) -> Any:
    raise AssertionError("no data")


NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(allow_nan=False), st.text(), st.binary()
)
DATA = st.recursive(
    NUMBERS | st.decimals(allow_nan=False) | st.fractions(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@pytest.mark.process
@given(DATA)
@settings(max_examples=200)
def test_values_come_back(value: object) -> None:
    back = remote_calls.decode_value(remote_calls.encode_value(value, refuse), refuse)
    assert repr(back) == repr(value)
    assert type(back) is type(value)


def test_values_of_derived_classes_are_pythons_own() -> None:
    class Big(int):
        pass

    back = remote_calls.decode_value(
        remote_calls.encode_value([Big(3), Decimal("1.50"), Fraction(1, 3), math.inf], refuse), refuse
    )
    assert type(back[0]) is int
    assert back == [3, Decimal("1.50"), Fraction(1, 3), math.inf]


@pytest.mark.process
@given(
    st.recursive(
        NUMBERS.filter(lambda one: not isinstance(one, (bytes, complex))), lambda inner: st.lists(inner, max_size=4)
    )
)
@settings(max_examples=300)
def test_hostile_values_are_errors(tree: Any) -> None:
    def resolve(kind: str, number: object) -> object:
        raise ValueError(kind)

    try:
        value = remote_calls.decode_value(tree, resolve)
    except (ValueError, TypeError):
        return
    assert remote_calls.decode_value(remote_calls.encode_value(value, refuse), refuse) == value
