"""Words of other languages for passwords and keys, written as they are; patterns see them without accents."""

from __future__ import annotations

import re

from anabatic.doctor.redaction_text import fold_text

_APART = (
    "losungswort|geheimwort|geheimnis|zugangsdaten|zugangscode|zugriffstoken|"
    "mots? de passe|motdepasse|mdp|jetons?|code d['’]?accès|phrase secrète|identifiants de connexion|"
    "contraseñas?|contrasenya|clave secreta|clave privada|clave de acceso|clave|secreto|"
    "senhas?|palavra passe|segredo|parola d['’]ordine|parola chiave|segreto|"
    "пароль|пароли|пароля|паролем|секрет|токен|токена|гасло|парола|лозинка|"
    "hasło|hasła|heslo|geslo|lozinka|zaporka|jelszó|jelszava|parolă|parola|şifre|şifresi|"
    "wachtwoord|wagwoord|lösenord|adgangskode|kodeord|passord|lykilorð|salasana|parool|slaptažodis|"
    "mật khẩu|mat khau|kata sandi|sandi|kata laluan|"
    "κωδικός|κωδικός πρόσβασης|συνθηματικό|סיסמה|סיסמא|كلمة المرور|كلمة السر|كلمه السر|رمز عبور|گذرواژه"
)
"""Words for a password or a token, with blanks around them."""
_JOINED = (
    "passwort|passwörter|kennwort|密[ ]?码|密[ ]?碼|口[ ]?令|密钥|密鑰|秘钥|秘鑰|密匙|私钥|私鑰|金鑰|金钥|权杖|權杖|"
    "令牌|凭证|憑證|凭据|憑據|通行码|通行碼|"
    "授权码|授權碼|激活码|验证码|驗證碼|提取码|访问码|暗号|パスワード|パスコード|パスフレーズ|暗証番号|秘密鍵|トークン|シークレット|"
    "合言葉|認証キー|アクセスキー|비밀번호|비밀 번호|패스워드|암호|토큰|비밀키|비밀 키|인증키|개인키|รหัสผ่าน|पासवर्ड"
)
"""The same in languages that do not part words."""
_KEYS = (
    "schlüssel|geheimschlüssel|clés?|llave|chave|chiave|klucz|klíč|kľúč|kulcs|sleutel|nyckel|nøkkel|nøgle|avain|anahtar|"
    "cheie|khóa|kunci|ключ|ключа|κλειδί"
)
"""Words for any key."""

SECRET_MARK, KEY_MARK = "\ue000", "\ue001"
"""Stand-ins that patterns see for a word for a secret, and for one for a possible key."""


def _compile(apart: str, joined: str) -> re.Pattern[str]:
    apart, joined = fold_text(apart).replace(" ", "[ _-]?"), fold_text(joined)
    first = "".join(sorted({word[0] for word in f"{apart}|{joined}".split("|") if word[0].isalpha()}))
    pattern = rf"(?=[{first}])(?:(?<![^\W\d_])(?:{apart})(?![^\W\d_])|{joined})"
    return re.compile(pattern, re.IGNORECASE)


MARKED_WORDS = ((_compile(_APART, _JOINED), SECRET_MARK), (_compile(_KEYS, fold_text("キー|키")), KEY_MARK))
"""(words, the mark in their place)."""
