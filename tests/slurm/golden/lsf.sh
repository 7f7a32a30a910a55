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
