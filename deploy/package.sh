#!/usr/bin/env bash
# Makes one relocatable folder of the programs with the libraries that a machine without OOM's packages lacks. It runs on
# Debian 12 and later and Ubuntu 24.04 with torch of OOM's version installed there (found by `python3 -c "import torch"`),
# and needs no compiler.
#
#   deploy/package.sh FOLDER        FOLDER is replaced; build/release must be built
#   deploy/package.sh --gpu-tests FOLDER     also FOLDER/gpu-tests: what needs a GPU to be tested, and run.sh, which runs it there
#
# OOM_BUILD: another build folder.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

gpu_tests=
case ${1:-} in
  -h | --help | '') sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
  --gpu-tests) gpu_tests=yes; shift ;;
esac
folder=${1:?"--gpu-tests needs a folder"}
build=${OOM_BUILD:-$oom_root/build/release}
programs=(oom oomd oom-jobhost oom-worker oom-export)
[[ ! -x $build/bin/oom-worker-cuda ]] || programs+=(oom-worker-cuda)

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/libexec/oom" "$folder/lib"
for program in "${programs[@]}"; do
  [[ -x $build/bin/$program ]] || fail "$build/bin/$program is missing; run deploy/build.sh first"
  strip -o "$folder/libexec/oom/$program" "$build/bin/$program"
done

cp -R "$oom_root/geometries" "$folder/libexec/oom/"

# What every Linux with a C++ runtime has, and what comes with torch and the driver, stays out.
needed() {
  ldd "$@" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -vE '/(ld-linux[^/]*|libc|libm|libdl|librt|libpthread|libresolv|libgcc_s|libstdc\+\+)\.so' |
    grep -vE '/(libtorch|libc10|libgomp|libcud|libnv|libcu|libnccl|libcupti|libshm)[^/]*\.so'
}
mapfile -t libraries < <(needed "${programs[@]/#/$folder/libexec/oom/}")
for library in "${libraries[@]}"; do
  strip -o "$folder/lib/$(basename "$library")" "$library" 2>/dev/null || cp -L "$library" "$folder/lib/"
done

# The programs start each other beside themselves and inherit where their libraries are.
for program in oom oomd; do
  cat >"$folder/bin/$program" <<'SCRIPT'
#!/bin/sh
# Finds the libraries of the package and those of the installed torch, then runs the program.
set -e
here=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
if [ -z "${OOM_TORCH_LIBRARIES:-}" ]; then
  OOM_TORCH_LIBRARIES=$(python3 - <<'PYTHON' || true
import glob, importlib.util, os
spec = importlib.util.find_spec("torch")
if spec:
    torch = spec.submodule_search_locations[0]
    print(":".join([torch + "/lib"] + sorted(glob.glob(os.path.dirname(torch) + "/nvidia/*/lib"))))
PYTHON
  )
  export OOM_TORCH_LIBRARIES
fi
LD_LIBRARY_PATH=$here/lib${OOM_TORCH_LIBRARIES:+:$OOM_TORCH_LIBRARIES}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$here/libexec/oom/$(basename "$0")" "$@"
SCRIPT
  chmod +x "$folder/bin/$program"
done
say "$folder: $(du -sm "$folder" | cut -f1) MiB, ${#programs[@]} programs, ${#libraries[@]} libraries"

[[ -n $gpu_tests ]] || exit 0
tests=$folder/gpu-tests
mkdir -p "$tests/programs"
# A test that says "skipped" where there is no GPU is one for GPUs.
mapfile -t names < <(ctest --test-dir "$build" --show-only=json-v1 | "$oom_python" -c '
import json, sys
for test in json.load(sys.stdin)["tests"]:
    if any(p["name"] == "SKIP_RETURN_CODE" and p["value"] == 77 for p in test.get("properties", [])):
        print(test["name"])')
[[ ${#names[@]} != 0 ]] || fail "$build has no tests for GPUs; was it configured with nvcc there?"
for name in "${names[@]}"; do
  [[ -x $build/tests/$name ]] || fail "$build/tests/$name is missing; run deploy/build.sh first"
  strip -o "$tests/programs/$name" "$build/tests/$name"
done
for name in "$build"/bin/bench_*; do strip -o "$tests/programs/$(basename "$name")" "$name"; done
[[ ! -e $build/tests/liboom_api_calls.so ]] || strip -o "$tests/liboom_api_calls.so" "$build/tests/liboom_api_calls.so"
for sources in gpu/e2e e2e parity; do
  mkdir -p "$tests/tests/$sources"
  cp "$oom_root/tests/$sources"/*.py "$tests/tests/$sources/"
done
cp "$oom_root/deploy/gpu-tests.sh" "$tests/run.sh"
say "$tests: $(du -sm "$tests" | cut -f1) MiB, ${#names[@]} test programs"
