"""Forms of secrets, as patterns: what stands before them is kept, what they are is removed.

Repetitions are bounded: a megabyte without a blank must not take hours.
"""

from __future__ import annotations

import importlib
import re
from functools import cache

from anabatic.doctor.redaction_text import fold_text
from anabatic.doctor.redaction_words import KEY_MARK, SECRET_MARK

REDACTED = "[removed]"
_ADDRESS = r"\[address [0-9a-f]{6}\]"
"""A public address that is removed already (`redaction_places`)."""
_COUNTED = (
    "num", "max", "min", "new", "per", "batch", "total", "bos", "eos", "pad", "unk", "cls", "sep", "mask", "stop",
    "start", "end", "special", "image", "video", "audio", "vision", "prompt", "completion", "input", "output",
    "generated", "cached", "reasoning", "think", "prefix", "suffix", "middle", "next", "last", "first", "train",
    "valid", "seen", "global", "local",
)  # fmt: skip
"""Words before `token` where it is a piece of a text."""
_TEXT = "".join(rf"(?<!{before}[ _-]token)" for before in _COUNTED)
_HOLDERS = (
    "api",
    "access",
    "auth",
    "hub",
    "hf",
    "github",
    "gitlab",
    "refresh",
    "bot",
    "session",
    "user",
    "service",
    "app",
)
"""Words before `tokens` where they are secrets."""
HOLDER_WORDS = "|".join(_HOLDERS)
_TOKEN = (
    rf"(?=token)(?:token(?!s){_TEXT}(?!iz|_?type|[ _-](?:id|per|count|embed|budget|limit)|/)|"
    rf"(?:(?<![a-z_-])|{'|'.join(rf'(?<={before}[_-])' for before in _HOLDERS)})tokens(?![ _-](?:per|id|count)|/))"
)
OTHER_WORDS = (
    r"s(?:(?<!pulls)ecret(?!_?(?:key)?_?(?:ref|name))|(?:ecret|ecure|ign|igning|ubscription)[ _.-]?key|"
    r"ess(?:ion)?[_-]?id|ignature)|"
    r"p(?:assw(?:or)?d|assphrase|asscode|(?<![a-z]p)ass word|rivate[ _.-]?key)|"
    r"a(?:(?:pi|ccess|ccount|es)[ _.-]?key|uth(?!or(?!i[sz])))|"
    rf"encryption[ _.-]?key|license[ _.-]?key|m(?:aster|ch)[ _.-]?key|c(?:redential|ookie)|{SECRET_MARK}"
)
"""Words that a secret follows, grouped by their first letters: they are looked for at every place of a text."""
SECRET_WORDS = rf"{_TOKEN}|{OTHER_WORDS}"
"""Words that a secret follows, after a colon or the like."""
_LETTERS = "ak|sk|pw|pwd|pass|psk|pat|sas|jwt|creds?"
SHORT_WORDS = rf"(?=[aspjc])(?<![a-z])(?:{_LETTERS})(?![a-z])"
"""Short words that a secret follows where they stand alone or after an underscore."""
_OWNERS = (
    "openai|azure|gemini|google|hf|huggingface|hub|modelscope|dashscope|qwen|zhipu|glm|moonshot|kimi|"
    "deepseek|minimax|baidu|qianfan|ark|volc|wandb|swanlab|comet|neptune|clearml|mlflow|github|gitlab|gitee|aws|gcp|s3|obs|"
    "oss|cos|minio|tencent|aliyun|huawei|huaweicloud|ssh|db|redis|mysql|enc|aes|hmac|root|admin|client|app|server|"
    "login|serper|tavily|bing|mistral|groq|cohere|sentry|slack|dingtalk|feishu|lark|bot|webhook|wifi"
)
"""Whose key it is, where a name ends in `_key`."""
_PROSE_WORDS = (
    "is|are|for|of|was|not|and|or|required|to|in|file|has|have|cannot|does|must|may|should|will|expired|incorrect|"
    "invalid|authentication|prompt|from|with|on|by|at|as|if|changed|the|a|an"
)
"""Words after "password" where no password follows."""
_TOKEN_PREFIXES = (
    "(?:hf|api_org|sk|pk|rk|gh[oprsu]|glpat|gldt|glrt|github_pat|xox[a-z]|xapp|dckr_pat|npm|pypi|wandb_v1|JDC|r8|nvapi|gsk|"
    "tvly|SG|dop_v1|doo_v1|shp(?:at|ss|ca|pa)|sq0[a-z]{3}|lin_api|ntn|atlasv1|hv[sb]|rubygems|glsa|PMAK|sntrys|figd|"
    "AGE-SECRET-KEY|ATATT|dp|tskey|whsec|secret_api|pul|jina|xai|csk|fw|tgp_v1|gl(?:ft|soat|imt|oas|cbt|ptt))[._-]|"
    "A[KSGI][IP]A|AROA|AIza|ya29|LTAI|AKID|ALTAK|ATATT|AKLT|EAA[AC]|dapi|ms-(?=[0-9a-f]{8}-)"
)
"""Start of the tokens of well-known sites."""
_SIGNED_URL_PARAMETERS = (
    r"x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|x-(?:oss|obs|cos|tos|bce)-[a-z-]{2,40}|"
    r"signature|sig|sign|q-ak|q-signature|\w{0,10}accesskeyid|security-token|policy|key-pair-id|key|code|st"
)
"""Parameters of addresses that let whoever holds them in."""
_QUOTE = r"\\{0,3}[\"'`“‘「『]"
_SHELL_WORD = (
    r"(?:\\{1,3}\"[^\"\n]{0,400}?\\{1,3}\"|\"(?:[^\"\\\n]|\\.){1,400}\"|'(?:[^'\\\n]|\\.){1,400}'|"
    r"(?![\s\"'])(?:[^\s\"'\\]|\\[^\"'\n]){1,4000})"
)
"""One word of a command line, quoted or not."""
_NEXT = r"(?:\\{0,3}[\"'],\s{0,9}\\{0,3}[\"']|=|(?:\s|\\\n){1,20})"
"""Between an option and its value: a blank, an equals sign, or the borders of two texts of a list."""
_ASSIGNMENT = rf"(?:{_QUOTE})?\s{{0,9}}(?:[:=：＝]|%3[AD]|是|为)\s{{0,9}}(?:{_QUOTE})?"
_VALUE_CHAR = r"[^\s,;&\"'\\]"
_MIXED = r"(?=[^\s\"',;]{0,80}\d)(?=[^\s\"',;]{0,80}[A-Za-z])"
"""Letters and digits, as in no word of a sentence."""
_ANY = (
    r"(?:[rbuf]{0,2}'{3}(?s:.{1,2000}?)'{3}|[rbuf]{0,2}\"{3}(?s:.{1,2000}?)\"{3}|"
    r"(?P<escaped>\\{1,3})\"(?:[^\"\n]|(?<=\\\\\\)\"){0,1000}?(?<!\\)(?P=escaped)\"|"
    r"[rbuf]{0,2}\"(?:[^\"\\\n]|\\.|\n(?!\n)){0,1000}\"|[rbuf]{0,2}'(?:[^'\\\n]|\\.|''|\n(?!\n)){0,1000}'|"
    r"[“‘「『][^”’」』\n]{1,400}[”’」』]|\$\([^()\n]{1,400}\)|[\"'][^\"'\n]{1,1000}|(?:bearer|basic|token)\s{1,9}\S{1,4000}|"
    r"[\[({](?=\s{0,40}\\?[\"'])(?:[^\[\](){}]|\[[^\[\](){}]{0,400}\]){1,4000}[\])}]|\{(?=\s{0,9}[\w-]{1,40}\s{0,9}:)[^{}\n]{1,1000}\}|\[[^\[\](){}\n]{1,4000}\]|\{\{[^{}\n]{1,200}\}\}|\((?=[^()\n]{0,200}\d)[^()\n\"',]{1,1000}\)|"
    r"[^\s,;&\"'\[({][^\s,;&\"']*(?:[,;&](?![\w.-]{1,40}\s{0,2}[=:])[^\s,;&\"']+)*)"
)
"""A value: quoted in any way, a list, or a word up to what cannot be its own."""
_END = r"(?![^\s,;&\"'\])}])"
_NOTHING = rf"(?:none|null|true|false|\[\]|\(\)|\{{\}}|\"\"|'')(?!['\"]){_END}"
_PLAIN = (
    rf"(?:{_NOTHING}|[\"']?(?:[-+]?[\d.,_]{{1,20}}(?:[a-z]{{1,3}}/\w{{1,9}})?|<[^<>\n\"']{{0,60}}>|\[[A-Z]{{1,9}}\])[\"']?{_END}|(?-i:(?![rbuf]{{1,2}}[\"'])[a-z]{{1,7}}){_END}|"
    rf"\[[\d\s,.-]{{1,4000}}\]|[\[(]\s{{0,9}}[\"']<)"
)
"""Values that are no secret: nothing; of tokens also numbers and names of pieces of a text."""
_REST = r"[\w.-]{0,40}(?![\w.-])(?:\[\d{1,3}\]|[ ]?\([^()\n]{0,30}\))?[\"'\])\\]{0,6}(?:[ ](?:is|was))?\s{0,20}"
_NAMED = rf"{_REST}(?::?=|[=-]>|→|::?)(?![:=])\s{{0,20}}(?:\\\n\s{{0,20}}|[!&]{{1,2}}\w{{1,40}}[ \t]{{1,9}})?"
"""The rest of a name, and what parts it from its value."""

