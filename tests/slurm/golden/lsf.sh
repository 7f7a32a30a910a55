#!/bin/bash
#BSUB -J long
#BSUB -n 16
#BSUB -R "span[ptile=8] rusage[mem=1200MB/host]"
#BSUB -W 60
#BSUB -q wide
#BSUB -P ml
#BSUB -Q "85"
#BSUB -r
#BSUB -o /dev/null
#
# 1 server and 3 workers: about 390 MB a worker, 330 MB a server, and 00:02:07 to the end.
# By bsub < FILE. It ends with 85 before its time limit, and LSF puts it back into the queue (-Q), as
# it does if its first node fails (-r). LSF would keep the output of the last start alone: it is in
# NAME-ID.out.
set -euo pipefail
job=$LSB_JOBID
exec >>long-"$job".out 2>&1
hosts=$(xargs -n 2 <<<"$LSB_MCPU_HOSTS" | awk '{print $1 ":" $2 / 4}' | paste -sd ,)
launcher=(--hosts "$hosts" --rsh blaunch)
left() { bjobs -noheader -o time_left "$job" | awk -F '[ :]+' '{print $1 * 3600 + $2 * 60}'; }
again() { :; }    # by the exit code
# A cluster's own mpirun may know the nodes: launcher=(-n 4 --mpirun mpirun)
[[ $hosts == *,* ]] || launcher=(-n 2)
export PATH=/home/ada/.venv/bin:$PATH    # load modules before you submit it, or here
export OMP_NUM_THREADS=4 OPENBLAS_NUM_THREADS=4
export MKL_NUM_THREADS=4 NUMBA_NUM_THREADS=4

say() { echo "== $(date '+%F %T') $*"; }

run="${MPIPS_RUN:-runs/long-$job}"    # of all links of the chain
mkdir -p "$(dirname "$run")"
echo "$job" >>"$run.links"
links=$(wc -l <"$run.links")
seconds=$(left || true)
[[ $seconds =~ ^[1-9][0-9]*$ ]] || seconds=3600
say "job $job, link $links of $run, on $hosts, $seconds s left"
if ((seconds <= 181)); then
    echo "mpips: $seconds s left, expected more than 181, as the ranks need 121 to save" >&2
    exit 2
fi

asked='' code=0
timeout --foreground --preserve-status --signal=USR1 $((seconds - 121)) \
    python -m mpips.launch "${launcher[@]}" --timeout 0 --restarts 100 -- 'my jobs/a.toml' --lr 0.1 --out "$run" --resume auto &
pid=$!
trap 'asked=yes; kill -s TERM "$pid"' INT TERM    # somebody ends the job: it stays ended
while :; do
    wait "$pid" || true    # which a signal ends
    kill -0 "$pid" 2>/dev/null || break
done
wait "$pid" || code=$?
say "mpips.launch ended with $code"
if [ -n "$asked" ]; then exit 143; fi
if [ $code = 85 ] && { ((links >= 100)) || ! again; }; then
    say "not submitted again; to go on, submit it with MPIPS_RUN=$run in its environment"
    code=1
fi
exit $code
