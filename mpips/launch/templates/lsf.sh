#!/bin/bash
#BSUB -J @job_name@
#BSUB -n @slots@
#BSUB -R "span[ptile=@cores@] rusage[mem=@memory@/host]"
#BSUB -W @minutes@
#BSUB -q @partition@
#BSUB -P @account@
#BSUB -Q "85"
#BSUB -r
#BSUB -o /dev/null
#
# @comments@
# By bsub < FILE. It ends with 85 before its time limit, and LSF puts it back into the queue (-Q), as
# it does if its first node fails (-r). LSF would keep the output of the last start alone: it is in
# NAME-ID.out.
set -euo pipefail
job=$LSB_JOBID
exec >>@job_name@-"$job".out 2>&1
hosts=$(xargs -n 2 <<<"$LSB_MCPU_HOSTS" | awk '{print $1 ":" $2 / @cpus_per_task@}' | paste -sd ,)
launcher=(--hosts "$hosts" --rsh blaunch)
left() { bjobs -noheader -o time_left "$job" | awk -F '[ :]+' '{print $1 * 3600 + $2 * 60}'; }
again() { :; }    # by the exit code
