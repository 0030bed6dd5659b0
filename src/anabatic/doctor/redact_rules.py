"""Forms of secrets, as patterns: what stands before them is kept, what they are is removed.

Repetitions are bounded: a megabyte without a blank must not take hours.
"""

from __future__ import annotations

import importlib
import re
from functools import cache

GONE = "[removed]"
WORD = (
    r"(?<!num_)(?<!max_)(?<!new_)(?<!per_)(?<!batch_)(?<!total_)token(?!iz)|secret|passw(?:or)?d|passphrase|"
    r"passcode|(?:api|access|private|account|secret)[ _-]?key|auth|credential|"
    r"cookie|session[_-]?id|signature|密码|口令|密钥|秘钥|令牌|凭证|凭据|通行码"
)
"""Words that a secret follows, after a colon or the like."""
_CHINESE = "密码|口令|密钥|秘钥|令牌|凭证|凭据|通行码"
_PROSE = "is|for|of|was|not|and|or|required|to|in|file|has|cannot|does"
"""What follows the word password where none is told."""
_SITES = (
    "hf|api_org|sk|pk|rk|gh[oprsu]|glpat|gldt|glrt|github_pat|xox[a-z]|xapp|A[KSGI][IP]A|AROA|AIza|ya29|dckr_pat|npm|pypi|"
    "wandb_v1|LTAI|AKID|JDC|r8|nvapi|gsk|tvly|SG|dop_v1|doo_v1|shp(?:at|ss|ca|pa)|sq0[a-z]{3}|lin_api|ntn|atlasv1|hv[sb]|"
    "ms|dapi|rubygems|glsa|PMAK|sntrys|figd|ATATT|AGE-SECRET-KEY"
)
"""Start of the tokens of well-known sites."""
_SIGNED = (
    r"x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|x-(?:oss|obs|cos|tos|bce)-[a-z-]{2,40}|"
    r"signature|sig|sign|q-ak|q-signature|\w{0,10}accesskeyid|security-token|policy|key-pair-id|key|code|st"
)
"""Parameters of addresses that let whoever holds them in."""
_REST = r"(?:\"[^\"\n]+\"|'[^'\n]+'|(?![\s\"'])[^\s\"']+)"
"""One word of a command line, quoted or not."""

_LONG = r"[^\n|;]{0,300}?\s"
"""Other options of a command line before the one that is meant."""
_IS = r"[\"']?\s{0,9}[:=]\s{0,9}[\"']?"
_VALUE = r"[^\s,;&\"']"

WHOLE: tuple[str, ...] = (
    # PEM
    r"-----BEGIN [A-Z0-9 ]{0,40}(?:PRIVATE KEY|CERTIFICATE)[A-Z ]{0,10}-----"
    r"(?s:.{0,20000}?)(?:-----END [A-Z0-9 ]{0,50}-----|\Z)",
)
"""Blocks that are removed as a whole, before all else."""

