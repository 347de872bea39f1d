r"""Predicts memory and step time: what fits under which ZeRO stage, or what a change would do.

MODEL is a number of parameters (7B, 350M), a Hugging Face config.json (or its folder), or a Python
entry module:factory. zeromon builds the model of both on the meta device and counts it exactly: a
config.json needs transformers. --config takes a DeepSpeed JSON or an accelerate YAML. --from RUN takes
a live or recorded run instead, whose speeds calibrate the prediction.

Every stage on these devices, with a recommendation:

  zeromon plan 7B --devices 4 --gpu a100-40
  zeromon plan config.json --devices 8 --gpu h100 --micro-batch 4 --length 4096
  zeromon plan config.json --config ds_z3.json --devices 8 --gpu 80GiB
  zeromon plan mymodel:build --devices 8 --trace --micro-batch 2 --length 2048
  zeromon plan --from RUN --devices 16 --micro-batch 8

Changes, each as a row beside what is there (step, exposed time, memory, throughput):

  zeromon plan --from RUN --changes                           the usual changes, one by one
  zeromon plan --from RUN --set stage=3                       one change
  zeromon plan --from RUN --set link=2 --set straggler=median          two together
  zeromon plan --from RUN --sweep stage=0,1,2,3 --sweep micro-batch=1,2,4,8
  zeromon plan config.json --devices 64 --nodes 8 --gpu h100 --interconnect 8x400Gb \
      --micro-batch 1 --length 4096 --sweep stage=1,2,3 --sweep checkpointing=no,yes

NAME is an option of machine, speeds, strategy or batch without its dashes; a flag takes yes or no. *
marks the points that no other beats in both memory and time per sample. Differences carry the
calibration's error interval. Ctrl-C prints the rows finished so far.

Exit codes: 0 a stage fits, 1 none fits. With --changes, --set or --sweep: 0, or 2 if nothing
can be predicted.
"""

import argparse

from zeromon.cli.parser import add_flag
from zeromon.cli.plan_changes import add_change_arguments, print_changes
from zeromon.cli.plan_output import plan_as_json, plan_as_text
from zeromon.cli.plan_setup import add_setup_arguments, read_run_snapshot, setup_from_model, setup_of_run
from zeromon.cli.terminal import show_json, show_text, show_working
from zeromon.memory import plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon plan MODEL | --from RUN [--changes] [--set NAME=VALUE] [...]``"""
    add_setup_arguments(parser)
    add_change_arguments(parser)
    add_flag(parser, "--fewest", "also the fewest devices on which a strategy fits")
    add_flag(parser, "--json", "print JSON")


def call(options: argparse.Namespace) -> int:
    """Reads, computes, prints."""
    if options.changes or options.set or options.sweep:
        return print_changes(options)
    with show_working("computing"):
        run = read_run_snapshot(options.run) if options.run else None
        setup = setup_of_run(run, options) if run is not None else setup_from_model(options)
        rows = plan.plan_table(setup)
        content = plan_as_json(setup, rows, fewest=options.fewest)
    if options.json:
        show_json(content)
    else:
        show_text(plan_as_text(setup, rows, fewest=options.fewest))
    return 1 if content["recommended"] is None else 0
