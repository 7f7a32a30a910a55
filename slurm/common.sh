# shellcheck shell=bash
# What the job scripts beside this file share. They run it by `.`, in the batch shell of a job.
# mpips.launch starts the ranks, and starts them again; here is what only SLURM knows.
#
# These may be set in site.sh or exported before sbatch:
#   LAUNCHER        srun or mpirun; by default srun, where it has the plugin for the MPI in use.
#                   By Open MPI's mpirun a job goes on without a worker that dies
#   LAUNCHER_FLAGS  more words for the launcher, such as --mpi=pmix_v4 or --bind-to none
#   MPIPS_MAX_REQUEUES  how often a job goes back into the queue at the most; by default 100
#   MPIPS_ELASTIC   with sbatch --no-kill: ranks with which a job goes on, at least, when nodes fail

readonly EXIT_SAVED=85    # of mpips: saved, run me again
readonly EXIT_REFUSED=2   # of mpips: the job cannot run as it was asked for
readonly EARLY_S=60       # SLURM may give its notice that much too early
how=(--hosts slurm --timeout 0 --restarts 100)    # of mpips.launch
launcher=() pid='' asked='' rc=0 out='' step=-1 library='' queued='' sweep_folder=''
name=${SLURM_JOB_NAME:-mpips} name=${name//\//-}    # of the run's folder
# The last task of an array has the array's own number as its SLURM_JOB_ID.
job_id=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job_id=${job_id:-${SLURM_JOB_ID:-}}

say() { echo "== $(date '+%F %T') $*"; }
refuse() { echo "mpips: $*" >&2; exit "$EXIT_REFUSED"; }
job_field() { scontrol -o show job "$job_id" | tr ' ' '\n' | sed -n "s/^$1=//p" | head -n 1; }

pause() { read -rt "$1" <> <(:) || true; }    # SECONDS, without a process that may be left behind

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
    unset SLURM_EXPORT_ENV    # of sbatch --export=...: the ranks need what this shell has
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
    if ((${SLURM_MEM_PER_CPU:-1024} * OMP_NUM_THREADS < 350)); then
        say "$((SLURM_MEM_PER_CPU * OMP_NUM_THREADS)) MB a rank, of which Python and MPI take 300;" \
            "give sbatch --mem-per-cpu=1G, or --mem"
    fi
    say "$(python --version) at $(command -v python), $library, commit $(commit)"
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
    local plugin mask pins=
    library=${library:-$(mpi_library)}
    case $library in
        *"Open MPI"*) plugin=pmix ;;
        *MPICH* | *MVAPICH*) plugin=pmi2 ;;
        *Intel*) plugin=pmi2 pins=intel ;;  # it pins ranks by itself, unless told
        *) refuse "MPI library '$library', expected MPICH, Open MPI or one of their kind;" \
            "set LAUNCHER and LAUNCHER_FLAGS in slurm/site.sh" ;;
    esac
    if [ -z "${LAUNCHER:-}" ]; then
        LAUNCHER=mpirun
        if grep -qw "$plugin" <<<"$(srun --mpi=list 2>&1)"; then LAUNCHER=srun; fi
    fi
    case $LAUNCHER in
        srun)
            # To kill the rest at the first rank's end may have an srun of several components wait
            # for ever (Open MPI). The rest of one that has died is killed once the wait is over.
            launcher=(srun "--mpi=$plugin" --kill-on-bad-exit=0 --wait=15)
            if grep -q '^TaskPlugin .*affinity' <<<"$(scontrol show config)"; then
                launcher+=(--cpu-bind=cores)
                export OMP_PLACES=cores OMP_PROC_BIND=close
            fi
            if [ -n "$pins" ]; then export I_MPI_PIN=off; fi ;;
        mpirun)
            mask=$(env -u OMP_NUM_THREADS nproc)
            if [ -n "${SLURM_HET_SIZE:-}" ]; then mask=0; fi    # each component has its own
            launcher=(mpirun)
            case $pins$plugin,$((${SLURM_NTASKS_PER_NODE:-1} * OMP_NUM_THREADS)) in
                intel*) launcher[0]=mpiexec.hydra ;;&  # its mpirun is a script that dies of USR1
                "intelpmi2,$mask") export I_MPI_PIN_DOMAIN=$OMP_NUM_THREADS ;;
                intelpmi2,*) export I_MPI_PIN=off ;;
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
    if [ -n "$asked" ] && ((rc > 128)); then rc=$EXIT_SAVED; fi    # before it could note a signal
    say "mpips.launch ended with $rc"
}

