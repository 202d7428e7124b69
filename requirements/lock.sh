#!/usr/bin/env bash
# Writes every lock file of this folder from pyproject.toml; `make lock` calls it.
# all.txt (every extra and dev) is resolved first; the others may only use versions it chose, so any
# two sets can share one environment. Pins stay as they are unless pyproject.toml asks otherwise or
# an option says so:  make lock LOCK_FLAGS=--upgrade   or   LOCK_FLAGS='--upgrade-package harbor'
set -eu
cd -P "$(dirname "$0")/.."
# What this machine is configured with must not leak into files that others install from.
unset UV_FIND_LINKS UV_INDEX UV_EXTRA_INDEX_URL UV_NO_INDEX UV_CONSTRAINT UV_OVERRIDE UV_EXCLUDE_NEWER
uv=${UV:-.venv/bin/uv}
python=${PYTHON:-.venv/bin/python}

lock() { # lock <name> <what to compile ...>
  local name=$1 notes=--no-annotate
  shift
  [ "$name" != all ] || notes=--annotate # one file says who needs what; in the others it is noise
  "$uv" pip compile "$@" $notes --python "$python" --python-version 3.12 --universal --generate-hashes \
    --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
    --quiet --output-file "requirements/$name.txt" >/dev/null
  echo "lock    requirements/$name.txt: $(grep -cE '^[a-zA-Z0-9]' "requirements/$name.txt") packages"
}

extras=$("$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])')
lock all pyproject.toml --extra all --extra dev "$@"
lock base pyproject.toml --constraint requirements/all.txt
for extra in $extras; do
  [ "$extra" = all ] || lock "$extra" pyproject.toml --extra "$extra" --constraint requirements/all.txt
done
lock build --group build --constraint requirements/all.txt
lock docs --group docs --constraint requirements/all.txt
lock uv --group uv "$@"
