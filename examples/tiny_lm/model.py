"""A transformer that guesses the next byte."""

import torch
from torch import nn
from torch.nn import functional

LENGTH = 96  # bytes that it sees
BYTES = 256


class TinyLM(nn.Module):
    """A decoder of about half a million weights.

    Args:
        width: Of what a byte is turned into.
        layers: How many.
        heads: Of attention, in each.
    """

    def __init__(self, width: int = 112, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Predict the next byte, after each.

        Args:
            seen: (rows, length), int64: bytes.

        Returns:
            (rows, length, 256), float32: logits.
        """
        x = self.bytes(seen) + self.places.weight[: seen.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.bytes.weight.T

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of rows, in nats a byte.

        Args:
            rows: (rows, length + 1), int64.
        """
        guessed = self(rows[:, :-1])
        return functional.cross_entropy(guessed.reshape(-1, BYTES), rows[:, 1:].reshape(-1))


class Layer(nn.Module):
    """Attention to what was before, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked = nn.Linear(width, 3 * width, bias=False)
        self.said = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, length, width) to the same."""
        rows, length, width = x.shape
        asked = self.asked(self.before(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = asked.permute(2, 0, 3, 1, 4)
        heard = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.said(heard.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))
