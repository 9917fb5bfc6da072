#!/usr/bin/env bash
# From a bare machine to a trained model: installs, builds, starts oomd for this user, packs Python sources with a
# tokenizer trained on them, trains a small Qwen3-MoE on two CPU workers, and checks the exported model.
#
#   deploy/quickstart.sh [--keep]     --keep: leave oomd running for the next job
#
# OOM_QUICKSTART_DIR: where everything goes (default ~/.local/share/oom/quickstart). What is there is used again.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

keep=0
for argument in "$@"; do
  case $argument in
    --keep) keep=1 ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) fail "unknown argument '$argument' (try --help)" ;;
  esac
done

work=${OOM_QUICKSTART_DIR:-$HOME/.local/share/oom/quickstart}
mkdir -p "$work/runs"
work=$(cd "$work" && pwd)
bin=$oom_root/build/release/bin
socket=$work/oomd.sock
# A socket's path is limited to 107 bytes.
[[ ${#socket} -le 100 ]] || socket=$(mktemp -d /tmp/oom-quickstart-XXXXXX)/oomd.sock
export OOM_HOST=$socket

oomd_pid=
job=
finish() {
  local status=$?
  trap - EXIT INT TERM
  if [[ $keep == 0 || $status != 0 ]]; then
    if [[ -n $oomd_pid ]]; then
      # A job that still runs would outlive its daemon.
      [[ -z $job ]] || "$bin/oom" -q --timeout 20s cancel "$job" --now >/dev/null 2>&1 || true
      kill -TERM "$oomd_pid" 2>/dev/null || true
      for _ in $(seq 100); do
        kill -0 "$oomd_pid" 2>/dev/null || break
        sleep 0.1
      done
    fi
    end_marked_processes
  fi
  exit "$status"
}
mark_processes
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

stage_start=$SECONDS
say "== install and build"
interruptible "$oom_root/deploy/setup.sh"
interruptible "$oom_root/deploy/build.sh" release oom oomd oom-jobhost oom-worker oom-export
say "   $((SECONDS - stage_start)) s"

stage_start=$SECONDS
say "== data: the Python sources of the installed torch package"
data=$work/data
mkdir -p "$data"
list_sources() {
  "$oom_python" - "$1" <<'PY'
import importlib.util
import pathlib
import sys
torch = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
files = sorted(p for part in ("nn", "optim", "distributed") for p in (torch / part).glob("**/*.py"))
# Every twentieth file is held out.
held_out = sys.argv[1] == "held-out"
print("\n".join(str(p) for i, p in enumerate(files) if (i % 20 == 19) == held_out))
PY
}
if [[ ! -d $data/tokenizer ]]; then
  list_sources train | "$oom_python" "$oom_root/tools/train_tokenizer.py" --vocabulary 2048 --output "$data/tokenizer" --files-from -
fi
for part in train held-out; do
  [[ -d $data/$part ]] || list_sources "$part" |
    "$oom_python" "$oom_root/tools/pack.py" --tokenizer "$data/tokenizer" --output "$data/$part" --format text --files-from -
done
"$oom_python" "$oom_root/deploy/quickstart_files.py" model "$data/train" "$work/model"
cp "$data"/tokenizer/tokenizer*.json "$work/model/"
say "   $((SECONDS - stage_start)) s"

number=1
while [[ -e $work/runs/quickstart-$number || -e $work/runs/quickstart-$number.yaml ]]; do number=$((number + 1)); done
name=quickstart-$number
run=$work/runs/$name
"$oom_python" "$oom_root/deploy/quickstart_files.py" job "$name" "$work/model" "$data" "$run" "$run.yaml"

if "$bin/oom" -q --timeout 5s health >/dev/null 2>&1; then
  say "== oomd: the one that listens on $socket"
else
  say "== oomd: starting it on $socket"
  started=$SECONDS
  setsid "$bin/oomd" --foreground --state-dir "$work/state" --socket "$socket" >"$work/oomd.log" 2>&1 </dev/null &
  oomd_pid=$!
  until "$bin/oom" -q --timeout 1s health >/dev/null 2>&1; do
    if ! kill -0 "$oomd_pid" 2>/dev/null || ((SECONDS - started > 60)); then
      tail -n 20 "$work/oomd.log" >&2
      fail "oomd did not start; its log is $work/oomd.log"
    fi
    sleep 0.1
  done
fi

stage_start=$SECONDS
say "== training: oom train $run.yaml"
job=$name
interruptible "$bin/oom" train "$run.yaml" || fail "the training failed; logs: $run/logs, $work/oomd.log"
job=
say "   $((SECONDS - stage_start)) s"

say "== the exported model in transformers"
interruptible "$oom_python" "$oom_root/deploy/quickstart_check.py" "$run" "$data"

metrics=$("$bin/oom" -o json node 2>/dev/null | "$oom_python" -c '
import json, sys
node = json.load(sys.stdin)
print(node.get("metricsAddress") or node.get("metrics_address") or "")' 2>/dev/null || true)
[[ -z $metrics || $metrics == http* ]] || metrics=http://$metrics/metrics
say "
model      $run/export
step log   $run/steps.jsonl (TensorBoard: $run/tensorboard)
trace      $run/trace (open in https://ui.perfetto.dev)
metrics    ${metrics:-off} (while oomd runs)
next job   edit a copy of $run.yaml (name, output), then:"
if [[ $keep == 1 || -z $oomd_pid ]]; then
  say "             OOM_HOST=$socket $bin/oom train JOB.yaml"
  [[ -z $oomd_pid ]] || say "stop oomd  kill $oomd_pid"
else
  say "             $oom_root/deploy/quickstart.sh --keep     leaves oomd running; or without it:
             $bin/oom train --embedded JOB.yaml"
fi