AFTER: tuple[tuple[str, str], ...] = (
    (r"Private-Lines: \d{1,4}\n", r"(?:[A-Za-z0-9+/=]{1,80}\n){1,100}"),  # PuTTY
    # addresses: user and password, signed parameters, hooks
    (r"\b[a-z][a-z0-9+.-]{0,30}://", r"[^/\s@]{1,400}(?=@)"),
    (r"\b[a-z][a-z0-9+.-]{0,30}://", r"[^\s@/:]{0,100}:[^\s@\"'<>]{1,200}(?=@)"),
    (rf"[?&;](?:amp;)?(?:{_SIGNED})=", r"[^&\s\"'<>#]+"),
    (
        r"https://[\w.-]{0,100}(?:hooks\.slack\.com/services|/open-apis/bot/v2/hook|discord(?:app)?\.com/api/webhooks)/",
        r"[\w/-]+",
    ),
    # headers: the whole line
    (r"\b(?:proxy-)?authorization[\"']?\s{0,5}[:=]\s{0,5}[\"']?|\b(?:set-)?cookie:\s{0,5}", r"[^\n\"']+"),
    # name and value
    (
        rf"(?:{WORD})[\w.-]{{0,80}}[\"'\])]{{0,3}}\s{{0,20}}(?::=|=>|[:=：＝])\s{{0,20}}",
        r"(?![|>][-+0-9]{0,3}\s)(?:\"[^\"]*\"|'[^']*'|bearer\s+\S+|basic\s+\S+|[^\s,;&\"']+)",
    ),
    (
        rf"(?:{_CHINESE})[^\S\n]{{0,5}}(?:是|为|改为|设为)?[^\S\n]{{0,5}}[:：=]?[^\S\n]{{0,5}}[\"'“‘「『]?",
        r"(?![\s\"'])[\x21-\x7e]{3,}",
    ),
    (
        rf"(?<![a-z0-9])(?:ak|sk|ak_id|sas|psk|jwt|pat|s3_key|appkey|ssh_?key|auth_?key|webhook){_IS}",
        rf"(?![/~\[]){_VALUE}{{6,}}",
    ),
    (rf"(?<![a-z])(?:\w{{0,40}}_)?(?:pwd|pass){_IS}", rf"(?![/~\[\s]){_VALUE}{{3,}}"),
    (
        rf"(?<![a-z])(?:\w{{0,40}}_)?key{_IS}",
        rf"(?={_VALUE}{{0,80}}\d)(?={_VALUE}{{0,80}}[a-z])[a-z0-9+/=_-]{{16,}}",
    ),
    (rf"<[\w:.-]{{0,60}}(?:{WORD})[\w.-]{{0,60}}>", r"[^<]{1,400}"),
    (rf"\b(?:env|arg|setenv|set(?:\s{{1,9}}-\w{{1,3}})?)[ \t]{{1,9}}\w{{0,60}}(?:{WORD})\w{{0,60}}[ \t]{{1,9}}", _REST),
    (r"\bpass(?:word|wd|phrase|code)?:", r"(?![/\s])[^\s\"']{3,}"),
    # options of programs
    (rf"(?<![\w-])--?[\w-]{{0,80}}(?:{WORD})[\w-]{{0,80}}(?:\s{{1,20}}|=)", rf"(?!-){_REST}"),
    (rf"\b(?:obsutil|ossutil\w{{0,3}}|coscmd|coscli|tosutil|swanlab|modelscope)\b{_LONG}-[ki](?:\s{{1,9}}|=)?", _REST),
    (
        r"(?<![\w-])-[ki](?:[ \t]{1,9}|=)[\"']?",
        r"(?=[^\s\"']{0,80}\d)(?=[^\s\"']{0,80}[a-z])[a-z0-9+=_-]{8,}",
    ),
    (
        r"\b(?:sshpass|mongo\w{0,8}|(?:docker|podman|nerdctl|registry|az|oc|ctr|crane|oras|skopeo)[ \t]{1,9}login|"
        rf"7za?|bsdtar)\b{_LONG}-(?-i:p)\s{{0,9}}",
        _REST,
    ),
    (rf"\b(?:mysql|mariadb)[\w-]{{0,20}}\b{_LONG}-(?-i:p)", _REST),
    (
        rf"\b(?:curl|https?|xh|aria2c|lftp|ncftp\w{{0,3}}|wget)\b{_LONG}(?:-u|--user|--proxy-user|-U)(?:\s{{0,9}}|=)",
        rf"(?!-){_REST}",
    ),
    (
        r"\b(?:redis-cli|sqlcmd|ldap\w{2,8}|smbclient|zip|unzip|ipmitool|keytool)\b"
        rf"{_LONG}-(?-i:a|P|w|U|storepass)\s{{1,9}}",
        _REST,
    ),
    (
        r"\b(?:wandb|swanlab|hf|huggingface-cli|modelscope|npm)[ \t]{1,9}(?:auth[ \t]{1,9})?login[ \t]{1,9}",
        rf"(?!-){_REST}",
    ),
    (r"\bhtpasswd\b[^\n|;]{0,100}?\s-\w{0,5}b\w{0,5}\s+\S+\s+\S+\s+", r"\S+"),
    (
        r"\becho\s{1,9}(?:-\w\s{1,9})?",
        rf"{_REST}(?=\s{{0,9}}\|\s{{0,9}}(?:sudo|su|passwd|chpasswd|kinit|cryptsetup|docker)\b)",
    ),
    (r"\b(?:sudo\s{1,9}-S|chpasswd|passwd|kinit)[^\n]{0,60}<<<\s{0,9}", r"(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)"),
    (r"\bidentified\s{1,9}by\s{1,9}", r"(?:'[^'\n]*'|\"[^\"\n]*\"|\S+)"),
    # prose
    (r"\bpass(?:word|wd|phrase)(?: +is)? +", rf"(?!(?:{_PROSE})\b)[^\s:=]+"),
    (r"\b(?:bearer|basic)\s+", r"[a-z0-9._~+/=-]{8,}"),
)  # fmt: skip
"""(what stands before it, the secret), upper and lower case alike."""

