#!/usr/bin/env bash
# Makes .venv and installs into it the pinned packages of the named sets (base, dev, or an extra) and
# this project, editable. Does nothing when that is already so; never removes a package.
# Usage: [PYTHON=/path/to/python] requirements/bootstrap.sh <set> ...
set -eu
cd -P "$(dirname "$0")/.."
venv=$PWD/.venv python=$PWD/.venv/bin/python
[ $# -gt 0 ] || set -- base

say() { printf '%-7s %s\n' "$1" "$2" >&2; }
fail() { say error "$1"; exit 1; }
for set in "$@"; do
  [ -f "requirements/$set.txt" ] || fail "no requirements/$set.txt; there are: $(cd requirements && echo *.txt)"
done

# Prints "3.12.1 /the/real/python", or nothing. Asking is the only way to know: pyenv has shims for versions
# it will not start. Inside an activated environment the interpreter beneath it is meant.
probe() {
  "$1" -I -c 'import sys; print("%d.%d.%d" % sys.version_info[:3], sys._base_executable)' 2>/dev/null || true
}

find_python() {
  local wanted candidate found
  if [ -n "${PYTHON:-}" ]; then
    set -- "$PYTHON"
  else
    set -- python3 python python3.14 python3.13 python3.12 \
      "${PYENV_ROOT:-/nowhere}"/versions/*/bin/python "${HOME:-/nowhere}"/.pyenv/versions/*/bin/python
  fi
  # 3.12 and 3.13 are what the project is tested with; a newer one only if there is nothing else.
  for wanted in '3\.1[23]\.' '3\.(1[4-9]|[2-9][0-9])\.'; do
    for candidate in "$@"; do
      found=$(probe "$candidate")
      if [[ $found =~ ^$wanted ]]; then echo "$found" && return; fi
    done
  done
}

# Made in this very folder (its scripts carry the path), Python >= 3.12, and no install was cut short.
venv_is_good() {
  [ ! -e "$venv/.installing" ] && grep -qsF -- "-m venv $venv" "$venv/pyvenv.cfg" &&
    "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

make_venv() {
  local found interpreter
  found=$(find_python)
  [ -n "$found" ] || fail "no Python >= 3.12 found${PYTHON:+ at $PYTHON}; install Python 3.12 or 3.13, or set PYTHON=/path/to/one"
  interpreter=${found#* }
  say python "$interpreter (${found%% *})"
  "$interpreter" -I -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python cannot make environments; install its venv package (on Debian and Ubuntu python3-venv)"
  [ ! -e "$venv" ] || say venv "made anew: the old .venv was moved, broken, too old or half installed"
  rm -rf "$venv" && mkdir "$venv" && touch "$venv/.installing"
  "$interpreter" -m venv "$venv"
}

# uv does not read pip's settings: hand over what a mirror or a proxy needs, and trust whom the system trusts.
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
[ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
[ ! -s /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
install() { "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$python" "$@"; }

venv_is_good || make_venv
# One digest for all locks: when any of them changes, every set is looked at again.
digest=$(cat pyproject.toml requirements/*.txt requirements/bootstrap.sh | "$python" -I -c \
  'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
missing=()
for set in "$@"; do grep -qsxF "$digest $set" "$venv/.installed" || missing+=("$set"); done
[ ${#missing[@]} -gt 0 ] || exit 0

locks=(requirements/build.txt $(printf 'requirements/%s.txt ' "${missing[@]}"))
touch "$venv/.installing"
"$python" -m pip install -qq --require-hashes -r requirements/uv.txt
say install "$(cat "${locks[@]}" | grep -oE '^[A-Za-z0-9._-]+==' | sort -u | grep -c .) pinned packages (${missing[*]})"
install --require-hashes $(printf -- '-r %s ' "${locks[@]}")
say install "evsys-sdk from this folder"
install --no-deps --no-build-isolation --editable .
{ grep -s "^$digest " "$venv/.installed" || true; printf "$digest %s\n" "${missing[@]}"; } >"$venv/.installed.new"
mv "$venv/.installed.new" "$venv/.installed" && rm "$venv/.installing"
