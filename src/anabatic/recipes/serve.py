"""`anabatic serve`: models behind an address, until a signal ends it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from anabatic.config.loading.command_table import import_served_classifier
from anabatic.config.sections.common import require_setting
from anabatic.config.serve import ServeJob
from anabatic.core import log
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.formatting import format_count
from anabatic.device.device import Device, select_device
from anabatic.infer.cache_sizing import make_engine
from anabatic.infer.loaded_model import load_model_to_ask
from anabatic.infer.reward_scorer import RewardScorer, is_reward_model
from anabatic.infer.server.app import create_app
from anabatic.infer.server.engine_worker import EngineWorker
from anabatic.infer.server.listening import (
    allowed_host_names,
    ignore_reraised_signal,
    is_loopback,
    make_server_config,
    open_listening_socket,
    warn_of_open_secret,
)
from anabatic.infer.server.model_registry import InputClassifier, ModelRegistry, ServedModel
from anabatic.models.model_init import count_parameters
from anabatic.models.pretrained import resolve_model_folder
from anabatic.plan import model_facts

API_KEYS_VARIABLE = "ANABATIC_API_KEYS"
STEP_SECONDS = 0.4
"""Who is being answered waits about so long for a piece of somebody else's prompt."""


def run(job: ServeJob) -> int:
    """Serve until SIGINT or SIGTERM; answers under way come to their end.

    Raises:
        ConfigError: several processes, two models of one name, a port that is taken, no key in the file of keys.
        DataError: a model, an adapter or a classifier cannot be used.
    """
    require_setting(job.device.nproc == 1, f"device.nproc is {job.device.nproc}", "one process serves: leave it out")
    keys = _read_api_keys(job.api_key_file)
    weights_folder = _require_weights_folder(job.weights_folder, keys)
    listening = open_listening_socket(job.host, job.port)
    with listening:
        catalogue = _load_model_registry(job)
        worker = EngineWorker(catalogue.engines)
        worker.start()
        config = make_server_config(
            create_app(
                catalogue, worker, keys, job.cors, allowed_host_names(job.allowed_hosts, listening), weights_folder
            ),
            job.limits.body_seconds,
            int(job.limits.shutdown_seconds),
        )
        host, port = listening.getsockname()[:2]
        names = ", ".join([served.name for served in catalogue.models] + list(catalogue.classifiers))
        log.info(f"serving {names} at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends)")
        if not keys and not is_loopback(listening):
            log.warn(f"whoever reaches {host}:{port} may ask: set {API_KEYS_VARIABLE} or --api-key-file")
        elif not keys:
            log.info(f"other users of this machine may ask, unless {API_KEYS_VARIABLE} or --api-key-file is set")
        with ignore_reraised_signal():
            uvicorn.Server(config).run(sockets=[listening])
        worker.stop()
        worker.join(timeout=30)
    if worker.failure:
        raise Failure(f"the engine stopped: {worker.failure}", "the log above says where")
    log.info("served")
    return 0


def _read_api_keys(file: str | None) -> list[str]:
    keys = [key.strip() for key in os.environ.get(API_KEYS_VARIABLE, "").split(",") if key.strip()]
    if file is None:
        return keys
    path = Path(file).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", "give a text file with a key a line") from error
    warn_of_open_secret(path)
    keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path}: there is no key", "write one a line")
    return keys


def _require_weights_folder(folder: str | None, keys: Sequence[str]) -> Path | None:
    if folder is None:
        return None
    if not keys:
        what = "weights_folder is given and there is no API key: whoever reaches the server could replace its weights"
        raise ConfigError(what, f"set {API_KEYS_VARIABLE}, or give --api-key-file FILE")
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(f"weights_folder is {folder}, which is no folder", f"mkdir -p {path}")
    return path


def _load_model_registry(job: ServeJob) -> ModelRegistry:
    given = [model_facts.split_name_and_folder(one)[0] for one in job.model]
    _require_different_names([*given, *(one.partition("=")[0] for one in job.classifier)])
    device = select_device(job.device)
    models = [served for at, one in enumerate(job.model) for served in _load_served_models(job, device, one, at == 0)]
    classifiers: dict[str, InputClassifier | RewardScorer] = {}
    for one in job.classifier:
        name, _, folder = one.partition("=")
        judges = is_reward_model(folder)
        classifiers[name] = RewardScorer(folder, device) if judges else import_served_classifier()(folder, job.device)
        log.info(f"{name}: {folder}" + (", a reward model" if judges else ""))
    _require_different_names([*(served.name for served in models), *classifiers])  # adapters are known by now
    return ModelRegistry(models, classifiers, job.sampling, job.limits, job.too_long == "cut")


def _require_different_names(names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two models are called {twice}", "give names: NAME=FOLDER")


def _load_served_models(job: ServeJob, device: Device, one: str, first: bool) -> Iterator[ServedModel]:
    """Read a model, and the adapters beside it."""
    name, folder = model_facts.split_name_and_folder(one)
    loaded = load_model_to_ask(folder, device, chat_template=job.chat_template, quantize=job.quantize)
    model = loaded.model
    log.info(f"{name}: {folder}, {format_count(count_parameters(model)[0])} parameters on {device.name}")
    engine = make_engine(
        model, loaded.tokenizer, device, job.batching, step_seconds=STEP_SECONDS, scaled=job.scaled_logprobs
    )
    yield ServedModel(name, engine, model, pictures=loaded.pictures)
    for adapter in job.adapter if first else ():
        label, _, place = adapter.partition("=")
        engine.load_adapter(label, resolve_model_folder(place))
        log.info(f"{label}: adapter {place}")
        yield ServedModel(label, engine, model, label, loaded.pictures)
