# shellcheck shell=bash
# Sourced by the scripts of this folder: where things are, how many jobs run at once, and messages.

set -euo pipefail

oom_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
oom_env=${OOM_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/oom/env}
oom_python=$oom_env/bin/python
oom_jobs=$(nproc)

export CCACHE_DIR=${CCACHE_DIR:-$HOME/.cache/ccache}
export PATH=$oom_env/bin:$PATH

say() { printf '%s\n' "$*"; }
fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Runs a command so that a signal to this script is handled at once, not when the command is done.
interruptible() {
  "$@" </dev/null &
  wait $!
}

# mark_processes: every process started from here on carries a mark in its environment, so that
# end_marked_processes finds those that left the process group or the session.
mark_processes() {
  export OOM_RUN_MARK=$$-$(date +%s%N)
}

marked_processes() {
  local environ pid
  for environ in /proc/[0-9]*/environ; do
    pid=${environ#/proc/}
    pid=${pid%/environ}
    if [[ $pid != "$$" && $pid != "$BASHPID" ]] &&
      grep -qzxF "OOM_RUN_MARK=$OOM_RUN_MARK" "$environ" 2>/dev/null; then
      printf '%s\n' "$pid"
    fi
  done
}

# Ends what still runs: SIGTERM, up to two seconds to leave, then SIGKILL.
end_marked_processes() {
  local pids turn
  [[ -n ${OOM_RUN_MARK:-} ]] || return 0
  pids=$(marked_processes)
  [[ -n $pids ]] || return 0
  # shellcheck disable=SC2086
  kill -TERM $pids 2>/dev/null || true
  for turn in 1 2 3 4 5 6 7 8 9 10; do
    pids=$(marked_processes)
    [[ -n $pids ]] || return 0
    sleep 0.2
  done
  # shellcheck disable=SC2086
  kill -KILL $pids 2>/dev/null || true
}
