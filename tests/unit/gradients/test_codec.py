"""The codec: what is decoded is the quantised top-k, exactly; nothing is lost, only late."""

import io
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.errors import ConfigurationError, NotFoundError
from millrace.gradients import (
    Codec,
    CodeError,
    Decoder,
    ErrorFeedback,
    GradientEncoder,
    Transform,
    decode,
    encode,
)
from millrace.gradients.codec import kernels
from millrace.gradients.codec.chunks import make_chunks, make_tiles
from millrace.gradients.codec.tensors import (
    decode_tensor,
    decode_values,
    fill_dense,
    pack_tensor,
    select_values,
    unpack_tensor,
)
from millrace.gradients.codec.transform import backward, forward
from millrace.schemas.gradient import CHUNK_SIZE
from tests.support.examples import scale_examples

SHAPES = [(), (1,), (7,), (64,), (4096,), (4097,), (12289,), (1, 1), (131, 1), (1, 257), (64, 64)]
SHAPES += [(127, 65), (97, 101), (3, 3, 17, 5), (2, 0, 3), (700, 300)]
BITS = [2, 4, 8, 16, 32]
shapes = st.lists(st.integers(1, 90), max_size=3).map(tuple)
codecs = st.builds(
    Codec,
    transform=st.sampled_from(Transform),
    k=st.integers(1, CHUNK_SIZE),
    bits=st.sampled_from(BITS),
)


