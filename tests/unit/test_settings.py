from datetime import timedelta
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Annotated

import click
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError

from millrace import errors, settings
from millrace.campaigns import TrainingOptions
from millrace.checkpoints import MemberSettings
from millrace.checkpoints.settings import SaveSettings
from millrace.cleanup import CleanupSettings
from millrace.cli.common import SIZE
from millrace.datasets import PipelineSettings
from millrace.datasets.settings import ShardingSettings
from millrace.digest import dump_canonical_json
from millrace.gradients import (
    AggregationSettings,
    AggregatorSettings,
    InitialWeights,
    TemplarImportSettings,
)
from millrace.settings import (
    AsWritten,
    Duration,
    Size,
    escape_variables,
    fill_variables,
    load_settings,
    read_settings_file,
    validate_settings,
)
from millrace.settings_values import write_duration, write_size
from millrace.storage import StoreSpec


class Inner(BaseModel):
    key: SecretStr = SecretStr("")
    names: list[str] = []


class Model(BaseModel):
    size: int = 0
    inner: Inner = Inner()


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.yaml",
            (
                "size: 7\ninner:\n  key: ${KEY}\n"
                "  names:\n  - a-${KEY}\n  - $${KEY}\n  - '${NO:-none}'\n"
            ),
        ),
        (
            "a.toml",
            'size = 7\n[inner]\nkey = "${KEY}"\nnames = ["a-${KEY}", "$${KEY}", "${NO:-none}"]\n',
        ),
    ],
)
def test_variables_are_filled_in_after_parsing(name, text, tmp_path):
    model = load_settings(written(tmp_path, name, text), Model, {"KEY": "se: cret\n# x"})
    assert model.size == 7
    assert model.inner.key.get_secret_value() == "se: cret\n# x"
    assert model.inner.names == ["a-se: cret\n# x", "${KEY}", "none"]


@given(st.text("${X}:-1"))
@example("echo ${HOME} $${X} $$${X} ${1} ${#X} ${X:-${X}}")
def test_an_escaped_text_is_read_as_it_was(text):
    written = {"names": [text], "inner": {"key": text}, "size": 1}
    assert fill_variables(escape_variables(written), {"X": "filled"}) == (written, [])


def test_every_missing_variable_is_named_with_its_file_and_line(tmp_path):
    text = "# ${ONE} in a comment\nsize: 1\ninner:\n  key: ${ONE}\n  names:\n    - ${TWO}\n"
    path = written(tmp_path, "a.yaml", text)
    with pytest.raises(errors.ConfigurationError) as refusal:
        load_settings(path, Model, {})
    assert f"ONE ({path}, line 4)" in str(refusal.value)
    assert f"TWO ({path}, line 6)" in str(refusal.value)


def test_variables_are_filled_in_only_where_a_model_reads_them(tmp_path):
    class Program(BaseModel):
        files: Annotated[dict[str, str], AsWritten]
        environment: dict[str, str]

    class Part(BaseModel):
        model_config = ConfigDict(extra="ignore")
        program: Program

    text = (
        "other: ${UNSET}\n"
        "program:\n  files: {a: 'x ${KEY} $${KEY} ${UNSET}'}\n  environment: {KEY: '${KEY}'}\n"
    )
    path = written(tmp_path, "a.yaml", text)
    program = load_settings(path, Part, {"KEY": "secret"}).program
    assert program.files == {"a": "x ${KEY} $${KEY} ${UNSET}"}
    assert program.environment == {"KEY": "secret"}


def test_an_empty_variable_counts_as_unset(tmp_path):
    needed = written(tmp_path, "a.yaml", "size: ${SIZE}\n")
    with pytest.raises(errors.ConfigurationError, match=r"SIZE .*line 1"):
        load_settings(needed, Model, {"SIZE": ""})
    assert (
        load_settings(written(tmp_path, "b.yaml", "size: ${SIZE:-7}\n"), Model, {"SIZE": ""}).size
        == 7
    )