# find_out DEFAULT OPTIONS...: check the job before it starts, and set `out`, the run's folder.
# Exits where the options ask for a text, or for an evaluation, and not for a run.
find_out() {
    local config default=$1 word explain=''
    shift
    for word; do
        case $word in    # of which the first ones need no ranks
            --help | -h | --version | --print-config | --ranks | --ranks=*)
                exec python -m mpips.train "$@" ;;
            --explain) explain=1 ;;
        esac
    done
    if [ -n "$explain" ]; then
        start "$@"
        exit "$rc"
    fi
    config=$(python -m mpips.train "$@" --print-config) || exit "$EXIT_REFUSED"
    out=$(python -c 'import sys, tomllib
print(tomllib.load(sys.stdin.buffer).get("out", ""))' <<<"$config")
    out=${out:-$default}
    if grep -q '^eval_only = true' <<<"$config"; then
        start "$@"
        exit "$rc"
    fi
    check_time
}

# seconds TIME: of a time limit as SLURM shows it; nothing where there is none.
seconds() {
    local days=0 h m s
    [[ $1 =~ ^([0-9]+-)?[0-9]+:[0-9]+:[0-9]+$ ]] || return 0
    case $1 in *-*) days=${1%%-*} ;; esac
    IFS=: read -r h m s <<<"${1#*-}"
    echo "$((((24 * 10#$days + 10#$h) * 60 + 10#$m) * 60 + 10#$s))"
}

# A job whose time limit is over as soon as the notice comes would be requeued for ever. The notice
# is that of the script, or of SBATCH_SIGNAL: one on the command line of sbatch cannot be seen.
check_time() {
    local limit signal notice=60 least
    limit=$(seconds "$(job_field TimeLimit)")
    signal=${SBATCH_SIGNAL:-$(sed -n 's/^#SBATCH .*--signal=//p' "$0" | tail -n 1)}
    case $signal in
        '') return 0 ;;
        *@*) notice=${signal#*@} notice=${notice%% *} ;;
    esac
    least=$((notice + EARLY_S))
    if [ -z "$limit" ] || ((limit > least)); then return 0; fi
    refuse "a time limit of $limit s, expected more than $least s, as the ranks are asked to save" \
        "$notice to $least s before its end; give sbatch --time=$((least / 60 + 5)), or a shorter" \
        "notice by SBATCH_SIGNAL=B:USR1@30 sbatch ..."
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
        echo "$step job $job_id restart $restarts" >>"$out/tries"
    fi
    if [ "$restarts" -lt 2 ]; then return 0; fi
    [ "$step" != -1 ] && [ "$(grep -v ^hurried "$out/tries" | tail -n 3 | grep -c "^$step ")" -lt 3 ]
}

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

# picture FOLDER: a run or a sweep that has ended, as a page beside it, where the extra for that is.
picture() {
    if python -c 'import jinja2, matplotlib' 2>/dev/null; then
        say "$(timeout 600 python -m mpips.report "$1" -o "$1/report.html" 2>&1 || echo "no report of $1")"
    fi
}

# start WORDS...: of mpips.launch, behind its --.
start() {
    attempt python -m mpips.launch "${how[@]}" --mpirun "${launcher[*]}" -- "$@"
}

# train_once OPTIONS...: train in `out`, from where an earlier try has left it. Exits where the run
# is done or can get no further; returns where there is something left to do.
train_once() {
    local words=("$@" --out "$out")
    if [ -d "$out" ] || [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then words+=(--resume auto); fi
    if ! got_further; then
        say "no further than step $step in two tries: giving up; see the messages above, then" \
            "submit it again with --out $out"
        exit 1
    fi
    if [ -n "${MPIPS_ELASTIC:-}" ]; then how+=(--elastic "$MPIPS_ELASTIC"); fi
    start "${words[@]}"
    if ((rc < 2)) && [ -z "$sweep_folder" ] && [ -e "$out/config.toml" ]; then picture "$out"; fi
    case $rc in
        0) say "done: $out" && exit 0 ;;
        1) if [ -z "$asked" ]; then exit 1; fi ;;
        2) exit 2 ;;
    esac
    say "not done: step $(saved_step) is saved in $out"
}