@pytest.mark.parametrize("offset", [0, 1, 16])
def test_a_gradient_is_decoded_into_memory_of_any_alignment(offset: int) -> None:
    shape = (300, 700)
    body = encode(drawn(shape), Codec())
    room = torch.full((300 * 700 + 64,), 7.0)
    begin = (-room.data_ptr() // 4) % 16 + offset
    out = room[begin : begin + 300 * 700].view(shape)
    decoded = Decoder(Codec()).decode(body, shape, out=out)
    assert decoded.data_ptr() == out.data_ptr()
    assert torch.equal(out, decode(body, shape, Codec()))
    assert set(room[:begin].tolist()) | set(room[begin + 300 * 700 :].tolist()) == {7.0}


def drawn(shape: tuple[int, ...], seed: int = 0, kind: str = "gauss") -> torch.Tensor:
    dice = np.random.default_rng(seed)
    kinds = {
        "gauss": lambda: dice.standard_normal(shape),
        "student": lambda: dice.standard_t(3, shape),
        "laplace": lambda: dice.laplace(size=shape),
        "few": lambda: dice.integers(-2, 3, shape),  # many are equal, and zero
        "tiny": lambda: dice.standard_normal(shape) * 1e-42,  # denormal
        "wide": lambda: dice.standard_normal(shape) * 10.0 ** dice.integers(-30, 30, shape),
    }
    return torch.from_numpy(np.asarray(kinds[kind](), dtype=np.float32))


def top_k(values: np.ndarray, codec: Codec, shape: tuple[int, ...]) -> list[np.ndarray]:
    """The indices of the largest values, as slowly and plainly as can be."""
    found = []
    for run in make_chunks(shape, codec):
        table = values[run.first : run.first + run.values].reshape(run.count, run.size)
        order = np.argsort(-np.abs(table), axis=1, kind="stable")[:, : run.k]
        found.append(np.sort(order, axis=1))
    return found


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the distance of each value from the nearest level of its chunk."""
    return np.abs(values[:, :, None] - table[:, None, :]).min(axis=2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transform", Transform)
def test_every_value_is_in_one_chunk(shape, transform):
    runs = make_chunks(shape, Codec(transform=transform))
    assert sum(run.values for run in runs) == prod(shape)
    assert all(1 <= run.k <= run.size <= CHUNK_SIZE for run in runs)
    assert [run.first for run in runs] == [
        sum(before.values for before in runs[:n]) for n in range(len(runs))
    ]


def test_primes_and_odd_sizes_are_not_left_uncompressed():
    for shape, least in (((1021, 4099), 205), ((50257, 64), 205), ((1000, 1), 100)):
        assert all(tile.height <= 64 and tile.width <= 64 for tile in make_tiles(shape))
        for transform in Transform:
            body = encode(drawn(shape), Codec(transform=transform))
            assert prod(shape) * 4 / len(body) > least, (shape, transform)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_transform_is_orthonormal_and_its_own_inverse(shape):
    tensor = drawn(shape)
    values = forward(tensor, Transform.DCT)
    assert values.shape == (prod(shape),)
    torch.testing.assert_close(values.norm(), tensor.norm())
    torch.testing.assert_close(backward(values, shape, Transform.DCT), tensor)


def test_the_transform_is_that_of_the_formula():
    tensor = drawn((5, 7))
    rows, columns = np.arange(5), np.arange(7)
    down = np.sqrt(2 / 5) * np.cos(np.pi / 5 * (rows[None] + 0.5) * rows[:, None])
    across = np.sqrt(2 / 7) * np.cos(np.pi / 7 * (columns[None] + 0.5) * columns[:, None])
    down[0] /= np.sqrt(2)
    across[0] /= np.sqrt(2)
    wanted = down @ tensor.numpy().astype(np.float64) @ across.T
    np.testing.assert_allclose(forward(tensor, Transform.DCT).view(5, 7), wanted, atol=1e-6)


@settings(max_examples=scale_examples(150), deadline=None)
@given(
    shape=shapes,
    codec=codecs,
    seed=st.integers(0, 99),
    kind=st.sampled_from(["gauss", "student", "laplace", "few", "tiny", "wide"]),
)
@example(shape=(64, 64), codec=Codec(k=4096, bits=2), seed=0, kind="few")
def test_what_is_decoded_is_the_quantised_top_k(shape, codec, seed, kind):
    tensor = drawn(shape, seed, kind)
    values = forward(tensor, codec.transform)
    body = encode(tensor, codec)
    runs = unpack_tensor(body, shape, codec)
    assert pack_tensor(runs, codec) == body
    indices = top_k(values.numpy(), codec, shape)
    assert all(np.array_equal(run.indices, own) for run, own in zip(runs, indices, strict=True))

    sent = np.zeros(prod(shape), np.float32)
    for run in runs:
        chunks = run.chunks
        rows = slice(chunks.first, chunks.first + chunks.values)
        table = sent[rows].reshape(chunks.count, chunks.size)
        np.put_along_axis(table, run.indices.astype(np.int64), decode_values(run, codec), axis=1)
        true = np.take_along_axis(
            values.numpy()[rows].reshape(table.shape), run.indices.astype(np.int64), axis=1
        )
        held = decode_values(run, codec)
        assert ((np.sign(held) == np.sign(true)) | (held == 0) | (true == 0)).all()
        if codec.bits < 16:  # each is the nearest of the levels that its chunk has
            levels = 1 << (codec.bits - 1)
            high = (run.high.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            low = high * (run.ratio / 255.0)
            steps = np.arange(levels) / (levels - 1)
            known = (low[:, None] + (high - low)[:, None] * steps).astype(np.float32)
            off = np.abs(np.abs(held) - np.abs(true))
            least = nearest(np.abs(true), known)
            assert (off <= least * (1 + 1e-4) + np.abs(true) * 1e-6 + 1e-44).all()
    wanted = backward(torch.from_numpy(sent), shape, codec.transform)
    assert torch.equal(decode(body, shape, codec), wanted)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("transform", Transform)
def test_the_bytes_do_not_depend_on_how_many_threads_made_them(transform, threads):
    codec = Codec(transform=transform)
    tensor = drawn((1500, 1100))
    values = forward(tensor, transform).numpy()
    body = pack_tensor(select_values(values, (1500, 1100), codec, threads), codec)
    assert body == GradientEncoder(codec, 7).encode(tensor)
    decoded = Decoder(codec, threads).decode(body, (1500, 1100), out=torch.empty(1500, 1100))
    assert torch.equal(decoded, decode(body, (1500, 1100), codec))


@pytest.mark.parametrize(("kind", "error"), [("gauss", 0.07), ("student", 0.26), ("laplace", 0.12)])
def test_two_bits_a_value_are_two_hundred_times_smaller_and_near_enough(kind, error):
    tensor, codec = drawn((1024, 4096), 1, kind), Codec()
    body = encode(tensor, codec)
    assert tensor.numel() * 4 / len(body) > 205
    (run,) = unpack_tensor(body, (1024, 4096), codec)
    table = tensor.numpy().reshape(run.chunks.count, run.chunks.size)
    true = np.take_along_axis(table, run.indices.astype(np.int64), axis=1)
    assert np.linalg.norm(decode_values(run, codec) - true) / np.linalg.norm(true) <= error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_taken_as_it_is(dtype):
    tensor = drawn((200, 300)).to(dtype)
    assert encode(tensor, Codec()) == encode(tensor.float(), Codec())
    assert encode(tensor.t(), Codec()) == encode(tensor.t().float().contiguous(), Codec())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(value, bits):
    tensor = drawn((100, 100))
    tensor[3, 5] = value
    with pytest.raises(ConfigurationError, match="not finite"):
        encode(tensor, Codec(bits=bits))


def test_another_type_is_refused():
    with pytest.raises(ConfigurationError, match=r"torch\.int64"):
        encode(torch.ones(3, dtype=torch.int64), Codec())


@settings(max_examples=scale_examples(60), deadline=None)
@given(shape=shapes, codec=codecs, seed=st.integers(0, 99), steps=st.integers(1, 6))
def test_error_feedback_conserves_mass(shape, codec, seed, steps):
    feedback = ErrorFeedback(codec)
    sent, given_ = torch.zeros(shape), torch.zeros(shape)
    for step in range(steps):
        change = drawn(shape, seed + step)
        given_ += change
        sent += decode(feedback.compress("w", change), shape, codec)
    torch.testing.assert_close(sent + feedback.read_residual("w"), given_, rtol=1e-4, atol=1e-4)


def test_what_is_small_is_sent_later():
    feedback, codec = ErrorFeedback(Codec(k=1)), Codec(k=1)
    change = torch.tensor([3.0, 2.0, 1.0])
    bodies = [feedback.compress("w", change * (step == 0)) for step in range(3)]
    got = [decode(body, (3,), codec).tolist() for body in bodies]
    assert got == [[3, 0, 0], [0, 2, 0], [0, 0, 1]]
    assert feedback.read_residual("w").tolist() == [0, 0, 0]


def test_a_state_can_be_loaded_by_torch_with_its_defaults():
    feedback = ErrorFeedback(Codec(k=1))
    body = feedback.compress("w", torch.tensor([3.0, 2.0]))
    feedback.compress("empty", torch.zeros(0, 3))
    with io.BytesIO() as file:
        torch.save(feedback.state_dict(), file)
        file.seek(0)
        state = torch.load(file)
    for saved in (state, {**state, "sent": {"w": body, "empty": b""}}):  # bytes of earlier versions
        again = ErrorFeedback(Codec(k=1))
        again.load_state_dict(saved)
        again.restore_sent()
        assert again.read_residual("w").tolist() == [3.0, 2.0]


@pytest.mark.parametrize("transform", Transform)
def test_what_nobody_took_is_kept(transform):
    codec = Codec(transform=transform, k=32)
    feedback = ErrorFeedback(codec)
    change = drawn((90, 70))
    body = feedback.compress("w", change)
    torch.testing.assert_close(feedback.read_residual("w") + decode(body, (90, 70), codec), change)
    feedback.restore_sent()
    torch.testing.assert_close(feedback.read_residual("w"), change)
    feedback.restore_sent()  # once
    torch.testing.assert_close(feedback.read_residual("w"), change)


def test_the_memory_decays_and_can_be_saved():
    feedback = ErrorFeedback(Codec(k=1), residual_factor=0.5)
    feedback.compress("w", torch.tensor([4.0, 2.0]))
    again = ErrorFeedback(Codec(k=1), residual_factor=0.5)
    again.load_state_dict(feedback.state_dict())
    for one in (feedback, again):
        one.compress("w", torch.tensor([0.0, 0.25]))
        assert one.read_residual("w").tolist() == [0, 0]
    with pytest.raises(NotFoundError):
        feedback.read_residual("other")
    with pytest.raises(ConfigurationError, match="shape"):
        feedback.compress("w", torch.ones(3))
    with pytest.raises(ConfigurationError, match="not finite"):
        feedback.compress("w", torch.tensor([float("nan"), 0.0]))
    assert feedback.read_residual("w").tolist() == [0, 0]


# -- bytes of whom one does not trust


def refused_or_whole(body: bytes, shape: tuple[int, ...], codec: Codec) -> None:
    """Whatever the bytes are: refused with a sentence, or the one way to write what they mean."""
    decoded, filled = np.full((2, prod(shape)), np.nan, np.float32)
    try:
        runs = unpack_tensor(body, shape, codec)
    except CodeError:
        with pytest.raises(CodeError):
            decode_tensor(body, shape, codec, decoded)
        return
    decode_tensor(body, shape, codec, decoded)
    fill_dense(runs, codec, filled)
    assert decoded.tobytes() == filled.tobytes()
    assert pack_tensor(runs, codec) == body
    for run in runs:
        assert (np.diff(run.indices.astype(np.int64), axis=1) > 0).all()
        assert run.indices.max(initial=0) < run.chunks.size
        assert np.isfinite(decode_values(run, codec)).all()
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_one_pass_decodes_what_several_passes_decode(shape, bits):
    codec = Codec(bits=bits, k=100)
    body = encode(drawn(shape), codec)
    refused_or_whole(body, shape, codec)
    alone, together = np.full((2, prod(shape)), np.nan, np.float32)
    decode_tensor(body, shape, codec, alone)
    decode_tensor(body, shape, codec, together, threads=3)
    assert alone.tobytes() == together.tobytes()


def test_there_is_one_way_to_write_a_gradient():
    shape, codec = (5000,), Codec()
    run = unpack_tensor(encode(drawn(shape), codec), shape, codec)[0]
    room = np.empty(10_000, np.uint8)
    length = kernels.write_gaps(run.indices, 3, room)  # longer codes of the same indices
    rest = pack_tensor((run,), codec)[
        5 + int.from_bytes(pack_tensor((run,), codec)[1:5], "little") :
    ]
    body = bytes([3]) + int(length).to_bytes(4, "little") + room[:length].tobytes() + rest
    with pytest.raises(CodeError, match="longer than necessary"):
        unpack_tensor(body, shape, codec)


@settings(max_examples=scale_examples(400), deadline=None)
@given(
    bits=st.sampled_from(BITS),
    shape=st.sampled_from([(70, 70), (5000,), (3,)]),
    data=st.data(),
)
def test_changed_bytes_are_refused_or_right(bits, shape, data):
    codec = Codec(bits=bits)
    body = bytearray(encode(drawn(shape), codec))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    refused_or_whole(bytes(body), shape, codec)
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(CodeError):
        unpack_tensor(bytes(body[:cut]), shape, codec)
    with pytest.raises(CodeError):
        unpack_tensor(bytes(body) + b"\0", shape, codec)


@settings(max_examples=scale_examples(300), deadline=None)
@given(body=st.binary(max_size=600), bits=st.sampled_from(BITS))
def test_any_bytes_are_refused_or_right(body, bits):
    refused_or_whole(body, (70, 70), Codec(bits=bits))


def test_every_flipped_bit_of_a_small_one_is_refused_or_right():
    shape, codec = (300,), Codec()
    body = encode(drawn(shape), codec)
    for at in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[at // 8] ^= 1 << (at % 8)
        refused_or_whole(bytes(flipped), shape, codec)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_of_a_script_changes_nothing(dtype):
    change, codec = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)), Codec(k=64)

    def send_twice() -> tuple[list[bytes], torch.Tensor]:
        feedback = ErrorFeedback(codec)
        sent = [feedback.compress("weight", change) for _ in range(2)]
        return sent, Decoder(codec).decode(sent[1], (40, 30))

    expected, values = send_twice()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found, decoded = send_twice()
    finally:
        torch.set_default_dtype(before)
    assert found == expected
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, values)
