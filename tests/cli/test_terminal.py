"""What a person at a terminal gets: help, suggestions, colour, wrapped lines, completion."""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from builders import rank, run
from command_line import zeromon

from zeromon.cli import VERBS, build_parser, main
from zeromon.cli.parser import walk_parser_actions
from zeromon.cli.terminal import style_output
from zeromon.storage.run_store import Store


def at_a_terminal(home: Path, *words: str, columns: int = 80, **extra: str) -> str:
    """What `zeromon` writes to a terminal of that width."""
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {
        "ZEROMON_DIR": str(home / "rings"), "ZEROMON_STORE": str(home / "store"),
        "COLUMNS": str(columns), "TERM": "xterm-256color",
    }  # fmt: skip
    return written_to_terminal([sys.executable, "-m", "zeromon", *words], environment | extra)


def written_to_terminal(command: list[str], environment: Mapping[str, str]) -> str:
    """What *command* writes to a terminal."""
    outer, inner = pty.openpty()
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=inner, stderr=inner
    ) as running:
        os.close(inner)
        parts = []
        while True:
            try:
                part = os.read(outer, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            if not part:
                break
            parts.append(part)
        running.wait()
    os.close(outer)
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_without_words_and_with_help_there_is_help(tmp_path: Path) -> None:
    """As --help, also of a verb."""
    bare = zeromon(tmp_path)
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout == zeromon(tmp_path, "help").stdout == zeromon(tmp_path, "--help").stdout
    assert zeromon(tmp_path, "help", "runs").stdout == zeromon(tmp_path, "runs", "-h").stdout
    assert zeromon(tmp_path, "-V").stdout == zeromon(tmp_path, "--version").stdout


@pytest.mark.parametrize(
    "words",
    [*([verb] for verb in VERBS),
     *(["trace", one] for one in ("capture", "analyze", "diff", "memory", "flight"))],
)  # fmt: skip
def test_the_help_fits_a_small_terminal(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        build_parser(words[0]).parse_args([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert not [line for line in lines if line.count("  zeromon ") > 1], "examples are wrapped"
    if words == ["trace"]:
        assert sum(line.startswith("  zeromon trace ") for line in lines) == 11


def test_the_help_lists_each_verb_once_below_a_title(tmp_path: Path) -> None:
    """In lines that fit the manual page, before the options."""
    text = at_a_terminal(tmp_path, "--help", columns=74, NO_COLOR="1")
    assert max(map(len, text.splitlines())) <= 74
    commands, _, _ = text.partition("\noptions:\n")
    assert re.findall(r"^  ([a-z]+)  ", commands, re.MULTILINE) == list(VERBS)
    assert "#" not in commands
    assert len(re.findall(r"^[A-Z][a-z ]+:$", commands, re.MULTILINE)) == 4
    assert "\x1b[1mWatch a run" in at_a_terminal(tmp_path, "--help")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["atach"], "zeromon: unknown command 'atach'; did you mean attach"),
        (["--completion", "zhs"], "zeromon: --completion: there is no zhs; did you mean zsh?"),
        (["trace", "captur"], "zeromon trace: unknown action 'captur'; did you mean capture?"),
        (["report", "--jsno"], "zeromon report: unknown option --jsno; did you mean --json?"),
        (["run", "--nme=x"], "zeromon run: unknown option --nme; did you mean --name?"),
        (["attach", "--every", "abc"], "zeromon attach: --every: 'abc' is not a number"),
        (["trace", "capture", "--steps=x"], "zeromon trace capture: --steps: 'x' is not a whole number"),
        (["attach", "--speed", "fast"], "zeromon attach: --speed: 'fast' is not a number"),
        (["attach", "r", "--replay", "--json"], "zeromon attach: --json: not allowed with"),
        (["dash", "--replay", "--prometheus=x"], "zeromon dash: --prometheus: not allowed with"),
        (["report", "-o"], "zeromon report: -o: expected one argument"),
        (["report", "--output"], "zeromon report: --output: expected one argument"),
        (["report", "--wait", "-1"], "zeromon report: --wait: must be 0 or more, not -1"),
        (["plan", "7B", "--gpu"], "zeromon plan: --gpu: expected one argument"),
        (["export", "x", "--to", "parqet"], "zeromon export: --to: there is no parqet; did you mean"),
        (["prometheus", "rulez"], "zeromon prometheus: unknown action 'rulez'; did you mean rules?"),
        (["rule", "ZM302", "more"], "zeromon rule: unexpected argument: more"),
        (["attach", "localhost:99999"], "zeromon: 99999 is not a port"),
    ],
)  # fmt: skip
def test_errors_name_what_was_typed(tmp_path: Path, words: list[str], text: str) -> None:
    """Two lines: the verb, the option as typed, what is near it; then where help is. No usage."""
    done = zeromon(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(text)
    assert "--help" in second or "Like: " in second


@pytest.mark.parametrize(
    ("words", "formats"),
    [
        (["report", "-o", "x.pdf"], ".html and .png"),
        (["trace", "memory", "x.pickle", "-o", "x.csv"], ".html"),
    ],
)
def test_a_format_that_is_not_written_is_refused(tmp_path: Path, words: list[str], formats: str) -> None:
    """Before anything is read, and with the formats that there are."""
    done = zeromon(tmp_path, *words, cwd=str(tmp_path))
    assert done.returncode == 2
    assert f"{words[-1]}: {words[-1][1:]} is not a format of -o" in done.stderr
    assert f"It writes {formats}." in done.stderr
    assert not (tmp_path / words[-1]).exists()


@pytest.mark.parametrize("verb", VERBS)
def test_the_grammar_of_options_is_one(verb: str) -> None:
    """An output file is -o and --output, JSON is --json, a positional is in capitals."""
    for action in walk_parser_actions(build_parser(verb)):
        names = set(action.option_strings)
        assert not names & {"-o", "--output"} or {"-o", "--output"} <= names
        if action.help is not argparse.SUPPRESS:
            assert not names & {"--html", "--out", "--format", "--interval-seconds"}
            assert "--json" not in names or action.const is True
            assert names or action.metavar is None or action.metavar.isupper()


# ---- colour and width -----------------------------------------------------------------------------


def test_lines_are_wrapped_and_painted_by_what_they_say() -> None:
    """Severities, the verdict, diffs and headings; a table stays as it is."""
    text = (
        "Findings\n!! ZM201 dying\n ! ZM301 slow\n"
        "  + a\n  - b\n  one two three four five\n  a    b    c    d    e    f\n"
    )
    assert style_output(text, 20, coloured=False).splitlines() == [
        "Findings", "!! ZM201 dying", " ! ZM301 slow", "  + a", "  - b", "  one two three four",
        "    five", "  a    b    c    d    e    f",
    ]  # fmt: skip
    painted = style_output(text, 200, coloured=True).splitlines()
    assert [line[2:4] for line in painted[:5]] == ["1m", "31", "33", "32", "31"]
    assert painted[5] == "  one two three four five"
    assert all(line.endswith("\x1b[0m") for line in painted[:5])


def test_a_terminal_gets_colour_and_a_pipe_plain_text(tmp_path: Path) -> None:
    """NO_COLOR takes the colour away and leaves the width."""
    dead = rank(0, failed=True, ended="SIGKILL", alive=False)
    Store(tmp_path / "store").save(run(dead, run="bad", ended=True, command=("word",) * 40))
    piped = zeromon(tmp_path, "report").stdout
    assert "\x1b" not in piped
    shown = at_a_terminal(tmp_path, "report")
    assert "\x1b[31m  ✖ dead" in shown
    plain = at_a_terminal(tmp_path, "report", NO_COLOR="1")
    assert "\x1b" not in plain
    assert any("word" in line and len(line) > 80 for line in piped.splitlines())
    assert not any("word" in line and len(line) > 80 for line in plain.splitlines())
    assert plain.split() == piped.split()


@pytest.mark.parametrize(
    "kernel", [{"JPY_PARENT_PID": "1"}, {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}]
)
def test_a_cell_of_a_notebook_gets_no_line_that_another_replaces(
    tmp_path: Path, kernel: dict[str, str]
) -> None:
    """A kernel gives commands a terminal whose every line stays on the page."""
    code = (
        "from zeromon.cli.terminal import show_progress\n"
        "from zeromon.export.files import Progress\n"
        "for number in 1, 1, 2: show_progress(f'{number} of 6 steps')\n"
        "bar = Progress(2, patience=0); bar.add(1); bar.end()"
    )
    command = [sys.executable, "-c", code]
    assert written_to_terminal(command, os.environ | kernel) == ""
    shown = written_to_terminal(command, {k: v for k, v in os.environ.items() if k not in kernel})
    assert shown.count("1 of 6 steps") == 2 and "[##########" in shown


def test_a_table_has_the_columns_that_fit_a_terminal(tmp_path: Path) -> None:
    """A pipe gets all of them."""
    words = "plan", "7B", "--devices", "8", "--gpu", "a100-80", "--micro-batch", "1", "--length", "512"
    piped = zeromon(tmp_path, *words, "--changes").stdout
    assert max(map(len, piped.splitlines())) > 100 and piped.count("(min to max)") == 2
    for columns, intervals in ((150, 2), (130, 1), (100, 0), (80, 0)):
        shown = at_a_terminal(tmp_path, *words, "--changes", columns=columns, NO_COLOR="1")
        assert shown.count("(min to max)") == intervals
        assert max(map(len, shown.splitlines())) <= columns


def test_pages_of_rules_are_drawn_at_a_terminal(tmp_path: Path) -> None:
    """Markdown into a pipe; no signs of Markdown at a terminal, no line wider than it."""
    assert "## Why" in zeromon(tmp_path, "rule", "ZM302").stdout
    shown = re.sub(r"\x1b\[[0-9;]*m", "", at_a_terminal(tmp_path, "rule", "ZM302", columns=60))
    assert "Why" in shown
    assert "##" not in shown
    assert max(map(len, shown.splitlines())) <= 60


# ---- completion -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_verb_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script is made from the parsers; that of bash completes verbs, options and runs."""
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as left:
        main(["--completion", shell])
    assert not left.value.code
    script = capsys.readouterr().out
    for word in ("attach", "sweep", "fail-on", "no-browser"):
        assert word in script
    assert "_zeromon_runs" in script


def test_bash_completes(tmp_path: Path) -> None:
    """As typed: `zeromon com<TAB>`, `zeromon report --js<TAB>`, `zeromon report ba<TAB>`."""
    pytest.importorskip("shtab")
    Store(tmp_path / "store").save(run(rank(0), run="baseline", ended=True))
    script = tmp_path / "completion.bash"
    script.write_text(zeromon(tmp_path, "--completion", "bash").stdout)
    for words, expected in (
        ("zeromon comp", {"compare"}),
        ("zeromon --completion z", {"zsh"}),
        ("zeromon report --js", {"--json"}),
        ("zeromon report ba", {"baseline"}),
    ):
        line = words.split()
        code = (
            f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; "
            f"_shtab_zeromon zeromon {line[-1]} {line[-2]}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        )
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, check=False,
            env=os.environ | {"ZEROMON_STORE": str(tmp_path / "store")},
        )  # fmt: skip
        assert {word.strip() for word in done.stdout.split()} == expected, done.stderr


def test_without_shtab_the_way_out_is_said(tmp_path: Path) -> None:
    """As where the extra is not installed."""
    code = (
        "import sys; sys.modules['shtab'] = None; "
        "from zeromon.cli import main; sys.exit(main(['--completion', 'zsh']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "zeromon[completion]" in done.stderr
