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
from matrix import VERSIONS, interpreters
from support import PROGRAMS, ROOT, clean_environment, free_port
from vgpu.environment import Missing, find

sys.path.insert(0, str(ROOT / "tools"))
import release
from compiled import MODULES
from release import MACHINES

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
    run("uv", "build", "--quiet", "--out-dir", folder, ROOT, ZEROMON_COMPILE="0")
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


@pytest.mark.parametrize("build", ["CPU", "CUDA"])
def test_no_extra_touches_torch_or_what_it_requires(
    build: str, wheel: Path, training: tuple[Path, set[str]]
) -> None:
    python, names = training
    if build == "CUDA":
        try:
            python, names = find().python, {"torch"}
        except Missing as missing:
            pytest.skip(str(missing))
    with zipfile.ZipFile(wheel) as parts:
        (place,) = (name for name in parts.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = parts.read(place).decode()
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) - {"dev"}
    assert {"dashboard", "torch"} < extras
    if build == "CUDA":
        extras -= {"torch"}  # NVIDIA's libraries, which it requires, are not installed there
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
    """It is one of this platform; of the agents the hot paths of the hooks alone are compiled."""
    python, _ = training
    run("uv", "build", "--wheel", "--quiet", "--out-dir", tmp_path, ROOT, ZEROMON_COMPILE="1")
    (wheel,) = tmp_path.glob("*.whl")
    assert not wheel.name.endswith("-any.whl")
    run("uv", "pip", "install", "--quiet", "--python", python, wheel)
    modules = "import zeromon.fold.fold as fold, zeromon_agents, zeromon.ring.buffer as ring"
    modules += ", zeromon_agents.runtime.compiled_hooks as hooks"
    shown = run(
        python, "-c", f"{modules}; print(*(m.__file__ for m in (fold, zeromon_agents, ring, hooks)))"
    )
    assert [Path(name).suffix for name in shown.split()] == [".so", ".py", ".py", ".so"]
    trained(python.parent / "zeromon", python, tmp_path)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_compiled_wheel_of_a_release_loads_on_any_linux_of_its_machine(
    machine: str, tmp_path: Path
) -> None:
    run("uv", "build", "--wheel", "--quiet", "--out-dir", tmp_path, ROOT, ZEROMON_COMPILE=machine)
    (wheel,) = tmp_path.glob(f"*-manylinux2014_{machine}.whl")
    with zipfile.ZipFile(wheel) as parts:
        libraries = [parts.read(name) for name in parts.namelist() if name.endswith(".so")]
        assert (
            f"-manylinux2014_{machine}"
            in parts.read(next(name for name in parts.namelist() if name.endswith("/WHEEL"))).decode()
        )
    # On other machines than x86-64 records need a CRC, which the compiled hooks do not make
    assert len(libraries) == len(MODULES) + 1 + (machine == "x86_64")
    for library in libraries:
        assert int.from_bytes(library[18:20], "little") == {"x86_64": 62, "aarch64": 183}[machine]
        names = re.findall(rb"GLIBC_2\.(\d+)", library)
        assert max((int(minor) for minor in names), default=0) <= 17
    assert any(f"-{machine}-linux-gnu.so".encode() in library for library in libraries)


INSTALLERS = {
    "pip": "{python} -m venv {folder} && {folder}/bin/pip install -q {wheel}",
    "uv tool": "UV_TOOL_DIR={folder}/tools UV_TOOL_BIN_DIR={folder}/bin"
    " uv tool install -q -p {python} {wheel}",
    "pipx": "{python} -m venv {folder}/pipx && {folder}/pipx/bin/pip install -q pipx"
    " && PIPX_HOME={folder}/home PIPX_BIN_DIR={folder}/bin {folder}/pipx/bin/pipx install -q {wheel}",
}


@pytest.mark.parametrize("version, python", interpreters(), ids=VERSIONS)
@pytest.mark.parametrize("installer", INSTALLERS)
def test_each_installer_makes_it_run_on_each_python(
    installer: str, version: str, python: str, wheel: Path, tmp_path: Path
) -> None:
    """In a clean environment without torch: what needs none works, what needs it says so."""
    if not python:
        pytest.skip(f"no Python {version} here")
    command = INSTALLERS[installer].format(python=python, folder=tmp_path / "own", wheel=wheel)
    run("bash", "-c", command)
    zeromon = tmp_path / "own" / "bin" / "zeromon"
    places = {"ZEROMON_DIR": str(tmp_path / "rings"), "ZEROMON_STORE": str(tmp_path / "store")}
    assert f"Python {version}." in run(zeromon, "doctor", **places)
    assert "ZeRO-3" in run(zeromon, "plan", "7B", "--devices", "8", **places)
    done = subprocess.run([zeromon, "dash"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "zeromon[dashboard]" in done.stderr


def test_the_sums_of_a_release_are_signed(tmp_path: Path) -> None:
    """By a key of this test; ``sha256sum`` and ``gpg`` verify them."""
    if not shutil.which("gpg"):
        pytest.skip("no gpg here")
    home, key = tmp_path / "gnupg", "test@example.org"
    home.mkdir(mode=0o700)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "a.whl").write_bytes(b"a wheel")
    run("gpg", "--batch", "--passphrase", "", "--quick-gen-key", key, GNUPGHOME=str(home))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNUPGHOME", str(home))
        sums = release.write_sums(tmp_path / "dist")
        release.sign(sums, key)
    run("gpg", "--verify", f"{sums}.asc", sums, GNUPGHOME=str(home))
    assert run("bash", "-c", f"cd {sums.parent}; sha256sum --check SHA256SUMS") == "a.whl: OK\n"
    sums.write_text(sums.read_text().replace("a.whl", "b.whl"))
    with pytest.raises(AssertionError, match="BAD signature"):
        run("gpg", "--verify", f"{sums}.asc", sums, GNUPGHOME=str(home))


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
