"""`anabatic rl`: reinforcement learning on rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.chat import Sampling
from anabatic.config.sections.common import EvaluateRounds, LogSettings, Optim, Schedule, SourceData, require_setting
from anabatic.config.sections.plan_facts import PlanFacts
from anabatic.config.sections.sandbox import SandboxSettings
from anabatic.config.sections.train_jobs import TuneJob

BUILTIN_REWARDS = ("answer", "format", "length", "tests")
"""Rewards that `rl/rewards.py` knows by name."""


@dataclass(kw_only=True)
class HeldoutEvaluate(EvaluateRounds):
    """Held-out reward: greedy answers, or several drawn ones for pass@k."""

    metric: Literal["reward"] = "reward"  # type: ignore[assignment]
    """What makes a model the best: the highest held-out mean reward."""
    every: int = 20
    """Steps between evaluations; 0: only at the beginning and at the end."""
    rows: int = 200
    """Held-out questions; all where there are fewer."""
    samples: int = 1
    """Answers to each: 1 is greedy; more are drawn as in training, and pass@k is reported for k = 1, 2, 4, ..."""
    show: int = 4
    """Held-out questions kept for the report, with what the model answered and its reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "samples"):
            require_setting(getattr(self, name) >= 1, f"eval.{name} is {getattr(self, name)}", "use 1 or more")
        require_setting(self.show >= 0, f"eval.show is {self.show}", "use 0 or more")


@dataclass(kw_only=True)
class QuestionData(SourceData):
    """Rows of questions, and the place of their pictures."""

    media: str | None = None
    """Folder that paths of pictures start from; default: the folder of the rows' file."""


@dataclass(kw_only=True)
class RolloutSampling:
    """How answers are drawn."""

    temperature: float = 1.0
    """Sampling temperature, also applied to the log-probabilities in the loss."""
    top_k: int | None = None
    """Only the k likeliest tokens; what is learned does not know of it."""
    top_p: float = 1.0
    """Only the likeliest tokens that hold this share of the probability; what is learned does not know of it."""
    max_new_tokens: int = 256
    """Longest answer in tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end the answer."""

    def __post_init__(self) -> None:
        require_setting(
            self.temperature > 0, "sampling.temperature is 0: all answers to a question are the same", "use 1"
        )
        self.make_sampling(0)

    def make_sampling(self, seed: int, greedy: bool = False) -> Sampling:
        """Return the settings of one answer."""
        return Sampling(
            temperature=0.0 if greedy else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            seed=seed,
        )


@dataclass(kw_only=True)
class RolloutSettings:
    """What answers while the model is trained."""

    engine: Literal["local", "vllm", "sglang", "anabatic"] = "local"
    """local: the engine of this process, on the very weights that are trained; vllm, sglang, anabatic (`anabatic
    serve`): servers, which are asked over HTTP and get new weights before every round."""
    url: list[str] = field(default_factory=list)
    """Addresses of the servers, which share the questions."""
    command: str | None = None
    """Command that starts the server of the first address on this machine; it is started again where it ends, and ended
    with the training. Its output goes to `rollout-server.log` in the run folder."""
    folder: str | None = None
    """Folder for new weights, under the same path for trainer and servers; default: `rollout` in the run folder."""
    correction: Literal["none", "token", "sequence", "token_mask", "sequence_mask"] = "none"
    """Weight of the ratio of the trainer's probability to the engine's, which drew: none: it is part of the clipped
    ratio; token, sequence: of each token or answer, cut at correction_cap; token_mask, sequence_mask: tokens or answers
    whose ratio is above correction_cap, or below its inverse, are not learned from."""
    correction_cap: float = 2.0
    """Largest ratio of the correction."""
    max_logprob_diff: float | None = None
    """Largest mean difference of log-probabilities of server and trainer after new weights; beyond it, they hold
    different models; default: 0.01 in fp32, 0.05 in bf16 and fp16."""

    def __post_init__(self) -> None:
        require_setting(
            bool(self.url) == (self.engine != "local"),
            f"rollout.engine is {self.engine} and rollout.url {'is empty' if not self.url else 'names servers'}",
            "give both: --rollout.engine vllm --rollout.url http://HOST:8000",
        )
        require_setting(
            self.command is None or bool(self.url), "rollout.command is given and rollout.url is empty", "give both"
        )
        for url in self.url:
            require_setting(url.startswith(("http://", "https://")), f"rollout.url is {url}", "use http://HOST:PORT")
        require_setting(self.correction_cap > 1, f"rollout.correction_cap is {self.correction_cap:g}", "use 2")
        given = self.max_logprob_diff is None or self.max_logprob_diff > 0
        require_setting(
            given, f"rollout.max_logprob_diff is {self.max_logprob_diff}", "use a number above 0, such as 0.05"
        )


def _default_schedule() -> Schedule:
    return Schedule(max_steps=100, warmup_ratio=0.0, decay_ratio=0.0)


def _default_optim() -> Optim:
    return Optim(name="adamw", weight_decay=0.0, beta2=0.99, eps=1e-8)


