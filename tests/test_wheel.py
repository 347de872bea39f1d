"""The wheel: beside a torch that it leaves alone, as a tool with its own environment, and its files."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from matrix import interpreters
from support import PROGRAMS, ROOT, clean_environment, free_port

pytestmark = pytest.mark.long


def run(*command: str | Path, **environment: str) -> str:
    """What *command* prints; with what it said where it fails."""
    done = subprocess.run(
        [str(word) for word in command], env=clean_environment() | environment, cwd="/",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the source distribution, so that this is complete, too."""
    folder = tmp_path_factory.mktemp("dist")
    run("uv", "build", "--quiet", "--out-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def training(tmp_path: Path) -> tuple[Path, set[str]]:
    """The Python of an environment that has torch and numpy with what they require, and their names."""
    home = tmp_path / "training"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    todo, done = ["torch", "numpy"], set()
    while todo:
        name = todo.pop().lower().replace("_", "-")
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        if name in done:
            continue
        done.add(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            source = Path(sysconfig.get_path("purelib"), top)
            if top.endswith(".dist-info"):
                shutil.copytree(source, site / top)  # a link is no distribution to uv
            else:
                (site / top).symlink_to(source)
        wanted = [text for text in found.requires or () if "extra ==" not in text]
        todo += [re.split(r"[^\w.-]", text)[0] for text in wanted]
    return home / "bin" / "python", done


def test_no_extra_touches_torch_or_what_it_requires(
    wheel: Path, training: tuple[Path, set[str]]
) -> None:
    python, names = training
    with zipfile.ZipFile(wheel) as parts:
        (place,) = (name for name in parts.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = parts.read(place).decode()
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) - {"dev"}
    assert {"dashboard", "torch"} < extras
    for extra in ("", *extras):
        plan = run("uv", "pip", "install", "--dry-run", "--python", python, f"{wheel}[{extra}]")
        changed = set(re.findall(r"^ [-+~] ([\w.-]+)", plan, re.MULTILINE))
        assert "zeromon" in changed
        assert not changed & names
        assert not {name for name in changed if name.startswith("nvidia-")} - {"nvidia-ml-py"}
        assert not re.search(r"^ [-~]", plan, re.MULTILINE)


def test_it_works_beside_torch_outside_of_the_checkout(
    wheel: Path, training: tuple[Path, set[str]], tmp_path: Path
) -> None:
    python, _ = training
    run("uv", "pip", "install", "--quiet", "--python", python, wheel)
    trained(python.parent / "zeromon", python, tmp_path)
    share = python.parents[1] / "share"
    page = share / "man" / "man1" / "zeromon.1"
    for name in ("ZEROMON ATTACH", "ZEROMON TRACE CAPTURE"):
        assert f"\n.SH {name}\n" in page.read_text()
    if shutil.which("man"):
        shown = run("man", "--warnings", "-l", page, MANWIDTH="80")
        assert "troff:" not in shown and "--sd-file FILE" in shown
    bash = share / "bash-completion" / "completions" / "zeromon"
    asked = "COMP_WORDS=(zeromon rep); COMP_CWORD=1; _shtab_zeromon; echo ${COMPREPLY[@]}"
    assert run("bash", "-c", f"source {bash}; {asked}").split() == ["report"]
    assert (share / "zsh/site-functions/_zeromon").read_text().startswith("#compdef zeromon\n")
    assert "complete -c zeromon" in (share / "fish/vendor_completions.d/zeromon.fish").read_text()


def test_a_tool_of_another_python_watches_the_training_of_an_environment_without_zeromon(
    wheel: Path, training: tuple[Path, set[str]], tmp_path: Path
) -> None:
    python, _ = training
    own = platform.python_version().rpartition(".")[0]
    others = [path for version, path in interpreters() if path and version != own]
    tools = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    run("uv", "tool", "install", "--quiet", "--python", (others or [sys.executable])[-1], wheel,
        **tools)  # fmt: skip
    zeromon = tmp_path / "bin" / "zeromon"
    trained(zeromon, python, tmp_path)
    path = f"{python.parent}:{os.environ['PATH']}"
    assert f"of {python}" in run(zeromon, "doctor", PATH=path, ZEROMON_DIR=str(tmp_path / "rings"))
    done = subprocess.run([zeromon, "dash"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "uv tool install 'zeromon[dashboard]'" in done.stderr


def test_a_compiled_wheel_runs_beside_torch(training: tuple[Path, set[str]], tmp_path: Path) -> None:
    """It is one of this platform, and the agents in it are the Python that they are everywhere."""
    python, _ = training
    run("uv", "build", "--wheel", "--quiet", "--out-dir", tmp_path, ROOT, ZEROMON_COMPILE="1")
    (wheel,) = tmp_path.glob("*.whl")
    assert not wheel.name.endswith("-any.whl")
    run("uv", "pip", "install", "--quiet", "--python", python, wheel)
    modules = "import zeromon.fold.fold as fold, zeromon_agents, zeromon.ring.buffer as ring"
    shown = run(python, "-c", f"{modules}; print(*(m.__file__ for m in (fold, zeromon_agents, ring)))")
    assert [Path(name).suffix for name in shown.split()] == [".so", ".py", ".py"]
    trained(python.parent / "zeromon", python, tmp_path)


def trained(zeromon: Path, python: Path, folder: Path) -> None:
    """Five steps by *python* under *zeromon run*; then the record has them."""
    places = {"ZEROMON_DIR": str(folder / "rings"), "ZEROMON_STORE": str(folder / "store"),
              "ZEROMON_PORT": str(free_port())}  # fmt: skip
    version = importlib.metadata.version("zeromon")
    assert run(zeromon, "--version").split() == ["zeromon", version]
    asked = "import importlib.util as u; print(u.find_spec('zeromon'))"
    assert ("None" in run(python, "-c", asked)) == (zeromon.parent != python.parent)
    said = run(zeromon, "run", "--name", "wheel", "--", python, PROGRAMS / "tiny.py",
               PAUSE="0.3", **places)  # fmt: skip
    assert "watching run wheel" in said and "not watched" not in said
    shown = run(zeromon, "report", "wheel", **places)
    assert re.search("step 5|after 5 steps", shown) and "1 of 1 ranks" in shown