BLOCK_PATTERNS: tuple[str, ...] = (
    # PEM
    r"-----? ?BEGIN [A-Z0-9 ]{0,40}(?:PRIVATE KEY|CERTIFICATE)[A-Z ]{0,10}-----?"
    r"(?:[^-]|-(?!---)){0,20000}(?:-----? ?END [A-Z0-9 ]{0,50}-----?|\Z|(?=-----? ?BEGIN))",
)
"""Blocks that are removed as a whole, before all else."""

COMMANDS: tuple[tuple[str, str, str], ...] = (
    (r"obsutil|ossutil\w{0,3}|coscmd|coscli|tosutil|swanlab|modelscope", rf"-[kis](?:{_NEXT})?", _SHELL_WORD),
    (
        r"mongo\w{0,8}|racadm|plink|7za?|bsdtar|"
        r"(?:docker|podman|nerdctl|registry|az|oc|ctr|crane|oras|skopeo)(?:[ \t]{1,9}|[\"'],[ \t]{0,9}[\"'])login",
        rf"-(?-i:p)(?:{_NEXT})?",
        _SHELL_WORD,
    ),
    (r"(?:mysql|mariadb)[\w-]{0,20}", r"-(?-i:p)", _SHELL_WORD),
    (
        r"curl|https?|xh|aria2c|lftp|ncftp\w{0,3}|wget",
        rf"(?-i:-[a-zA-Z]{{0,6}}[uU]|-a)(?:{_NEXT})?|--(?:user|proxy-user|auth){_NEXT}",
        _SHELL_WORD,
    ),
    (r"curl", rf"(?-i:-b)(?:{_NEXT})?", _SHELL_WORD),
    (r"ssh-keygen|useradd|usermod|groupmod", rf"-(?-i:N|P|p)(?:{_NEXT})?", _SHELL_WORD),
    (
        r"redis-cli|sqlcmd|ldap\w{2,8}|smbclient|zip|unzip|ipmitool|keytool|rar|unrar|kinit|bcp|impacket\w{0,20}",
        rf"-(?-i:storepass|keypass|a|P|w|U|E|k|y)(?:{_NEXT})?",
        _SHELL_WORD,
    ),
    (r"snmp\w{2,12}", rf"-(?-i:A|X|c|3[mkM]?)(?:{_NEXT})?", _SHELL_WORD),
    (r"vault[ \t]{1,9}(?:kv[ \t]{1,9})?(?:put|write|patch)", r"[\w.-]{1,60}=", _SHELL_WORD),
)
"""(program, option, secret): every such option of a program's line."""
KEYED_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"Private-Lines: \d{1,4}\n", r"(?:[A-Za-z0-9+/=]{1,80}\n){1,100}"),  # PuTTY
    # addresses: user and password, signed parameters, hooks
    (
        r"(?:\b[a-z][a-z0-9+.-]{0,30}:|(?<![\w:/]))(?:/|%2f){2}",
        r"(?!\[removed\]@)(?:[^/\s@%]|%(?:(?!40|2f)|40(?=[^/\s]{1,400}@))){1,400}(?=@|%40)",
    ),
    (r"(?:\b[a-z][a-z0-9+.-]{0,30}:|(?<![\w:/]))//", r"[^\s@/:]{0,100}:[^\s@\"'<>]{1,200}(?=@)"),
    (r"\b[\w.-]{1,40}:", r"[^\s@/:]{1,100}(?=@(?:tcp|unix|udp)\()"),
    (r"\bjdbc:oracle:\w{1,20}:[\w$.-]{1,40}/", r"[^\s@/]{1,100}(?=@)"),
    (r"\bsqlplus[ \t]{1,9}(?:-\w{1,9}[ \t]{1,9}){0,3}[\w$.-]{1,40}/", r"[^\s@/]{1,100}(?=@|\s)"),
    (rf"[?&;](?:amp;)?(?:{_SIGNED_URL_PARAMETERS})=", r"[^&\s\"'<>#]+"),
    (
        r"https://[\w.-]{0,100}(?:hooks\.slack\.com/services|/open-apis/bot/(?:v\d/)?hook|discord(?:app)?\.com/api/webhooks|"
        r"office\.com/webhook\w{0,3}|/trigger/\w{1,60}/(?:json/)?with/key|api\.day\.app|sctapi\.ftqq\.com|hc-ping\.com)/",
        r"[^\s\"'<>?]+",
    ),
    (r"https?://[\w.-]{1,100}/[\w./-]{0,60}hooks?/", r"(?=[\w/-]{0,80}\d)[\w/-]{16,}"),
    (r"<\(\s{0,3}(?:echo|printf)\s{1,9}(?:-\w\s{1,9})?", r"[^)\n]+"),
    # a name, and its value in another field, after or before it
    (
        rf"\b(?:name|key|id|variable|param(?:eter)?|option|header|field)(?:{_QUOTE})?\s{{0,9}}[:=>]\s{{0,9}}(?:{_QUOTE})?"
        rf"[\w./-]{{0,80}}(?:{SECRET_WORDS}|{SHORT_WORDS}|_key)[\w./-]{{0,60}}(?:{_QUOTE})?(?:</\w{{1,20}}>)?"
        rf"(?:(?!\b(?:name|key|value)\b)[^{{}}]){{1,200}}?\b(?:value|val|content|default)(?:{_QUOTE})?\s{{0,9}}[:=>]\s{{0,9}}",
        rf"(?!\s)(?:(?<=>)[^<\n]{{1,1000}}|{_ANY})",
    ),
    (
        rf"(?<![\w:=])(?:value|val|content)(?:{_QUOTE})?\s{{0,9}}[:=]\s{{0,9}}",
        r"(?:\\{0,3}\"[^\"\n]{1,400}\"|'[^'\n]{1,400}'|[^\s,\"'<>{}]{1,400})"
        rf"(?=(?:(?!value)[^{{}}]){{1,100}}?(?:{_QUOTE})?\b(?:name|key|id|variable)(?:{_QUOTE})?\s{{0,9}}[:=]\s{{0,9}}(?:{_QUOTE})?"
        rf"[\w./-]{{0,80}}(?:{SECRET_WORDS}|{SHORT_WORDS}|_key))",
    ),
    # other separators
    (
        rf"(?:{OTHER_WORDS}|(?:{HOLDER_WORDS})[_-]token|{SHORT_WORDS}){_REST}(?:={{2,3}}|\?=|~>|[|]|\.{{3,9}})\s{{0,20}}(?:[\"']{{1,3}})?",
        rf"(?![\[(]){_MIXED}[^\s\"'|]+",
    ),
    (rf"(?:{OTHER_WORDS}){_REST}[:=]\s{{0,9}}''", r"[^\s']+(?='')"),
    (
        rf"(?:{SECRET_WORDS}|{SHORT_WORDS})[\w.-]{{0,40}}\s{{0,9}}</\w{{1,20}}>\s{{0,20}}<\w[^<>\n]{{0,60}}>",
        r"[^<]{1,400}",
    ),
    (
        rf"(?m:^)[ \t]{{0,20}}[\w.-]{{0,30}}(?:{SECRET_WORDS})[\w.-]{{0,30}}[ \t]{{0,9}}"
        r"(?:[,;]|\n[ \t]{0,20}(?:[-=]{3,80}\n[ \t]{0,20})?)",
        rf"{_MIXED}[^\s\"':=(|]{{6,}}(?=[ \t]{{0,9}}(?m:$))",
    ),
    (
        rf"(?<![\w.-])[\w.-]{{0,60}}(?:{OTHER_WORDS})[\w.-]{{0,30}}(?:\t|[ ]{{2,20}})[|]?[ \t]{{0,20}}",
        rf"{_MIXED}[^\s\"':=(|]{{6,}}(?![(=:])",
    ),
    # in other languages
    (
        rf"{SECRET_MARK}(?:[ ]\w{{1,16}}){{0,3}}[ ]?(?:[:=→-]|"
        rf"(?<![^\W\d_])(?:lautet|ist|est|es|e|jest|je|is|ar|adalah)(?![^\W\d_])|"
        rf"{fold_text('は|が|은|는|이')}){{1,2}}[ ]?[\"']?",
        r"(?![\[(])(?=[^\s\"',;]{0,80}\d)[\x21-\x7e]{3,}",
    ),
    (rf"{KEY_MARK}(?:[ ]\w{{1,16}}){{0,3}}[ ]?[:=→-]{{1,2}}[ ]?[\"']?", rf"{_MIXED}[\x21-\x7e]{{8,}}"),
    (
        rf"[\[(]\s{{0,20}}[ub]?[\"'][\w.-]{{0,60}}(?:{SECRET_WORDS}|{SHORT_WORDS})[\w.-]{{0,40}}[\"'],\s{{0,20}}[ub]?",
        rf"(?=[\"'][^\"'\n]{{0,80}}\d)(?=[\"'][^\"'\n]{{0,80}}[A-Za-z]){_SHELL_WORD}",
    ),
    (rf"(?:{SECRET_WORDS})\w{{0,40}}[ \t]{{0,9}}<<<(?!<)[ \t]{{0,9}}", _SHELL_WORD),
    (
        r"\bpass(?:word|wd|phrase|code)[ \t]{1,3}(?:(?:was|is|to|set|reset|changed|now)[ \t]{1,3}){1,3}[\"']?",
        rf"{_MIXED}[^\s\"',;]{{6,}}",
    ),
    # headers: the whole line
    (
        r"\b(?:proxy-)?authorization[\"']?\s{0,5}[:=]\s{0,5}[\"']?|\b(?:set-)?cookie(?::\s{0,5}|\s{0,5}=\s{0,5}(?=[\w.-]{1,60}=))",
        r"[^\n\"']+",
    ),
    # what is asked for, with its answer; two names with two values
    (r"\b(?:password|passphrase|passcode|token|pin)[ \t]{1,9}for[ \t]{1,9}[^\n]{1,200}?:[ \t]{1,9}", r"\S+"),
    (
        r"(?:user(?:name)?|login|account|用户名?|账号|帐号|账户)[ \t]{0,3}[/|、和][ \t]{0,3}"
        r"(?:pass\w{0,5}|pwd?|密码|口令)"
        r"[ \t]{0,5}[:：=是为]?[ \t]{0,5}",
        r"[^\s/]{1,100}[ \t]{0,3}[/|、][ \t]{0,3}[^\s，。]{1,400}",
    ),
    (r"\b[\w.-]{1,64}@[\w.-]{1,100}[ \t]{1,3}/[ \t]{1,3}", r"[^\s/]{4,}"),
    (
        r"(?m:^)[ \t]{0,9}(?![^:\n]{0,200}\.(?:log|txt|py|json\w?|yaml|c|cpp|h|out)\b)[\w.*-]{1,200}:(?:\*|\d{4,5}):"
        r"(?!info|debug|warn|err|crit)[\w.*-]{1,60}:[\w.*@-]{1,60}:",
        r"(?![\s/])[^\s:]{4,}(?![:\w])",
    ),
    # name and value; at the start of a line, a value of several words
    (
        rf"(?m:^)[ \t]{{0,20}}(?:(?:export|set|env|-)[ \t]{{1,3}})?[\w.-]{{0,60}}"
        rf"(?:passw(?:or)?d|passphrase|passcode|[_-]pass|[_-]pwd|{SECRET_MARK})[ \t]{{0,5}}[:=：＝][ \t]{{0,5}}",
        rf"(?!(?:{_PROSE_WORDS})\b)(?![\s\"'|>\[({{$!&/~]|{_NOTHING})[^\s\"'#]{{1,200}}"
        r"(?:[ \t]{1,3}[^\s\"'#=:]{1,60}){1,12}(?=[ \t]{0,9}(?:[\r\n#]|\Z))",
    ),
    (
        rf"<\w{{1,40}}\s[^<>\n]{{0,100}}?\b(?:name|key|id)=[\"'][\w./-]{{0,60}}(?:{SECRET_WORDS}|{SHORT_WORDS})[\w./-]{{0,40}}[\"'][^<>\n]{{0,100}}>",
        r"[^<\s][^<]{0,400}",
    ),
    (rf"<[\w:.-]{{0,60}}(?:{SECRET_WORDS})[\w:.-]{{0,60}}(?:\s[^<>\n]{{0,299}}[^<>\n/])?>", r"[^<]{1,400}"),
    (
        rf"<[\w:.-]{{0,60}}(?:{SECRET_WORDS})[\w:.-]{{0,60}}\s[^<>\n]{{0,200}}?\b(?:value|val|content)=[\"']",
        r"[^\"'<>]{1,400}",
    ),
    (
        rf"(?:{_TOKEN}){_NAMED}",
        rf"(?!{_PLAIN})(?![|>][-+0-9]{{0,3}}\s|\[removed|{_ADDRESS}|[!&\\][!&\w]{{0,40}}\s{{1,30}}\[removed){_ANY}",
    ),
    (
        rf"(?:{OTHER_WORDS}){_NAMED}",
        rf"(?!{_NOTHING})(?![|>][-+0-9]{{0,3}}\s|\[removed|{_ADDRESS}|[!&\\][!&\w]{{0,40}}\s{{1,30}}\[removed){_ANY}",
    ),
    (
        rf"{SECRET_MARK}(?:[(（][^()（）\n]{{0,12}}[)）])?[^\S\n]{{0,5}}[是为改成了设置重更新修变换已被就叫用的统一到如下]{{0,10}}"
        r"[^\S\n]{0,5}[:：=]?[^\S\n]{0,5}[\"'“‘「『]?",
        rf"(?![\s\"']|\[removed|{_ADDRESS})[\x21-\x7e]{{3,}}",
    ),
    (
        rf"(?<![a-z0-9])(?:ak|sk|ak_id|sas|psk|jwt|pat|s3_key|appkey|ssh_?key|auth_?key|webhook|otp|totp){_ASSIGNMENT}",
        rf"(?![/~\[]){_VALUE_CHAR}{{6,}}",
    ),
    (
        rf"(?:(?<![a-z])(?:pwd|pass|pw)|(?-i:(?<=[a-z])P(?:w|wd|ass)))(?:{_QUOTE})?\s{{0,9}}[:=：＝]\s{{0,9}}",
        r"\"(?![/~\[])(?:[^\"\\\n]|\\.){1,1000}\"|'(?![/~\[])(?:[^'\\\n]|\\.){1,1000}'",
    ),
    (rf"(?:(?<![a-z])(?:pwd|pass|pw)|(?-i:(?<=[a-z])P(?:w|wd|ass))){_ASSIGNMENT}", rf"(?![/~\[\s]){_ANY}"),
    (rf"(?<![a-z0-9])(?=[a-z])(?:{_OWNERS})_?key{_ASSIGNMENT}", rf"(?![/~\[\s]){_VALUE_CHAR}{{6,}}"),
    (rf"\b(?-i:[A-Z][A-Z0-9_]{{1,60}}_KEY\b){_ASSIGNMENT}", rf"(?![/~\[\s]){_VALUE_CHAR}{{6,}}"),
    (
        rf"(?<![a-z])key{_ASSIGNMENT}",
        rf"(?={_VALUE_CHAR}{{0,80}}\d)(?={_VALUE_CHAR}{{0,80}}[a-z])[a-z0-9+/=_-]{{16,}}",
    ),
    (
        rf"\b(?:env|arg|setenv|set(?:\s{{1,9}}-\w{{1,3}})?)[ \t]{{1,9}}"
        rf"\w{{0,60}}(?:{SECRET_WORDS})\w{{0,60}}[ \t]{{1,9}}",
        rf"(?!to[ \t]){_SHELL_WORD}",
    ),
    (
        rf"(?<![\w.-])[\w.-]{{0,60}}[_.-](?:{SECRET_WORDS}|key)(?:_?token|[_.](?:id|key))?[ \t|]{{1,20}}",
        rf"{_MIXED}[^\s,;\"'=:(|]{{6,}}(?![(=:])",
    ),
    # names and values of a call
    (
        rf"\w\(\s{{0,9}}[\"'][\w.-]{{0,60}}(?:{SECRET_WORDS}|{SHORT_WORDS}|_key)[\w.-]{{0,40}}[\"'],\s{{0,9}}(?=[\"'])",
        _SHELL_WORD,
    ),
    (r"\blogin\(\s{0,9}(?:(?:key|token)\s{0,3}=\s{0,3})?(?=[\"'])|BasicAuth\([^,()\n]{1,200},\s{0,9}", _SHELL_WORD),
    (r"\bpass(?:word|wd|phrase|code)?:", r"(?![/\s])[^\s\"']{3,}"),
    # options of programs
    (rf"(?<![\w-])--?[\w-]{{0,80}}(?:{SECRET_WORDS})(?!-stdin)[\w-]{{0,80}}{_NEXT}", rf"(?!-|{_PLAIN}){_SHELL_WORD}"),
    (rf"(?<![\w-])--(?:[\w-]{{0,40}}[_-])?(?:{_LETTERS}|apikey){_NEXT}", rf"(?!-){_SHELL_WORD}"),
    (rf"(?<![\w-])--(?:[\w-]{{0,40}}[_-])?key{_NEXT}", rf"(?!-){_MIXED}[\w+/=-]{{12,}}(?![\w.])"),
    (rf"--from-literal{_NEXT}[\w.-]{{1,100}}=", _SHELL_WORD),
    (
        r"(?<![\w-])-[ki](?:[ \t]{1,9}|=)[\"']?",
        r"(?=[^\s\"']{0,80}\d)(?=[^\s\"']{0,80}[a-z])[a-z0-9+/=_-]{8,}",
    ),
    (rf"\bsshpass\b[^\n|;]{{0,100}}?-(?-i:p)(?:{_NEXT})?", _SHELL_WORD),
    (
        r"\bmc[ \t]{1,9}(?:alias[ \t]{1,9}set|config[ \t]{1,9}host[ \t]{1,9}add)"
        r"[ \t]{1,9}\S{1,100}[ \t]{1,9}\S{1,300}[ \t]{1,9}",
        rf"{_SHELL_WORD}(?:[ \t]{{1,9}}{_SHELL_WORD})?",
    ),
    (
        r"\b(?:rootpw|rclone[ \t]{1,9}obscure|vault[ \t]{1,9}login)[ \t]{1,9}(?:--?[a-z-]{1,30}[ \t]{1,9}){0,3}",
        rf"(?!-){_SHELL_WORD}",
    ),
    (
        r"\b(?:wandb|swanlab|hf|huggingface-cli|modelscope|npm|clearml|ngc)[ \t]{1,9}(?:auth[ \t]{1,9})?login[ \t]{1,9}"
        r"(?:--?[a-z-]{1,30}(?:=\S{0,200})?[ \t]{1,9}){0,3}",
        rf"(?!-){_MIXED}{_SHELL_WORD}",
    ),
    (r"\bnet[ \t]{1,9}use\b[^\n]{0,60}?\\\\\S{1,200}[ \t]{1,9}", rf"(?!/){_SHELL_WORD}"),
    (r"\bhtpasswd\b[^\n|;]{0,100}?\s-\w{0,5}b\w{0,5}\s+\S+\s+\S+\s+", r"\S+"),
    (
        r"(?:\b(?:echo|printf)\s{1,9}(?:-\w\s{1,9}|['\"]%s(?:\\n)?['\"]\s{1,9})?|(?<!<)<<<(?!<)\s{0,9})",
        rf"(?=(?P<piped>{_SHELL_WORD}))(?P=piped)(?=\s{{0,9}}(?:\|\s{{0,9}}(?:sudo|su|passwd|chpasswd|kinit|cryptsetup|docker|podman|gpg|openssl|ssh-add)\b|"
        r">{1,2}\s{0,9}[^\s|;]{0,100}(?:pw|pass|secret|token|cred|netrc|key)))",
    ),
    (
        r"\b(?:sudo|su|login|chpasswd|passwd|kinit|cryptsetup|gpg|openssl|ssh-add|password-stdin|stdin)\b[^\n<]{0,100}<<<\s{0,9}",
        r"(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)",
    ),
    (r"\bsend[ \t]{1,9}(?:--[ \t]{1,9})?\\?\"", r"[^\"\n]{1,200}(?=\\[rn]\\?\")"),
    (r"\bidentified\s{1,9}by\s{1,9}", r"(?:'[^'\n]*'|\"[^\"\n]*\"|\S+)"),
    # prose
    (r"\bpass(?:word|wd|phrase)(?: +is)? +", rf"(?!(?:{_PROSE_WORDS})\b)(?![^\s:=]{{1,60}}[:=])(?![|=~.\[])[^\s:=]+"),
    (
        rf"\b(?:{SECRET_WORDS}|(?:with|the|my|your|api|login|license)[ \t]{{1,3}}key|{_LETTERS})[ \t]{{1,9}}"
        r"(?:(?:is|was|=|是|为)[ \t]{1,9})?[\"']?",
        r"(?=[^\s\"',;]{0,80}\d)(?=[^\s\"',;]{0,80}(?-i:[a-z]))(?=[^\s\"',;]{0,80}(?-i:[A-Z]))[a-z0-9+/=_-]{10,}(?![\w.(/])",
    ),
    (r"\b(?:bearer|basic)\s+", r"[a-z0-9._~+/=-]{8,}"),
)
"""(what stands before it, the secret), upper and lower case alike."""