ANYWHERE: tuple[str, ...] = (
    rf"(?<![A-Za-z0-9])(?:{_SITES})[._-]?[A-Za-z0-9_-]{{16,}}",
    r"\beyJ[A-Za-z0-9_-]{8,4000}\.[A-Za-z0-9_-]{4,4000}\.[A-Za-z0-9_-]*",
    r"\$(?:1|2[abxy]|5|6|y|apr1|argon2\w{0,2})\$[A-Za-z0-9./=,$+-]{8,}",
    # the name of a key of Huawei Cloud: twenty capitals and digits, six or more of them letters, as in no serial number
    r"(?<![\w/+.-])(?=[A-Z]{0,19}\d)(?=(?:\d{0,19}[A-Z]){6})[A-Z0-9]{20}(?![\w/+.-])",
    # a word of 32 and more in which capitals, small letters and digits are mixed
    r"(?<![\w/+.=-])(?=[A-Za-z]{0,127}\d)(?=[^a-z\s]{0,127}[a-z])(?=[^A-Z\s]{0,127}[A-Z])"
    r"(?=(?:[A-Za-z]{0,60}\d){3})[A-Za-z0-9]{32,128}(?![\w/+.-])",
    r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+",
)
"""What looks like a token, or names a person, wherever it stands."""

BELOW = (
    rf"(?i)^(?P<indent>[ \t]{{0,60}})(?P<key>(?:- )?[\"']?[\w.-]{{0,60}}(?:{WORD})[\w.-]{{0,60}}[\"']?[ \t]{{0,9}}:"
    r"[ \t]{0,9}(?:[|>][-+0-9]{0,3})?[ \t]{0,9}\n)(?:(?P=indent)[ \t]{1,60}\S[^\n]{0,4000}(?:\n|\Z)){1,200}"
)
"""What YAML puts on the lines below a key."""

RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    *((re.compile(whole), GONE) for whole in WHOLE),
    (re.compile(BELOW, re.MULTILINE), rf"\g<indent>\g<key>\g<indent>  {GONE}\n"),
    *((re.compile(rf"(?i)(?P<head>{head}){secret}"), rf"\g<head>{GONE}") for head, secret in AFTER),
    *((re.compile(token), GONE) for token in ANYWHERE),
)
"""(what, instead), in this order."""
HEXADECIMAL = re.compile(r"\b[A-Fa-f0-9]{32,}\b")
"""A key, unless a word before it says that it is the name of a commit or of a content."""
NAMED = re.compile(
    r"(?i)(?:commit|revision|\brev|git|head|branch|sha-?\d{0,3}|md5|crc|checksum|digest|blob|hash|etag)[^\n]{0,12}$"
)
ADDRESS = re.compile(r"(?<![\w./-])(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})(?![\w-]|\.\d)")
VERSION = re.compile(r"(?i)(?:version|ver|release|driver|firmware|cann|toolkit|v|[=<>~^])[\"']?[\s:=]{0,5}[\"']?$")
"""What stands before four numbers that are a version."""


@cache
def kept() -> tuple[re.Pattern[str], ...]:
    """Return the patterns of detect-secrets (Yelp, Apache-2.0) for what sites hand out.

    Left out are its plugins for entropy, for words and for addresses, which take versions and hashes for secrets, and
    those for npm and JWT, which need hours for a long text without blanks and whose forms stand above.
    """
    found: list[re.Pattern[str]] = []
    for name in _PLUGINS:
        module = importlib.import_module(f"detect_secrets.plugins.{name}")
        for plugin in vars(module).values():
            rules = vars(plugin).get("denylist") if isinstance(plugin, type) else None
            if isinstance(rules, (list, tuple)):
                found += [rule for rule in rules if isinstance(rule, re.Pattern)]
    return tuple(found)


_PLUGINS = (
    "artifactory", "aws", "azure_storage_key", "basic_auth", "cloudant", "discord", "github_token", "gitlab_token",
    "ibm_cloud_iam", "ibm_cos_hmac", "mailchimp", "openai", "private_key", "pypi_token", "sendgrid", "slack",
   "softlayer",    "square_oauth", "stripe", "telegram_token", "twilio",
)  # fmt: skip
