#!/usr/bin/env bash
# What only a GPU can show, part by part, each some minutes long.
#
#     tests/gpu.sh PART OUT [COMMIT]
#
#   checks     every test of a GPU, a process a file, several at a time
#   sanitize   every kernel under memcheck and racecheck, a process an operator
#   jobs       jobs from Parquet to Parquet: the rows of the README's table
#   peers      such a job at 2.7b, and the same documents through other implementations
#   kernels    every operator beside its peers;  networks: whole networks in turns with theirs
#   tune       the tables of what is fastest, into OUT
#   scale      a job on one GPU, and the same on two
#
# OUT gets a JSON file a measurement, and what each said. COMMIT is named in the files where there is no git to ask.
# longscan, pytest, and for peers mamba-ssm and fla-core, must be importable. The exit code is 1 where anything failed.
set -uo pipefail

part=${1:?a part: checks sanitize jobs peers kernels networks tune scale}
out=${2:?a folder for the results}
commit=${3:-$(git -C "$(dirname "$0")" rev-parse --short HEAD 2>/dev/null)}
tests=$(cd "$(dirname "$0")" && pwd)
day=$(date +%F)
failed=0
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONUNBUFFERED=1 PYTHONPATH="$tests${PYTHONPATH:+:$PYTHONPATH}"

# NAME COMMAND...: run it, its words to the terminal and to OUT/words.txt, whatever became of those before it.
step() {
  local name=$1
  shift
  printf '\n== %s (%ss)\n' "$name" "$SECONDS"
  "$@" 2>&1 | tee -a "$out/words.txt"
  local code=${PIPESTATUS[0]}
  [[ $code == 0 ]] || { echo "== $name FAILED with $code"; failed=1; }
}

bench() {  # NAME WHAT ARGUMENTS...
  local name=$1 what=$2
  shift 2
  step "$name" python3 -m longscan.jobs.bench "$what" "$@" --json "$out/$day-$name.json" --commit "$commit"
}

job() {  # NAME SHAPE LENGTHS TOKENS ARGUMENTS...
  local name=$1 shape=$2 lengths=$3 tokens=$4
  shift 4
  bench "job-$name" job --shape "$shape" --lengths "$lengths" --tokens "$tokens" "$@"
}

one_file() {  # FILE: its tests of a GPU; what it said only where one failed
  local log
  log=$(mktemp)
  if timeout 560 python3 -m pytest -q -p no:cacheprovider -m gpu "$1" >"$log" 2>&1; then
    echo "$(basename "$1"): $(tail -n 1 "$log")"
  else
    echo "$(basename "$1"): FAILED"
    tail -n 60 "$log"
    return 1
  fi
}
export -f one_file

case $part in
  checks)
    # The longest first: most of the time is the compiler's, which works in one thread of each process.
    files=$(grep -lrE 'mark\.gpu' "$tests" --include='test_*.py' | grep -v test_battery | sort)
    step checks xargs -n 1 -P "${PROCESSES:-8}" bash -c 'one_file "$0"' <<<"$(ls "$tests"/kernels/test_battery_*.py) $files"
    ;;
  sanitize)
    step results python3 "$tests/kernels/sanitize.py"
    for tool in memcheck racecheck; do
      step "$tool" xargs -n 1 -P 5 timeout 280 compute-sanitizer --tool "$tool" --error-exitcode 9 python3 "$tests/kernels/sanitize.py" \
        <<<"ssd conv1d norm pool logprob"
    done
    ;;
  jobs)
    job 130m-lognormal 130m lognormal:8000 60000000
    job 130m-mixed 130m mixed 40000000
    job 130m-lognormal-score 130m lognormal:8000 25000000 --task score
    job 130m-500 130m constant:500 40000000
    job 130m-one 130m giant 10000000
    job 2.7b-lognormal 2.7b lognormal:8000 5000000
    ;;
  peers) job 2.7b-lognormal-peers 2.7b lognormal:8000 5000000 --peers --peer-tokens 800000 ;;
  kernels) bench kernels kernels ;;
  networks) for shape in 130m 2.7b 7b; do bench "model-$shape" model --shape "$shape"; done ;;
  tune) step tune python3 -m longscan.jobs.bench tune --out "$out/tuned" --commit "$commit" ${OPERATORS:+--operator $OPERATORS} ;;
  scale)
    job one-gpu 130m lognormal:8000 60000000 --cluster local --keys cluster.workers=1
    job two-gpus 130m lognormal:8000 60000000 --cluster local --keys cluster.workers=2
    ;;
  *) echo "gpu.sh: no part $part" >&2; exit 2 ;;
esac
exit "$failed"