# Put this job back into the queue, where it keeps its number and goes on. Not where somebody has
# cancelled it: its state is COMPLETING then, as at the time limit, which the reason tells apart.
requeue() {
    local restarts=${SLURM_RESTART_COUNT:-0} most=${MPIPS_MAX_REQUEUES:-100}
    trap leave TERM    # SLURM ends this shell by it, once the job is requeued
    case $(job_field JobState),$(job_field Reason) in
        RUNNING,* | *,TimeLimit | ,) ;;    # nothing: the controller did not answer
        *) leave ;;
    esac
    if ((restarts >= most)); then
        say "requeued $restarts times, MPIPS_MAX_REQUEUES is $most; go on with --out $out"
        exit "$EXIT_SAVED"
    fi
    if hurried; then
        say "asked to save within a minute of its start three times: giving up; give a longer" \
            "--time or a shorter --signal, and go on with --out $out"
        exit "$EXIT_SAVED"
    fi
    if scontrol requeue "$job_id"; then
        queued=1
        pause 600    # until SLURM ends this shell, and `leave` tells why
    fi
    say "cannot be requeued; submit it again with --out $out"
    exit "$EXIT_SAVED"
}

# Whether this try and the two before it were asked to save as soon as they had begun, though nobody
# needed the nodes: the notice is too long for the time limit.
hurried() {
    local restarts=${SLURM_RESTART_COUNT:-0} k
    if [ "$asked" != USR1 ] || ((SECONDS > EARLY_S)); then return 1; fi
    if [ ! -f "$out/config.toml" ]; then return 1; fi
    case $(job_field PreemptTime) in None | '') ;; *) return 1 ;; esac
    echo "hurried job $job_id restart $restarts" >>"$out/tries"
    for ((k = restarts - 2; k <= restarts; k++)); do
        grep -qx "hurried job $job_id restart $k" "$out/tries" || return 1
    done
}

# SLURM has ended this job: somebody has cancelled it, or it is requeued for a node that failed or
# for a job that is more urgent.
leave() {
    local restarts
    restarts=$(job_field Restarts)
    if [ -n "$queued" ] || ((${restarts:-0} > ${SLURM_RESTART_COUNT:-0})); then
        queued=1
        say "requeued"
        exit "$EXIT_SAVED"
    fi
    say "cancelled; go on with --out $out"
    exit 1
}

# train OPTIONS...: train in --out, or in a folder with the name of the job.
train() {
    find_out "runs/$name-$SLURM_JOB_ID" "$@"
    train_once "$@"
    requeue
}

# sweep TABLE JOB OPTIONS...: train as row k of the table says, k being this task of the array, in a
# folder of its own below --out. Whenever a row has ended, results.txt there shows all of them.
sweep() {
    local table=$1 row word last=''
    shift
    sweep_folder=runs/$name-$SLURM_ARRAY_JOB_ID
    for word; do
        case $last,$word in
            --out,*) sweep_folder=$word ;;
            *,--out=*) sweep_folder=${word#--out=} ;;
        esac
        last=$word
    done
    row=$(python -m mpips.sbatch --sweep "$table" --row "$SLURM_ARRAY_TASK_ID") || exit "$EXIT_REFUSED"
    say "row $SLURM_ARRAY_TASK_ID of $table: $row"
    eval "row=($row)"    # words in quotes
    mkdir -p "$sweep_folder"
    rm -f "$sweep_folder/$SLURM_ARRAY_TASK_ID.failed"
    trap 'row_ended $?' EXIT
    find_out '' "$@" "${row[@]}" --out "$sweep_folder/$SLURM_ARRAY_TASK_ID"
    train_once "$@" "${row[@]}"
    requeue
}

# Note a row that has failed, which may have left no run, and write the table of results: one row at
# a time, so that the last one writes the last table, and draws them all.
row_ended() {
    if [ -n "$queued" ]; then return; fi
    if [ "$1" != 0 ]; then echo "exit code $1" >"$sweep_folder/$SLURM_ARRAY_TASK_ID.failed"; fi
    (
        flock 9 || true    # a file system without locks goes without
        python -m mpips.results "$sweep_folder" >"$sweep_folder/results.tmp"
        mv "$sweep_folder/results.tmp" "$sweep_folder/results.txt"
        shopt -s nullglob
        ended=("$sweep_folder"/*/DONE "$sweep_folder"/*.failed)
        if ((${#ended[@]} >= ${SLURM_ARRAY_TASK_COUNT:-1})); then picture "$sweep_folder"; fi
    ) 9>"$sweep_folder/results.lock"
}
