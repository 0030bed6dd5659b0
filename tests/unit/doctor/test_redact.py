"""Forms in which secrets stand in logs, recipes, shells and addresses; and what must stay readable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from anabatic.doctor import redaction, redaction_rules

WORD = "hunter2Blue"
LOWER = "q7wjx9zkt4mv2bn8"
HEX = "0123456789abcdef" * 2
UUID = "3f2b8c1e-9d4a-4e7b-8a6c-5d1e2f3a4b5c"
MIXED = "Ab3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6kL9n"
UPPER = "QWERTY7ASDFGH2ZXCVBN"
# Written in two parts, so that no scanner takes this file for a leak.
FORMS: dict[str, tuple[str, str]] = {
    "huawei ak and sk in variables": ("HUAWEICLOUD_SDK_AK={} HUAWEICLOUD_SDK_SK=x", UPPER),
    "huawei sk in variables": ("export HUAWEICLOUD_SDK_SK={}", MIXED),
    "huawei sk": ("sk: {}", MIXED),
    "ak in json": ('{{"ak": "{}"}}', UPPER),
    "bare sk": ("the pair was {} yesterday", MIXED),
    "obsutil": ("obsutil config -i=someone -k={} -e=obs.example.com", MIXED),
    "obsutil ak": ("obsutil config -i={} -k=x", UPPER),
    "ossutil": ("ossutil64 config -i me -k {} -e oss", LOWER),
    "coscmd": ("coscmd config -a me -s x --secret_key {}", MIXED),
    "aws id": ("found {} in the log", "AK" + "IA" + UPPER),
    "aws key": ("aws_secret_access_key = {}", MIXED),
    "aws session": ("AWS_SESSION_TOKEN={}", MIXED * 3),
    "aws header": ("Authorization: AWS4-HMAC-SHA256 Credential=me/x, SignedHeaders=host, Signature={}", HEX * 2),
    "aliyun id": ("id {}", "LT" + "AI" + "5tQ7wjx9zkt4mv2bn8"),
    "tencent id": ("id {}", "AK" + "ID" + MIXED[:32]),
    "oss header": ("Authorization: OSS someone:{}", LOWER + "="),
    "azure account": ("AccountName=x;AccountKey={}==;EndpointSuffix=y", MIXED * 2),
    "s3 presigned": ("https://b.s3.example/x?X-Amz-Date=1&X-Amz-Signature={}&y=1", HEX * 2),
    "s3 credential": ("https://b.s3.example/x?X-Amz-Credential={}%2F2026", LOWER),
    "obs presigned": ("https://b.obs.example/x?AccessKeyId=me&Expires=1&Signature={}", LOWER + "%3D"),
    "obs id": ("https://b.obs.example/x?AccessKeyId={}&Expires=1", UPPER),
    "oss presigned": ("https://b.oss.example/x?OSSAccessKeyId={}&Expires=1", LOWER),
    "sas": ("https://a.blob.example/c?sv=2022-11-02&se=2026&sig={}", LOWER + "%3D"),
    "gcs presigned": ("https://storage.example/x?X-Goog-Signature={}", HEX * 4),
    "html escaped": ("https://b.example/x?a=1&amp;Signature={}", LOWER),
    "hugging face": ("hello {}", "hf" + "_" + MIXED[:34]),
    "modelscope": ("modelscope login --token {}", "ms" + "-" + UUID),
    "modelscope bare": ("using {} now", "ms" + "-" + UUID),
    "wandb new": ("key {}", "wandb_" + "v1_" + MIXED),
    "wandb old": ("wandb login {}", HEX + "01234567"),
    "wandb netrc": ("machine api.wandb.ai\n  login user\n  password {}", HEX + "01234567"),
    "swanlab": ("swanlab login -k {}", LOWER),
    "npm": ("{} found", "npm" + "_" + MIXED[:36]),
    "npm file": ("//registry.example/:_authToken={}", UUID),
    "github": ("{} found", "ghp" + "_" + MIXED[:36]),
    "github fine": ("{} found", "github_" + "pat_" + MIXED[:40]),
    "gitlab": ("{} found", "glpat" + "-" + LOWER + "aaaa"),
    "openai": ("{} found", "sk" + "-" + MIXED),
    "openai project": ("OPENAI {} found", "sk" + "-proj-" + MIXED),
    "nvidia": ("{} found", "nvapi" + "-" + MIXED),
    "slack": ("{} found", "xoxb" + "-1234567890-" + LOWER),
    "slack hook": ("https://hooks.slack.com/services/{}", "T00/B00/" + LOWER),
    "feishu hook": ("https://open.feishu.cn/open-apis/bot/v2/hook/{}", UUID),
    "wecom hook": ("https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={}", UUID),
    "dingtalk hook": ("https://oapi.dingtalk.com/robot/send?access_token={}", HEX * 2),
    "pypi": ("{} found", "pypi" + "-AgEIcHlwaS5vcmc" + MIXED * 2),
    "jwt": ("x {} y", "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxIn0.abc123"),
    "google": ("{} found", "AI" + "za" + MIXED[:35]),
    "hashed": ("root:{}:19000::", "$6$" + LOWER + "$" + MIXED),
    "option k": ("tool -k {} run", LOWER),
    "option token": ("tool --hf-token={} run", WORD),
    "option quoted": ('tool --password "{}" run', WORD),
    "sshpass": ("sshpass -p {} ssh user@host", WORD),
    "sshpass joined": ("sshpass -p{} ssh user@host", WORD),
    "sshpass quoted": ("sshpass -p '{}' scp a b", WORD),
    "curl": ("curl -u someone:{} https://x", WORD),
    "curl joined": ("curl -sS -usomeone:{} https://x", WORD),
    "curl user": ("curl --user someone:{} https://x", WORD),
    "curl header": ('curl -H "X-Api-Key: {}" https://x', LOWER),
    "curl bearer": ('curl -H "Authorization: Bearer {}"', LOWER),
    "mysql": ("mysql -uroot -p{} db", WORD),
    "mysqldump": ("mysqldump --user=root -p'{}' db", WORD),
    "redis": ("redis-cli -h host -a {} ping", WORD),
    "docker": ("docker login -u me -p {} registry.example", WORD),
    "unzip": ("unzip -P {} a.zip", WORD),
    "openssl": ("openssl rsa -passin pass:{} -in x", WORD),
    "sudo": ("echo {} | sudo -S reboot", WORD),
    "sudo here": ("sudo -S ls <<< '{}'", WORD),
    "sql": ("CREATE USER me IDENTIFIED BY '{}'", WORD),
    "url": ("git clone https://me:{}@git.example/x.git", WORD),
    "url with slash": ("postgres://me:{}@db/x", "hunter2/Blue"),
    "proxy": ("http_proxy=http://me:{}@proxy:8080", WORD),
    "redis url": ("redis://:{}@cache:6379/0", WORD),
    "yaml": ("password: {}\n", WORD),
    "yaml block": ("password: |\n  {}\nnext: 1\n", WORD),
    "yaml folded": ("db:\n  secret: >-\n    one\n    {}\n  port: 1\n", WORD),
    "yaml next line": ("api_key:\n  {}\n", WORD),
    "yaml list": ("tokens:\n  - a\n  - {}\n", WORD),
    "yaml quoted lines": ('password: "one\n  {}"\n', WORD),
    "pem": ("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----", MIXED),
    "pem openssh": ("-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----", MIXED),
    "pem pgp": ("-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{}\n-----END PGP PRIVATE KEY BLOCK-----", MIXED),
    "pem in json": ('{{"key": "-----BEGIN RSA PRIVATE KEY-----\\n{}\\n-----END RSA PRIVATE KEY-----"}}', MIXED),
    "pem without end": ("-----BEGIN EC PRIVATE KEY-----\n{}\n", MIXED),
    "chinese": ("密码：{}", WORD),
    "chinese colon": ("登录密码: {}", WORD),
    "chinese prose": ("数据库密码是{}，请保密", WORD),
    "chinese kouling": ("口令 {}", WORD),
    "chinese key": ("访问密钥＝{}", LOWER),
    "bearer": ("> Bearer {}", LOWER),
    "basic": ("authorization: basic {}", "dXNlcjpodW50ZXIy"),
    "cookie": ("Set-Cookie: a=1; sid={}; Path=/", LOWER),
    "variable": ("DB_PASSWORD={} ./run", WORD),
    "variable pwd": ("MYSQL_PWD={}", WORD),
    "variable pass": ("SMTP_PASS={}", WORD),
    "python": ('login(token="{}")', WORD),
    "dict": ("{{'client_secret': '{}'}}", WORD),
    "ruby": (":password => '{}'", WORD),
    "toml": ('api_key = "{}"', WORD),
    "ini": ("[db]\npasswd={}\n", WORD),
    "prose": ("log in with password {} please", WORD),
    "dockerfile": ("ENV HF_TOKEN {}", WORD),
    "fish": ("set -gx DB_PASSWORD {}", WORD),
    "environ": ('os.environ["HF_TOKEN"] = "{}"', WORD),
    "xml": ("<password>{}</password>", WORD),
    "two words": ("Secret Access Key: {}", LOWER),
    "csv of a cloud": ('"someone","{}"', UPPER),
    "sshpass two words": ("sshpass -p 'one {}' ssh host", WORD),
    "chinese two": ("密码为：{}", WORD),
    "mail": ("ask {} about it", "someone@" + "example.org"),
    "public address": ("from {} port 22", "39.105.44.7"),
}
READABLE = (
    "torch 2.13.0+cpu, torch_npu 2.7.1.post4",
    "/usr/local/Ascend/cann-9.1.0/lib64:/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1/lib",
    "0000:C1:00.0",
    "25.5.1",
    "the password is required",
    "monkey: 7",
    "EI0006: [PID: 7] Getting socket times out",
    "NPU function error: aclrtSynchronizeStream, error code is 507035",
    "EZ9999: Inner Error! retCode=0x26, dump info: pc start: 0x12c08127bb74",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "git revision 0123456789abcdef0123456789abcdef01234567",
    "sha256:" + "0123456789abcdef" * 4,
    "version=7.7.0.220",
    "Firmware Version : 7.1.0.130",
    "CANN 8.0.0.100",
    "HCCL_IF_IP=192.168.0.7",
    "address_0=10.20.0.2",
    "127.0.0.1:29500",
    "255.255.255.0",
    "undefined symbol: _ZNK3c1010TensorImpl20is_contiguous_customENS_12MemoryFormatE",
    "model.layers.27.mlp.up_proj.lora_B.default.weight",
    "PWD=/data/job",
    "serial number 2102313NPU10P1000012",
    "serial number is 13, core id is 43",
    "VDie ID : 5C4B2C84 2160A3C2 1C8A7B33 3A3A7B0E 7C0B0A2D",
    "npu-smi info -t health -i 0 -c 0",
    "curl -s https://example.org/x",
    "pytest -k loader",
    "mkdir -p out/logs",
    "num_tokens: 4096, tokenizer: qwen",
    "tokens per second 1234.5",
    "key: 7",
    "2026-11-20-10:42:34.020.677",
    "Processes: 12, threads: 345",
    "HCCL_BUFFSIZE=200 ASCEND_RT_VISIBLE_DEVICES=0,1,2,3",
    "libtorch_npu.so: cannot open shared object file: No such file or directory",
    "https://www.hiascend.com/document/detail/en/canncommercial/850/API/aolapi/atlasascendc_api_07_1205.html",
)


def test_the_table_is_long_enough() -> None:
    assert len(FORMS) >= 70 and len(READABLE) >= 30


@pytest.mark.parametrize("name", FORMS)
def test_the_secret_is_removed(name: str) -> None:
    form, secret = FORMS[name]
    for content in (form.format(secret), f"2026-11-20 INFO\n{form.format(secret)}\nafter\n"):
        assert secret not in redaction.redact_text(content, set()), redaction.redact_text(content, set())


@pytest.mark.parametrize("name", [name for name, (form, _) in FORMS.items() if "\n" not in form])
def test_the_secret_is_removed_in_json_and_by_its_kind(name: str) -> None:
    form, secret = FORMS[name]
    assert secret not in json.dumps(redaction.redact_values({"rows": [form.format(secret)]}, set()), ensure_ascii=False)


@pytest.mark.parametrize("text", READABLE)
def test_what_a_supporter_needs_stays(text: str) -> None:
    assert redaction.redact_text(text, set()) == text
    assert redaction.redact_text(f"before\n{text}\nafter\n", set()) == f"before\n{text}\nafter\n"


def test_lines_beside_a_block_stay() -> None:
    told = redaction.redact_text("db:\n  password: |\n    one\n    two\n  port: 5432\nhost: a\n", set())
    assert told == "db:\n  password: |\n    [removed]\n  port: 5432\nhost: a\n"


def test_an_address_has_the_same_word_everywhere() -> None:
    first = redaction.redact_text("39.105.44.7 and 39.105.44.8", set())
    again = redaction.redact_text("to 39.105.44.7", set())
    assert "39.105" not in first + again
    assert again.removeprefix("to ") == first.partition(" and ")[0] != first.partition(" and ")[2]


def test_the_rules_of_the_library_are_used() -> None:
    assert len(redaction_rules.load_detect_secrets_patterns()) >= 30
    stripe = "rk_" + "live_" + "0123456789abcdefghijklmn"
    telegram = "1234567890" + ":AA" + "x" * 32 + "y"
    for secret in (stripe, telegram):
        assert secret not in redaction.redact_text(f"before {secret} after", set())
    assert telegram not in redaction.redact_text("x" * 3000 + " " + telegram, set())


@pytest.mark.parametrize("name", ["ASCEND_CA_PASS", "TORCH_PSK", "ASCEND_CREDS", "HCCL_ACCESS", "NPU_SSH_LOGIN"])
def test_variables_that_are_named_after_secrets_leave_without_their_value(name):
    assert redaction.redact_environ({name: "s3cr3t-value", "ASCEND_HOME_PATH": "/opt/cann"}, set()) == {
        name: redaction_rules.REDACTED,
        "ASCEND_HOME_PATH": "/opt/cann",
    }


@pytest.mark.parametrize(
    "form", yaml.safe_load(Path(__file__).with_name("redact_forms.yaml").read_text(encoding="utf-8"))
)
def test_no_secret_of_a_form_is_left(form: str) -> None:
    left = redaction.redact_text(f"step 1\n{form}\nstep 2\n", set())
    assert "s3cr3t" not in left.lower()
    assert left.startswith("step 1\n") and left.endswith("step 2\n")