def test_a_variable_in_a_comment_need_not_be_set(tmp_path):
    assert (
        load_settings(written(tmp_path, "a.yaml", "size: 1  # or ${SIZE}\n"), Model, {}).size == 1
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "size: [1", "line 1: not valid YAML"),
        ("a.yaml", "inner:\n  names: [${BIG}]", "line 2: .* must be quoted"),
        ("a.toml", "size = = 1", "not valid TOML"),
        ("a.json", "{}", r"ends in \.yaml"),
        ("a.yaml", "- 1", "settings by name"),
        ("a.yaml", "size: ${BIG}", "size: Input should be a valid integer"),
    ],
)
def test_what_is_wrong_is_said_without_the_value(name, text, said, tmp_path):
    with pytest.raises(errors.ConfigurationError, match=said) as refusal:
        load_settings(written(tmp_path, name, text), Model, {"BIG": "hush-hush"})
    assert "hush-hush" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size: 1\nsize: 2\n", "line 2: .*'size' is already set in line 1: remove one"),
        ("size: 1\ninner: {}\n'size': 1\n", "line 3: .*'size' is already set in line 1"),
        ("inner:\n  key: ${A}\n  size: 1\n  key: a\n", "line 4: .*'key' is already set in line 2"),
        ("inner: {names: [a], names: [b]}\n", "line 1: .*'names' is already set in line 1"),
        ("a:\n- 1\n- x: 1\n  0x1: 2\n  1: 3\n", "line 5: .*1 is already set in line 4"),
        ("a: &a {x: 1}\nb:\n  <<: *a\n  y: 1\n  y: 1\n", "line 5: .*'y' is already set in line 4"),
    ],
)  # fmt: skip
def test_a_setting_that_is_written_twice_is_refused(text, said, tmp_path):
    """YAML allows no repeated keys, but its parser kept the last one only."""
    with pytest.raises(errors.ConfigurationError, match=f"a.yaml, {said}") as refusal:
        load_settings(written(tmp_path, "a.yaml", text), Model, {"A": "a"})
    assert "must be quoted" not in str(refusal.value)