@dataclass(kw_only=True)
class RlJob(TuneJob):
    """Let a model answer questions, reward the answers, and make the better ones likelier."""

    out: str = "runs/rl"
    """Run folder."""
    algorithm: Literal["grpo", "dapo", "dr_grpo", "gspo", "reinforce++", "rloo"] = "dapo"
    """grpo: mean over the tokens of each answer; dapo: over all tokens of the step, clipped higher than lower; dr_grpo:
    divided by a constant; gspo: one ratio an answer; reinforce++: advantages over the whole step; rloo: each answer is
    one action, compared with the other answers to its question."""
    advantage: Literal["group", "mean", "leave_one_out", "batch"] | None = None
    """group: (r - mean) / std among the answers to a question; mean: r - mean; leave_one_out: r less the mean of the
    others; batch: (r - mean) / std over the step; default: the algorithm's."""
    clip_low: float | None = None
    """Lower clip range: the ratio of new to old probability is clipped at 1 - clip_low; default: the algorithm's."""
    clip_high: float | None = None
    """Upper clip range: the ratio is clipped at 1 + clip_high; default: the algorithm's."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the model before training; 0: no penalty, and no reference model is kept."""
    rewards: list[str] = field(default_factory=lambda: ["answer"])
    """Rewards that are added up, each NAME or NAME=WEIGHT: answer, format, length, tests, FILE.py:FUNCTION, or
    model:FOLDER."""
    reward_pattern: str = r".*####\s*-?[\d,.]+\s*"
    """Regular expression that a whole answer must match for the reward `format`."""
    reward_timeout: float = 10.0
    """Seconds after which a reward function or a unit test is given up and counts as an error."""
    examples_per_step: int = 16
    """Questions per step, over all ranks."""
    num_samples: int = 16
    """Answers to each question."""
    device_batch_size: int = 8
    """Answers in one forward and backward pass."""
    updates: int = 1
    """Optimizer steps made of the answers of one round; from the second on they are a little off-policy."""
    mask_truncated: bool = True
    """Answers that hit the limit of their length are rewarded, but not learned from."""
    system: str | None = None
    """System message of the questions that have none."""
    python: bool = True
    """Run the code that answers hold between <|python_start|> and <|python_end|>, and give them its output, which is
    not learned."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    turns: int = 1
    """Turns of the assistant at most; more than one needs a function `turn` in the reward's file."""
    eval: HeldoutEvaluate = field(default_factory=HeldoutEvaluate)  # type: ignore[assignment]
    sampling: RolloutSampling = field(default_factory=RolloutSampling)
    data: QuestionData = field(default_factory=QuestionData)  # type: ignore[assignment]  # nothing is tokenised ahead
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    rollout_batch: int = 64
    """Answers generated concurrently; the others wait."""
    cache_gib: float | None = None
    """Memory for the keys and values of answers, free while the model is trained; default: what `rollout_batch` answers
    need, at most 0.4 of what is free."""
    schedule: Schedule = field(default_factory=_default_schedule)
    optim: Optim = field(default_factory=_default_optim)
    log: LogSettings = field(default_factory=lambda: LogSettings(every=1))

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(
            bool(self.data.train), "data.train is empty", "give --data task:spelling, or a .jsonl of questions"
        )
        require_setting(bool(self.rewards), "rewards is empty", "give --rewards answer")
        require_setting(
            self.parallel.context == 1,
            f"parallel.context is {self.parallel.context}, and the tokens of rollouts are not split over processes",
            "leave it out; lower device_batch_size where memory is short",
        )
        for name in ("examples_per_step", "num_samples", "device_batch_size", "updates", "turns", "rollout_batch"):
            require_setting(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}", "use 1 or more")
        require_setting(self.kl_coef >= 0, f"kl_coef is {self.kl_coef}", "use 0 or more; 0.04 was GRPO's")
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            require_setting(value is None or value > 0, f"{name} is {value}", "use a number above 0, such as 0.2")
        require_setting(self.clip_low is None or self.clip_low <= 1, f"clip_low is {self.clip_low}", "use at most 1")
        require_setting(self.reward_timeout > 0, f"reward_timeout is {self.reward_timeout:g}", "use seconds above 0")
        require_setting(
            self.rollout.engine == "local" or (self.sampling.top_p == 1 and self.sampling.top_k is None),
            "sampling.top_p or sampling.top_k cuts the answers of a server, whose log-probabilities then mean another"
            " distribution than the trainer's",
            "leave them out",
        )
        require_setting(
            not (self.rollout.correction.startswith("token") and self.algorithm in ("gspo", "rloo")),
            f"rollout.correction is {self.rollout.correction}, and {self.algorithm} has one ratio for an answer",
            "use --rollout.correction sequence",
        )
        given = self.cache_gib is None or self.cache_gib > 0
        require_setting(given, f"cache_gib is {self.cache_gib}", "use GiB above 0, such as 2")
        self._require_sizes()

    def get_plan_facts(self) -> PlanFacts:
        """Targets are the tokens of answers; a penalty compares with the first weights."""
        answer_share = self.sampling.max_new_tokens / self.batch.resolved_seq_len
        return PlanFacts(has_reference=self.kl_coef > 0, targets=min(1.0, answer_share))

    def _require_sizes(self) -> None:
        answers = self.examples_per_step * self.num_samples
        require_setting(
            answers % (self.updates * self.device_batch_size) == 0,
            f"examples_per_step x num_samples is {answers}, not a multiple of updates x device_batch_size ="
            f" {self.updates * self.device_batch_size}",
            "change one of them",
        )
        require_setting(
            self.num_samples > 1 or self.advantage == "batch" or self.algorithm == "reinforce++",
            "num_samples is 1: an answer has no others to be compared with",
            "use 2 or more, or --algorithm reinforce++",
        )
        require_setting(
            self.batch.packing, "batch.packing is false, and answers are always packed", "leave batch.packing out"
        )
        for name in ("micro_batch_tokens", "global_batch_tokens"):
            value = getattr(self.batch, name)
            hint = "leave it out: examples_per_step, num_samples and device_batch_size say it"
            require_setting(value is None, f"batch.{name} is {value}, and rl counts answers, not tokens", hint)
