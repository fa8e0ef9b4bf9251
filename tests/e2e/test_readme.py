"""README's paths by the letter, where README's line installs.

Each test runs the commands of a code block as they stand there. Only what a reader substitutes is
substituted: accounts, folders and ports.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from millrace.testing.process import find_free_ports
from millrace.testing.rgw import RGW
from tests.oracle import S3Bucket
from tests.support.flows.fixtures import make_jsonl, make_texts, read_texts
from tests.support.readme import Clone, make_clone, read_block

FIVE_MINUTES = "Five minutes to a sharded dataset in your own bucket"
ACCOUNT = "0123456789abcdef0123456789abcdef"

# What a person does in an editor: fill in the values. Meanwhile the server starts.
_EDITOR = """
import re, sys, time, urllib.request
from pathlib import Path

values = {values!r}
path = Path(sys.argv[1])
text = path.read_text()
for name, value in values.items():
    text, found = re.subn(rf"^(?:# )?{{name}}=.*$", f"{{name}}={{value}}", text, flags=re.MULTILINE)
    assert found == 1, name
path.write_text(text)
while True:
    try:
        urllib.request.urlopen(values["PREFECT_API_URL"] + "/health", timeout=5)
        break
    except OSError:
        time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone whose environment has what README's line installs."""
    made = make_clone(tmp_path_factory.mktemp("readme") / "millrace")
    # Python compiles what the commands import. pip reads the variable the other way round.
    made.run(read_block("Install", "console"), PIP_NO_COMPILE="0")
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of JSON lines."""
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(make_jsonl(make_texts()))
    return folder


def edit_job(clone: Clone, commands: str, source: Path) -> str:
    """Return commands that also edit the settings which they write: a person names the source."""
    (clone.folder / "job.yaml").unlink(missing_ok=True)
    edit = f"sed -i 's#file:///path/to/a/folder#{source.as_uri()}#' job.yaml"
    script, edited = re.subn(r"^millrace init .*$", rf"\g<0>\n{edit}", commands, flags=re.MULTILINE)
    assert edited == 1
    return script


def test_the_five_minutes(clone: Clone, source: Path, rgw: RGW, bucket: str) -> None:
    commands = read_block(FIVE_MINUTES, "console")
    key = rgw.full
    for written, meant in (("r2://ACCOUNT/BUCKET", f"s3://{bucket}"),
                           ("=KEY", f"={key.access_key_id}"),
                           ("=SECRET", f"={key.secret_access_key}")):  # fmt: skip
        assert written in commands
        commands = commands.replace(written, meant)

    read = f"cat > read.py <<'END'\n{read_block(FIVE_MINUTES, 'python')}END\npython read.py\n"
    script = edit_job(clone, commands, source) + read
    shown = clone.run(script, AWS_ENDPOINT_URL=rgw.endpoint)

    assert read_texts(S3Bucket(rgw.make_client(key), bucket, "my-dataset")) == Counter(make_texts())
    assert "my-dataset: complete" in shown
    assert "1 shard of 1 as the manifest says" in shown
    assert shown.splitlines()[-1] == "{'train': 4000}"


def test_the_prefect_path(
    clone: Clone, source: Path, rgw: RGW, bucket: str, tmp_path: Path
) -> None:
    script = read_block("Terminal or Prefect", "console")
    (port,) = find_free_ports(1)
    values = {
        "R2_DATASET_ACCOUNT_ID": ACCOUNT,
        "R2_DATASET_BUCKET_NAME": bucket,
        "R2_DATASET_READ_ACCESS_KEY_ID": rgw.read_only.access_key_id,
        "R2_DATASET_READ_SECRET_ACCESS_KEY": rgw.read_only.secret_access_key,
        "R2_DATASET_WRITE_ACCESS_KEY_ID": rgw.full.access_key_id,
        "R2_DATASET_WRITE_SECRET_ACCESS_KEY": rgw.full.secret_access_key,
        "R2_ENDPOINT": rgw.endpoint,
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
    }
    editor = tmp_path / "editor"
    editor.write_text(f"#!{sys.executable}\n{_EDITOR.format(values=values)}")
    editor.chmod(0o755)
    for written, meant in (("127.0.0.1:4200", f"127.0.0.1:{port}"),
                           ("file:///data/words", source.as_uri())):  # fmt: skip
        assert written in script
        script = script.replace(written, meant)

    shown = clone.run(
        script,
        EDITOR=str(editor),
        PREFECT_HOME=str(tmp_path / "prefect"),
        PREFECT_SERVER_API_PORT=str(port),
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
    )

    assert read_texts(S3Bucket(rgw.make_client(rgw.full), bucket, "words")) == Counter(make_texts())
    assert "ModuleNotFoundError" not in shown
