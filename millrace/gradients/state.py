"""Weights of a run. Every machine that applies the same links has the same bytes.

The arithmetic is in float32 on the processor, with one rounding per operation. numpy does not fuse
multiplications and additions, as a compiler might. The inverse DCT adds in a fixed order, which a
library's matrix product does not guarantee.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace import errors
from millrace.digest import compute_digest, dump_canonical_json
from millrace.gradients.codec import kernels
from millrace.gradients.codec.chunks import make_tiles, view_as_matrix
from millrace.gradients.codec.merged_chunks import MergedChunks, make_dense
from millrace.gradients.codec.transform import get_basis
from millrace.schemas.chain import OuterKind, OuterOptimizer
from millrace.schemas.gradient import Codec, Transform
from millrace.threads import count_processors, map_slices

Array = npt.NDArray[np.float32]


@dataclass(slots=True)
class WeightState:
    """Weights of a run, with the moments of the outer optimizer.

    Attributes:
        weights: Weights by their names.
        moments: Moments of `OuterKind.NESTEROV`, by the weights' names.
    """

    weights: dict[str, Array]
    moments: dict[str, Array] = field(default_factory=dict[str, Array])

    def step_tensor(
        self, name: str, groups: Sequence[MergedChunks], codec: Codec, outer: OuterOptimizer
    ) -> None:
        """Apply the merged values of a tensor in place. A buffer is set to its merged values.

        The moment of a buffer stays zero, so that weights and moments have the same names.

        Raises:
            ConfigurationError: There is no such tensor.
        """
        weight = self.weights.get(name)
        if weight is None:
            raise errors.ConfigurationError(f"The weights have no {name}.")
        change = compute_dense_change(groups, weight.shape, codec.select_for_tensor(name))
        if codec.is_buffer(name):
            weight[...] = change
            if outer.kind is OuterKind.NESTEROV:
                self.moments.setdefault(name, np.zeros_like(weight))
            return
        match outer.kind:
            case OuterKind.SIGN:
                np.sign(change, out=change)
            case OuterKind.NESTEROV:
                # m <- momentum * m + u; w <- w - lr * (u + momentum * m), as torch.optim.SGD
                moment = self.moments.setdefault(name, np.zeros_like(weight))
                moment *= np.float32(outer.momentum)
                moment += change
                change += np.float32(outer.momentum) * moment
            case OuterKind.SGD:
                pass
        change *= np.float32(outer.lr)
        weight -= change

    def digest(self) -> str:
        """Return the digest of the tensors' digests. Equal states have equal digests."""
        return combine_tensor_digests(self.compute_digests())

    def compute_digests(self) -> dict[str, str]:
        """Return the digest of each tensor's shape and bytes, by its name in the state."""
        tensors = [
            (kind, name, held[name])
            for kind, held in (("weights", self.weights), ("moments", self.moments))
            for name in sorted(held)
        ]
        digests = map_slices(
            lambda one: _digest_tensor(tensors[one][0][2]),
            len(tensors),
            step=1,
            threads=count_processors(),
        )
        names = (f"{kind}.{name}" for kind, name, _ in tensors)
        return dict(zip(names, digests, strict=True))


def combine_tensor_digests(digests: Mapping[str, str]) -> str:
    """Return the digest of weights from the results of `WeightState.compute_digests`."""
    return compute_digest(dump_canonical_json(dict(digests)))


def _digest_tensor(tensor: Array) -> str:
    content = compute_digest(np.ascontiguousarray(tensor, dtype="<f4").data)
    return compute_digest(dump_canonical_json({"shape": list(tensor.shape), "content": content}))


def copy_state(tensors: Mapping[str, Any], names: Sequence[str] | None = None) -> WeightState:
    """Copy tensors of torch or numpy, of any floating-point type, into a new state.

    Args:
        tensors: Tensors by their names.
        names: Names of the tensors to copy; by default all.
    """

    def copy_array(tensor: Any) -> Array:
        if hasattr(tensor, "detach"):
            tensor = tensor.detach().cpu().float().numpy()
        return np.array(tensor, dtype=np.float32)

    return WeightState({name: copy_array(tensors[name]) for name in (names or tensors)})


def compute_dense_change(
    groups: Sequence[MergedChunks], shape: tuple[int, ...], codec: Codec
) -> Array:
    """Return the dense values of a merged tensor: the same bytes on every machine."""
    values = make_dense(groups, shape)
    if codec.transform is Transform.NONE:
        return values.reshape(shape)
    matrix = np.empty(view_as_matrix(shape), np.float32)
    first = 0
    for tiles in make_tiles(shape):
        count, size = tiles.rows * tiles.columns, tiles.height * tiles.width
        stack = values[first : first + count * size].reshape(count, tiles.height, tiles.width)
        kernels.invert_tiles(
            stack,
            get_basis(tiles.height),
            get_basis(tiles.width),
            tiles.columns,
            matrix[tiles.row :, tiles.column :],
        )
        first += count * size
    return matrix.reshape(shape)
