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
