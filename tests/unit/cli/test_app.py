"""The command line: one style of error, strict values, help without heavy libraries."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic import __version__
from anabatic.cli import app, command_tree, error_report, job_command
from anabatic.config.loading import command_table, common_settings, validation
from anabatic.config.loading.validation import UntypedText
from anabatic.core import log
from anabatic.core.errors import DataError


def call(*words: str) -> int:
    """Run a command in this process; return its exit code."""
    with pytest.raises(SystemExit) as caught:
        app.main(words)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A whole recipe for sft."""
    path = tmp_path / "good.yaml"
    path.write_text("model: m\ndata: {train: [a]}\n")
    return str(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sft -c GOOD --schedule.max-steps 1.5", '--schedule.max-steps is "1.5", expected a whole number'),
        ("sft -c GOOD --schedule.max_steps=1.5", '--schedule.max-steps is "1.5", expected a whole number'),
        ("sft -c GOOD --batch.seq-len 1e3", '--batch.seq-len is "1e3", expected a whole number'),
        ("sft -c GOOD --seed null", '--seed is "null"'),
        ("sft -c GOOD --optim.lr fast", '--optim.lr is "fast", expected a number'),
        ("sft -c GOOD --optim.lr nan", '--optim.lr is "nan", expected a number'),
        ("sft -c GOOD --optim.lr -1e-4", "optim.lr is -0.0001"),
        ("sft -c GOOD --device.dtype bf17", '--device.dtype is "bf17", expected one of auto, bf16'),
        ("sft -c GOOD --log.sinks wandb swanlap", 'log.sinks[1] is "swanlap"'),
        ("sft -c GOOD --train-on-inputs=maybe", '--train-on-inputs is "maybe", expected true or false'),
        ("sft -c GOOD --optim.lr 1 --optim.lr 2", "--optim.lr is given twice"),
        (
            "sft -c GOOD --minutes 1 --schedule.minutes 2",
            "--minutes and --schedule.minutes are one setting, which is given twice",
        ),
        ("sft -c GOOD --minutes 0", "--minutes is 0"),
        ("sft -c GOOD --schedule.minutes 0", "--schedule.minutes is 0"),
        ("sft -c GOOD --minutes soon", '--minutes is "soon", expected a number'),
        ("launch -- sft -c GOOD --minutes 0", "--minutes is 0"),
        ("sft -c GOOD --optim.lr", "--optim.lr needs a value"),
        ("sim --npus 2 stat", '"stat" is neither `status` nor `clean`'),
        ("sim --bogus -- true", 'unknown option "--bogus"'),
        ("sim --npus two -- true", '--npus is "two", expected a whole number'),
        ("sft -c GOOD --data.train", "--data.train needs a value"),
        ("sft -c", "-c needs a value"),
        ("sft GOOD", "Did you mean -c "),
        ("sft .", "Did you mean --data .?"),
        ("chat GOOD", "is a recipe for `anabatic sft`"),
        ("export A B", "model is given 2 times: A, B"),
        ("sft -c GOOD --optim.lrr 1", 'unknown option "--optim.lrr". Did you mean "--optim.lr"?'),
        ("sft -c GOOD --max-steps 1", 'unknown option "--max-steps". Did you mean --schedule.max-steps?'),
        ("sft -c MISSING", "does not exist"),
        ("sftt", 'unknown command "sftt". Did you mean "sft"?'),
        ("tokenizer trian", 'unknown command "trian". Did you mean "train"?'),
        ("--foo", 'unknown option "--foo"'),
        ("sft -config GOOD", 'unknown option "-config". Did you mean --config?'),
        ("launch -x -- sft", 'unknown option "-x"'),
        ("--help sftt", 'unknown command "sftt"'),
        ("help nonsense", 'there is no topic "nonsense"'),
        ("chat -p", "-p needs a value"),
        ("chat -p hello", "model is not given"),
        ("config show nope", 'unknown command "nope"'),
        ("config show", "which command?"),
        ("config check", "which file?"),
        ("config check MISSING", "does not exist"),
        ("run", "which pipeline?"),
        ("run GOOD", "is a recipe for `anabatic sft`"),
        ("run GOOD --set x", '--set is "x", expected NAME=VALUE'),
    ],
)
def test_mistakes_are_one_error_and_one_hint(
    words: str, message: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [word.replace("GOOD", recipe).replace("MISSING", str(tmp_path / "missing.yaml")) for word in words.split()]
    assert call(*typed) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 2, err
    assert lines[0].startswith("error: ") and message in lines[0]
    assert lines[1].startswith("hint: ") and len(lines[1]) > 8


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("export A B", "hint: give one; the folder to write follows --out"),
        ("plan sft --model M", "hint: the command to run and its options stand after --; see `anabatic plan --help`"),
        ("sim --npus 2 stat -x", "hint: the command to run and its options stand after --; see `anabatic sim --help`"),
        ("sim --npus 2 stat", "hint: anabatic sim --npus 2 -- stat"),
    ],
)
def test_hints_say_where_a_word_belongs(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words.split()) == 2
    assert hint in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([""], "error: the command is an empty word"),
        ([" ", "sft"], "error: the command is an empty word"),
        (["sft", ""], "error: '' does not belong to an option."),
    ],
)
def test_empty_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 2
    assert capsys.readouterr().err.splitlines()[0] == message


