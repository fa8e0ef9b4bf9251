"""Payloads of Templar's workers, of both versions, and those that no worker would send."""

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.errors import ConfigurationError
from millrace.gradients.codec.gradient_object import GradientError
from millrace.gradients.templar.payload import ExpectedPayload, TemplarPayload, parse_payload
from millrace.gradients.templar.tiling import find_tile_length, make_templar_tiles
from millrace.schemas.gradient import ExclusionReason, Transform
from millrace.torchfile import TorchFile
from tests.support.examples import scale_examples
from tests.support.templar_gradients import Written, cut, save, write_payload

SHAPES = {
    "blocks.0.weight": (128, 192),  # tiles of 64 by 64
    "blocks.0.odd": (130, 63),  # of 26 by 63
    "blocks.0.prime": (67, 64),  # of 1 by 64
    "norm.weight": (48,),
    "norm.long": (200,),  # four tiles of 50
}
VERSIONS = {
    "v0.2.80": {"dct": True, "packed": False, "bins": None},
    "v1.0": {"dct": False, "packed": False, "bins": 256},
    "v2.1.28": {"dct": False, "packed": True, "bins": 4},
}


def make_changes(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return {
        name: (torch.randn(shape, generator=random) * 1e-3).to(dtype)
        for name, shape in SHAPES.items()
    }


def expect(version: str = "v2.1.28", **changed: Any) -> ExpectedPayload:
    transform = Transform.DCT if VERSIONS[version]["dct"] else Transform.NONE
    return ExpectedPayload(**{"shapes": SHAPES, "k": 16, "transform": transform} | changed)


def write(version: str = "v2.1.28", **changed: Any) -> Written:
    return write_payload(make_changes(), **{"k": 16} | VERSIONS[version] | changed)


def check_refusal(body: bytes, reason: ExclusionReason, sentence: str, **expected: Any) -> None:
    with pytest.raises(GradientError) as caught:
        parse_payload(body, expect(**expected))
    assert sentence in str(caught.value)
    assert caught.value.reason is reason
    assert len(str(caught.value)) < 200


def check_decoded(payload: TemplarPayload, written: Written) -> None:
    assert set(payload.parameters) == set(written.decoded)
    for name, decoded in written.decoded.items():
        found = payload.restore_change(name, SHAPES[name])
        if payload.transform is Transform.NONE:
            assert torch.equal(found, decoded.float())
        else:
            assert torch.allclose(found, decoded, rtol=0, atol=1e-6 * float(decoded.abs().max()))
        assert found.any()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_payload_has_the_changes_that_templars_own_workers_decode(version: str):
    pages = [("CC-MAIN-2024-10", 17, "train"), ("CC-MAIN-2023-50", 4, "train")]
    written = write(version, window=41, pages_info=pages, sample_digest="a1", sample_count=9)
    payload = parse_payload(written.save(global_step=12), expect(version, window=41))
    check_decoded(payload, written)
    assert (payload.window, payload.global_step) == (41, 12)
    assert payload.metadata == {
        "pages_info": tuple(pages), "sample_digest": "a1", "sample_count": 9
    }  # fmt: skip
    norm = torch.cat([one.double().flatten() for one in written.decoded.values()]).norm()
    assert payload.norm == pytest.approx(float(norm), rel=1e-5)
    for sent in payload.parameters.values():
        assert (np.diff(sent.indices.astype(int), axis=1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bins", [4, 256, None])
def test_values_of_each_type_are_rounded_as_their_sender_rounds_them(dtype, bins):
    written = write_payload(make_changes(dtype), k=16, bins=bins)
    check_decoded(parse_payload(written.save(), expect()), written)


def test_tensors_of_a_gpu_are_read_without_one():
    """A worker leaves its shift and its lookup on the GPU, and torch saves their device."""
    body = change_pickle(
        write().save(), lambda pickle: pickle.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0")
    )
    assert b"cuda:0" in body
    check_decoded(parse_payload(body, expect()), write())


@pytest.mark.parametrize(
    ("length", "size"),
    [(1, 1), (2, 2), (63, 63), (64, 64), (65, 13), (67, 1), (96, 48), (128, 64), (4099, 1)],
)
def test_a_dimension_is_cut_by_its_largest_divisor_up_to_64(length, size):
    assert find_tile_length(length) == size


def test_tiles_are_those_of_the_writer():
    for name, change in make_changes().items():
        tiles, made = make_templar_tiles(SHAPES[name]), cut(change)
        assert tiles.width == made.shape[-1]
        assert tiles.rows * tiles.columns * tiles.height * tiles.width == change.numel()
        assert tiles.columns == made.shape[-2 if change.ndim == 1 else 1]
    for shape in ((), (2, 3, 4), (0, 4)):
        with pytest.raises(ConfigurationError, match="no parameter of the shape"):
            make_templar_tiles(shape)


def change_state(**changed: Any) -> bytes:
    """Return a payload of v2.1.28 with other entries; None removes one."""
    written = write()
    written.state |= changed
    written.state = {name: value for name, value in written.state.items() if value is not None}
    return written.save()


NAME = "blocks.0.weight"
GOOD = write().state
PLAIN = write("v0.2.80").state
CODES = GOOD[f"{NAME}vals"]
LARGE = torch.full((4,), 3e38)
PARAMS = GOOD[f"{NAME}quant_params"]


def change_params(place: int, value: object) -> bytes:
    return change_state(**{f"{NAME}quant_params": (*PARAMS[:place], value, *PARAMS[place + 1 :])})


def set_first(tensor: torch.Tensor, *values: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[: len(values)] = torch.tensor(values, dtype=tensor.dtype)
    return changed


FAULTS = {
    "a parameter is missing": (
        lambda: change_state(**{f"{NAME}idxs": None}),
        f"{NAME} has no idxs",
    ),
    "values are missing": (lambda: change_state(**{f"{NAME}vals": None}), f"{NAME} has no vals"),
    "another parameter": (
        lambda: change_state(**{"head.weightidxs": torch.zeros(3).byte()}),
        "belong to no parameter",
    ),
    "other k": (lambda: write(k=18).save(), f"{NAME}: it has 18 values per tile, where 16"),
    "fewer tiles": (
        lambda: change_state(**{f"{NAME}vals": CODES[:1].clone()}),
        f"{NAME}: the shape of its vals is not that of the tiles",
    ),
    "flat values": (
        lambda: change_state(**{f"{NAME}vals": CODES.flatten(0, 1).clone()}),
        f"{NAME}: the shape of its vals is not that of the tiles",
    ),
    "no dimension": (
        lambda: change_state(**{f"{NAME}vals": torch.tensor(1).byte()}),
        f"{NAME}: it has 0 values per tile",
    ),
    "short indices": (
        lambda: change_state(**{f"{NAME}idxs": GOOD[f"{NAME}idxs"][:-3].clone()}),
        f"{NAME}: its idxs have another length",
    ),
    "indices of floats": (
        lambda: change_state(**{f"{NAME}idxs": CODES.float()}),
        f"{NAME}: its idxs are not integers",
    ),
    "indices are a list": (
        lambda: change_state(**{f"{NAME}idxs": [1, 2]}),
        f"{NAME}: its idxs or vals are not a tensor",
    ),
    "an index beyond a short tile": (
        lambda: change_state(**{"norm.weightidxs": torch.full((24,), 255).byte()}),
        "norm.weight: an index is beyond a tile of 48 values",
    ),
    "an index twice": (
        lambda: change_state(**{f"{NAME}idxs": torch.zeros_like(GOOD[f"{NAME}idxs"])}),
        f"{NAME}: an index is sent twice in a tile",
    ),
    "codes beyond the lookup": (
        lambda: change_state(**{f"{NAME}vals": set_first(CODES, 200)}),
        f"{NAME}: a code is beyond its lookup",
    ),
    "values of integers": (
        lambda: change_state(**{f"{NAME}vals": CODES.int()}),
        f"{NAME}: it has quant_params, but its vals are not codes",
    ),
    "integers without parameters": (
        lambda: change_state(**{f"{NAME}vals": CODES.int(), f"{NAME}quant_params": None}),
        f"{NAME}: its vals are neither floats nor codes",
    ),
    "no parameters of the quantiser": (
        lambda: change_state(**{f"{NAME}quant_params": None}),
        f"{NAME}: its vals are codes, and it has no quant_params",
    ),
    "four parameters": (
        lambda: change_state(**{f"{NAME}quant_params": PARAMS[:4]}),
        f"{NAME}: its quant_params are not five values",
    ),
    "parameters of texts": (
        lambda: change_state(**{f"{NAME}quant_params": "abcde"}),
        f"{NAME}: its vals are codes, and it has no quant_params",
    ),
    "shift is nan": (
        lambda: change_params(0, torch.tensor(float("nan"))),
        f"{NAME}: its shift or lookup is not finite",
    ),
    "shift is infinite": (
        lambda: change_params(0, float("inf")),
        f"{NAME}: its shift or lookup is not finite",
    ),
    "two shifts": (
        lambda: change_params(0, torch.zeros(2)),
        f"{NAME}: its shift is not one number",
    ),
    "shift is a text": (lambda: change_params(0, "x"), f"{NAME}: its shift is not one number"),
    "scale is 0": (lambda: change_params(1, 0.0), f"{NAME}: its scale is not a number"),
    "scale is nan": (lambda: change_params(1, float("nan")), f"{NAME}: its scale is not a number"),
    "scale is large": (lambda: change_params(1, 1e9), f"{NAME}: its scale is not a number"),
    "scale is a text": (lambda: change_params(1, "1"), f"{NAME}: its scale is not a number"),
    "offset": (lambda: change_params(2, 128), f"{NAME}: its offset is not half"),
    "offset is large": (lambda: change_params(2, 1 << 2000), f"{NAME}: its offset is not half"),
    "lookup is a list": (
        lambda: change_params(3, [0.0] * 4),
        f"{NAME}: its lookup is not a tensor",
    ),
    "lookup is long": (
        lambda: change_params(3, torch.zeros(300)),
        f"{NAME}: its lookup is not a tensor of 2",
    ),
    "lookup is a matrix": (
        lambda: change_params(3, torch.zeros(2, 2)),
        f"{NAME}: its lookup is not a vector",
    ),
    "lookup is of integers": (
        lambda: change_params(3, torch.arange(4)),
        f"{NAME}: its vals are neither floats nor codes",
    ),
    "lookup is infinite": (
        lambda: change_params(3, torch.full((4,), float("inf"))),
        f"{NAME}: its shift or lookup is not finite",
    ),
    "sum is infinite": (
        lambda: change_state(**{f"{NAME}quant_params": (3e38, 1.0, 2, LARGE, torch.float32)}),
        f"{NAME}: a value is not finite",
    ),
    "type is of integers": (
        lambda: change_params(4, torch.int64),
        f"{NAME}: its quant_params name no type of floats",
    ),
    "type is a text": (
        lambda: change_params(4, "torch float32"),
        f"{NAME}: its quant_params name no type of floats",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_parameter_is_refused_with_its_name(fault: str):
    make, sentence = FAULTS[fault]
    reason = ExclusionReason.CODES if ":" in sentence else ExclusionReason.TENSORS
    check_refusal(make(), reason, sentence)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({f"{NAME}idxs": set_first(PLAIN[f"{NAME}idxs"], -1)}, "an index is beyond a tile of"),
        ({f"{NAME}idxs": set_first(PLAIN[f"{NAME}idxs"], 4096)}, "an index is beyond a tile of"),
        ({f"{NAME}idxs": torch.zeros_like(PLAIN[f"{NAME}idxs"])}, "an index is sent twice"),
        ({f"{NAME}idxs": PLAIN[f"{NAME}idxs"].flatten()}, "the shape of its idxs is not that of"),
        ({f"{NAME}vals": set_first(PLAIN[f"{NAME}vals"], float("nan"))}, "a value is not finite"),
        ({f"{NAME}vals": set_first(PLAIN[f"{NAME}vals"], -float("inf"))}, "a value is not finite"),
    ],
)
def test_faults_of_plain_indices_and_values_are_refused(changed, sentence):
    written = write("v0.2.80")
    written.state |= changed
    check_refusal(written.save(), ExclusionReason.CODES, f"{NAME}: {sentence}", version="v0.2.80")


def make_bomb() -> list[Any]:
    """Return a list of 2^60 values, in a pickle of some hundred bytes."""
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    return nested


def nest(depth: int) -> list[Any]:
    return [nest(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        (None, "has no metadata"),
        ({}, "no number of a window"),
        ({"window": "7"}, "no number of a window"),
        ({"window": -7}, "no number of a window"),
        ({"window": True}, "no number of a window"),
        ({"window": 7, "x": torch.zeros(1)}, "other than texts and numbers"),
        ({"window": 7, "x": float("nan")}, "other than texts and numbers"),
        ({"window": 7, "x": 1 << 64}, "other than texts and numbers"),
        ({"window": 7, "x": "x" * 5000}, "other than texts and numbers"),
        ({"window": 7, "x": [0] * 20_000}, "too many values"),
        ({"window": 7, "x": nest(9)}, "too many values"),
        ({"window": 7, "x": make_bomb()}, "too many values"),
    ],
)
def test_metadata_of_other_values_is_refused(metadata, sentence):
    body = save({"state_dict": GOOD | {"metadata": metadata}, "global_step": 1})
    check_refusal(body, ExclusionReason.HEADER, sentence)


@pytest.mark.parametrize(
    ("content", "reason", "sentence"),
    [
        ({"state_dict": GOOD}, "HEADER", "not a dict of a state_dict and a"),
        ({"state_dict": [1], "global_step": 1}, "HEADER", "not a dict of a state_dict"),
        ({"state_dict": GOOD, "global_step": -1}, "HEADER", "global_step is not"),
        ({"state_dict": GOOD, "global_step": True}, "HEADER", "global_step is not"),
        ({"state_dict": GOOD, "global_step": {1}}, "FORMAT", "not a payload of torch.save"),
        ({"state_dict": GOOD, "global_step": Path("/x")}, "FORMAT", "builds values other than"),
        ({"state_dict": GOOD, "global_step": 1j}, "FORMAT", "builds values other than"),
        ([GOOD], "FORMAT", "it is not a dict"),
    ],
)
def test_what_is_no_payload_is_refused(content, reason, sentence):
    check_refusal(save(content), ExclusionReason[reason], sentence)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return open, ("/tmp/millrace-templar-was-here", "w")


def test_no_code_of_a_payload_is_executed():
    for place in ("global_step", "metadata"):
        state = GOOD | ({"metadata": Evil()} if place == "metadata" else {})
        step = Evil() if place == "global_step" else 1
        body = save({"state_dict": state, "global_step": step})
        check_refusal(body, ExclusionReason.FORMAT, "builds values other than tensors")
    assert not Path("/tmp/millrace-templar-was-here").exists()


def test_a_payload_of_another_window_and_a_large_norm_are_refused():
    check_refusal(write(window=8).save(), ExclusionReason.WINDOW, "of window 8, not", window=7)
    check_refusal(write().save(), ExclusionReason.NORM, "more than 0.001", max_norm=1e-3)


def test_a_payload_larger_than_any_is_refused_before_it_is_parsed():
    body = write().save() + bytes(expect().size)
    check_refusal(body, ExclusionReason.TOO_LARGE, "are the most there are")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_limit_of_the_size_holds_each_version(version: str):
    assert len(write(version).save()) < expect(version).size


def test_a_tile_of_one_value_has_no_packed_index():
    shapes = {"w": (67, 71)}
    written = Written({"metadata": {"window": 1}, "widxs": torch.zeros(67 * 71 * 3).byte(),
                       "wvals": torch.ones(67, 71, 2)})  # fmt: skip
    check_refusal(
        written.save(), ExclusionReason.CODES, "w: its tiles have one value", shapes=shapes
    )


def test_a_plain_tile_of_one_value_is_sent_whole():
    changes = {"w": torch.arange(67.0 * 71).reshape(67, 71)}
    written = write_payload(changes, k=16, packed=False, bins=None)
    payload = parse_payload(written.save(), expect(shapes={"w": (67, 71)}))
    assert torch.equal(payload.restore_change("w", (67, 71)), changes["w"])


def change_pickle(body: bytes, change: Callable[[bytes], bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(body)) as origin, zipfile.ZipFile(file, "w") as made:
        for name in origin.namelist():
            content = origin.read(name)
            made.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return file.getvalue()


def make_pickle(inside: bytes) -> bytes:
    """Return a payload whose pickle is a dict with the global step of some opcodes."""
    name = b"X" + struct.pack("<I", 11) + b"global_step"
    return change_pickle(write().save(), lambda _: b"\x80\x02}" + name + inside + b"s.")


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        (b"]q\x01h\x01a", "is not a dict of"),  # a list within itself
        (b"K\x01K\x02a", "something other than a list"),
        (b"]X\x01\x00\x00\x00aK\x02s", "outside of a dict"),
        (b"\x8b\xff\xff\xff\x7f1", "damaged"),  # an integer of two GiB
        (b"X\xff\xff\xff\x7fa", "damaged"),  # a text of two GiB
        (b"cos\nsystem\nX\x01\x00\x00\x00a\x85R", "values other than tensors"),
        (b"h\x07", "damaged"),
        (b"a", "something other than a list"),
        (b"0", "opcode that no tensor needs"),
    ],
)
def test_pickles_that_torch_would_not_write_are_refused_in_little_memory(inside, sentence):
    body = make_pickle(inside)
    tracemalloc.start()
    try:
        with pytest.raises(GradientError, match=sentence):
            parse_payload(body, expect())
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_declared_lengths_take_no_memory():
    """The pickle declares a million times the values that a storage of the file has."""

    def raise_lengths(pickle: bytes) -> bytes:
        size = CODES.numel()
        assert pickle.count(b"K" + bytes([size]) + b"tq") >= 1
        return pickle.replace(
            b"K" + bytes([size]) + b"tq", b"J" + struct.pack("<i", size << 20) + b"tq"
        )

    body = change_pickle(write().save(), raise_lengths)
    tracemalloc.start()
    try:
        check_refusal(body, ExclusionReason.CODES, "its storages are longer than the file")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_the_size_of_the_payload():
    changes = {"w": torch.randn(2048, 1024, generator=torch.Generator().manual_seed(1))}
    body = write_payload(changes, k=1024).save()
    tracemalloc.start()
    try:
        parse_payload(body, expect(shapes={"w": (2048, 1024)}, k=1024))
        assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    finally:
        tracemalloc.stop()


def test_a_storage_is_read_once_and_big_endian_files_are_refused():
    codes = CODES.clone()
    shared = change_state(**{f"{NAME}vals": codes, "blocks.0.oddvals": codes})
    with pytest.raises(GradientError):
        parse_payload(shared, expect())
    table = torch.zeros(4)
    lookups = {
        name: (GOOD[name][0], 1.0, 2, table, torch.float32)
        for name in GOOD
        if name.endswith("quant_params")
    }
    check_refusal(change_state(**lookups), ExclusionReason.CODES, "two tensors share a storage")
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(write().save())) as origin,
        zipfile.ZipFile(file, "w") as made,
    ):
        for name in origin.namelist():
            made.writestr(name, b"big" if name.endswith("byteorder") else origin.read(name))
    check_refusal(file.getvalue(), ExclusionReason.FORMAT, "not little-endian")


def test_a_view_of_another_order_is_refused():
    idxs = PLAIN[f"{NAME}idxs"]
    written = write("v0.2.80")
    written.state[f"{NAME}idxs"] = idxs.transpose(0, 1).contiguous().transpose(0, 1)
    check_refusal(
        written.save(), ExclusionReason.FORMAT, "a tensor is not contiguous", version="v0.2.80"
    )


def test_the_result_takes_three_times_the_size_of_a_payload_of_many_parameters():
    shapes = {str(number): (256, 256) for number in range(16)}
    random = torch.Generator().manual_seed(1)
    changes = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    body = write_payload(changes, k=1024).save()
    tracemalloc.start()
    try:
        payload = parse_payload(body, expect(shapes=shapes, k=1024))
        held, peak = tracemalloc.get_traced_memory()
        assert set(payload.parameters) == set(shapes)
        assert held < 3 * len(body)
        assert peak < 3 * len(body) + 8 * len(body) / len(shapes)
    finally:
        tracemalloc.stop()


BODIES = {version: write(version).save() for version in VERSIONS}
PICKLES = {
    version: (body.index(b"\x80\x02}"), body.index(b"PK\x07\x08"))
    for version, body in BODIES.items()
}


def read_checked(body: bytes, version: str) -> None:
    """Parse bytes that may be damaged, and check what was accepted."""
    expected = expect(version)
    try:
        payload = parse_payload(body, expected)
    except GradientError:
        return
    for name, sent in payload.parameters.items():
        assert np.isfinite(sent.values).all()
        size = sent.tiles.height * sent.tiles.width
        assert (np.diff(sent.indices.astype(int), axis=1) > 0).all()
        assert sent.indices.max() < size
        assert payload.restore_change(name, SHAPES[name]).isfinite().all()


@settings(
    max_examples=scale_examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data(), version=st.sampled_from(list(VERSIONS)))
def test_changed_bytes_are_refused_or_valid(data, version):
    body = bytearray(BODIES[version])
    begin, end = PICKLES[version]
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(begin, end) | st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body))) :]
    read_checked(bytes(body), version)


