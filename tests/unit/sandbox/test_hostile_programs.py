"""Programs that want to pass without being right, and tests of every kind that right programs must pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    "os.write(5, struct.pack('=Q', len(data)) + data)\nos.write(5, b'x' * 1000)\ndef square(x): return 0",
    "a length without end": "import os\nos.write(5, b'\\xff' * 8)\ndef square(x): return 0",
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
def test_program_never_sees_the_tests(box: Sandbox) -> None:
    """Not in what any of its objects holds."""
    program = """
import gc
def square(x):
    secret = "-".join(["forty", "two"])
    return sum(isinstance(one, (dict, list, tuple)) and secret in str(one) for one in gc.get_objects())
"""
    assert box.check_program(program, "secret = 'forty-two'\nassert square(1) == 0").passed


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
     "assert P(1) + P(2) == P(3)\nassert P(1) != P(2)\nassert P(1) != 1"),
    ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2), 2 ** 0.5)"),
    ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
    ("N = 3\ndef f(): return N", "assert f() == N == 3"),
    ("def f(x):\n print('said', x)\n return x",
     "import random\nfor _ in range(50):\n n = random.random()\n assert f(n) == n"),
]  # fmt: skip


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
        ("def f():\n x = []\n x.append(x)\n return x", "assert f() == 1", "error", "RecursionError"),
    ],
)
def test_what_became_of_it(box: Sandbox, program: str, test: str, status: str, said: str) -> None:
    brief = ResourceLimits(seconds=1 if status == "timeout" else 60, memory_mib=256)
    with Sandbox(brief, ways=[box.protections.mode]) as other:
        done = other.check_program(program, test)
    assert (done.status, done.passed) == (status, False)
    assert said in done.stderr


@pytest.mark.process
def test_memory_of_all_processes_is_bounded() -> None:
    """Four processes with 200 MiB each, 256 MiB allowed; files in memory are refused."""
    try:
        box = Sandbox(LIMIT, ways=[NAMESPACES])
    except Failure as error:
        pytest.skip(str(error))
    if "memory" not in box.protections.guards or "none" in box.protections.guards["processes"]:
        box.close()
        pytest.skip(f"a program may start no processes, or their memory is not counted: {box.protections.guards}")
    hold = "import os, time\nfor _ in range(3):\n if not os.fork(): break\nx = b'x' * (200 << 20)\ntime.sleep(60)"
    drop = (
        "import mmap, os, time\nfor _ in range(3):\n if not os.fork(): break\nx = mmap.mmap(-1, 200 << 20)\n"
        "for at in range(0, len(x), 8 << 20):\n x[at : at + (8 << 20)] = b'x' * (8 << 20)\n"
        " x.madvise(mmap.MADV_DONTNEED, at, 8 << 20)\ntime.sleep(60)"
    )
    share = "import mmap, os\nx = mmap.mmap(-1, 100 << 20)\nfor _ in range(3): os.fork()\nprint(1)"
    with box:
        for source in (hold, drop):
            done = box.run(source)
            assert (done.status, done.passed) == ("memory", False)
            assert done.seconds < 60
        assert box.run(share).is_ok
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
        remote_calls.decode_value(tree, resolve)
    except (ValueError, TypeError):
        return
