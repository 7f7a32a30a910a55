# shellcheck shell=bash
# What the job scripts beside this file share: the environment of the ranks, and SLURM's signals.
# They run it by `.`, in the batch shell of a job. What is done there is mpips.launch.job's.
#
# These may be set in site.sh or exported before sbatch:
#   LAUNCHER        srun or mpirun; by default srun, where it has the plugin for the MPI in use.
#                   By Open MPI's mpirun a job goes on without a worker that dies
#   LAUNCHER_FLAGS  more words for the launcher, such as --mpi=pmix_v4 or --bind-to none
#   MPIPS_MAX_REQUEUES  how often a job goes back into the queue at the most; by default 100
#   MPIPS_ELASTIC   with sbatch --no-kill: ranks with which a job goes on, at least, when nodes fail

asked='' pid=''

say() { echo "== $(date '+%F %T') $*"; }
refuse() { echo "mpips: $*" >&2; exit 2; }

# The environment of everything that follows.
prepare() {
    trap 'request USR1' USR1
    trap 'request TERM' TERM
    local site
    site=$(dirname "${BASH_SOURCE[0]}")/site.sh
    set +u    # modules and virtual environments look at variables that are not there
    # As by hand, without set -e: it would end the job where the last line is `[ ... ] && ...`.
    # shellcheck source=site.sh.example
    if [ -r "$site" ]; then
        loading=$site    # the trap stays: site.sh may have set its own in its place
        trap 'if [ "$loading" ]; then refuse "$loading ends this shell, expected no exit"; fi' EXIT
        . "$site" || say "$site has ended with $?"
        loading=''
    fi
    set -u
    unset SLURM_EXPORT_ENV    # of sbatch --export=...: the ranks need what this shell has
    export LAUNCHER=${LAUNCHER:-} LAUNCHER_FLAGS=${LAUNCHER_FLAGS:-}
    export MPIPS_MAX_REQUEUES=${MPIPS_MAX_REQUEUES:-} MPIPS_ELASTIC=${MPIPS_ELASTIC:-}
    export PYTHONUNBUFFERED=1
    export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
    export OPENBLAS_NUM_THREADS=$OMP_NUM_THREADS MKL_NUM_THREADS=$OMP_NUM_THREADS
    export NUMBA_NUM_THREADS=$OMP_NUM_THREADS
    export SRUN_CPUS_PER_TASK=$OMP_NUM_THREADS    # since 22.05 srun does not take sbatch's
    if ! python -c 'import mpips, mpi4py'; then
        refuse "$(command -v python || echo 'no python') cannot import mpips, expected one that" \
            "can; activate its environment before sbatch, or in slurm/site.sh"
    fi
}

# SLURM wants the job to end: before its limit, at a preemption (USR1), at a scancel (TERM).
request() {
    asked=$1
    if [ -n "$pid" ]; then kill -s "$1" "$pid" 2>/dev/null || true; fi
}

# job VERB WORDS...: do it, and exit with its code. A shell runs its traps only between commands, so
# that Python is in the background and `wait` is what a signal ends. What a signal has ended before
# Python could note it is begun again.
job() {
    local rc told
    while :; do
        told=$asked rc=0
        python -m mpips.launch.job "$0" "$told" "$@" &
        pid=$!
        if [ "$asked" != "$told" ]; then kill -s "$asked" "$pid" 2>/dev/null || true; fi
        while :; do
            wait "$pid" || true
            kill -0 "$pid" 2>/dev/null || break
        done
        wait "$pid" || rc=$?
        pid=''
        if [ "$asked" = "$told" ] || { [ $rc != 138 ] && [ $rc != 143 ]; }; then exit $rc; fi
    done
}

train() { job train "$@"; }      # OPTIONS... | PROGRAM.py WORDS... | -m MODULE WORDS...
chain() { job chain "$@"; }      # OPTIONS...
sweep() { job sweep "$@"; }      # TABLE JOB OPTIONS...
doctor() { job doctor "$@"; }    # OPTIONS...

# scratch DIR PATH...: copy files, folders and virtual environments to DIR, on a disk of every node's
# own, and start Python from there. DIR is the same in every job, as a run that goes on must find its
# data under their name; a whole copy of what has not changed since stays.
scratch() {
    local dir=$1 n=${SLURM_JOB_NUM_NODES:-1} path copy
    # shellcheck disable=SC2016    # that is for the nodes' shells
    copy='
        mkdir -p "$0" && exec 9>"$0/.lock" && flock 9 || exit
        for path; do
            is=$(find -L "$path" -maxdepth 4 -printf "%T@ %s %p\n" 2>/dev/null | cksum)
            if [ "$is" = "$(cat "$0$path.copied" 2>/dev/null)" ]; then continue; fi
            rm -rf "$0$path" "$0$path.copied" && mkdir -p "$0${path%/*}" &&
                cp -rpH "$path" "$0$path" && echo "$is" >"$0$path.copied" || exit
        done'
    say "copying to $dir on every node: ${*:2}"
    timeout 3600 srun --nodes="$n" --ntasks="$n" --ntasks-per-node=1 --mpi=none \
        bash -c "$copy" "$@" || refuse "--scratch $dir cannot be filled, expected a folder that can" \
        "be written on every node, with enough space"
    shift
    for path; do
        if [ -x "$dir$path/bin/python" ]; then export PATH=$dir$path/bin:$PATH; fi
    done
}
