# Sourced by scripts/run and scripts/test: makes the virtual environment once and installs the project in it.
# T2N_VENV: where it goes (default .venv in the project). PYTHON: the interpreter to make it with (3.11 or newer).
# T2N_CONSTRAINTS: the versions that it gets (default constraints.txt in the project).

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${T2N_VENV:-$project/.venv}
constraints=${T2N_CONSTRAINTS:-$project/constraints.txt}

# Prints the interpreter to make the environment with: $PYTHON, or the first one found, unless another is much faster. With a Python
# that was compiled without profile-guided optimization, as pyenv does by default, captures take about a quarter longer.
find_python() {
  local candidate time found="" best=""
  for candidate in ${PYTHON:-$(type -ap python3.12 python3.11 python3.13 python3.14 python3)}; do
    "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    time=$("$candidate" "$project/scripts/interpreter_speed.py")
    if [ -z "$best" ] || [ "$time" -lt $((best * 3 / 4)) ]; then found=$candidate best=$time; fi
  done
  if [ -n "$found" ]; then
    printf '%s\n' "$found"
    return
  fi
  echo "error: ${PYTHON:+PYTHON=$PYTHON: }no Python 3.11 or newer with venv was found." >&2
  echo " hint: install one (Debian: apt-get install python3 python3-venv), or name it: PYTHON=/path/to/python scripts/run" >&2
  return 1
}

# install EXTRAS: installs the project with the given extras, pinned by the constraints; nothing to do the second time, nor
# where the extra dev is installed, which includes the others that scripts install.
install() {
  local extras=$1 python stamp wanted
  wanted=$(cat "$project/pyproject.toml" "$constraints" | cksum)
  for stamp in "$venv/.installed-dev" "$venv/.installed-$extras"; do
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
  done
  if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python) || return 1
    echo "making the environment in $venv"
    "$python" -m venv "$venv" || return 1
  fi
  echo "installing (the first time takes a few minutes, most of it PyTorch)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$constraints" --editable "$project${extras:+[$extras]}" || return 1
  printf '%s' "$wanted" >"$stamp"
}
