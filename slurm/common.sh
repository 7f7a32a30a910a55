# shellcheck shell=bash
# What the job scripts beside this file share. They run it by `.`, in the batch shell of a job.
#
# These may be set in site.sh or exported before sbatch:
#   LAUNCHER        srun or mpirun; by default srun, where it has the plugin for the MPI in use
#   LAUNCHER_FLAGS  more words for the launcher, such as --mpi=pmix_v4 or --bind-to none

readonly EXIT_SAVED=85    # of mpips: saved, run me again
readonly EXIT_REFUSED=2   # of mpips: the job cannot run as it was asked for
launcher=() pid='' asked='' rc=0 out='' step=-1

say() { echo "== $(date '+%F %T') $*"; }
refuse() { echo "mpips: $*" >&2; exit "$EXIT_REFUSED"; }
job_field() { scontrol -o show job "$SLURM_JOB_ID" | tr ' ' '\n' | sed -n "s/^$1=//p" | head -n 1; }

# Everything before the first rank: the site, the environment, threads, the launcher.
prepare() {
    trap 'request USR1' USR1
    trap 'request TERM' TERM
    local site
    site=$(dirname "${BASH_SOURCE[0]}")/site.sh
    set +u    # modules and virtual environments look at variables that are not there
    # shellcheck source=site.sh.example
    if [ -r "$site" ]; then . "$site"; fi
    set -u
    export PYTHONUNBUFFERED=1
    export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
    export OPENBLAS_NUM_THREADS=$OMP_NUM_THREADS MKL_NUM_THREADS=$OMP_NUM_THREADS
    export NUMBA_NUM_THREADS=$OMP_NUM_THREADS
    export SRUN_CPUS_PER_TASK=$OMP_NUM_THREADS    # since 22.05 srun does not take sbatch's
    if ! python -c 'import mpips, mpi4py'; then
        refuse "$(command -v python || echo 'no python') cannot import mpips, expected one that" \
            "can; activate its environment before sbatch, or in slurm/site.sh"
    fi
    pick_launcher
    say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: $SLURM_NTASKS ranks on" \
        "$SLURM_JOB_NODELIST by ${launcher[*]}"
    say "$(python --version) at $(command -v python), $(mpi_library), commit $(commit)"
}

mpi_library() {    # such as "MPICH Version: 5.0.2"; asked without starting MPI
    python -c 'import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(*MPI.Get_library_version().replace("\x00", " ").split(",")[0].split()[:4])'
}

commit() { git -C "$(dirname "${BASH_SOURCE[0]}")" describe --always --dirty 2>/dev/null || echo unknown; }

# Sets the array `launcher`. With a wrong --mpi srun starts N worlds of one rank each. Ranks are
# pinned where SLURM does it, or where all cores of this shell's mask are theirs: elsewhere mpirun
# would pin them to cores of other jobs.
pick_launcher() {
    local plugin library mask
    library=$(mpi_library)
    case $library in
        *"Open MPI"*) plugin=pmix ;;
        *MPICH* | *MVAPICH* | *Intel*) plugin=pmi2 ;;
        *) refuse "MPI library '$library', expected MPICH, Open MPI or one of their kind;" \
            "set LAUNCHER and LAUNCHER_FLAGS in slurm/site.sh" ;;
    esac
    if [ -z "${LAUNCHER:-}" ]; then
        LAUNCHER=mpirun
        if grep -qw "$plugin" <<<"$(srun --mpi=list 2>&1)"; then LAUNCHER=srun; fi
    fi
    case $LAUNCHER in
        srun)
            launcher=(srun "--mpi=$plugin" --kill-on-bad-exit=1)
            if grep -q '^TaskPlugin .*affinity' <<<"$(scontrol show config)"; then
                launcher+=(--cpu-bind=cores)
                export OMP_PLACES=cores OMP_PROC_BIND=close
            fi ;;
        mpirun)
            mask=$(env -u OMP_NUM_THREADS nproc)
            launcher=(mpirun -n "$SLURM_NTASKS")
            case $plugin,$((${SLURM_NTASKS_PER_NODE:-1} * OMP_NUM_THREADS)) in
                "pmix,$mask") launcher+=(--map-by "slot:PE=$OMP_NUM_THREADS" --bind-to core) ;;
                "pmi2,$mask") launcher+=(-bind-to "core:$OMP_NUM_THREADS") ;;
                pmix,*) launcher+=(--bind-to none) ;;
            esac ;;
        *) refuse "LAUNCHER '$LAUNCHER', expected srun or mpirun" ;;
    esac
    # shellcheck disable=SC2206    # several words
    launcher+=(${LAUNCHER_FLAGS:-})
    if [ "$LAUNCHER" = srun ]; then fresh_step_id; fi
}

# MPICH names its shared memory, and SLURM's pmix its folders, by job and step: what a killed step of
# this job has left on a node breaks the start of another one of the same number.
fresh_step_id() {
    local k
    for ((k = 0; k < ${SLURM_RESTART_COUNT:-0}; k++)); do
        srun --nodes=1 --ntasks=1 --mpi=none true
    done
}

