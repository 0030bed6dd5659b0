"""`anabatic serve`: answer over HTTP, as OpenAI's API does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.chat import Sampling
from anabatic.config.infer import Batching
from anabatic.config.sections.common import DeviceSettings, require_setting

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine."""


@dataclass(kw_only=True)
class ServerLimits:
    """What a request may ask for, so that none can hold up the others."""

    body_mib: float = 4.0
    """Largest body of a request."""
    body_seconds: float = 15.0
    """Longest time for the head of a request to arrive, and as long again for its body; then the connection closes."""
    messages: int = 4096
    """Messages that one request may bring; of several conversations all together."""
    bytes_per_token: int = 16
    """A prompt of more bytes than this for each token of the model's context is refused before its tokens are
    counted."""
    pictures: int = 16
    """Pictures that one request may bring to a model that sees; what they take of body_mib is their size in base64."""
    choices: int = 1024
    """Texts that an answer may be chosen from."""
    new_tokens: int = 4096
    """Longest answer that may be asked for."""
    answers: int = 16
    """Answers that one request may ask for: its prompts times its n."""
    queue: int = 256
    """Requests that wait for a place; more are refused with status 429, type queue_full_error."""
    seconds: float = 600.0
    """Longest time for an answer; then it ends."""
    shutdown_seconds: float = 30.0
    """After a signal, answers under way have so long to come to their end."""

    def __post_init__(self) -> None:
        for name in ("body_mib", "body_seconds", "seconds"):
            require_setting(getattr(self, name) > 0, f"limits.{name} is {getattr(self, name)}", "use more than 0")
        for name in ("new_tokens", "answers", "queue", "messages", "pictures", "bytes_per_token", "choices"):
            require_setting(getattr(self, name) >= 1, f"limits.{name} is {getattr(self, name)}", "use 1 or more")
        seconds = self.shutdown_seconds
        require_setting(seconds >= 0, f"limits.shutdown_seconds is {seconds}", "use 0 or more")


@dataclass(kw_only=True)
class ServeJob:
    """Serve models over HTTP, as OpenAI's API does."""

    model: list[str] = field(default_factory=list)
    """Models: a Hugging Face folder, run folder or adapter folder, as often as wanted; NAME=FOLDER gives it a name."""
    adapter: list[str] = field(default_factory=list)
    """Adapters of the first model: NAME=FOLDER. Each is served as its own model; the weights are shared."""
    chat_template: str | None = None
    """Chat template of all models in place of the tokenizers' own: a file of Jinja, or a name: chatml, llama3, qwen2.5,
    qwen3, mistral, deepseek, gemma, glm4, phi3, phi4, llama2."""
    classifier: list[str] = field(default_factory=list)
    """Classifiers of trajectories, and reward models: NAME=FOLDER, asked at /v1/classify."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets other machines in."""
    port: int = 8000
    """Port to listen at; 0 takes a free one."""
    api_key_file: str | None = None
    """File with keys, one a line; requests then need one (`Authorization: Bearer KEY`). Also from the variable
    ANABATIC_API_KEYS, separated by commas."""
    cors: list[str] = field(default_factory=list)
    """Origins whose web pages may ask, for example https://example.org; `*` for all. None by default."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names in the Host of requests that are answered, besides those of this machine; `*`: any. Default: at a loopback
    address only localhost, 127.0.0.1 and [::1], at another address any."""
    weights_folder: str | None = None
    """Folder below which requests may load weights of the first model and adapters, as `anabatic rl` with
    `rollout.engine: anabatic` asks for; needs an API key. None by default."""
    scaled_logprobs: bool = False
    """Log-probabilities of drawn tokens are those at the temperature of the request, not at 1; `anabatic rl` at another
    `sampling.temperature` needs them."""
    too_long: Literal["error", "cut"] = "error"
    """A prompt without room for an answer: refuse it, or cut its beginning away."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Hold the weights of the linear layers in few bits: less memory; slower where the device must widen them."""
    batching: Batching = field(default_factory=Batching)
    limits: ServerLimits = field(default_factory=ServerLimits)
    sampling: Sampling = field(default_factory=Sampling)
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        require_setting(bool(self.model or self.classifier), "no model is given", "anabatic serve FOLDER")
        require_setting(0 <= self.port < 65536, f"port is {self.port}", "use 0 to 65535")
        for host in self.allowed_hosts:
            bare = bool(host.strip()) and not any(sign in host for sign in "/ ,")
            require_setting(
                bare, f"allowed_hosts has {host!r}, which is no name of a host", "give example.org, without http://"
            )
        for one in (*self.adapter, *self.classifier):
            name, _, folder = one.partition("=")
            require_setting(bool(name and folder), f"{one!r} is not NAME=FOLDER", "for example legal=runs/legal")
        if self.weights_folder is not None:
            require_setting(bool(self.model), "weights_folder is given and no model is", "anabatic serve FOLDER")
            require_setting(
                self.quantize == "none",
                f"quantize is {self.quantize}, and weights of weights_folder are those of a training",
                "leave quantize out",
            )
        require_setting(
            not self.adapter or bool(self.model), "adapters need a model", "anabatic serve FOLDER --adapter a=DIR"
        )