TOKEN_PATTERNS: tuple[str, ...] = (
    rf"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt]))(?:{_TOKEN_PREFIXES})(?=[a-z_-]{{0,60}}[A-Z0-9])[A-Za-z0-9_-]{{16,}}(?!\.(?:py|so|json|safetensors)\b)(?:\.[A-Za-z0-9_-]{{16,}})?",
    r"\beyJ[A-Za-z0-9_-]{8,4000}\.[A-Za-z0-9_-]{0,4000}(?:\.[A-Za-z0-9_-]{0,4000}){1,3}",
    r"\$(?:1|2[abxy]|5|6|y|apr1|argon2\w{0,2})\$[A-Za-z0-9./=,$+-]{8,}",
    r"\bbce-(?:v3|auth-v1)/[\w/:.-]{8,}",
    r"(?<![\w.])[0-9a-f]{32}\.[A-Za-z0-9]{12,40}(?![\w.])",  # Zhipu
    # the name of a key of Huawei Cloud: twenty capitals and digits, six or more of them letters, as in no serial number
    r"(?<![\w/+.-])(?=[A-Z]{0,19}\d)(?=(?:\d{0,19}[A-Z]){6})[A-Z0-9]{20}(?![\w/+.-])",
    # a word of 32 and more in which capitals, small letters and digits are mixed
    r"(?<![\w/+.=-])(?=[A-Za-z]{0,127}\d)(?=[^a-z\s]{0,127}[a-z])(?=[^A-Z\s]{0,127}[A-Z])"
    r"(?=(?:[A-Za-z]{0,60}\d){3})[A-Za-z0-9]{32,128}(?![\w/+.-])",
    r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+",
)
"""Patterns of tokens and of names of people, anywhere in a text."""

