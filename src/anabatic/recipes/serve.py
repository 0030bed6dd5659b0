"""`anabatic serve`: models behind an address, until a signal ends it."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from anabatic.config.serve import LOCAL, ServeJob
from anabatic.config.shared import require
from anabatic.core import log
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.text import count
from anabatic.data import templates
from anabatic.data import tokenizer as tokenizers
from anabatic.device.device import Device, pick
from anabatic.infer.classify import TrajectoryClassifier
from anabatic.infer.plan import engine_of
from anabatic.infer.score import Scorer, is_reward_model
from anabatic.infer.server.app import make_app
from anabatic.infer.server.patience import patient
from anabatic.infer.server.served import Catalogue, Served
from anabatic.infer.server.worker import Worker
from anabatic.infer.web.runs import Runs
from anabatic.models import classifier
from anabatic.models.build import count_parameters
from anabatic.models.hf import below, load_config, load_model, require_fit, resolve, tokenizer_folder
from anabatic.recipes import length

KEYS = "ANABATIC_API_KEYS"
_BACKLOG = 2048
STEP_SECONDS = 0.4
"""Who is being answered waits about so long for a piece of somebody else's prompt."""
UNREAD_SECONDS = 60.0
"""A client that takes nothing of its answer for so long is cut off."""


def run(job: ServeJob) -> int:
    """Serve until SIGINT or SIGTERM; answers under way come to their end.

    Raises:
        ConfigError: several processes, two models of one name, a port that is taken, no key in the file of keys.
        DataError: a model, an adapter or a classifier cannot be used.
    """
    require(job.device.nproc == 1, f"device.nproc is {job.device.nproc}", "one process serves: leave it out")
    keys = _keys(job.api_key_file)
    runs = _runs(job.runs)
    listening = _listen(job.host, job.port)
    with listening:
        catalogue = _catalogue(job)
        worker = Worker(catalogue.engines)
        worker.start()
        config = uvicorn.Config(
            make_app(catalogue, worker, keys, job.cors, runs, _hosts(job.allowed_hosts, listening)),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            http=patient(job.limits.body_seconds),
            timeout_graceful_shutdown=int(job.limits.shutdown_seconds),
        )
        host, port = listening.getsockname()[:2]
        names = ", ".join([served.name for served in catalogue.models] + list(catalogue.classifiers)) or "runs"
        log.info(f"serving {names} at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends)")
        if not keys and host not in ("127.0.0.1", "::1"):
            log.warn(f"whoever reaches {host}:{port} may ask: set {KEYS} or --api-key-file")
        with _raised_again():
            uvicorn.Server(config).run(sockets=[listening])
        worker.stop()
        worker.join(timeout=30)
    if worker.failure:
        raise Failure(f"the engine stopped: {worker.failure}", "the log above says where")
    log.info("served")
    return 0


@contextmanager
def _raised_again() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more when everything is answered: that is no other end."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    """Take the address before the models are read, which may take minutes: who asks meanwhile waits."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux (tcp(7)); connections take it over from who listens
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_SECONDS))
    try:
        listening.bind((host, port))
        listening.listen(_BACKLOG)  # two that are only bound would both have the address
    except (OSError, ValueError, TypeError) as error:  # the latter two: no host can be called so
        listening.close()
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{host}:{port} cannot be listened at: {why}", "give another --host or --port") from error
    return listening


def _hosts(allowed: list[str], listening: socket.socket) -> list[str] | None:
    """Return the names under which the server may be asked; None: any."""
    address = str(listening.getsockname()[0])
    loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if "*" in allowed or not (allowed or loopback):
        return None
    return [*LOCAL, f"[{address}]" if ":" in address else address, *allowed]


def _keys(file: str | None) -> list[str]:
    keys = [key.strip() for key in os.environ.get(KEYS, "").split(",") if key.strip()]
    if file is None:
        return keys
    path = Path(file).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", "give a text file with a key a line") from error
    keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path}: there is no key", "write one a line")
    return keys


def _runs(folder: str | None) -> Runs | None:
    if folder is None:
        return None
    root = Path(folder).expanduser()
    require(root.is_dir(), f"runs is {folder}, which is no folder", "give the folder above your run folders")
    return Runs(root)


def _catalogue(job: ServeJob) -> Catalogue:
    device = pick(job.device)
    models = [served for at, one in enumerate(job.model) for served in _models(job, device, one, at == 0)]
    classifiers: dict[str, TrajectoryClassifier | Scorer] = {}
    for one in job.classifier:
        name, _, folder = one.partition("=")
        judges = is_reward_model(folder)
        classifiers[name] = Scorer(folder, device) if judges else TrajectoryClassifier(folder, job.device)
        log.info(f"{name}: {folder}" + (", a reward model" if judges else ""))
    names = [*(served.name for served in models), *classifiers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two models are called {twice}", "give names: NAME=FOLDER")
    return Catalogue(models, classifiers, job.sampling, job.limits, job.too_long == "cut")


def _models(job: ServeJob, device: Device, one: str, first: bool) -> Iterator[Served]:
    """Read a model, and the adapters beside it."""
    name, folder = length.named(one)
    root = resolve(folder)
    classifier.require_writer(root)
    shares = below([], root)
    tokens = templates.folder_with(tokenizer_folder(root, shares), job.chat_template)
    tokenizer = tokenizers.load(tokens)
    require_fit(load_config(root), tokenizer, root)
    model = load_model(root, device.torch, device.dtype, shares, job.quantize)
    log.info(f"{name}: {folder}, {count(count_parameters(model)[0])} parameters on {device.name}")
    engine = engine_of(model, tokenizer, device, job.batching, step_seconds=STEP_SECONDS)
    yield Served(name, engine, model)
    for adapter in job.adapter if first else ():
        label, _, place = adapter.partition("=")
        engine.load_adapter(label, resolve(place))
        log.info(f"{label}: adapter {place}")
        yield Served(label, engine, model, label)
