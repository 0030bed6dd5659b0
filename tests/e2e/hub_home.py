"""Commands on data sets of a hub that this machine plays, forked from one process that knows its address."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from e2e import command, warm
from unit.hub.hub_server import SHA, Hub, serving

CARD = b"---\nlicense: mit\n---\n"
LATER = "f" * 40
"""The commit of another state of a data set."""


@dataclass(frozen=True)
class HubHome:
    """The hub with its only data set, `hf:acme/rows`, a model, and what commands keep of the hub."""

    hub: Hub
    root: Path
    server: warm.Server
    variables: dict[str, str]

    @property
    def model(self) -> Path:
        """A folder with a random model."""
        return self.root / "model"

    def hold(self, rows: bytes) -> None:
        """Begin anew: the data set has these rows, and no command has asked for it."""
        self.hub.files = {"README.md": CARD, "train.jsonl": rows}
        self.hub.commit = SHA
        self.hub.asked.clear()
        shutil.rmtree(self.root / "cache", ignore_errors=True)

    def change(self, name: str, rows: bytes) -> None:
        """Let the data set have a later state."""
        self.hub.files[name] = rows
        self.hub.commit = LATER

    def anabatic(self, *words: object) -> str:
        """Run a command that must succeed; return what it said."""
        line = ["anabatic", *map(str, words)]
        started = self.server.start(line, {**os.environ, **self.variables}, Path.cwd())
        assert started is not None
        return command.end(started).err


@contextmanager
def hub_home(root: Path) -> Iterator[HubHome]:
    """Serve the hub while the block runs."""
    cache = root / "cache"
    with serving(Hub({}, "acme/rows")) as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache / "hf"), "HF_HUB_OFFLINE": "0"}
        outer = {**os.environ, **variables}
        made = HubHome(hub, root, warm.Server(outer, outer), {**variables, "ANABATIC_CACHE": str(cache / "shards")})
        build_random_model(len(build_byte_tokenizer(made.model))).save_pretrained(made.model)
        try:
            yield made
        finally:
            made.server.close()