YAML_BLOCK_PATTERN = (
    rf"(?i)^(?P<indent>[ \t]{{0,60}})(?:(?:- )?[\"']?[\w.-]{{0,60}}(?:{SECRET_WORDS})[\w.-]{{0,60}}[\"']?[ "
    rf"\t]{{0,9}}[:=]"
    r"[ \t]{0,9}(?:[!&]{1,2}\w{1,40}[ \t]{1,9})?(?:[|>][-+0-9]{0,3})?[ \t]{0,9}\n"
    r"(?P=indent)(?:[ \t]{1,60}|- ))(?P<secret>\S[^\n]{0,4000}"
    r"(?:\n(?P=indent)(?:[ \t]{1,60}|- )\S[^\n]{0,4000}){0,200})"
)
"""Values that YAML puts on the lines below a key."""

REDACTION_RULES: tuple[re.Pattern[str], ...] = (
    *(re.compile(rf"(?P<secret>{whole})") for whole in BLOCK_PATTERNS),
    re.compile(YAML_BLOCK_PATTERN, re.MULTILINE),
    *(re.compile(rf"(?i)(?:{head})(?P<secret>{secret})") for head, secret in KEYED_PATTERNS),
    *(re.compile(rf"(?P<secret>{token})") for token in TOKEN_PATTERNS),
)
"""Patterns applied in this order; the group `secret` is removed."""
LINES: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...] = tuple(
    (
        re.compile(rf"(?i)\b(?:{program})\b(?:\"[^\"\n]{{0,400}}\"|'[^'\n]{{0,400}}'|\\\n|[^\n|;]){{0,2000}}"),
        re.compile(rf"(?i)[\s\"']{{1,9}}(?:{option})(?P<secret>{secret})"),
    )
    for program, option, secret in COMMANDS
)
"""(a program's line, what is removed in it)."""
ANY_WORD = re.compile(rf"(?i){SECRET_WORDS}|{SHORT_WORDS}|key")
"""Something that may be named after a secret."""
SCRAMBLED = re.compile(
    r"(?<![\w/+.=-])(?=[A-Za-z0-9/+]{36})(?=[^\d\s]{0,60}\d)(?=[^a-z\s]{0,60}[a-z])(?=[^A-Z\s]{0,60}[A-Z])[A-Za-z0-9/+]{36,64}(?![\w/+.-])"
)
"""A key, unless it reads like a path."""
HEX_STRING = re.compile(r"\b[A-Fa-f0-9]{32,}\b")
"""A key, unless a word before it says that it is the name of a commit or of a content."""
HASH_CONTEXT = re.compile(
    r"(?i)(?:commit|revision|\brev|git|head|branch|sha-?\d{0,3}|md5|crc|checksum|digest|blob|hash|etag|(?:actor|node|task|worker|job|object|trace|request|span)[_-]?id)[^\n]{0,12}$"
)


