"""Masks secrets in what is recorded of a program: its command, its exceptions, its settings.

A record is shown to others: as an HTML report, to an assistant, in a ticket. What is masked is the
value of an option or variable named like a secret, the password of an address, and what looks like the
key of a well-known service. It is a filter, no proof: a password in a sentence stays.
"""

import re
from collections.abc import Sequence

MASK = "***"

_ALWAYS = frozenset(
    ("password", "passwd", "passphrase", "passcode", "pwd", "pw", "secret", "secrets", "credential",
     "credentials", "apikey", "authkey", "accesskey", "secretkey", "privatekey", "apitoken", "authtoken",
     "accesstoken", "authorization", "userpwd", "cookie", "dsn"),
)  # fmt: skip
"""The last words of names of secrets."""
_TOKENIZERS = frozenset(
    ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "audio", "video", "special", "stop",
     "start", "end", "begin", "per", "next", "prefix", "suffix", "trigger", "instance", "class",
     "placeholder", "initializer", "modifier", "response", "decoder", "additional",
     "max", "min", "num", "n", "total",
     "every", "each", "first", "last", "unexpected", "tokenizer"),
)  # fmt: skip
"""Words before ``token`` where it is one of a tokenizer, or a number of them."""
_KEYS = frozenset(
    ("api", "access", "private", "secret", "account", "auth", "encryption", "signing", "ssh", "license",
     "master", "service", "storage", "subscription", "client", "app", "application", "session", "shared",
     "deploy", "webhook", "host", "wandb", "hf", "aws", "openai", "azure", "gcp", "comet", "neptune",
     "clearml", "anthropic", "sas"),
)  # fmt: skip
"""Words before ``key`` where it is a secret; ``text_key`` and ``sort_key`` are none."""
_PASSES = frozenset(
    ("", "db", "database", "smtp", "mail", "mysql", "postgres", "pg", "redis", "mongo", "user", "login",
     "ftp", "admin", "root", "proxy", "sudo", "http", "basic", "my"),
)  # fmt: skip
"""Words before ``pass`` where it is a password; ``forward_pass`` is none."""
_AUTHS = frozenset(("", "proxy", "basic", "redis", "http", "registry", "docker", "npm"))
"""Words before ``auth`` where it is a login; ``use_auth`` is a switch."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NAME = r"[A-Za-z_][A-Za-z0-9_.\-]{0,80}"
_VALUE = re.compile(
    r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|(?:(?:Bearer|Basic|Token)\s+)?[^\s\"',;&)}\]]+"
)
_ASSIGNED = re.compile(rf"(?<![A-Za-z0-9_.\-])(-{{0,2}}{_NAME})([\"']?\s{{0,9}}[:=]\s{{0,9}})")
_OPTION = re.compile(rf"(?<![A-Za-z0-9_.\-])(--?{_NAME})([\"']?[,\s]{{1,9}})")
_LOGIN = re.compile(r"(?<=://)([^\s/?#:@\"'<>]*):(?!\d+[/?#])[^\s\"'<>]*@")
_USER = re.compile(r"(?<=://)[A-Za-z0-9_\-.~%+]{20,}(?=@)")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9_\-.~+/=]{8,}")
_SHAPES = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
"""Keys of GitHub, GitLab, Hugging Face, OpenAI, Slack, AWS and Google; JSON web tokens."""
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z]).{8,}")


def masked(words: Sequence[str]) -> list[str]:
    """*words* of a command with :data:`MASK` in place of secrets; of a text, its only word.

    The value of an option is the rest of its word, or the next word.
    """
    found: list[str] = []
    for word in words:
        before = found[-1] if found else ""
        is_option = before.startswith("-") and "=" not in before and " " not in before
        if is_option and is_secret(before) and not word.startswith("-"):
            found.append(MASK)
        else:
            found.append(_masked_text(word))
    return found


def is_secret(name: str) -> bool:
    """Returns whether an option, variable or key named *name* has a secret as its value."""
    parts = [part.lower() for part in _WORDS.findall(name)]
    last, before = (parts or [""])[-1], parts[-2] if len(parts) > 1 else ""
    if last in _ALWAYS:
        return True
    if last == "token":
        return before not in _TOKENIZERS
    if last == "key":
        return before in _KEYS or name.isupper() or name.lstrip("-") == "key"
    return (last == "pass" and before in _PASSES) or (last == "auth" and before in _AUTHS)


def _masked_text(text: str) -> str:
    text = _LOGIN.sub(rf"\1:{MASK}@", text)
    text = _USER.sub(MASK, text)
    text = _SHAPES.sub(MASK, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    return _without_values(_ASSIGNED, _without_values(_OPTION, text))


def _without_values(named: re.Pattern[str], text: str) -> str:
    """*text* with masks in place of the values that follow what *named* finds."""
    parts, done, position = [], 0, 0
    while found := named.search(text, position):
        position = found.end()
        value = _VALUE.match(text, position) if is_secret(found[1]) else None
        if value is not None and _has_secret(found[1], found[2], value[0]):
            quote = value[0][0] if value[0][0] in "\"'" else ""
            parts.append(f"{text[done:position]}{quote}{MASK}{quote}")
            done = position = value.end()
    return "".join((*parts, text[done:]))


def _has_secret(name: str, between: str, value: str) -> bool:
    """Returns whether *value*, which follows the name of a secret, is the secret itself."""
    if value.strip("\"'") in ("None", "null", "True", "False", "true", "false", "", MASK):
        return False
    if value.startswith("-") and not between.strip().startswith(("=", ":")):
        return False  # an option without a value, and the next one
    is_prose = between.strip(" ") == ":" and between != ":" and not name.isupper()
    # "unexpected token: }" has no secret
    return not is_prose or _is_strong(name) or _RANDOM.fullmatch(value) is not None


def _is_strong(name: str) -> bool:
    """Returns whether *name* alone announces a secret, even within a sentence."""
    return _WORDS.findall(name)[-1].lower() in _ALWAYS
