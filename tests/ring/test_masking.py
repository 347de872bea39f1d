"""Secrets are masked in commands, texts and settings, and what is none stays as it is."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from zeromon.ring.masking import MASK, is_secret_name, mask_words

S = "hunter2-Zx9"
"""The secret in each form."""
KEYS = (
    "ghp_0123456789abcdefghijABCDEFGHIJ456789", "hf_abcdefghijklmnopqrstuvwxyzABCD",
    "sk-proj-abcdefghijklmnopqrstuvwx", "glpat-abcdefghij0123456789", "xoxb-123456789012-abcdef",
    "AKIAIOSFODNN7EXAMPLE", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF",
)  # fmt: skip
COMMANDS = [
    ["train.py", "--password", S],
    ["train.py", f"--password={S}"],
    ["train.py", "--db-password", S],
    ["train.py", "--db_password", S],
    ["train.py", "-password", S],
    ["train.py", "--passwd", S, "--lr", "3"],
    ["train.py", "--api-key", S],
    ["train.py", "--api_key", S],
    ["train.py", "--apikey", S],
    ["train.py", "--apiKey", S],
    ["train.py", "--wandb-key", S],
    ["train.py", "--wandb_api_key", S],
    ["train.py", "--hf-token", S],
    ["train.py", "--hub_token", S],
    ["train.py", "--token", S],
    ["train.py", "--access-token", S],
    ["train.py", "--accessToken", S],
    ["train.py", "--client-secret", S],
    ["train.py", "--secret", S],
    ["train.py", "--secret-access-key", S],
    ["train.py", "--credentials", S],
    ["train.py", "--passphrase", f"{S} and more"],
    ["train.py", "--pass", S],
    ["train.py", "--key", S],
    ["train.py", "--auth", f"me:{S}"],
    ["train.py", "--pwd", S],
    ["train.py", f"wandb.api_key={S}"],
    ["train.py", f"+model.hub.token={S}"],
    ["train.py", f"++trainer.logger.password='{S}'"],
    ["env", f"WANDB_API_KEY={S}", "python", "train.py"],
    ["env", f"AWS_SECRET_ACCESS_KEY={S}", "python", "train.py"],
    ["env", f"MYAPP_KEY={S}", "python"],
    ["env", f"DB_PASS={S}", "python"],
    ["docker", "run", "-e", f"HF_TOKEN={S}", "image"],
    ["bash", "-c", f"export HF_TOKEN={S}; python train.py"],
    ["bash", "-c", f"python train.py --password {S} --lr 3"],
    ["bash", "-c", f"python train.py --password '{S}'"],
    ["curl", "-H", f"Authorization: Bearer {S}"],
    ["curl", "-H", f"Authorization: Basic {S}"],
    ["curl", "-H", f"X-Api-Key: {S}"],
    ["train.py", "--url", f"https://user:{S}@host/path"],
    ["train.py", f"--dsn=postgresql://user:{S}@host:5432/db"],
    ["train.py", "--redis", f"redis://:{S}@host:6379/0"],
    ["train.py", "--store", f"s3://key:{S}@bucket/part"],
    ["train.py", "--config", f'{{"password": "{S}", "lr": 3}}'],
    ["train.py", "--config", f"{{'api_key': '{S}'}}"],
    ["train.py", "--config", f"password: {S}"],
    ["train.py", "--hook", f"https://host/hook?token={S}&a=1"],
    ["train.py", "--hook", f"https://host/hook?a=1&access_token={S}"],
]
TEXTS = [
    f"RuntimeError: https://u:{S}@h/",
    f"cannot connect to mysql+pymysql://u:{S}@h:3306/db?charset=utf8",
    f"ConnectionError: ('amqp://u:{S}@h', 5)",
    f"OSError: two: http://a:{S}@h/x and http://b:{S}@h/y",
    f"Command '['train.py', '--password', '{S}']' returned non-zero exit status 1.",
    f"Command '['train.py', '--api-key={S}', '--lr', '3']' timed out",
    f"KeyError: {{'password': '{S}'}}",
    f"ValueError: login(user='me', password='{S}') failed",
    f"ValueError: Config(lr=3, api_key='{S}', name='a')",
    f"ValueError: Config(password={S}, lr=3)",
    f'ValueError: {{"token": "{S}", "lr": 3}}',
    f"401 for password: {S}",
    f"401 for PASSWORD: {S}",
    f"401: Authorization: Bearer {S}",
    f"sent header Bearer {S}",
    f"environment: WANDB_API_KEY={S}, LR=3",
    f"postgres://u:p/{S}@h/db",
    f"https://u:p@{S}@h/db",
    *(f"invalid credentials {key}" for key in KEYS),
    *(f"https://{key}@github.com/a/b.git" for key in KEYS[:2]),
]
HARMLESS = [
    ["train.py", "--tokenizer", "gpt2", "--max-tokens", "512", "--tokens-per-step", "4096"],
    ["train.py", "--pad-token", "<pad>", "--eos_token", "</s>", "--image-token", "<img>"],
    ["train.py", "--text-key", "content", "--sort_key", "length", "--num-key-value-heads", "8"],
    ["train.py", "--use-auth-token", "--lr", "3e-4"],
    ["train.py", "--forward-pass", "2", "--passes", "3", "--token-file", "/home/me/token"],
    ["torchrun", "--nproc-per-node", "2", "--rdzv-endpoint", "host:29500", "train.py"],
    ["train.py", "--url", "https://host:8080/path?x=1", "--mail", "me@host"],
    ["train.py", "--url", "http://host:8080/user@domain"],
    ["SyntaxError: unexpected token: } at line 3"],
    ["KeyError: 'password'"],
    ["RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB"],
    ["TypeError: key must be a string, not int"],
    ["ValueError: password=None, token=None"],
    ["AssertionError: tokens: 512, hidden: 64"],
]


@pytest.mark.parametrize("words", [*COMMANDS, *([text] for text in TEXTS)], ids=str)
def test_a_secret_is_masked(words: list[str]) -> None:
    found = mask_words(words)
    assert len(found) == len(words) and MASK in " ".join(found)
    assert S not in " ".join(found) and not any(key in " ".join(found) for key in KEYS)
    assert mask_words(found) == found


def test_there_are_sixty_forms() -> None:
    assert len(COMMANDS) + len(TEXTS) >= 60


@pytest.mark.parametrize("words", HARMLESS, ids=str)
def test_what_is_no_secret_stays(words: list[str]) -> None:
    assert mask_words(words) == words


def test_what_surrounds_a_secret_stays() -> None:
    assert mask_words(["a.py", "--password", S, "--lr", "3"]) == [
        "a.py",
        "--password",
        MASK,
        "--lr",
        "3",
    ]
    assert mask_words([f"https://u:{S}@h/x?a=1"]) == [f"https://u:{MASK}@h/x?a=1"]
    assert mask_words([f'{{"password": "{S}", "lr": 3}}']) == [f'{{"password": "{MASK}", "lr": 3}}']


@given(st.lists(st.text(max_size=60), max_size=6))
def test_any_words_are_masked_once(words: list[str]) -> None:
    found = mask_words(words)
    assert len(found) == len(words)


@pytest.mark.parametrize(
    "piece", ["://", "a:", "password", "--key ", "'", "\\", "://u:", "@", "eyJ", "Bearer ", "a=", "_-."]
)
def test_a_long_text_takes_no_longer_than_its_length(piece: str) -> None:
    """CPU time, of this thread: twice the text takes about twice as long, not four times."""

    def cost(count: int) -> float:
        text = piece * count
        began = time.thread_time()
        mask_words([text])
        return time.thread_time() - began

    assert cost(4000) < 2.0


def test_names() -> None:
    assert all(map(is_secret_name, ("HF_TOKEN", "--password", "db.password", "SECRET_KEY", "authToken")))
    assert not any(map(is_secret_name, ("", "-", "OMP_NUM_THREADS", "MASTER_ADDR", "monkey", "tokens")))
