#!/usr/bin/env bash
# Does what is published work? Builds the sdist, the wheel from that sdist, and uses it where no checkout is near.
# Usage: scripts/wheel_test.sh PYTHON   (one that has "build" installed)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$1
[[ $python == */* ]] && python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
unset PYTHONPATH
while IFS= read -r name; do unset "$name"; done < <(compgen -e MEMVAULT_ || true)

say() { echo "wheel-test: $*"; }
quietly() { # prints what a command said only where it failed
    "$@" >"$tmp/log" 2>&1 || { cat "$tmp/log" >&2; say "FAILED: $*" >&2; exit 1; }
}

cd "$tmp"
say "build the sdist"
quietly "$python" -m build --sdist --outdir "$tmp/dist" "$root"
sdist=("$tmp"/dist/memvault-*.tar.gz)

say "build the wheel from ${sdist[0]##*/}"
mkdir "$tmp/source"
tar -xzf "${sdist[0]}" -C "$tmp/source" --strip-components 1
quietly "$python" -m build --wheel --outdir "$tmp/dist" "$tmp/source"
wheel=("$tmp"/dist/memvault-*.whl)

say "look into ${wheel[0]##*/}"
"$python" - "${wheel[0]}" <<'PY'
import re
import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
wanted = [
    r"memvault/__init__\.py",
    r"memvault/py\.typed",
    r"memvault/cli/sample\.jsonl",
    r"memvault/_migrations/alembic\.ini",
    r"memvault/_migrations/alembic/env\.py",
    r"memvault/_migrations/alembic/script\.py\.mako",
    r"memvault/_migrations/alembic/versions/.+\.py",
    r"memvault-[^/]+\.dist-info/licenses/LICENSE",
]
missing = [pattern for pattern in wanted if not any(re.fullmatch(pattern, name) for name in names)]
foreign = [n for n in names if not re.match(r"memvault/|memvault-[^/]+\.dist-info/", n) or "__pycache__" in n]
if missing or foreign:
    sys.exit(f"wheel-test: FAILED: missing {missing}, should not be there {foreign}")
PY

say "install it into a new environment"
"$python" -m venv "$tmp/venv"
quietly "$tmp/venv/bin/python" -m pip install --disable-pip-version-check --no-compile \
    -c "$root/constraints.txt" "${wheel[0]}"

mkdir "$tmp/elsewhere"
cd "$tmp/elsewhere"
export MEMVAULT_DATABASE_URL="sqlite:///$tmp/elsewhere/vault.db"

say "memvault db upgrade"
quietly "$tmp/venv/bin/memvault" db upgrade

say "memvault db current"
quietly "$tmp/venv/bin/memvault" db current

say "open, add, search, close"
cat >"$tmp/elsewhere/use.py" <<'PY'
import os
import sys
from pathlib import Path

import memvault
from memvault import StorageLayer

assert Path(memvault.__file__).is_relative_to(sys.prefix), memvault.__file__

if __name__ == "__main__":
    with StorageLayer.open(os.environ["MEMVAULT_DATABASE_URL"]) as storage:
        alice = storage.for_user("alice")
        chunk = alice.chunks.add("Prefers concise answers", memory_type="semantic")
        hits = alice.search("how long should an answer be?")
        assert [hit.chunk.id for hit in hits] == [chunk.id], hits
        assert storage.for_user("bob").search("how long should an answer be?") == []
PY
quietly "$tmp/venv/bin/python" use.py

unset MEMVAULT_DATABASE_URL
say "memvault demo"
quietly "$tmp/venv/bin/memvault" demo

say "passed"
