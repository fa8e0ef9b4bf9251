from pathlib import Path

import pytest
from pydantic import BaseModel, SecretStr

from millrace import errors
from millrace.settings import load


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
    model = load(written(tmp_path, name, text), Model, {"KEY": "se: cret\n# x"})
    assert model.size == 7
    assert model.inner.key.get_secret_value() == "se: cret\n# x"
    assert model.inner.names == ["a-se: cret\n# x", "${KEY}", "none"]


def test_every_missing_variable_is_named_with_its_file_and_line(tmp_path):
    text = "# ${ONE} in a comment\nsize: 1\ninner:\n  key: ${ONE}\n  names:\n    - ${TWO}\n"
    path = written(tmp_path, "a.yaml", text)
    with pytest.raises(errors.ConfigurationError) as refusal:
        load(path, Model, {})
    assert f"ONE ({path}, line 4)" in str(refusal.value)
    assert f"TWO ({path}, line 6)" in str(refusal.value)


def test_a_variable_in_a_comment_need_not_be_set(tmp_path):
    assert load(written(tmp_path, "a.yaml", "size: 1  # or ${SIZE}\n"), Model, {}).size == 1


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
        load(written(tmp_path, name, text), Model, {"BIG": "hush-hush"})
    assert "hush-hush" not in str(refusal.value)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(errors.ConfigurationError, match="millrace init"):
        load(tmp_path / "none.yaml", Model)