@cache
def load_detect_secrets_patterns() -> tuple[re.Pattern[str], ...]:
    """Return the patterns of detect-secrets (Yelp, Apache-2.0) for what sites hand out.

    Left out are its plugins for entropy, for words and for addresses, which take versions and hashes for secrets, and
    those for npm, JWT and OpenAI, which need hours for a long text without blanks and whose forms stand above.
    """
    found: list[re.Pattern[str]] = []
    for name in _DETECT_SECRETS_PLUGINS:
        module = importlib.import_module(f"detect_secrets.plugins.{name}")
        for plugin in vars(module).values():
            rules = vars(plugin).get("denylist") if isinstance(plugin, type) else None
            if isinstance(rules, (list, tuple)):
                found += [rule for rule in rules if isinstance(rule, re.Pattern)]
    return tuple(found)


KEYED_START = "(?:(?<=\\W)|(?<=^))"
"""Start of the patterns of detect-secrets for a name with its value."""
KEYED_HINT = re.compile(r"(?:key|pwd|pw|password|pass|token)[\"']?\]? *[=: ]", re.IGNORECASE)
"""A text that each of their matches contains; searched first, because it is cheap."""


_DETECT_SECRETS_PLUGINS = (
    "artifactory", "aws", "azure_storage_key", "basic_auth", "cloudant", "discord", "github_token", "gitlab_token",
    "ibm_cloud_iam", "ibm_cos_hmac", "mailchimp", "private_key", "pypi_token", "sendgrid", "slack",
   "softlayer",    "square_oauth", "stripe", "telegram_token", "twilio",
)  # fmt: skip
