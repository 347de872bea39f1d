"""Where a script, a framework or a logger holds loss, gradient norm and learning rate as numbers."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zeromon.ring.codes import Scalar
from zeromon_agents.hooks.backend import Backend, ImportHook
from zeromon_agents.hooks.fsdp1 import WRAPPER
from zeromon_agents.runtime.around import RAISED, around

_TRAINER_KEYS = {
    "loss": Scalar.LOSS, "grad_norm": Scalar.GRAD_NORM, "learning_rate": Scalar.LEARNING_RATE
}  # fmt: skip
"""Key in the step log of ``Trainer`` -> scalar; means over the training at the end have other keys."""
_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"


class Loggers(Backend):
    """The hooks on Trainer, Lightning, TensorBoard, W&B, DeepSpeed's monitor and ``clip_grad_norm_``."""

    _has_board = False

    def hooks(self) -> Iterable[ImportHook]:
        """Patches each function once, when its module is loaded."""
        lightning, clip = ("lightning.pytorch", "pytorch_lightning"), "clip_grad_norm_"
        # torch.nn.utils holds references of its own: callers there do not see a patch of clip_grad
        torch_utils = ("torch.nn.utils", "torch.nn.utils.clip_grad")
        to_scalars, add_scalar = "convert_tensors_to_scalars", "SummaryWriter.add_scalar"
        clips = (self._clip_begins, self._clip_ends)
        return (
            self._hook("transformers.trainer", "Trainer.log", self._trainer_logs),
            self._hook(
                "transformers.trainer_callback", "CallbackHandler.on_train_begin", self._hf_begins
            ),
            *(
                self._hook(f"{name}.{_CONNECTOR}", to_scalars, None, self._lightning_logs)
                for name in lightning
            ),
            *(
                self._hook(f"{name}.loops.fit_loop", "_FitLoop.on_run_start", self._fit_begins)
                for name in lightning
            ),
            self._hook("torch.utils.tensorboard.writer", add_scalar, self._tag_logged),
            self._hook("tensorboardX.writer", add_scalar, self._tag_logged),
            self._hook("wandb.sdk.wandb_run", "Run.log", self._give_mapping),
            self._hook("deepspeed.monitor.monitor", "MonitorMaster.write_events", self._events),
            self._hook(WRAPPER, f"FullyShardedDataParallel.{clip}", *clips),
            *(self._hook(module, clip, *clips) for module in torch_utils),
            *(self._hook(module, "clip_grads_with_norm_", self._scale_begins) for module in torch_utils),
        )

    def _hook(
        self,
        module: str,
        function: str,
        before_hook: Callable[..., Any] | None,
        after_hook: Callable[..., None] | None = None,
    ) -> ImportHook:
        def watch_module(loaded: Any) -> None:
            hook = around(self.context, before_hook, after_hook, where=function, traced=True)
            self.patches.wrap_in(loaded, function, hook)

        return module, watch_module

    def _trainer_logs(self, _: Any, logs: Any = None, *__: Any, **___: Any) -> None:
        for key, scalar in _TRAINER_KEYS.items():
            if isinstance(logs, Mapping) and key in logs:
                self.scalars.give_scalar(scalar, logs[key], "Trainer")

    def _hf_begins(self, _: Any, __: Any, state: Any, *___: Any, **____: Any) -> None:
        self.steps.goal.tell(int(state.max_steps), int(state.global_step), "Trainer")

    def _fit_begins(self, loop: Any) -> None:
        trainer = loop.trainer
        # Lightning has -1 for no limit, and inf batches for a dataset without a length
        limits = [trainer.max_steps] if trainer.max_steps > 0 else []
        batches, epochs = trainer.num_training_batches, trainer.max_epochs or 0
        if 0 < batches < math.inf and epochs > 0:
            limits.append(math.ceil(batches / trainer.accumulate_grad_batches) * epochs)
        self.steps.goal.tell(min(limits, default=0), trainer.global_step, "Lightning")

    def _lightning_logs(self, _: None, result: Any, *__: Any) -> None:
        if result is not RAISED:
            self._give_mapping(None, result)

    def _give_mapping(self, _: Any, data: Any = None, *__: Any, **___: Any) -> None:
        if isinstance(data, Mapping):
            for name, value in data.items():
                self.scalars.give_named(name, value)

    def _tag_logged(
        self, writer: Any, tag: Any = None, scalar_value: Any = None, *__: Any, **___: Any
    ) -> None:
        self.scalars.give_named(tag, scalar_value)
        if not self._has_board:  # a later one may be of hyperparameters alone
            self._has_board = True
            folder = getattr(writer, "log_dir", None) or getattr(writer, "logdir", None)
            if folder:
                self.context.add_metadata(tensorboard={"folder": os.path.abspath(str(folder))})

    def _events(self, _: Any, event_list: Any = (), *__: Any, **___: Any) -> None:
        for name, value, *_samples in event_list or ():
            self.scalars.give_named(name, value)

    def _clip_begins(self, _: Any, max_norm: Any = None, *__: Any, **___: Any) -> None:
        self.scalars.note_clipping(max_norm)

    def _scale_begins(
        self, _: Any, max_norm: Any = None, total_norm: Any = None, *__: Any, **___: Any
    ) -> None:
        self.scalars.note_clipping(max_norm)
        self._clip_ends(None, total_norm)

    def _clip_ends(self, _: None, norm: Any, *__: Any) -> None:
        if norm is not RAISED:
            self.scalars.give_scalar(Scalar.GRAD_NORM, norm, "clip_grad_norm_")