def test_merge_keys_are_no_repeated_keys(tmp_path):
    text = (
        "a: &a {x: 1, y: 1}\nb: &b {z: 3}\n"
        "c: {d: {e: &e {<<: *a, x: 2}}}\n"  # nested more deeply than its use
        "f:\n  <<: *e\n  x: 5\n"
        "g: {<<: [*a, *b], y: 2}\nh: {<<: *a, <<: *b}\n"
    )
    found = read_settings_file(written(tmp_path, "a.yaml", text), {})
    assert found["c"] == {"d": {"e": {"x": 2, "y": 1}}}
    assert found["f"] == {"x": 5, "y": 1}
    assert found["g"] == {"x": 1, "y": 2, "z": 3}
    assert found["h"] == {"x": 1, "y": 1, "z": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"size: 1\nname: caf\xe9\n", ", line 2: the text is not UTF-8: save the file"),
        ("size: 1\n".encode("utf-16"), ", line 1: the text is not UTF-8: save the file"),
        (b"size: 1\nname: a\x07\n", r", line 2: not valid YAML: .* U\+0007 .*: remove the char"),
        (b"size: 1\nname: a\xef\xbf\xbe", r", line 2: .* U\+FFFE is not allowed"),
        (b"size: 1\ndate: 2024-13-45\n", ", line 2: .* no timestamp: correct .* quotes"),
        (b"size: 1\n2024-13-45: 1\n", ", line 2: .* no timestamp: correct .* quotes"),
        (b"size: 1\na:\n- {b: 2024-02-30T00:00:00Z}\n", ", line 3: .* no timestamp"),
        (b"size: !!int hush-hush\n", ", line 1: .* no int: correct"),
        (b"size: !!bool hush-hush\n", ", line 1: .* no bool: correct"),
        (b"size: !!timestamp hush-hush\n", ", line 1: .* no timestamp: correct"),
        (b"size: " + 5000 * b"1", ", line 1: .* no int: correct"),
        (b"size: 1" + 200 * b":59" + b".5", ", line 1: .* no float: correct"),
    ],
)
def test_a_file_of_other_bytes_or_values_is_refused_with_its_line(text, said, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(text)
    with pytest.raises(errors.ConfigurationError, match=f"a.yaml{said}") as refusal:
        load_settings(path, Model, {})
    assert "hush-hush" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"size = 1\nname = 'caf\xe9'\n", ", line 2: the text is not UTF-8"),
        (b"size = 2024-13-45\n", ": not valid TOML"),
        (b"size = " + 5000 * b"1", ": not valid TOML"),
    ],
)
def test_a_file_of_toml_is_refused_likewise(text, said, tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(text)
    with pytest.raises(errors.ConfigurationError, match=f"a.toml{said}"):
        load_settings(path, Model, {})


def test_a_folder_in_place_of_a_file_is_said(tmp_path):
    (tmp_path / "a.yaml").mkdir()
    with pytest.raises(errors.ConfigurationError, match=r"a\.yaml cannot be read: Is a"):
        load_settings(tmp_path / "a.yaml", Model)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(errors.ConfigurationError, match="`millrace init` writes one"):
        load_settings(tmp_path / "none.yaml", Model, template="millrace init")
    with pytest.raises(errors.ConfigurationError, match=r"none\.yaml\. Correct the path"):
        load_settings(tmp_path / "none.yaml", Model)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("20m", 1200), ("24h", 86400), ("7d", 604800), ("1w", 604800), ("0h", 0),
        ("1.5h", 5400), ("1h30m", 5400), ("1h 30m", 5400), (" 1 h  30 m ", 5400), ("2 d", 172800),
        ("PT20M", 1200), ("P2D", 172800), ("0.05s", 0.05), (timedelta(seconds=5), 5),
    ],
)  # fmt: skip
def test_a_duration_has_its_unit(text, seconds):
    adapter = TypeAdapter(Duration)
    found = adapter.validate_python(text)
    assert found == timedelta(seconds=seconds)
    assert adapter.validate_json(adapter.dump_json(found)) == found


@pytest.mark.parametrize(
    "value",
    [48, 48.0, "48", " 48", -3, "-3", 0, True, "00:20:00", "soon", "", "1h 30", "1h, 30m", "1H"],
)
def test_a_bare_number_is_no_duration(value):
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(Duration).validate_python(value)
    assert "(seconds, minutes, hours, days; 1w is a week, PT20M is ISO 8601)" in str(refused.value)
    if value in {48, "48"}:
        assert "write 48s, 48m, 48h or 48d" in str(refused.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (90, "90s"), (1200, "20m"), (86400, "1d"), (1_234_567, "1234567s"),
        (0.05, "0.05s"), (90.123457, "90.123457s"), (100 * 86400, "100d"), (-90, "-P0DT90S"),
        (14 * 86400, "2w"),
    ],
)  # fmt: skip
def test_a_duration_is_written_with_all_digits(seconds, text):
    assert write_duration(timedelta(seconds=seconds)) == text


@given(st.timedeltas())
@example(timedelta(seconds=1_234_567))
@example(timedelta.max)
@example(timedelta.min)
def test_a_written_duration_is_read_as_the_same_duration(value):
    assert TypeAdapter(Duration).validate_python(write_duration(value)) == value


