"""torchair: importing it works, as programs do that never make a graph; a graph is refused by name."""

from __future__ import annotations

from npu_sim.conftest import Sim


def test_import_works_and_a_graph_is_refused_by_name(sim: Sim) -> None:
    lines = sim.python(
        """
        import torch
        import torchair

        print(hasattr(torchair, "inference"))
        compiled = torch.compile(lambda x: x + 1, backend=torchair.get_npu_backend())
        try:
            compiled(torch.ones(2, device="npu"))
        except Exception as error:
            print("ge::" in str(error), "of CANN's graph engine is not simulated" in str(error))
        """
    ).splitlines()
    assert lines == ["True", "True True"]


def test_bounded_strings(sim: Sim) -> None:
    # -1 or an error code where a text does not fit: securec.h of libboundscheck.
    lines = sim.python(
        """
        import ctypes, errno

        library = ctypes.CDLL("libascendcl.so")
        for size, count in ((8, 7), (8, 3), (4, 7), (0, 7)):
            target = ctypes.create_string_buffer(b"before", 8)
            print(library.snprintf_s(target, size, count, b"%s", b"words"), target.value.decode() or "-")
        for size in (6, 5):
            target = ctypes.create_string_buffer(b"before", 8)
            code = library.strcpy_s(target, size, b"words")
            print(code == (0 if size == 6 else errno.ERANGE), target.value.decode() or "-")
        """
    ).splitlines()
    assert lines == ["5 words", "-1 wor", "-1 -", "-1 before", "True words", "True -"]
