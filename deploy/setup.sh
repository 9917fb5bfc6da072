#!/usr/bin/env bash
# Installs what OOM needs and is not there yet: system packages, and a Python environment with CMake,
# Ninja, LibTorch and the Hugging Face libraries. A second run finds nothing to do.
#
#   deploy/setup.sh [--development]     --development: also ccache, mold, lld, clang
#
# OOM_ENV: folder of the Python environment (default ~/.cache/oom/env).

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

lists=("$oom_root/deploy/packages.txt")
for argument in "$@"; do
  case $argument in
    --development) lists+=("$oom_root/deploy/packages-development.txt") ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) fail "unknown argument '$argument' (try --help)" ;;
  esac
done

missing_packages() {
  local wanted installed
  wanted=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "${lists[@]}" | sort -u)
  # shellcheck disable=SC2086
  installed=$(dpkg-query -W -f='${db:Status-Abbrev}${Package}\n' $wanted 2>/dev/null |
    sed -n 's/^ii //p' | sort -u || true)
  comm -23 <(printf '%s\n' "$wanted") <(printf '%s\n' "$installed")
}

install_packages() {
  local missing=("$@") as_root=() log
  local command="apt-get update && apt-get install --no-install-recommends ${missing[*]}"
  if [[ $(id -u) != 0 ]]; then
    if ! command -v sudo >/dev/null || { ! sudo -n true 2>/dev/null && ! { : </dev/tty; } 2>/dev/null; }; then
      fail "system packages are missing and need root; run this, then $0 again:
  sudo sh -c '$command'"
    fi
    as_root=(sudo)
  fi
  say "setup: installing ${#missing[@]} system packages: ${missing[*]}"
  log=$(mktemp)
  if ! { "${as_root[@]}" apt-get update -q &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -q --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    fail "apt-get failed; the command was: $command"
  fi
  rm -f "$log"
}

if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
  mapfile -t missing < <(missing_packages)
  [[ ${#missing[@]} == 0 ]] || install_packages "${missing[@]}"
else
  say "setup: no apt-get here; the packages of deploy/packages.txt must be installed by other means"
fi

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "python3 is older than 3.11, the first version that the pinned packages support"

stamp=$oom_env/oom-setup.stamp
wanted_stamp=$(python3 --version; sha256sum <"$oom_root/deploy/requirements.txt")
if [[ -f $stamp && $(<"$stamp") == "$wanted_stamp" ]]; then
  say "setup: up to date ($oom_env)"
  exit 0
fi

mkdir -p "$oom_env"
exec 9>"$oom_env/.setup.lock"
flock 9
if [[ ! -f $stamp || $(<"$stamp") != "$wanted_stamp" ]]; then
  say "setup: Python environment in $oom_env (downloads about 3 GB the first time)"
  [[ -x $oom_python ]] || python3 -m venv "$oom_env"
  "$oom_python" -m pip install --quiet --disable-pip-version-check --no-input \
    --requirement "$oom_root/deploy/requirements.txt" </dev/null ||
    fail "pip could not install deploy/requirements.txt into $oom_env"
  "$oom_python" -c 'import torch, transformers, tokenizers, pyarrow' ||
    fail "the environment in $oom_env does not work; remove that folder and run $0 again"
  printf '%s' "$wanted_stamp" >"$stamp"
fi
say "setup: done ($oom_env)"
