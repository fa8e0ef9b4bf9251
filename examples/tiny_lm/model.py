"""A transformer that predicts the next byte."""

import torch
from torch import nn
from torch.nn import functional

LENGTH = 96  # bytes of context
BYTES = 256


class TinyLM(nn.Module):
    """A decoder of about half a million weights.

    Args:
        width: Size of the embeddings.
        layers: Number of layers.
        heads: Number of attention heads of each layer.
    """

    def __init__(self, width: int = 112, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Predict the byte after each byte.

        Args:
            inputs: (rows, length), int64: bytes.

        Returns:
            (rows, length, 256), float32: logits.
        """
        x = self.embedding(inputs) + self.positions.weight[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.T

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of rows, in nats a byte.

        Args:
            rows: (rows, length + 1), int64: bytes.
        """
        logits = self(rows[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, BYTES), rows[:, 1:].reshape(-1))


class Layer(nn.Module):
    """Causal self-attention, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (rows, length, width)."""
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.contract(functional.gelu(self.expand(self.mlp_norm(x))))
