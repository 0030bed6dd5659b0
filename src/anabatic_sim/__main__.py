"""Start the simulator: `python -m anabatic_sim`."""

from __future__ import annotations

import sys

from anabatic_sim.standalone_command import main

if __name__ == "__main__":
    sys.exit(main())
