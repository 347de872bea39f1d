"""DistributedDataParallel: forward, the reducer's buckets, and its own timing of backward.

DDP's all-reduces are issued from C++, so no hook of ours sees them. The reducer keeps when each
backward's communication began and ended, when its computation ended, and when each gradient was
complete; that is read once a step (two calls into C++ that copy about thirty integers, and one a
parameter). Buckets are reduced in order, so one begins when it and all before it are complete.
"""

from __future__ import annotations

import functools
import time
import weakref
from typing import Any

import torch

from zeromon.events import Kind
from zeromon_agents.c10d import Collectives
from zeromon_agents.guard import Guard
from zeromon_agents.patches import Patches
from zeromon_agents.pending import DeviceTimer
from zeromon_agents.recorder import ON, Recorder
from zeromon_agents.step import Steps
from zeromon_agents.torch_roles import Models

DISTRIBUTED = "torch.nn.parallel.distributed"
_DEFAULT_SAMPLE_RATE = 100  # of torch's reducer


class Model:
    """What is known of one DDP model."""

    def __init__(self, ddp: Any, group: int, *, on_cpu: bool) -> None:
        self.ref = weakref.ref(ddp)
        self.group = group
        self.on_cpu = on_cpu
        self.iteration = -1
        self.buckets: list[int] = []
        self.members: list[list[int]] = []
        """Indices of the parameters in each bucket."""
        self.units: list[int] = []
        self.rebuilt = False


class Ddp:
    """The hook on DDP's forward, and the list of DDP models."""

    def __init__(
        self,
        recorder: Recorder,
        steps: Steps,
        collectives: Collectives,
        device: DeviceTimer,
        patches: Patches,
        known: Models,
    ) -> None:
        self._known = known
        self._recorder = recorder
        self._steps = steps
        self._collectives = collectives
        self._device = device
        self._patches = patches
        self.models: dict[int, Model] = {}
        self._wall_to_monotonic = time.monotonic_ns() - time.time_ns()

    def watch(self, module: Any) -> None:
        """Patches ``DistributedDataParallel.forward``."""
        wrapper = module.DistributedDataParallel
        original = self._patches.original(wrapper, "forward")
        recorder, steps = self._recorder, self._steps

        @functools.wraps(original)
        def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            # asked first: else a compiled graph would depend on the mode and be made anew with it
            if torch.compiler.is_compiling() or not recorder.mode:
                return original(ddp, *args, **kwargs)
            try:
                self._device.mark_compute_stream()
                steps.forward_begins()
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "DistributedDataParallel.forward")
            try:
                return original(ddp, *args, **kwargs)
            finally:
                try:
                    steps.forward_ends()
                    self._read(ddp)
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "DistributedDataParallel.forward")

        self._patches.set(wrapper, "forward", forward)

    def buckets(self, group: int) -> list[int]:
        """Gradient bucket sizes in bytes of the model on *group*; empty when unknown or several."""
        models = [m for m in self.models.values() if m.group == group and m.ref() is not None]
        return models[0].buckets if len(models) == 1 else []

    def stop(self) -> None:
        """Gives the reducers their own sampling back."""
        for model in self.models.values():
            ddp = model.ref()
            if ddp is not None and model.on_cpu:
                ddp._set_ddp_runtime_logging_sample_rate(_DEFAULT_SAMPLE_RATE)
        self.models.clear()

    def _model(self, ddp: Any) -> Model:
        model = self.models.get(id(ddp))
        if model is None or model.ref() is None:
            on_cpu = ddp.device_type == "cpu"
            group = self._collectives.group_of(ddp.process_group)
            model = self.models[id(ddp)] = Model(ddp, group.id, on_cpu=on_cpu)
            self._recorder.meta(strategy="ddp")
            self._known.saw_module(ddp)
            if on_cpu:
                # on CUDA reading a sampled iteration waits for its events: keep torch's own rate
                ddp._set_ddp_runtime_logging_sample_rate(1)
        return model

    def _read(self, ddp: Any) -> None:
        model = self._model(ddp)
        if self._steps.joining:
            return  # of a backward that we have not seen
        if not model.on_cpu and model.rebuilt:
            return  # there its starts are of the host's clock and its durations of the device's
        data = ddp.logger._get_ddp_logging_data()
        figures = data.ints_map
        if not model.rebuilt:
            self._read_buckets(model, data.strs_map, figures, ddp.reducer)
        if not model.on_cpu:
            return
        start, end = figures.get("backward_comm_time_start", 0), 0
        if start:
            end = start + figures.get("backward_comm_time", 0)
        compute_end = figures.get("backward_compute_time_end", 0)
        if not start or model.iteration == start or not compute_end:
            return
        model.iteration = start
        shift = self._wall_to_monotonic
        if self._recorder.mode == ON and model.units:
            began = figures.get("backward_compute_time_start", 0)
            self._write_buckets(model, ddp.reducer, began + shift, figures.get("iteration", 0))
        # fmt: off
        self._recorder.write(end + shift, Kind.BACKWARD_COMM, 0, 0, 0, model.group, 0,
                             start + shift, compute_end + shift, len(model.buckets), 0)
        # fmt: on

    def _read_buckets(
        self, model: Model, texts: dict[str, str], figures: dict[str, int], reducer: Any
    ) -> None:
        model.rebuilt = bool(figures.get("has_rebuilt_buckets", 0))
        text = texts.get("rebuilt_bucket_sizes") if model.rebuilt else texts.get("bucket_sizes")
        model.buckets = [int(size) for size in (text or "").split(",") if size.strip()]
        members = texts.get("rebuilt_per_bucket_param_indices") if model.rebuilt else ""
        model.members = [[int(i) for i in part.split()] for part in (members or "").split(",")]
        # without the moments of an older or newer torch, buckets are counted and not timed
        timed = hasattr(reducer, "get_backward_stats")
        if timed and len(model.members) == len(model.buckets):
            model.units = [
                self._recorder.unit_id(f"bucket {number}", {"kind": "ddp"})
                for number in range(len(model.buckets))
            ]

    def _write_buckets(self, model: Model, reducer: Any, began_ns: int, iteration: int) -> None:
        """When each bucket could be sent, by the moments at which its gradients were complete."""
        moments, ready = reducer.get_backward_stats(), 0
        write, count = self._recorder.write, len(model.units)
        for number, (unit, members) in enumerate(zip(model.units, model.members, strict=True)):
            ready = max(ready, max((moments[i] for i in members), default=0))
            sequence = -(iteration * count + number + 1)
            # fmt: off
            write(began_ns + ready, Kind.BUCKET, 0, 0, 0, model.group, unit,
                  model.buckets[number], sequence, number, 0)
            # fmt: on
