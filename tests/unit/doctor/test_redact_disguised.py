"""Secrets in disguise: colours, letters without width, other languages, encodings, tables; homes and addresses."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabatic.doctor import (
    redaction,
    redaction_places,
    redaction_rules,
    redaction_tables,
    redaction_text,
    redaction_words,
)
from unit.doctor import pattern_costs

FORMS: list[str] = yaml.safe_load(Path(__file__).with_name("redact_disguised.yaml").read_text(encoding="utf-8"))
HOMES = (
    "/data/home/{}/x",
    "/home2/{}/x",
    "/home01/{}",
    "/Users/{}",
    "C:\\Users\\{}\\x",
    "C:\\\\Users\\\\{}\\\\x",
    "C:\\Documents and Settings\\{}\\x",
    "D:/Users/{}/x",
    "nas:/vol/users/{}/x",
    "\\\\nas\\home\\{}\\x",
    "~{}/x",
    "cd ~{}",
    "/nfs/home/{}",
    "hdfs://nn/user/{}/x",
    "file:///home/{}/x",
    "%2Fhome%2F{}%2Fx",
    "/mnt/c/Users/{}/x",
    "/gpfs/users/{}/x",
    "/homes/{}/",
    "/\uff48\uff4f\uff4d\uff45/{}/x",
    "/home/\x1b[1m{}\x1b[0m/x",
    "{}@node1:~$ ls",
    "uid=1000({}) gid=1000({})",
    "LOGNAME={}",
    "ssh -p 22 {}@node1",
    "scp a.txt {}@node1:/tmp",
)
ADDRESSES = (
    "2408:8207:1234::5e3c:e7",
    "2408:8207:1234:0:0:0:5e3c:e7",
    "2408:8207:1234:0000:0000:0000:5E3C:00E7",
    "[2408:8207:1234::5e3c:e7]:22",
    "http://[2408:8207:1234::5e3c:e7]:80/",
    "2408:8207:1234::5e3c:e7%eth0",
    "2408:8207:1234::5e3c:e7/64",
    "addr=2408:8207:1234::5e3c:e7,",
    "\x1b[1m2408\x1b[0m:8207:1234::5e3c:e7",
    "::ffff:39.105.44.7",
    "::FFFF:2769:2C07",
    "64:ff9b::39.105.44.7",
    "2002:2769:2c07::1",
    "2001:db8::ff00:42:8329",
    "2408-8207-1234--5e3c-e7.ipv6-literal.net",
    "7.e.0.0.c.3.e.5.0.0.0.0.0.0.0.0.0.0.0.0.4.3.2.1.7.0.2.8.8.0.4.2.ip6.arpa",
    "http://39.105.44.7:8080/x",
    "10.0.0.1-39.105.44.7",
    "039.105.044.007",
    "ip-39-105-44-7.compute.internal",
    "7.44.105.39.in-addr.arpa",
)
LOGS = (
    "2026-11-20 10:42:34,020 INFO step 120/1000 loss 3.2113 lr 3.0e-04 grad_norm 0.91 tokens/s 51234.5 eta 0:12:33",
    "\x1b[32mINFO\x1b[0m 11-20 10:42:34 [loader.py:120] Loading weights took 3.21 seconds",
    "{'loss': 2.1432, 'grad_norm': 1.25, 'learning_rate': 1.98e-05, 'epoch': 0.12, 'num_input_tokens_seen': 1048576}",
    "[rank3]:[W1120 10:42:34.123456789 ProcessGroupHCCL.cpp:123] Warning: timeout 1800000(ms)",
    "[ERROR] HCCL(4711,python3):2026-11-20-10:42:34.020.677 [transport.cc:120][1][hccl]errNo[0x0000000005000007]",
    "EI0006: 2026-11-20-10:42:34.020.677 Getting socket times out. Reason: Remote Rank did not send the data in time.",
    '  File "/usr/local/lib/python3.10/site-packages/torch/nn/modules/module.py", line 1751, in _wrapped_call_impl',
    "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 58.12 GiB used)",
    "Special tokens have been added in the vocabulary, make sure the associated word embeddings are trained.",
    "bos_token_id: 151643, eos_token_id: 151645, pad_token: <|endoftext|>, max_new_tokens=2048",
    '{"event": "save", "step": 600, "seconds": 12.5, "bytes": 16106127360, "path": "runs/mine/checkpoint-600"}',
    "| step | loss   | tokens |\n|------|--------|--------|\n| 100  | 2.3111 | 40960  |\n| 200  | 2.102  | 81920  |",
    "step,loss,tokens,lr\n1,3.21,4096,1e-4\n2,3.11,8192,1e-4",
    "token       logprob\nhello       -0.12\nworld       -1.25",
    "Epoch 1:  12%|█▏        | 120/1000 [00:12<01:28,  9.95it/s, v_num=3, loss=2.31]",
    "训练开始：模型 qwen2.5-7b，批大小 64，学习率 1e-5，词元数 4,096，保存到 runs/第一次",
    "错误：第 3 行的密码学教材不是 JSON；请检查数据",
    "Ошибка: ключ «loss» не найден, шаг 120 из 1000",
    "エラー：トークン数が 4096 を超えました",
    "Fehler: der Schlüssel lr fehlt in Zeile 12",
    "+---------------------------+---------------+----------------------------------------------------+",
    "| 0     910B3               | OK            | 98.1        45                0    / 0             |",
    "fe80::a00:27ff:fe4e:66a1%eth0, ::1, fd00::12, x[2000::3], at::native::add, 12:34:56",
    "dead::beef bad::cafe a::b",
    "https://huggingface.co/Qwen/Qwen2.5-7B/resolve/main/model-00001-of-00004.safetensors",
    "Converting 100%25 done, see docs/a%20b.md and C:\\Windows\\System32",
    "~100 tokens, HEAD~1, a~b/c, ~/runs/x, POST /v1/users/list",
    "key: layers.0.self_attn.q_proj.weight shape (4096, 4096)",
    "missing keys: ['lm_head.weight'], unexpected keys: []",
    "password is required; the token limit is 4096; authentication failed",
    "author: someone, authority: none, tokenizer_config.json, secretary problem",
)
"""Lines as programs write them; nothing in them is a secret."""
PIECES = (
    "password",
    "密码",
    "Schlüssel",
    "token",
    "HF_TOKEN",
    "api_key",
    "--token",
    "curl -u me:",
    "mysql -p",
    "\x1b[1m",
    "\u200b",
    "：",
    "=",
    ": ",
    "->",
    "|",
    "\t",
    "  ",
    "\n",
    "\n  ",
    "- ",
    "'",
    '"',
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    "<",
    ">",
    "\\",
    "\\n",
    "%3D",
    "&quot;",
    "s3cr3tVal01",
    "hunter2",
    "[removed]",
    "2408:8207::1",
    "39.105.44.7",
    "/home/",
    "~",
    "zhangsan",
    "@",
    "://",
    "Authorization: Basic ",
    "sk-",
    "Ab3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3h",
    "USER",
    ",",
    ";",
    "!!str ",
    "&a ",
    "::",
    "is ",
    "eyJhbGciOiJIUzI1NiJ9.",
    "dXNlcjpodW50ZXIy",
    " for ",
    "name: ",
    "value: ",
)


def redact(text: str) -> str:
    return redaction.redact_text(text, {"wangwu"})


def test_the_tables_are_long_enough() -> None:
    assert len(FORMS) >= 200 and len(set(FORMS)) == len(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_no_secret_of_a_form_is_left(form: str) -> None:
    left = redact(f"step 1\n{form}\nstep 2\n")
    assert "s3cr3t" not in left.lower().replace("\0", "")
    assert left.startswith("step 1\n") and left.endswith("step 2\n")
    assert redact(left) == left


@pytest.mark.parametrize("form", HOMES)
def test_no_home_is_left(form: str) -> None:
    for name in ("zhangsan", "li.si-2", "张三"):
        if name == "张三" and not re.search("home|[Uu]sers|Settings", form):
            continue
        left = redact(f"a {form.format(name, name)}")
        assert name not in left and "USER" in left
        assert redact(left) == left
    assert "wangwu" not in redact("owner Wangwu, wangwu_1 and (WANGWU)").lower()


@pytest.mark.parametrize("form", ADDRESSES)
def test_no_public_address_is_left(form: str) -> None:
    left = redact(f"from {form} on")
    assert re.search(r"\[address \w{6}\]", left)
    assert not any(part in left.lower() for part in ("8207", "39.105", "39-105", "2c07", "8329", "105.044", "44.105"))


def test_spellings_of_an_address_have_one_word() -> None:
    words = {redact(form) for form in ("2408:8207:1234::5e3c:e7", "2408:8207:1234:0:0:0:5E3C:E7")}
    assert len(words) == 1


@pytest.mark.parametrize("log", LOGS)
def test_ordinary_logs_stay(log: str) -> None:
    assert redact(log) == log
    assert redact(f"before\n{log}\nafter\n") == f"before\n{log}\nafter\n"


def test_ordinary_logs_stay_beside_each_other_and_beside_a_secret() -> None:
    logs = "\n".join(LOGS)
    assert redact(logs) == logs
    assert redact(f"密\u200b码：s3cr3t\n{logs}") == f"密\u200b码：[removed]\n{logs}"


@pytest.mark.parametrize("pair", ["user:hunter2", "password=hunter2", "HF_TOKEN: hunter2\n", '{"secret": "x"}'])
def test_pairs_in_base64_are_removed(pair: str) -> None:
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        word = encode(pair.encode()).decode()
        assert word.rstrip("=") not in redact(f"got {word} from it")


@pytest.mark.parametrize(
    "name", ["ANABATIC_API_KEYS", "ANABATIC_STUDIO_TOKEN", "ANABATIC_JOB_SECRET", "ANABATIC_HFTOKEN", "NPU_MYPASSWD",
             "LANGFUSE_HOST", "MASTER_CODE", "LD_SDK", "TORCH_TOKENS", "ASCEND_ACCESSKEYID"]
)  # fmt: skip
def test_variables_with_secrets_leave_without_their_value(name: str) -> None:
    kept = redaction.redact_environ({name: "plainvalue", "ANABATIC_CACHE": "/cache", "LANG": "C.UTF-8"}, set())
    assert kept == {name: redaction_rules.REDACTED, "ANABATIC_CACHE": "/cache", "LANG": "C.UTF-8"}


def test_words_of_json_are_read_in_every_language() -> None:
    value: Any = {
        "密码": "hunter2",
        "contrase\u00f1a": "hunter2",
        "pass\u200bword": ["hunter2"],
        "parola": {"a": "hunter2"},
    }
    assert "hunter2" not in str(redaction.redact_values(value, set()))


@pytest.mark.process
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14))
@example(["token", "name: ", "39.105.44.7"])
def test_twice_is_once(pieces: list[str]) -> None:
    once = redact("".join(pieces))
    assert redact(once) == once


@given(st.text(alphabet=st.sampled_from("ab \n\t\x1b[1m\u200b：é\u0301密\\u003d%3D&#61;\x08\0\u2066"), max_size=60))
def test_what_is_not_removed_is_given_back(text: str) -> None:
    folded = redaction_text.FoldedText(text)
    assert folded.restore_text() == text
    for words, sign in redaction_words.MARKED_WORDS:
        folded.mark_words(words, sign)
    assert folded.restore_text() == text


LONG = (
    "value: a , ",
    "value = x" + " , " * 60,
    "http://" + "%ab" * 60 + " ",
    "<",
    "\n",
    "a\n",
    "password:\n ",
    "1:",
    "::",
    "<<<",
    "sk-",
    "sk-A",
    "key" + " " * 90,
    '"',
    "'",
    "\\",
    "\\u",
    "%3",
    "[",
    "{",
    "password=[",
    'password="""a',
    "密码",
    "\x1b[",
    "\x1b",
    "&#",
    "a@",
    "--token ",
    "curl -u ",
    "|",
    "a|",
    "password,\n",
    "~a",
    "/home",
    "/home/a",
    "a=",
    "Ab3",
    "x.",
    "eyJaaaaaaaa.",
    "http://a:b",
    "USER=",
    "- \n",
    "\0",
    "é",
)