def test_a_long_text_is_refused_without_a_search(monkeypatch):
    """A member's lease has a duration, and anybody reads it: a search of it took hours."""
    monkeypatch.setattr(settings, "_PART", None)
    with pytest.raises(ValidationError, match="a text of 1,000,000 characters is no duration"):
        TypeAdapter(Duration).validate_python("1" * 1_000_000)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0), ("0", 0), (1000, 1000), (5.0, 5), ("1_000", 1000), ("64MiB", 64 << 20),
        ("64 mib", 64 << 20), (" 80GB ", 80 * 10**9), ("1.5KB", 1500), (".5K", 500),
        ("2G", 2 * 10**9), ("11.3GiB", 12133282611), ("9007199254740993B", 2**53 + 1),
        ("100Mb", 10**8), ("100Mbit", 12_500_000), (ByteSize(7), 7),
    ],
)  # fmt: skip
def test_a_size_has_a_unit_or_is_a_number_of_bytes(value, size):
    adapter = TypeAdapter(Size)
    found = adapter.validate_python(value)
    assert found == size
    assert type(found) is ByteSize
    assert adapter.validate_json(adapter.dump_json(found)) == size
    assert SIZE.convert(value, None, None) == size


NO_SIZES = [
    "1,000GB", "1,000,000GB", "64MB/s", "2.5.1GB", "2.5.1", "64MB 5", "5.", "1_000_GB", "-1",
    "-1GB", "+5", "1e3", "GB", "", "all", "5 parsecs", "0.5", "0.5B", "1.5", "0.1KiBx", "0.0001KB",
    "1bit",
]  # fmt: skip


@pytest.mark.parametrize("value", [*NO_SIZES, -1, 0.5, float("inf"), float("nan"), True, None])
def test_a_text_that_is_no_whole_size_is_refused(value):
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(Size).validate_python(value)
    said = refused.value.errors()[0]["msg"]
    assert "write 80GB or 512MiB, or a whole number of bytes" in said
    assert repr(str(value)) in said


@pytest.mark.parametrize("text", NO_SIZES)
def test_an_option_refuses_a_text_that_is_no_whole_size(text):
    with pytest.raises(click.BadParameter, match="write 80GB or 512MiB, or a whole number"):
        SIZE.convert(text, None, None)


def test_a_long_text_is_no_size():
    with pytest.raises(ValidationError, match="a text of 1,000,000 characters is no size"):
        TypeAdapter(Size).validate_python("1" * 1_000_000)


def test_a_size_setting_keeps_its_limits():
    assert SaveSettings(part_bytes="1KiB").part_bytes == 1024
    assert ShardingSettings(shard_bytes="1GiB").shard_bytes == 1 << 30
    with pytest.raises(ValidationError, match="greater than or equal to 1024"):
        SaveSettings(part_bytes="1KB")
    with pytest.raises(ValidationError, match="less than or equal to 1073741824"):
        ShardingSettings(shard_bytes="1.1GiB")


def test_a_seed_is_an_integer_that_the_plan_of_a_dataset_can_have():
    for seed in (-(1 << 63), (1 << 64) - 1):
        dump_canonical_json(ShardingSettings(seed=seed).model_dump(mode="json"))
    for seed in (-(1 << 63) - 1, 1 << 64):
        with pytest.raises(ValidationError, match="seed"):
            ShardingSettings(seed=seed)


def test_a_form_takes_a_size_as_text_or_number():
    assert TypeAdapter(Size).json_schema() == TypeAdapter(ByteSize).json_schema()


def _models() -> list[type[BaseModel]]:
    """Every pydantic model of the project."""
    for package in ("millrace", "tasks", "flows", "blocks"):
        found = import_module(package)
        for info in walk_packages(found.__path__, f"{package}."):
            import_module(info.name)
    models, seen = [BaseModel], []
    while models:
        models += (kind := models.pop()).__subclasses__()
        if kind.__module__.startswith(("millrace.", "tasks.", "flows.", "blocks.")):
            seen.append(kind)
    return seen


def test_every_setting_that_is_a_duration_is_read_as_one():
    """So that `48` means neither seconds here nor hours there."""
    bare = [
        f"{kind.__module__}.{kind.__name__}.{name}"
        for kind in _models()
        for name, field in kind.model_fields.items()
        if "timedelta" in str(field.annotation)
        and "parse_duration" not in f"{field.annotation} {field.metadata}"
    ]
    assert bare == []


