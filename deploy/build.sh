#!/usr/bin/env bash
# Configures (the first time) and builds one CMake preset into build/PRESET.
#
#   deploy/build.sh [PRESET [TARGET...]]     PRESET: release (default), dev, asan, tsan, or fuzz
#
# `fuzz` builds the libFuzzer programs with clang; CTest runs them (label fuzz). With no TARGET everything is built.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
preset=${1:-release}
targets=("${@:2}")
[[ -x $oom_env/bin/cmake ]] || fail "no CMake in $oom_env; run deploy/setup.sh first"

folder=$oom_root/build/$preset
options=("-DOOM_PYTHON=$oom_python" "-DCMAKE_MAKE_PROGRAM=$oom_env/bin/ninja")
# A build folder of another environment is configured again; otherwise Ninja itself sees what changed.
if [[ ! -f $folder/build.ninja ]] ||
  [[ $(sed -n 's/^OOM_PYTHON:[A-Z]*=//p' "$folder/CMakeCache.txt") != "$oom_python" ]]; then
  say "build: configuring $preset"
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  if [[ $preset == fuzz ]]; then
    configure=(cmake -S "$oom_root" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DOOM_FUZZERS=ON
      -DOOM_LIBTORCH=OFF -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++)
  else
    configure=(cmake -S "$oom_root" --preset "$preset")
  fi
  if ! (cd "$oom_root" && "${configure[@]}" "${options[@]}") >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    fail "cmake could not configure the preset '$preset'"
  fi
fi

arguments=(--build "$folder" --parallel "$oom_jobs")
[[ ${#targets[@]} == 0 ]] || arguments+=(--target "${targets[@]}")
# Ninja's own status line is for terminals; elsewhere only its last line and errors are of use.
if [[ -t 1 ]]; then
  exec cmake "${arguments[@]}"
fi
log=${log:-$(mktemp)}
trap 'rm -f "$log"' EXIT
if ! cmake "${arguments[@]}" >"$log" 2>&1 </dev/null; then
  grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking|Generating|Scanning|Re-running|Running)' "$log" >&2 || true
  fail "the build of '$preset' failed"
fi
say "build: $preset is up to date in $folder"
