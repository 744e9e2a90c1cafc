#!/usr/bin/env bash
# The tests of a release, one after the other: both stacks, and merging on a newer ppdiffusers in SOURCE. Ends with one table.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -f "${SOURCE:-}/ppdiffusers/__init__.py" ]; then
  echo "Needs SOURCE=DIR, the folder of a newer ppdiffusers that contains the package ppdiffusers" >&2
  exit 1
fi
mkdir -p build/test-all
rows=() status=0
run() {  # name, then arguments of make
  local name=$1 begin=$SECONDS log=build/test-all/$1.log
  shift
  if make "$@" 2>&1 | tee "$log"; then result=passed; else result=FAILED status=1; fi
  rows+=("$(printf '%-10s %-7s %4d min  %s' "$name" "$result" $(((SECONDS - begin + 30) / 60)) "$(grep -E '^=+ .* in .*=+$' "$log" | tail -1 | tr -d =)")")
}
run paddle3 test STACK=paddle3
run paddle2 test STACK=paddle2
run newer test-newer "SOURCE=$SOURCE"
echo
printf '%s\n' "${rows[@]}"
exit $status