def test_every_setting_that_is_a_size_is_read_as_one():
    """So that `1,000GB` is refused everywhere, and is 1 byte nowhere."""
    loose = [
        f"{kind.__module__}.{kind.__name__}.{name}"
        for kind in _models()
        for name, field in kind.model_fields.items()
        if "ByteSize" in str(field.annotation)
        and "parse_size" not in f"{field.annotation} {field.metadata}"
    ]
    assert loose == []


def test_the_old_names_of_presets_take_no_bare_hours(tmp_path):
    for rule in (
        "{preset: s3_manager, older_than: 48}",
        "{preset: cleanup_bucket, older_than: 48}",
    ):
        path = written(tmp_path, "a.yaml", f"store: {{url: 'file:///x'}}\nrules: [{rule}]\n")
        with pytest.raises(
            errors.ConfigurationError, match="'48' has no unit: write 48s, 48m, 48h"
        ):
            load_settings(path, CleanupSettings, {})


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{kinds: [gradients], older_than: 48}", "rules.1.older_than: '48' has no unit: write 48s"),
        ("{kinds: [gradient]}", "rules.1.kinds.0: Input should be 'gradients', 'start windows'"),
        ("{kinds: [gradients], older: 2d}", "rules.1: no setting older: write kinds, older_than"),
        ("{older_than: 2d}", "rules.1.kinds: Field required"),
        ("{preset: clean_versions}", "rules.1.current_version: Field required"),
        (
            "{preset: s3_manager, delete_older: 2d}",
            "no setting delete_older: write preset, older_than",
        ),
        ("{preset: cleanup}", "rules.1: no such preset: write cleanup_bucket, delete_gather"),
        ("{kinds: [datasets], keep_last: 3}", "rules.1: datasets have neither windows nor steps"),
    ],
)
def test_an_error_of_a_rule_names_the_field_and_what_is_allowed(tmp_path, rule, said):
    good = "{kinds: [gradients], older_than: 2d}"
    text = f"store: {{url: 'file:///x'}}\nrules:\n  - {good}\n  - {rule}\n"
    path = written(tmp_path, "clean.yaml", text)
    with pytest.raises(errors.ConfigurationError) as refused:
        load_settings(path, CleanupSettings, {})
    assert f"{path}: " in str(refused.value)
    assert said in str(refused.value)
    for noise in ("Rule", "CleanupBucket", "S3Manager", "Value error", "Extra inputs"):
        assert noise not in str(refused.value).removeprefix(str(path))


ENDPOINT = {
    "url": "s3://bucket",
    "endpoint": "http://127.0.0.1:1",
    "credentials": {"access_key_id": "a", "secret_access_key": "b"},
}
WHOLE = {
    "millrace.yaml": (PipelineSettings, "source", {"dataset": "d", "source": {"kind": "files"}}),
    "cooldown.yaml": (MemberSettings, "source", {"job": "j", "epoch": 0, "source": {"job": "j"}}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_store_of_a_part_stands_beside_its_other_settings(name, tmp_path):
    """In each file as in a flow's form and in a campaign."""
    model, part, data = WHOLE[name]
    data = {"store": {"url": "memory://x"}, **data, part: {**data[part], **ENDPOINT}}
    found = load_settings(written(tmp_path, name, yaml.safe_dump(data)), model)
    assert getattr(found, part).store == StoreSpec.model_validate(ENDPOINT)


@pytest.mark.parametrize("name", WHOLE)
def test_a_part_with_a_nested_store_is_refused_with_the_shape_to_write(name, tmp_path):
    model, part, data = WHOLE[name]
    own = next(iter(data[part]))
    data = {"store": {"url": "memory://x"}, **data, part: {**data[part], "store": ENDPOINT}}
    with pytest.raises(errors.ConfigurationError) as refusal:
        load_settings(written(tmp_path, name, yaml.safe_dump(data)), model)
    assert (
        f"{name}: {part}: the settings of its store stand beside its other settings: write "
        f"{{url: ..., credentials: ..., {own}: ...}}, without `store`"
    ) in str(refusal.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1000, "1000B"), (64 << 20, "64MiB"), (8 * 10**9, "8GB"), (3 << 30, "3GiB")],
)
def test_a_size_is_written_with_its_unit(size, text):
    assert write_size(size) == text
    assert TypeAdapter(Size).validate_python(text) == size


