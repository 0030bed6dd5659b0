"""`anabatic studio`: train, compare and try models in the browser."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.sections.common import require_setting

TOKEN_VARIABLE = "ANABATIC_STUDIO_TOKEN"


@dataclass(kw_only=True)
class StudioJob:
    """Train, compare and try models in the browser: one process, its state in the folder of the runs."""

    runs: str = "runs"
    """Folder of the training runs; new runs are written there. It is created if it does not exist."""
    data: list[str] = field(default_factory=lambda: ["."])
    """Folders whose files can be picked as data, four levels deep."""
    models: list[str] = field(default_factory=lambda: ["."])
    """Folders with Hugging Face model folders, four levels deep, besides the runs and the Hugging Face cache."""
    host: str = "127.0.0.1"
    """Address to listen at. Requests need the token, which is part of the address that the start prints."""
    port: int = 8800
    """Port to listen at; 0 takes a free one."""
    token_file: str | None = None
    """File with the access token in its first line. Also from the variable ANABATIC_STUDIO_TOKEN; otherwise a new token
    is made at each start."""
    require_token: bool = True
    """Require the token. Without it every user of this machine, and whoever else reaches the address, runs programs as
    you."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names in the Host header of requests that are answered, besides those of this machine; `*`: any. Default: at a
    loopback address only localhost, 127.0.0.1 and [::1], at another address any."""
    concurrent_jobs: int = 1
    """Jobs that run at the same time on the processor; on accelerators every job waits for free devices."""

    def __post_init__(self) -> None:
        require_setting(bool(self.runs), "runs is empty", "give a folder: --runs runs")
        require_setting(0 <= self.port < 65536, f"port is {self.port}", "use 0 to 65535")
        require_setting(self.concurrent_jobs >= 1, f"concurrent_jobs is {self.concurrent_jobs}", "use 1 or more")
        for host in self.allowed_hosts:
            bare = bool(host.strip()) and not any(sign in host for sign in "/ ,")
            require_setting(
                bare, f"allowed_hosts has {host!r}, which is not a host name", "give example.org, without http://"
            )