# SLURM wants the job to end: before its limit, at a preemption (USR1), at a scancel (TERM).
request() {
    asked=$1
    say "SIG$1: asking the ranks to save"
    if [ -n "$pid" ]; then kill -USR1 "$pid" 2>/dev/null || true; fi
}

# attempt COMMAND...: run it, and hand requests on; sets rc. A shell runs its traps only between
# commands, so that the command is in the background and `wait` is what a signal ends.
attempt() {
    rc=0
    if [ -n "$asked" ]; then
        rc=$EXIT_SAVED    # nothing was begun that could be lost
        return
    fi
    "$@" &
    pid=$!
    if [ -n "$asked" ]; then kill -USR1 "$pid" 2>/dev/null || true; fi    # just now
    while :; do
        wait "$pid" || true
        kill -0 "$pid" 2>/dev/null || break
    done
    wait "$pid" || rc=$?
    pid=''
    say "the launcher ended with $rc"
}

# Runs that have begun in `out`, each of which leaves a line.
begun() { grep -c '"kind": "start"' "$out/metrics.jsonl" 2>/dev/null || true; }

# never_began COUNT: whether the launcher has ended with none of mpips' exit codes before a run
# began, `begun` being COUNT before it. SLURM's pmi2 plugin reads 1,024 bytes of a command, and what
# MPICH puts into one depends on what is in memory behind its address: now and then it is longer, and
# the ranks die in MPI_Init. So the next start is by mpirun, which needs no plugin; but it sees one
# component of a heterogeneous job alone.
never_began() {
    case $rc in
        0 | 1 | 2 | 3 | "$EXIT_SAVED") return 1 ;;
    esac
    if [ -n "$asked" ] || [ "$(begun)" != "$1" ]; then return 1; fi
    case "${launcher[*]},${LAUNCHER_FLAGS:-},${SLURM_HET_SIZE:-}" in
        "srun --mpi=pmi2 "*,,) LAUNCHER=mpirun && pick_launcher ;;
    esac
    say "no rank got as far as to begin: starting once more, by ${launcher[0]}"
}

# find_out DEFAULT OPTIONS...: check the job before it starts, and set `out`, the run's folder.
find_out() {
    local config default=$1
    shift
    config=$(python -m mpips.train "$@" --print-config) || exit "$EXIT_REFUSED"
    out=$(sed -n 's/^out = "\(.*\)"$/\1/p' <<<"$config")
    out=${out:-$default}
    if grep -q '^eval_only = true' <<<"$config"; then
        start "$@"
        exit "$rc"
    fi
}

# The step of the newest checkpoint in `out`, -1 where there is none.
saved_step() {
    local index
    index=$(printf '%s\n' "$out"/checkpoints/step-*/index.h5 | sort | tail -n 1)
    if [ -e "$index" ]; then
        index=${index%/index.h5}
        echo "$((10#${index##*/step-}))"
    else
        echo -1
    fi
}

# Whether one of the last two tries of this job got further. Each leaves a line as it begins, which a
# node that fails cannot prevent.
got_further() {
    local restarts=${SLURM_RESTART_COUNT:-0}
    step=$(saved_step)
    if [ -f "$out/config.toml" ]; then    # else there is no run yet, and mpips wants an empty folder
        echo "$step job $SLURM_JOB_ID restart $restarts" >>"$out/tries"
    fi
    if [ "$restarts" -lt 2 ]; then return 0; fi
    [ "$step" != -1 ] && [ "$(tail -n 3 "$out/tries" | grep -c "^$step ")" -lt 3 ]
}

# What a script may say differently: how ranks start, and what else to do once the run is done.
start() { attempt "${launcher[@]}" python -m mpips.train "$@"; }
on_done() { :; }

# train_once OPTIONS...: train in `out`, from where an earlier try has left it. Exits where the run
# is done or can get no further; returns where there is something left to do.
train_once() {
    local words=("$@" --out "$out") before
    if [ -d "$out" ] || [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then words+=(--resume auto); fi
    if ! got_further; then
        say "no further than step $step in two tries: giving up; see the messages above, then" \
            "submit it again with --out $out"
        exit 1
    fi
    before=$(begun)
    start "${words[@]}"
    if never_began "$before"; then start "${words[@]}" --resume auto; fi
    if [ "$rc" = 0 ] && [ -e "$out/DONE" ]; then
        say "done: $out"
        on_done
        exit 0
    fi
    if [ "$rc" = "$EXIT_REFUSED" ]; then exit "$rc"; fi
    if [ "$rc" = 1 ] && [ "$(saved_step)" = "$step" ]; then exit "$rc"; fi
    say "not done: step $(saved_step) is saved in $out"
}

# Put this job back into the queue, where it keeps its number and goes on. Not where somebody has
# cancelled it: its state is COMPLETING then, as at the time limit, which the reason tells apart.
requeue() {
    trap - TERM    # SLURM ends this shell by it, once the job is requeued
    case $(job_field JobState),$(job_field Reason) in
        RUNNING,* | *,TimeLimit | ,) ;;    # nothing: the controller did not answer
        *) say "cancelled; go on with --out $out"; exit 1 ;;
    esac
    if scontrol requeue "$SLURM_JOB_ID"; then
        say "requeued"
        sleep 600
    fi
    say "cannot be requeued; submit it again with --out $out"
    exit "$EXIT_SAVED"
}
