#!/bin/bash
#PBS -N long
#PBS -l select=2:ncpus=8:mpiprocs=2:mem=1200MB
#PBS -l place=scatter
#PBS -l walltime=3600
#PBS -q wide
#PBS -A ml
#PBS -V
#PBS -r y
#PBS -j oe
#
# 1 server and 3 workers: about 390 MB a worker, 330 MB a server, and 00:02:07 to the end.
# By qsub. Before its time limit it submits itself again, so that qsub must work on a node. PBS
# starts it again if its first node fails, or for a job that is more urgent.
set -euo pipefail
cd "$PBS_O_WORKDIR"
job=$PBS_JOBID
hosts=$(uniq -c "$PBS_NODEFILE" | awk '{print $2 ":" $1}' | paste -sd ,)
launcher=(--hosts "$hosts")    # by ssh
left() {
    qstat -f "$job" | awk -F '[ :]+' '/Resource_List.walltime/ {print $4 * 3600 + $5 * 60 + $6}'
}
again() { qsub -v "MPIPS_RUN=$run" "$0"; }    # PBS runs a copy of this file
