"""What reinforcement learning keeps beside the trained model: frozen models, and generation. Pure."""

from collections.abc import Iterable, Iterator

from zeromon.memory.spec import ModelSpec, ShardPlan, Transformer, ZeroStage
from zeromon.memory.terms import During, Term


def frozen(models: Iterable[ModelSpec], plan: ShardPlan) -> Iterator[Term]:
    """Yields the parameters of reference and reward models: sharded at stage 3, whole below it."""
    for model in models:
        split = plan.shard_ranks if plan.stage == ZeroStage.PARAMETERS else 1
        yield Term(
            role="frozen_param",
            nbytes=model.params // split * plan.precision.compute_bytes,
            cause=f"the frozen model {model.name} (--reference)",
        )


def kv_cache_bytes(t: Transformer, tokens: int, each: int = 2) -> int:
    """Returns the bytes of keys and values of *tokens*.

    Two vectors a layer and token; 800 KiB a token of OPT-13B (Kwon et al. 2023, arXiv 2309.06180).
    """
    return 2 * t.layers * t.kv_width * each * tokens // t.tensor_ranks


def generation(model: ModelSpec, plan: ShardPlan, tokens: int) -> Iterator[Term]:
    """Yields what exists while the trained model generates *tokens*, the activations do not."""
    if tokens and model.architecture is not None:
        yield Term(
            role="kv_cache",
            nbytes=kv_cache_bytes(model.architecture, tokens, plan.precision.compute_bytes),
            cause="keys and values of the sequences that are generated at once (--rollout)",
            during=During.GENERATION,
        )
    if tokens and plan.stage == ZeroStage.PARAMETERS:
        yield Term(
            role="unsharded_param",
            nbytes=model.params * plan.precision.compute_bytes,
            cause="the whole model, gathered to generate (ds3_gather_for_generation)",
            during=During.GENERATION,
        )
