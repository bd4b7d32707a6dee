#!/bin/sh
# install.sh NAME...: make .venv where it is missing and install requirements/NAME.lock for each NAME that changed.
# Each failure is one line that says what to do. A stamp in .venv remembers which lock file is installed.
set -u
cd "$(dirname "$0")/.." || exit 1

fail() { echo "error: $*" >&2; exit 1; }

find_python() {
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        [ -n "$candidate" ] || continue
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || fail "no Python 3.11 found (Debian: apt install python3.11 python3.11-venv), or name one: make serve PYTHON=/path/to/python3.11"
    echo "  .. making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv >/dev/null 2>&1 || { rm -rf .venv; fail "$python cannot make a virtual environment; install its venv module (Debian: apt install python3.11-venv)"; }
fi

for name in "$@"; do
    lock="requirements/$name.lock"
    stamp=".venv/.installed-$name"
    sum=$(sha256sum "$lock" | cut -d' ' -f1)
    [ "$(cat "$stamp" 2>/dev/null)" = "$sum" ] && continue
    if [ "$name" = cpu ] && [ ! -e "$stamp" ]; then
        free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
        [ "$free_kb" -ge 6000000 ] || fail "$((free_kb / 1000000)) GB free in $(pwd), the installation needs 6 GB: free some"
    fi
    echo "  .. installing $lock ($([ "$name" = cpu ] && echo 'once, a few minutes, 3.8 GB' || echo 'once'))"
    rm -f "$stamp"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps -r "$lock" </dev/null ||
        fail "pip could not install $lock (its words are above); for torch's +cpu build point PIP_EXTRA_INDEX_URL at PyTorch's CPU package index"
    echo "$sum" >"$stamp"
done

ln -sf ../../tidegate .venv/bin/tidegate
