#!/bin/bash
#PBS -N @job_name@
#PBS -l select=@nodes@:ncpus=@cores@:mpiprocs=@ntasks_per_node@:mem=@memory@
#PBS -l place=scatter
#PBS -l walltime=@seconds@
#PBS -q @partition@
#PBS -A @account@
#PBS -V
#PBS -r y
#PBS -j oe
#
# @comments@
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