@pytest.mark.parametrize("words", [["--help", "sft"], ["-h", "checkpoint", "verify"], ["sft", "-h"], ["help", "sft"]])
def test_help_of_a_command_is_found_from_both_sides(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 0
    name = " ".join(word for word in words if word not in ("--help", "-h", "help"))
    assert capsys.readouterr().out.startswith(f"Usage: anabatic {name} [OPTIONS]")


def test_debug_adds_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("sft", "-c", str(tmp_path / "x.yaml"), "--debug") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and "\nerror: " in err


@pytest.mark.parametrize("words", ["", "bench train", "launch slurm", "sim status", "checkpoint list", "config show"])
def test_version(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words.split(), "--version") == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("name", [name for name in command_tree.COMMANDS if command_tree.is_callable(name)])
def test_examples_of_the_help_are_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry = command_tree.COMMANDS[name]
    _, line = command_tree.parse_command(name, shlex.split(entry.example))
    if command_tree.is_job(entry):
        cls = command_table.COMMANDS.find_row(name).import_job_class()
        validation.check_section(job_command.read_job_options(name, line).tree, cls, validation.OptionNamer())
    assert call(*name.split(), "--help") == 0
    assert f"For example: anabatic {name}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["tokenizer"], ["tokenizer", "--help"], ["run", "--help"]])
def test_help_of_groups(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 0
    assert "Usage: anabatic" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["pretrain", "sft", "eval", "chat", "tokenizer train", "tokenizer eval"])
@pytest.mark.parametrize("asked", ["--help --all", "--all -h"])
def test_full_help_of_a_job_has_its_sections(name: str, asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*name.split(), *asked.split()) == 0
    out = capsys.readouterr().out
    for section in ["Job", *{"pretrain": ["model", "optim"], "chat": ["sampling"]}.get(name, ["data"])]:
        assert f"\n{section}:\n" in out
    assert "--config" in out and "-c" in out
    assert "more settings" not in out


@pytest.mark.parametrize("name", common_settings.list_common_commands())
def test_help_lists_the_common_settings_by_task(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*name.split(), "--help") == 0
    out = capsys.readouterr().out
    tasks = common_settings.get_common_settings(name)
    shown = {validation.OptionNamer().format_key(key) for keys in tasks.values() for key in keys}
    for task in tasks:
        assert f"\n{task}:\n" in out
    assert shown <= set(re.findall(r"--[a-z][\w.-]*", out))
    number = common_settings.count_further_settings(name)
    assert out.splitlines()[-1] == f"{number} more settings: anabatic {name} --help --all"


def test_help_of_few_settings_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("chat", "--help") == 0
    assert "more settings" not in capsys.readouterr().out


def test_all_behind_the_separator_belongs_to_the_other_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "--help", "--", "sft", "--all") == 0
    assert "Usage: anabatic plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("sft --lora.dropuot 3", 'Did you mean "--lora.dropout"?', "see `anabatic sft --help --all`"),
        ("sft --dropout 3", "Did you mean --lora.dropout?", "see `anabatic sft --help --all`"),
        ("sft --nonsense", "unknown option", "see `anabatic sft --help --all`"),
        ("sft --lora.dropout", "needs a value", "see `anabatic sft --help --all`"),
        ("merge --nonsense", "unknown option", "see `anabatic merge --help`"),
    ],
)
def test_errors_lead_to_settings_that_the_help_leaves_out(
    words: str, message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert f"hint: {hint}" in err.splitlines()


def test_config_show_and_check(tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", "show", "tokenizer", "train", "--all") == 0
    template = tmp_path / "t.yaml"
    template.write_text(capsys.readouterr().out.replace("train: []", "train: ['stdlib:']"))
    assert call("config", "check", str(template), recipe) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("a good recipe for `anabatic tokenizer train`")
    assert "`anabatic sft`" in out[1]
    assert call("config", "check", recipe, "--command", "pretrain") == 2
    assert "model is" in capsys.readouterr().err


def test_config_check_names_what_the_user_must_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    job = '{data: {train: ["${corpus}"]}}'
    path.write_text(f'vars: {{corpus: ""}}\nstages:\n  tok: {{command: tokenizer train, job: {job}}}\n')
    assert call("config", "check", str(path)) == 0
    assert "`anabatic run --set corpus=...`" in capsys.readouterr().out
    assert call("run", str(path), "--dry-run") == 2
    assert "vars.corpus is empty" in capsys.readouterr().err


def test_config_check_looks_into_the_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("stages:\n  a:\n    command: pretrain\n    job: {tokenizer: t, seed: 1.5}\n")
    assert call("config", "check", str(path)) == 2
    assert "stages.a.job: seed is 1.5" in capsys.readouterr().err


GIVEN: list[tuple[str, dict[str, object]]] = [
    ("--data.train a b --seed 3", {"data": {"train": ["a", "b"]}, "seed": "3"}),
    ("--data.train a --seed 3 --data.train b", {"data": {"train": ["a", "b"]}, "seed": "3"}),
    ("--data.train=a", {"data": {"train": ["a"]}}),
    ("--data a b --nproc 2", {"data": {"train": ["a", "b"]}, "device": {"nproc": "2"}}),
    ("--data.train=[]", {"data": {"train": []}}),
    ("--train-on-inputs", {"train_on_inputs": True}),
    ("--no-train-on-inputs", {"train_on_inputs": False}),
    ("--train-on-inputs=false", {"train_on_inputs": False}),
    ("--train-on-inputs=true", {"train_on_inputs": True}),
    ("--optim.lr -1", {"optim": {"lr": "-1"}}),
    ("--optim.lr null", {"optim": {"lr": "null"}}),
    ("--optim.lr -1e-4", {"optim": {"lr": "-1e-4"}}),
    ("--optim.lr -.5", {"optim": {"lr": "-.5"}}),
    ("--no-train-on-inputs=false", {"train_on_inputs": True}),
    ("--schedule.max_steps 4", {"schedule": {"max_steps": "4"}}),
]


@pytest.mark.parametrize(("words", "tree"), GIVEN)
def test_options_become_a_tree_of_texts(words: str, tree: dict[str, object]) -> None:
    _, line = command_tree.parse_command("sft", words.split())
    given = job_command.read_job_options("sft", line).tree
    assert given == tree
    texts = [value for value in given.values() if isinstance(value, str)]
    assert all(isinstance(value, UntypedText) for value in texts)


def test_chat_takes_several_prompts() -> None:
    _, line = command_tree.parse_command("chat", ["-p", "hello there", "-p", "and you?", "-m", "runs/x"])
    assert job_command.read_job_options("chat", line).tree == {"prompt": ["hello there", "and you?"], "model": "runs/x"}


class _Broken:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DataError("no corpus", "give one"), 2, "error: no corpus\nhint: give one\n"),
        (MemoryError(), 1, "error: not enough memory\nhint: "),
        (OSError(28, "No space left on device", "/tmp/file"), 1, "error: no space left while writing /tmp/file: "),
        (OSError(30, "Read-only file system"), 1, "error: cannot write: Read-only file system\nhint: "),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\nhint: "),
        (ValueError("two\nlines"), 1, "error: unexpected ValueError: two lines\nhint: add --debug"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_what_is_raised_becomes_a_line_and_a_code(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run_with_error_report(_Broken(error), debug=False) == code
    err = capsys.readouterr().err
    assert err.startswith(text) and "Traceback" not in err


def test_a_failure_that_is_known_ends_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["LC_ALL"] = "C"
    error = ValueError("wrapped")
    error.__cause__ = RuntimeError("NPU function error, error code is 507035")
    assert app.run_with_error_report(_Broken(error), debug=False) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["error: unexpected ValueError: wrapped", "hint: add --debug for the traceback"]
    assert len(lines) == 3 and lines[2].startswith("hint: 507035: ")
    os.environ[error_report.EXPLAIN_VARIABLE] = "0"
    assert app.run_with_error_report(_Broken(error), debug=False) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_hint_that_cannot_be_made_does_not_hide_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["ANABATIC_KNOWLEDGE"] = "/nowhere.yaml"
    assert app.run_with_error_report(_Broken(ValueError("one")), debug=False) == 1
    assert capsys.readouterr().err.startswith("error: unexpected ValueError: one\nhint: add --debug")


def test_a_worker_reports_to_its_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update(ANABATIC_REPORTS=str(tmp_path), RANK="3")
    assert app.run_with_error_report(_Broken(DataError("no corpus", "give one")), debug=False) == 2
    assert (tmp_path / "rank-3.error").read_text() == "error: no corpus\nhint: give one"
    assert (tmp_path / "rank-3.code").read_text() == "2"
    assert capsys.readouterr().err == ""


def test_another_launchers_worker_says_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["RANK"] = "3"
    assert app.run_with_error_report(_Broken(DataError("no corpus")), debug=False) == 2
    assert capsys.readouterr().err == "[rank 3] error: no corpus\n"


def test_no_name_writes_lines_or_colours(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\nerror: b\x1b[31m\u202e\udcff.jsonl"
    assert call("help", name) == 2
    assert "a\\nerror: b\\x1b[31m\\u202e\\xff.jsonl" in (told := capsys.readouterr().err) and told.count("\nhint:") == 1
    log.setup_logging()
    log.warn(f"{name} is skipped")
    assert "\x1b" not in (told := capsys.readouterr().err) and "\\x1b[31m" in told


def test_a_path_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", "A" * 10_000) == 2
    told = capsys.readouterr().err
    assert "10,000 bytes long" in told and "255" in told and len(told) < 400


@pytest.mark.process
def test_a_reader_that_leaves_is_not_an_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m anabatic config show pretrain | head -c 1 | wc -c"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=240)
    assert (done.stdout.strip(), done.stderr) == ("1", "")


@pytest.mark.process
def test_a_full_disk_is_readable() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "anabatic", "config", "show", "pretrain"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write: No space left on device\nhint: ")
    assert "Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files(closed: str, tmp_path: Path) -> None:
    """The first file opened would take the place of a closed one, and messages would end up in it."""
    out = tmp_path / "recipe.yaml"
    script = f"{shlex.quote(sys.executable)} -m anabatic config show sft {closed}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and not out.exists()
