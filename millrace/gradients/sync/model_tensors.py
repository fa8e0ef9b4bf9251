"""Tensors of a model that belong to a run, where FSDP may shard the model over several ranks."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from millrace import errors
from millrace.checkpoints.tensor_shards import is_distributed
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.ranks import RankedWeights
from millrace.gradients.state import WeightState, copy_state
from millrace.schemas.gradient import BUFFER_NAMES, Codec

log = logging.getLogger(__name__)


class ModelTensors:
    """Access to the tensors of a worker's model that belong to the run.

    All ranks call the methods together, with the same model or with their shards of it.

    Args:
        weights: Weights of the run.
        ranks: Group of the worker's ranks.
        codec: Settings of the compression, which tell buffers from weights.
    """

    def __init__(self, weights: RankedWeights, ranks: RankGroup, codec: Codec) -> None:
        self._weights, self._ranks, self._codec = weights, ranks, codec
        self._has_warned = False

    def select(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's tensors that belong to the run, in the order of their names.

        Raises:
            ConfigurationError: The model of a rank lacks a tensor, or has one of another shape.
        """
        return self._ranks.run_on_each(lambda: self._select_here(model))

    def load(self, model: torch.nn.Module) -> None:
        """Overwrite the model's tensors with the weights of the run."""
        held = self._weights.held.weights
        with torch.no_grad():
            for name, weight in self.select(model).items():
                whole = torch.from_numpy(held[name]) if name in held else None  # pyright: ignore[reportUnknownMemberType]
                self._ranks.broadcast(whole, weight, self._weights.owners[name])

    def _select_here(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        # Untrained tensors may belong to the run, and tied tensors have two names.
        tensors = dict[str, torch.Tensor](model.named_buffers(remove_duplicate=False))
        tensors.update(model.named_parameters(remove_duplicate=False))
        for name, shape in self._weights.shapes.items():
            if name not in tensors or tuple(tensors[name].shape) != tuple(shape):
                raise errors.ConfigurationError(
                    f"The model has no {name} of the shape {list(shape)}, which the run has. Use "
                    "the model of the run, or begin a run with this model's tensors."
                )
        self._warn_of_buffers(tensors)
        return {name: tensors[name] for name in self._weights.shapes}

    def _warn_of_buffers(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Log the buffers that the run lacks, once."""
        absent = [
            name
            for name in tensors
            if self._codec.is_buffer(name) and name not in self._weights.shapes
        ]
        if absent and not self._has_warned:
            self._has_warned = True
            log.warning(
                "The run has no %s, which the model has, so each worker keeps its own. Begin the "
                "run with all of `model.state_dict()`.",
                ", ".join(absent),
            )


def select_weights(model: torch.nn.Module, *, buffers: Sequence[str] = BUFFER_NAMES) -> WeightState:
    """Return the trained weights and the buffers of a model in float32, to begin a run with.

    All ranks of a sharded model call this function. Each then has all weights in memory.

    Args:
        model: Model of the run.
        buffers: Names of buffers to include, as in `Codec.buffers`.
    """
    codec = Codec(buffers=tuple(buffers))
    tensors = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    tensors |= {name: value for name, value in model.named_buffers() if codec.is_buffer(name)}
    return copy_state({name: gather_tensor(tensor) for name, tensor in tensors.items()})


def gather_tensor(weight: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. For a DTensor, this is a collective."""
    weight = weight.detach()
    return cast("Any", weight).full_tensor() if is_distributed(weight) else weight