@pytest.mark.parametrize("piece", LONG)
def test_long_texts_are_read_once(piece: str) -> None:
    """A pattern that starts again at every place of them takes minutes, and the test ends at its limit."""
    long = (piece * (20_000 // len(piece) + 1))[:20_000]
    assert "s3cr3tVal" not in redact(f"{long}\n\npassword=s3cr3tVal\n{long}")


def test_no_text_can_be_read_in_two_ways_by_a_repetition() -> None:
    """Each blank of `value: a ,  ,  ,` doubled the time, when a repeated alternative had two ways to take it."""
    assert pattern_costs.find_ambiguous("(?:[ ,]|(?!x)[^{}\\n]){1,100}y") and pattern_costs.find_ambiguous(
        "(?:a{1,9}){1,9}y"
    )
    assert pattern_costs.find_ambiguous("(?:%[0-9]{0,2}|[^%]){1,40}y") and pattern_costs.find_ambiguous("(a+)+y")
    assert not pattern_costs.find_ambiguous("(?:[ ,]|[^{} ,\\n]){1,100}y")
    patterns = [*redaction_rules.REDACTION_RULES, *(option for _, option in redaction_rules.LINES)]
    for module in (redaction, redaction_places, redaction_rules, redaction_tables, redaction_text):
        for value in vars(module).values():
            patterns += [one for one in (value if isinstance(value, tuple) else [value]) if isinstance(one, re.Pattern)]
    found = {one.pattern[:100]: said for one in patterns if (said := pattern_costs.find_ambiguous(one.pattern))}
    assert not found


@pytest.mark.parametrize(
    "name", ["password:", "  passphrase: ", "db_password = ", "- root_passwd: ", "密码：", "set X_PASS=", "Kennwort: "]
)
def test_a_value_of_several_words_goes_to_the_end_of_its_line(name: str) -> None:
    redacted = redaction.redact_text(f"a line\n{name}correct horse battery staple\nlast line\n", set())
    assert not {"correct", "horse", "battery", "staple"} & {*re.findall(r"\w+", redacted)}
    assert (
        redacted.startswith("a line\n")
        and redacted.endswith("\nlast line\n")
        and redaction.redact_text(redacted, set()) == redacted
    )


def test_a_sentence_is_kept() -> None:
    for text in ("password = None and nothing else", "compass: north by west"):
        assert redaction.redact_text(text, set()) == text