@settings(
    max_examples=scale_examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data(), version=st.sampled_from(list(VERSIONS)))
def test_changed_bytes_within_right_checksums_are_refused_or_valid(data, version):
    """The archive is written again, so that the reader of pickles and tensors gets the bytes."""
    name = data.draw(st.sampled_from(["data.pkl", "data/0", "data/1", "data/2", "data/3"]))

    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        return bytes(changed)

    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(BODIES[version])) as origin, zipfile.ZipFile(file, "w") as made:
        for entry in origin.namelist():
            content = origin.read(entry)
            made.writestr(entry, change(content) if entry.endswith(f"/{name}") else content)
    read_checked(file.getvalue(), version)


def test_a_file_has_plain_values_of_all_types():
    content = {
        "a": [1, 2.5, None, True, "x", (1, (2, 3, 4, 5))], "b": {"c": torch.arange(4).short()},
        "d": torch.float16, "big": 1 << 62, "empty": torch.zeros(0, 3), "row": torch.zeros(1, 3),
    }  # fmt: skip
    file = TorchFile(save(content), most=9, head=4096)
    assert file.content["a"] == [1, 2.5, None, True, "x", (1, (2, 3, 4, 5))]
    assert file.read(file.content["b"]["c"]).tolist() == [0, 1, 2, 3]
    assert file.content["d"].name == "torch float16"
    assert file.content["big"] == 1 << 62
    assert file.read(file.content["empty"]).shape == (0, 3)
    assert file.read(file.content["row"]).shape == (1, 3)