@pytest.mark.parametrize("model", [AggregatorSettings, TemplarImportSettings])
def test_one_class_says_which_weights_a_run_begins_with(model):
    """In each settings file, form and plan; the store of the checkpoint stands beside it."""
    assert model.model_fields["initial_weights"].annotation == InitialWeights | None
    assert TrainingOptions.model_fields["initial_weights"].annotation is InitialWeights


def test_parts_of_the_settings_of_an_aggregator_nest(tmp_path):
    data = {
        "run": {"run": "r"}, "store": {"url": "memory://x"}, "workers": ["a"],
        "initial_weights": {"job": "j"}, "initial_weights_store": ENDPOINT,
        "aggregation": {"every": 4},
    }  # fmt: skip
    found = load_settings(written(tmp_path, "a.yaml", yaml.safe_dump(data)), AggregatorSettings)
    assert found.initial_weights == InitialWeights(job="j")
    assert found.initial_weights_store == StoreSpec.model_validate(ENDPOINT)
    assert found.aggregation == AggregationSettings(every=4)


def test_a_setting_that_this_version_does_not_have_is_a_sentence(tmp_path):
    path = written(tmp_path, "a.yaml", "store: {url: 'file:///x', regoin: a}\nrules: []\n")
    with pytest.raises(errors.ConfigurationError) as refused:
        load_settings(path, CleanupSettings, {})
    assert "store.regoin: there is no such setting in this version of Millrace" in str(
        refused.value
    )
    assert "Extra inputs" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1h", "older_than: Input should be less than or equal to 5m"),
        ("0s", "older_than: Input should be greater than or equal to 1s"),
    ],
)
def test_a_limit_of_a_duration_is_shown_as_a_duration(value, said):
    with pytest.raises(errors.ConfigurationError, match=said):
        validate_settings(
            _Limited, {"older_than": value, "rules": [{"name": "a"}]}, source="a.yaml"
        )


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([], "a.yaml: rules: write at least 1 item."),
        ("x", "a.yaml: rules: write a list: [FIRST, SECOND]."),
        (["x"], "a.yaml: rules.0: write settings by name: {NAME: VALUE}."),
        ([{"name": []}], "a.yaml: rules.0.name: Input should be a valid string."),
    ],
)
def test_one_fault_of_a_list_is_one_fault_in_the_words_of_a_file(rules, said):
    with pytest.raises(errors.ConfigurationError) as refused:
        validate_settings(_Limited, {"rules": rules}, source="a.yaml")
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: &a [*a]", "a.yaml, line 1: not valid YAML: this contains itself."),
        ("a.yaml", f"a: {'[' * 3000}{']' * 3000}", "a.yaml: its values are nested too deeply."),
        ("a.toml", f"a = {'[' * 3000}{']' * 3000}", "a.toml: its values are nested too deeply."),
        ("a.yaml", "a0: &a0 [1, 2]\n" + "\n".join(
            f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)
        ), "a.yaml, line 7: not valid YAML: this has too many values: write fewer anchors."),
    ],
    ids=["itself", "deep", "deep-toml", "anchors"],
)  # fmt: skip
def test_values_that_never_end_are_a_sentence(name, text, said, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(errors.ConfigurationError) as refused:
        read_settings_file(path, {})
    assert str(refused.value) == f"{tmp_path}/{said}"


@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
def test_a_file_may_begin_with_the_mark_of_its_encoding(name, tmp_path):
    text = "a: 1" if name == "a.yaml" else "a = 1"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_settings_file(tmp_path / name, {}) == {"a": 1}


class _Named(BaseModel):
    name: str


class _Limited(BaseModel):
    older_than: Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(minutes=5))] = (
        timedelta(minutes=1)
    )
    rules: tuple[_Named, ...] = Field(min_length=1)
