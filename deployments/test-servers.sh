#!/usr/bin/env bash
# Debian packages that the tests run: Ceph's S3 gateway, PostgreSQL, a browser, and what makes networks.
set -euo pipefail
packages=(radosgw ceph-mon ceph-osd ceph-mgr ceph-base chromium iproute2 postgresql)
missing=()
for package in "${packages[@]}"; do
  dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' \
    || missing+=("$package")
done
((${#missing[@]})) || exit 0
if ((EUID)) || ! command -v apt-get >/dev/null; then
  echo "The tests need these Debian packages: ${missing[*]}" >&2
  echo "As root: apt-get update && apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
