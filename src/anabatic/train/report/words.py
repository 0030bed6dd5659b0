"""Every fixed word and sentence of the report in English and Chinese; `{name}` stands for a figure or a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anabatic.core.formatting import format_duration
from anabatic.core.language import LocalizedText

WORDS: dict[str, tuple[str, str]] = {
    # the page
    "report": ("training report", "训练报告"),
    "compared_runs": ("Compared runs", "训练对比"),
    "language": ("Language", "语言"),
    "contents": ("Contents", "目录"),
    "results": ("Results", "结果"),
    "stages": ("Stages", "阶段"),
    "tasks": ("Tasks", "任务"),
    "conversation": ("Conversation", "对话"),
    "events": ("Events", "事件"),
    "configuration": ("Configuration", "配置"),
    "of_stage": ("{name} · {what}", "{name} · {what}"),
    "earlier_events": ("{count} earlier events are in events.jsonl", "更早的 {count} 个事件见 events.jsonl"),
    "written": (
        "Written by anabatic, {date}. The numbers behind the curves are in the metrics.jsonl of each run.",
        "由 anabatic 生成，{date}。曲线的原始数据在每次训练的 metrics.jsonl 中。",
    ),
    "more_characters": ("{text} … ({count} characters more)", "{text} …（还有 {count} 个字符）"),
    "left_out": ("{file} is left out, it is not JSON: {why}", "{file} 未采用，它不是 JSON：{why}"),
    "left_out_type": ("{file} is left out, it holds no JSON object", "{file} 未采用，其中没有 JSON 对象"),
    "stale_note": (
        "made before the settings changed; it is made again when the run continues",
        "在配置更改之前生成，继续运行时会重新生成",
    ),
    # machine
    "processor": ("processor", "处理器"),
    "memory": ("memory", "内存"),
    "accelerator": ("accelerator", "加速器"),
    "no_accelerator": ("none, trained on the processor", "无，在处理器上训练"),
    "number_format": ("number format", "数值格式"),
    "software": ("software", "软件"),
    "commit": ("commit", "代码提交"),
    "changed": ("{commit} + changes", "{commit}（有未提交的改动）"),
    "core": ("{name}, {cores} core", "{name}，{cores} 核"),
    "cores": ("{name}, {cores} cores", "{name}，{cores} 核"),
    "core_threads": ("{name}, {cores} core ({threads} threads)", "{name}，{cores} 核（{threads} 线程）"),
    "cores_threads": ("{name}, {cores} cores ({threads} threads)", "{name}，{cores} 核（{threads} 线程）"),
    # bits per byte and tasks
    "bits_per_byte": ("Bits per byte", "每字节比特数"),
    "lower_is_better": ("lower is better", "越低越好"),
    "this_model": ("this model", "本模型"),
    "fewer_bits": ("{share} fewer bits than {other}", "比 {other} 少用 {share} 的比特"),
    "more_bits": ("{share} more bits than {other}", "比 {other} 多用 {share} 的比特"),
    "heldout_text": ("held-out text", "留出文本"),
    "heldout_bytes": ("{size} of held-out text", "{size} 的留出文本"),
    "heldout_of": ("{amount}: {sources}", "{amount}：{sources}"),
    "measured_in": ("measured in {name}", "在 {name} 中测得"),
    "out_of_date": ("{name} (out of date)", "{name}（已过期）"),
    "tasks_share": ("share of held-out questions answered right", "留出问题的正确率"),
    "tasks_chance": ("held-out questions, compared with the baseline", "留出问题，与基线对比"),
    "chance": ("baseline {value}", "基线 {value}"),
    "without_picture": ("without pictures {value}", "不看图片 {value}"),
    "picture": ("the picture that is asked about", "所问的图片"),
    "chance_key": ("the baseline: the score of the best constant answer", "基线：固定回答同一个答案所能得到的最高分"),
    "questions": ("{count} questions", "{count} 个问题"),
    "right": ("right", "正确"),
    "wrong": ("wrong", "错误"),
    "expected": ("expected", "应为"),
    # facts
    "parameters": ("parameters", "参数量"),
    "training_tokens": ("training tokens", "训练 token 数"),
    "optimizer_steps": ("optimizer steps", "优化步数"),
    "training_time": ("training time", "训练用时"),
    "tokens_per_second": ("tokens per second", "每秒 token 数"),
    "peak_memory": ("peak memory", "峰值内存"),
    "device_utilisation": ("device utilisation", "设备利用率"),
    "device_power": ("device power", "设备功率"),
    "energy": ("energy per million tokens", "每百万 token 能耗"),
    # stages
    "stage": ("Stage", "阶段"),
    "state": ("State", "状态"),
    "time": ("Time", "用时"),
    "tokens": ("Tokens", "token 数"),
    "final_loss": ("Final loss", "最终损失"),
    "loss": ("loss", "损失"),
    "state.done": ("done", "完成"),
    "state.skip": ("up to date", "已是最新"),
    "state.fail": ("failed", "失败"),
    "state.interrupted": ("interrupted", "已中断"),
    "state.run": ("unfinished", "未完成"),
    "state.stale": ("out of date", "已过期"),
    "state.": ("not run", "未运行"),
    "what.valid_reward": ("held-out reward", "留出集奖励"),
    "what.valid_loss": ("held-out", "留出集"),
    "what.train_loss": ("training", "训练"),
    # faults
    "note.slow_device": (
        "rank {rank} ({place}) was slower than the others from step {step} on: its device, or the host that feeds it",
        "进程 {rank}（{place}）从第 {step} 步起慢于其他进程：原因在该设备或为其下发任务的主机",
    ),
    "note.slow_data": (
        "rank {rank} ({place}) waited for its data from step {step} on, and the others for it",
        "进程 {rank}（{place}）从第 {step} 步起在等待数据，其他进程在等它",
    ),
    "note.slow_link": (
        "the link of rank {rank} ({place}) was slow from step {step} on",
        "进程 {rank}（{place}）的通信链路从第 {step} 步起变慢",
    ),
    "note.corrupt_copy": (
        "silent data corruption: copies of the weights differed after step {step} (rank {ranks}), first in {tensor}",
        "静默数据损坏：第 {step} 步后各副本的权重不一致（进程 {ranks}），首个不一致的张量为 {tensor}",
    ),
    # charts
    "chart.loss": ("Loss, nats per token", "损失（nat/token）"),
    "chart.loss_pair": ("Loss, of a pair", "损失（每个偏好对）"),
    "chart.loss_advantage": ("Loss, of the advantages", "损失（优势）"),
    "chart.reward": ("Mean reward", "平均奖励"),
    "chart.valid_loss": ("Held-out loss, nats per token", "留出集损失（nat/token）"),
    "chart.valid_bpb": ("Held-out bits per byte", "留出集每字节比特数"),
    "chart.valid_perplexity": ("Held-out perplexity", "留出集困惑度"),
    "chart.train_loss": ("Training loss, smoothed", "训练损失（平滑）"),
    "chart.valid_accuracy": ("Held-out accuracy", "留出集准确率"),
    "chart.valid_reward": ("Held-out reward", "留出集奖励"),
    "chart.train_reward": ("Training reward, smoothed", "训练奖励（平滑）"),
    "chart.accuracy": ("Accuracy", "准确率"),
    "chart.answers": ("Rewards: chosen, rejected", "奖励：优选、拒绝"),
    "chart.answer_tokens": ("Tokens of an answer", "每个回答的 token 数"),
    "chart.truncated": ("Truncated answers", "被截断的回答"),
    "chart.entropy": ("Entropy of the answers, nats per token", "回答的熵（nat/token）"),
    "chart.kl": ("Divergence from the reference, nats per token", "与参考模型的散度（nat/token）"),
    "chart.logprob_diff": ("Log-probability: engine to training", "对数概率差：推理引擎与训练"),
    "chart.lr": ("Learning rate", "学习率"),
    "chart.grad_norm": ("Gradient norm", "梯度范数"),
    "chart.tokens_per_s": ("Tokens per second", "每秒 token 数"),
    "chart.ranks": (
        "Time of a micro-batch: median rank, slowest rank, waiting",
        "微批次用时：中位进程、最慢进程、等待",
    ),
    "chart.utilization": ("Device utilisation: mean, least, most", "设备利用率：平均、最低、最高"),
    "chart.power": ("Device power", "设备功率"),
    "chart.levels": ("Levels of the curriculum, share of the samples", "课程各难度占样本的比例"),
    "chart.label": (
        "{title}, steps {first} to {last}: from {begin} to {end}",
        "{title}，第 {first} 至 {last} 步：从 {begin} 到 {end}",
    ),
    "chart.levels_label": (
        "Share of each level over the steps 1 to {last}; samples in all: {latest}",
        "第 1 至 {last} 步各难度的比例；样本总数：{latest}",
    ),
    "chart.beyond": ("{count} point lies beyond the axis", "{count} 个点超出坐标轴"),
    "chart.beyond_many": ("{count} points lie beyond the axis", "{count} 个点超出坐标轴"),
    "curve.compute_s_median": ("computing, median rank", "计算，中位进程"),
    "curve.compute_s_max": ("computing, slowest rank", "计算，最慢进程"),
    "curve.wait_s_median": ("waiting for others, median rank", "等待其他进程，中位进程"),
    "curve.training": ("training", "训练"),
    "curve.measured": ("measured", "测量值"),
    "curve.smoothed": ("smoothed", "平滑值"),
    "curve.training_measured": ("training, measured", "训练，测量值"),
    "curve.training_smoothed": ("training, smoothed", "训练，平滑值"),
    "curve.heldout": ("held out", "留出集"),
    "curve.chosen": ("chosen", "优选"),
    "curve.rejected": ("rejected", "拒绝"),
    "curve.mean": ("mean", "平均"),
    "curve.min": ("least", "最低"),
    "curve.max": ("most", "最高"),
    "curve.lr": ("learning rate", "学习率"),
    "mark.resumed": ("resumed", "恢复训练"),
    "mark.stage": ("stage {number}", "第 {number} 阶段"),
    "step": ("step {step}", "第 {step} 步"),
    "after_step": ("{name}, after step {step}", "{name}，第 {step} 步之后"),
    "measured_once": ("Measured once", "只测量过一次"),
    # samples and conversations
    "what_it_wrote": ("What it wrote", "模型写了什么"),
    "after": ("after step", "训练步数"),
    "of_samples": ("{shown} of {all}", "{shown}/{all}"),
    "sample_reward": ("{step} (reward {reward})", "{step}（奖励 {reward}）"),
    "role.system": ("system", "系统"),
    "role.user": ("user", "用户"),
    "role.assistant": ("assistant", "助手"),
    "role.tool": ("tool", "工具"),
    # data
    "data.text": ("plain text of {source}", "{source} 的纯文本"),
    "data.conversations": ("conversations of {source}", "{source} 的对话"),
    "data.pairs": ("preference pairs of {source}", "{source} 的偏好对"),
    "data.questions": ("questions of {source}", "{source} 的问题"),
    "data.sequences": ("sequences of {source}", "{source} 的序列"),
    "data.unknown": ("{source}", "{source}"),
    "data.more": ("{sources} and {count} more", "{sources} 等，另有 {count} 个来源"),
    "data.training": ("Training: {sources}.", "训练数据：{sources}。"),
    "data.share": (
        "Training: {sources}. Held out: {share} of them.",
        "训练数据：{sources}。留出集：从中留出的 {share}。",
    ),
    "data.heldout": (
        "Training: {sources}. Held out: {heldout}.",
        "训练数据：{sources}。留出集：{heldout}。",
    ),
    "data.other_kind": (
        "The held-out data are of another kind than the training data, so their figures are not comparable with the "
        "training's.",
        "留出数据与训练数据不是同一类，二者的指标不可直接比较。",
    ),
    "data.eval_other_kind": (
        "The model was last trained on another kind: {sources} ({name}).",
        "模型最后一次训练用的是另一类数据：{sources}（{name}）。",
    ),
    # comparison
    "compared.title": ("{count} runs compared", "{count} 次训练的对比"),
    "compared.figures": ("Final figures", "最终指标"),
    "compared.settings": ("Settings that differ", "不同的设置"),
    "compared.figure": ("Figure", "指标"),
    "compared.setting": ("Setting", "设置"),
    "compared.same": ("All settings are the same.", "所有设置都相同。"),
    "compared.no_settings": (
        "The settings of fewer than two runs are known.",
        "设置已知的训练不足两次。",
    ),
    "compared.label": ("{title}, last values: {values}", "{title}，最后的值：{values}"),
    "compared.value": ("{name} {value}", "{name} {value}"),
    "compared.curves": ("Curves", "曲线"),
    "compared.best": ("best", "最佳"),
    "compared.runs": ("Runs", "训练"),
    "compared.no_metrics": ("has written no metrics", "没有写入任何指标"),
    "compared.no_config": ("has no readable config.yaml", "没有可读取的 config.yaml"),
    "compared.nothing": ("None of the runs has written any metrics.", "这些训练都没有写入任何指标。"),
    "compared.heldout_differs": (
        "The runs name different held-out data; unless the texts are the same, their held-out figures are not "
        "comparable.",
        "各次训练所写的留出数据不同；除非内容相同，否则留出集指标不可直接比较。",
    ),
    "figure.loss": ("training loss, last", "训练损失（最后）"),
    "figure.valid_loss": ("held-out loss, lowest", "留出集损失（最低）"),
    "figure.valid_bpb": ("held-out bits per byte, lowest", "留出集每字节比特数（最低）"),
    "figure.valid_perplexity": ("held-out perplexity, lowest", "留出集困惑度（最低）"),
    "figure.valid_accuracy": ("held-out accuracy, highest", "留出集准确率（最高）"),
    "figure.valid_reward": ("held-out reward, highest", "留出集奖励（最高）"),
    "figure.reward": ("training reward, last", "训练奖励（最后）"),
    "figure.optimizer steps": ("optimizer steps", "优化步数"),
    "figure.training tokens": ("training tokens", "训练 token 数"),
    "figure.tokens per second": ("tokens per second, median", "每秒 token 数（中位数）"),
    "figure.mfu": ("model FLOPs utilization, median", "模型算力利用率（中位数）"),
    "figure.peak memory": ("peak memory", "峰值内存"),
    "figure.training time": ("training time", "训练用时"),
    "figure.parameters": ("parameters", "参数量"),
}
"""Key -> (English, Chinese)."""

EVENT_WORDS: dict[str, tuple[str, str]] = {
    "start": ("start", "开始"),
    "resume": ("resume", "恢复"),
    "device": ("device", "设备"),
    "model": ("model", "模型"),
    "data": ("data", "数据"),
    "checkpoint": ("checkpoint", "检查点"),
    "bad_step": ("bad step", "异常步"),
    "skip": ("skip", "跳过"),
    "rewind": ("rewind", "回退"),
    "straggler": ("slow rank", "慢进程"),
    "straggler_over": ("rank no longer slow", "进程恢复正常"),
    "corrupt_copy": ("damaged weights", "权重损坏"),
    "early_stop": ("early stop", "提前停止"),
    "stop": ("stop", "停止"),
    "end": ("end", "结束"),
    "stage": ("stage", "阶段"),
}
"""Names of events; others are shown as they were written."""

FIELD_WORDS: dict[str, tuple[str, str]] = {
    "step": ("step", "步数"),
    "steps": ("steps", "总步数"),
    "reason": ("reason", "原因"),
    "why": ("why", "原因"),
    "seconds": ("seconds", "秒数"),
    "name": ("name", "名称"),
    "type": ("type", "类型"),
    "dtype": ("dtype", "数值格式"),
    "threads": ("threads", "线程数"),
    "params": ("params", "参数量"),
    "multiplying": ("multiplying", "矩阵乘参数量"),
    "plan": ("plan", "计划"),
    "depth": ("depth", "层数"),
    "width": ("width", "宽度"),
    "path": ("path", "路径"),
    "bytes": ("bytes", "字节数"),
    "best": ("best", "最佳"),
    "action": ("action", "处理"),
    "bad_step": ("bad step", "异常步"),
    "world_size": ("world size", "进程数"),
    "nodes": ("nodes", "节点数"),
    "rank": ("rank", "进程"),
    "ranks": ("ranks", "进程"),
    "device": ("device", "设备"),
    "ratio": ("times the median", "与中位数之比"),
    "health": ("state of the device", "设备状态"),
    "hosts": ("hosts", "主机"),
    "tensor": ("tensor", "张量"),
    "last_good_step": ("last equal after step", "最后一致的步"),
    "host": ("host", "主机"),
    "version": ("version", "版本"),
    "torch": ("torch", "torch"),
    "train": ("train", "训练数据"),
    "heldout": ("held out", "留出数据"),
    "heldout_fraction": ("held-out share", "留出比例"),
}
"""Names of what an event says; others are shown as they were written."""


MISSING = "–"
"""Of a table, where a run has no value."""


def get_text(key: str, /, **figures: object) -> LocalizedText:
    """Return the text of `key` with its figures; a figure that is a text itself is taken in the same language.

    Raises:
        KeyError: there is no such text, or it needs another figure.
    """
    return _fill(WORDS[key], figures)


def get_known_text(table: Mapping[str, tuple[str, str]], name: str) -> LocalizedText:
    """Return the text of a name that a run wrote, or the name itself where the table has none."""
    return LocalizedText(*table[name]) if name in table else as_text(name)


def as_text(value: str | LocalizedText) -> LocalizedText:
    """Return what a run wrote as it is in both languages."""
    return LocalizedText(value, value) if isinstance(value, str) else value


def join_texts(parts: Iterable[str | LocalizedText], en: str = ", ", zh: str = "，") -> LocalizedText:
    """Return texts in a row."""
    texts = [as_text(part) for part in parts]
    return LocalizedText(en.join(text.en for text in texts), zh.join(text.zh for text in texts))


def describe_duration(seconds: float) -> LocalizedText:
    """Return `3m05s` and its Chinese form."""
    english = format_duration(seconds)
    if seconds < 60:
        return LocalizedText(english, f"{english[:-1]} 秒")
    chinese = english
    for unit, word in (("h", " 小时 "), ("m", " 分 "), ("s", " 秒")):
        chinese = chinese.replace(unit, word)
    return LocalizedText(english, chinese.strip())


def _fill(pair: tuple[str, str], figures: Mapping[str, object]) -> LocalizedText:
    sides = [
        {name: getattr(value, side) if isinstance(value, LocalizedText) else value for name, value in figures.items()}
        for side in ("en", "zh")
    ]
    return LocalizedText(pair[0].format(**sides[0]), pair[1].format(**sides[1]))
