#!/usr/bin/env bash
# Runs what deploy/package.sh --gpu-tests put beside it, one after the other, on a machine with a GPU and torch: the test
# programs, then training end to end. Prints each one's seconds and status; its output goes to a folder.
#
#   gpu-tests/run.sh [OUTPUT [NAME...]]      OUTPUT: default ./gpu-tests-output; NAME: only these (ops_cuda_test, gpu_training, ...)
#
# Programs bench_* print speeds and run only if named. OOM_TEST_SECONDS: limit of each (300). The status is 0 if all passed.

set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=${1:-gpu-tests-output}
shift || true
mkdir -p "$output"
libraries=$(python3 - <<'PYTHON'
import glob, importlib.util, os
torch = importlib.util.find_spec("torch").submodule_search_locations[0]
print(":".join([torch + "/lib"] + sorted(glob.glob(os.path.dirname(torch) + "/nvidia/*/lib"))))
PYTHON
) || { echo "gpu-tests: python3 has no torch here" >&2; exit 1; }
failed=0

# wanted NAME: among those asked for; without any all but benchmarks.
names=("$@")
wanted() {
  local name
  if [[ ${#names[@]} == 0 ]]; then [[ $1 != bench_* ]]; return; fi
  for name in "${names[@]}"; do [[ $name != "$1" ]] || return 0; done
  return 1
}

run() {
  local name=$1 start=$SECONDS status=0
  shift
  wanted "$name" || return 0
  timeout --kill-after=10 "${OOM_TEST_SECONDS:-300}" "$@" >"$output/$name.log" 2>&1 || status=$?
  local how=
  case $status in
    0) ;;
    77) how='  skipped: no GPU here' ;;
    *) how="  status $status, see $output/$name.log"; failed=1 ;;
  esac
  printf '%6d s  %s%s\n' $((SECONDS - start)) "$name" "$how"
}

for program in "$here"/programs/*; do
  run "$(basename "$program")" env LD_LIBRARY_PATH="$here/../lib:$libraries" "$program"
done
export OOM_BIN=$here/../bin OOM_API_CALLS_LIBRARY=$here/liboom_api_calls.so
run gpu_training python3 "$here/tests/gpu/e2e/gpu_training_test.py"
run api_calls python3 "$here/tests/gpu/e2e/api_calls_test.py"
exit "$failed"
