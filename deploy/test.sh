#!/usr/bin/env bash
# Installs what is missing, builds, and runs the tests with CTest.
#
#   deploy/test.sh          the release build and all of its tests
#   deploy/test.sh --ci     also, but for label slow, under ASan + UBSan; TSan (base, memory, graph, optim, core);
#                           fuzzers for 10 s each
#   deploy/test.sh --all    as --ci, with every test under TSan, and every header compiled alone
#   --counts FILE           writes "PASSED FAILED" there too
#
# Prints the seconds of each stage and, as its last line, "N passed, N failed".

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mode=release
counts_file=
while [[ $# != 0 ]]; do
  case $1 in
    --ci) mode=ci ;;
    --all) mode=all ;;
    --counts) counts_file=${2:?"--counts needs a file"}; shift ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) fail "unknown argument '$1' (try --help)" ;;
  esac
  shift
done

# By name or label: what has threads and shared memory of its own, without gRPC (whose callback path is noisy).
tsan_tests='^(base|memory|graph|optim|core|tsan)(_|$)'
passed=0
failed=0
skipped=0
stages=()
work=$(mktemp -d)
exec </dev/null
mark_processes
finish() {
  end_marked_processes
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# stage NAME COMMAND...: runs it, keeps its time; its status is the command's.
stage() {
  local name=$1 start=$SECONDS status=0
  shift
  say "== $name"
  "$@" || status=$?
  stages+=("$(printf '%6d s  %s%s' $((SECONDS - start)) "$name" "$([[ $status == 0 ]] || echo '  FAILED')")")
  return "$status"
}

# A step that is no CTest test (a build, a fuzzer) counts as one test.
count() {
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

# Sanitizers of GCC 12 cannot always map their shadow where the kernel randomises addresses widely.
prefix=()

# run_ctest PRESET ARGUMENTS...: adds what CTest counted. No test at all is a failure.
run_ctest() {
  local folder=$oom_root/build/$1 report=$work/$1.xml status=0 counts
  shift
  interruptible "${prefix[@]}" ctest --test-dir "$folder" --output-on-failure --parallel "$oom_jobs" \
    --output-junit "$report" --no-tests=error "$@" || status=$?
  if [[ -f $report ]]; then
    counts=$("$oom_python" - "$report" <<'PY'
import sys
import xml.etree.ElementTree as xml
suite = xml.parse(sys.argv[1]).getroot()
cases = list(suite.iter("testcase"))
failed = sum(case.find("failure") is not None for case in cases)
skipped = sum(case.find("skipped") is not None or case.get("status") in ("notrun", "disabled")
              for case in cases if case.find("failure") is None)
print(len(cases) - failed - skipped, failed, skipped)
PY
    )
    read -r new_passed new_failed new_skipped <<<"$counts"
    passed=$((passed + new_passed))
    failed=$((failed + new_failed))
    skipped=$((skipped + new_skipped))
    [[ $status == 0 || $new_failed != 0 ]] || failed=$((failed + 1))
  else
    failed=$((failed + 1))
    status=1
  fi
  return "$status"
}

build_and_test() {
  local preset=$1
  shift
  if stage "$preset: build" interruptible "$oom_root/deploy/build.sh" "$preset"; then
    stage "$preset: test" run_ctest "$preset" "$@" || true
  else
    failed=$((failed + 1))
  fi
}

# Names of the tests of a preset that are called so or carry such a label, but for label slow. A test is called as its
# target; the parts of a test have _shard_N behind that.
find_tests() {
  ctest --test-dir "$oom_root/build/$1" --show-only=json-v1 | "$oom_python" -c '
import json, re, sys
for test in json.load(sys.stdin)["tests"]:
    labels = next((p["value"] for p in test.get("properties", []) if p["name"] == "LABELS"), [])
    if "slow" not in labels and any(re.search(sys.argv[1], text) for text in [test["name"], *labels]):
        print(test["name"])' "$2"
}

build_part() {
  local preset=$1
  # `help` configures and builds nothing.
  interruptible "$oom_root/deploy/build.sh" "$preset" help >/dev/null || return 1
  mapfile -t part < <(find_tests "$preset" "$2")
  if [[ ${#part[@]} == 0 ]]; then
    say "no test of $preset matches $2"
    return 1
  fi
  local targets
  mapfile -t targets < <(printf '%s\n' "${part[@]%_shard_*}" | sort -u)
  interruptible "$oom_root/deploy/build.sh" "$preset" "${targets[@]}"
}

# build_and_test_part PRESET EXPRESSION: only the tests of that name or label, and only what they need is built.
build_and_test_part() {
  local part=()
  if stage "$1: build" build_part "$1" "$2"; then
    stage "$1: test" run_ctest "$1" -R "^($(IFS='|'; echo "${part[*]}"))\$" || true
  else
    failed=$((failed + 1))
  fi
}

say "OOM: tests ($mode), $oom_jobs jobs"
if ! stage "set-up" interruptible "$oom_root/deploy/setup.sh" --development; then
  say "0 passed, 1 failed"
  exit 1
fi
build_and_test release
if [[ $mode != release ]]; then
  if setarch "$(uname -m)" -R true 2>/dev/null; then prefix=(setarch "$(uname -m)" -R); fi
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
  export UBSAN_OPTIONS=print_stacktrace=1
  if [[ -f $oom_root/tests/lsan.suppressions ]]; then
    export LSAN_OPTIONS=suppressions=$oom_root/tests/lsan.suppressions:print_suppressions=0
  fi
  export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
  if [[ -f $oom_root/tests/tsan.suppressions ]]; then
    TSAN_OPTIONS+=:suppressions=$oom_root/tests/tsan.suppressions
  fi
  build_and_test asan -LE '^slow$'
  if [[ $mode == ci ]]; then
    build_and_test_part tsan "$tsan_tests"
  else
    build_and_test tsan -LE '^slow$'
  fi
  build_and_test_part fuzz '^fuzz$'
fi
if [[ $mode == all ]]; then
  count stage "headers: each alone" interruptible "$oom_root/deploy/build.sh" dev all_verify_interface_header_sets
fi

say "== seconds by stage"
printf '%s\n' "${stages[@]}"
printf '%6d s  all\n' "$SECONDS"
[[ $skipped == 0 ]] || say "$skipped tests skipped themselves; CTest gives the reasons above"
[[ -z $counts_file ]] || say "$passed $failed" >"$counts_file"
say "$passed passed, $failed failed"
[[ $failed == 0 ]]
