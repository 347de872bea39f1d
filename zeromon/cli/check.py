"""Checks training configurations before the run: DeepSpeed JSON, accelerate YAML, Python scripts.

The YAML of LLaMA-Factory, axolotl, torchtune and TRL is checked, too. Scripts are parsed, never
executed. In a folder, all .json, .yaml, .yml and .py files that are training configurations are checked.
With a model and a machine, the strategy itself is checked, too.

  zeromon check ds_config.json accelerate.yaml train.py
  zeromon check a.yaml ds.json -- accelerate launch --config_file a.yaml train.py    with the command
  zeromon check train.py launch.sh              the same; comments of a .sh or .txt file name the machine
  zeromon check -- llamafactory-cli train full.yaml bf16=true    a trainer's YAML and its overrides
  zeromon check -- FSDP_VERSION=2 torchrun train.py              accelerate's environment variables
  zeromon check configs/ --ignore ZM208,ZM7
  zeromon check ds_z3.json --model 7B --devices 8 --gpu h100 --host-memory 512
  zeromon check . --sarif findings.sarif        for code scanning and editors
  zeromon rule ZM302                            explains a rule

Exit code 0 without errors and warnings, 1 with any, 2 for wrong usage.
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from zeromon.base.errors import CheckError, PlanError
from zeromon.base.units import counted, printable, printable_lines
from zeromon.check.launch_figures import as_lines
from zeromon.check.problem import SEVERITIES, Machine, Problem, as_sarif
from zeromon.check.runner import Result, check, parse_codes, select_problems
from zeromon.cli import AFTER_DASHES
from zeromon.cli.parser import add_flag, add_option, positive, write_text
from zeromon.cli.plan_setup import add_host_arguments, link_speed, parse_host_memory, parse_memory_size
from zeromon.cli.terminal import is_coloured, show_working
from zeromon.memory.spec import ModelSpec

_COLOURS = {"error": "31", "warning": "33", "info": "36"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon check PATH... [--json] [--sarif FILE] [--model SPEC ...]``"""
    parser.add_argument("paths", nargs="*", metavar="PATH",
                        help="a file or a folder; after -- the launch command")  # fmt: skip
    add_option(parser, "--select", "CODES", "check only these rules: ZM302,ZM5", default="")
    add_option(parser, "--ignore", "CODES", "check all rules but these", default="")
    add_flag(parser, "--verbose", "also print problems that are marked as notes")
    output = parser.add_argument_group("output")
    add_flag(output, "--json", "print JSON")
    add_option(output, "--sarif", "FILE", "write SARIF 2.1.0 to a file; - for stdout")
    machine = parser.add_argument_group("model and machine")
    add_option(machine, "--model", "SPEC", "7B, or a Hugging Face config.json")
    add_option(machine, "--devices", "N", "number of devices", positive)
    add_option(machine, "--gpu", "GPU", "h100, a100-40, ..., or its memory: 80 (GiB), 80GB")
    add_host_arguments(machine, "num_machines of the launch file, else one for 8 devices")
    add_option(
        machine, "--interconnect", "SPEED",
        "of the slowest link between ranks: 8x400Gb (bits), 25GB/s, ib-ndr", link_speed,
    )  # fmt: skip


def call(options: argparse.Namespace) -> int:
    """Reads, checks, prints."""
    select, ignore = parse_codes(options.select), parse_codes(options.ignore)
    command = getattr(options, AFTER_DASHES, [])
    if not options.paths and not command:
        raise CheckError("no files given", "Try: zeromon check ds_config.json train.py")
    with show_working("checking"):
        checked = check(options.paths, _given_machine(options), command)
    everything = options.verbose or options.json
    result = select_problems(checked, select, ignore, with_quiet=everything)
    if options.json and options.sarif == "-":
        raise CheckError("--json and --sarif - both write to stdout")
    if options.sarif:
        sarif_text = json.dumps(as_sarif(result.problems), indent=2) + "\n"
        write_text(sarif_text, None if options.sarif == "-" else options.sarif)
    if options.json:
        sys.stdout.write(json.dumps(problems_as_json(result)) + "\n")
    elif options.sarif != "-":
        sys.stdout.write(problems_as_text(result, coloured=is_coloured(sys.stdout)))
    return 1 if result.failed else 0


def _given_machine(options: argparse.Namespace) -> Machine:
    if options.model and not options.gpu:
        raise CheckError("--model is compared with a machine", "Add --gpu h100, or 80GiB.")
    if options.host_memory and not options.model:
        raise CheckError("--host-memory is compared with a model", "Add --model 7B --gpu h100.")
    return Machine(
        devices=options.devices,
        device_bytes=parse_memory_size("--gpu", options.gpu) if options.gpu else None,
        model=_read_model_spec(options.model) if options.model else None,
        host_bytes=parse_host_memory(options.host_memory),
        hosts=options.nodes,
        device=(options.gpu or "").strip().lower(),
        link=options.interconnect,
    )


def _read_model_spec(spec: str) -> ModelSpec:
    from zeromon.cli.plan_setup import read_model  # with all that a plan needs

    try:
        return read_model(spec)
    except PlanError as error:
        raise CheckError(str(error), error.hint) from error


# ---- output ---------------------------------------------------------------------------------------


def problems_as_json(result: Result) -> dict[str, Any]:
    """The problems as JSON."""
    names = ("code", "name", "severity", "file", "line", "column", "message", "fix", "key")
    rows = [{name: getattr(problem, name) for name in names} for problem in result.problems]
    entries = [asdict(entry) for entry in result.figures]
    return {"files": result.files, "problems": rows} | ({"figures": entries} if entries else {})


def problems_as_text(result: Result, *, coloured: bool = False) -> str:
    """One problem a line, its fix below it, then the counts."""
    rows = [_problem_text(problem, coloured=coloured) for problem in result.problems]
    if result.figures:
        rows += [
            "figures of this launch, and what says otherwise",
            *map(printable, as_lines(result.figures)),
        ]
    return "\n".join([*rows, summarize_check_result(result)]) + "\n"


def _problem_text(problem: Problem, *, coloured: bool) -> str:
    file, message = printable(problem.file), printable(problem.message)
    fix = printable_lines(problem.fix).replace("\n", "\n         ")
    location = f"{file}:{problem.line}:{problem.column}:"
    code = f"{problem.code} {problem.name}"
    if coloured:
        location = f"\x1b[1m{file}\x1b[0m:{problem.line}:{problem.column}:"
        code = f"\x1b[{_COLOURS[problem.severity]};1m{problem.code}\x1b[0m {problem.name}"
    return f"{location} {code}  {message}\n    fix: {fix}"


def summarize_check_result(result: Result) -> str:
    """``Found 3 problems in 2 files (1 error, 2 warnings)``."""
    files = counted(result.files, "file")
    if not result.problems:
        return f"No problems in {files}"
    kinds = [(s, sum(p.severity == s for p in result.problems)) for s in SEVERITIES]
    counts = [f"{n} info" if s == "info" else counted(n, s) for s, n in kinds if n]
    total = counted(len(result.problems), "problem")
    return f"Found {total} in {files} ({', '.join(counts)})"
