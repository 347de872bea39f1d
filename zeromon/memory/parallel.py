"""The part of a model that one rank of tensor and pipeline parallelism has. Pure."""

import math
from dataclasses import replace

from zeromon.errors import PlanError
from zeromon.memory.spec import ROOT, ModelSpec, Shape, Unit


def part_of(model: ModelSpec, tensor: int, pipeline: int) -> ModelSpec:
    """Returns the part of *model* on a rank of *tensor* x *pipeline* ranks, that of the largest stage.

    Tensor parallelism divides matrices and not vectors. A pipeline divides the layers; its first stage
    keeps the activations of as many micro-batches as there are stages, so of as many layers as without
    it (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3). Embedding and head are counted on one
    stage. Raises :class:`PlanError` for more stages than layers.
    """
    if tensor == pipeline == 1:
        return model
    if not model.has_units:
        numel = math.ceil(model.params / (tensor * pipeline))
        return replace(model, units=(Unit("(all)", ((numel,),)),))
    layers = sum(unit.count for unit in model.units if unit.name != ROOT)
    if pipeline > layers:
        raise PlanError(f"{layers} layers cannot be split into {pipeline} stages")
    units = tuple(
        replace(
            unit,
            shapes=tuple(_split(shape, tensor) for shape in unit.shapes),
            count=unit.count if unit.name == ROOT else math.ceil(unit.count / pipeline),
        )
        for unit in model.units
    )
    shape = model.architecture
    shape = None if shape is None else replace(shape, tensor_ranks=tensor)
    return replace(model, units=units, architecture=shape)


def _split(shape: Shape, ranks: int) -> Shape:
    return (math.ceil(shape[0] / ranks), *shape[1:]) if len(shape) > 1 else shape
