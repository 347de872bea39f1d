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


def mask_words(arguments: Sequence[str]) -> list[str]:
    """*arguments* of a command with :data:`MASK` in place of secrets; of a text, its only word.

    The value of an option is the rest of its word, or the next word.
    """
    masked_words: list[str] = []
    for argument in arguments:
        previous = masked_words[-1] if masked_words else ""
        is_option = previous.startswith("-") and "=" not in previous and " " not in previous
        # In `--token --verbose` the second word is an option and no value
        if is_option and is_secret_name(previous) and not argument.startswith("-"):
            masked_words.append(MASK)
        else:
            masked_words.append(_mask_text(argument))
    return masked_words


def is_secret_name(name: str) -> bool:
    """Returns whether an option, variable or key named *name* has a secret as its value."""
    segments = [segment.lower() for segment in _WORDS.findall(name)]
    last_word, word_before = (segments or [""])[-1], segments[-2] if len(segments) > 1 else ""
    if last_word in _ALWAYS:
        return True
    if last_word == "token":
        return word_before not in _TOKENIZERS
    if last_word == "key":
        return word_before in _KEYS or name.isupper() or name.lstrip("-") == "key"
    return (last_word == "pass" and word_before in _PASSES) or (
        last_word == "auth" and word_before in _AUTHS
    )


def _mask_text(message: str) -> str:
    message = _LOGIN.sub(rf"\1:{MASK}@", message)
    message = _USER.sub(MASK, message)
    message = _SHAPES.sub(MASK, message)
    message = _BEARER.sub(rf"\1 {MASK}", message)
    return _mask_named_values(_ASSIGNED, _mask_named_values(_OPTION, message))


def _mask_named_values(named: re.Pattern[str], message: str) -> str:
    """*message* with masks in place of the values that follow what *named* finds."""
    chunks, done, position = [], 0, 0
    while match := named.search(message, position):
        position = match.end()
        value = _VALUE.match(message, position) if is_secret_name(match[1]) else None
        if value is not None and _is_secret_value(match[1], match[2], value[0]):
            quote = value[0][0] if value[0][0] in "\"'" else ""
            chunks.append(f"{message[done:position]}{quote}{MASK}{quote}")
            done = position = value.end()
    return "".join((*chunks, message[done:]))


def _is_secret_value(name: str, separator: str, value: str) -> bool:
    """Returns whether *value*, which follows the name of a secret, is the secret itself."""
    if value.strip("\"'") in ("None", "null", "True", "False", "true", "false", "", MASK):
        return False
    if value.startswith("-") and not separator.strip().startswith(("=", ":")):
        return False  # an option without a value, and the next one
    is_prose = separator.strip(" ") == ":" and separator != ":" and not name.isupper()
    # "unexpected token: }" has no secret
    return not is_prose or _is_strong_name(name) or _RANDOM.fullmatch(value) is not None


def _is_strong_name(name: str) -> bool:
    """Returns whether *name* alone announces a secret, even within a sentence."""
    return _WORDS.findall(name)[-1].lower() in _ALWAYS
