#!/bin/bash
#SBATCH --job-name=@job_name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=@ntasks_per_node@
#SBATCH --cpus-per-task=@cpus_per_task@
#SBATCH --mem-per-cpu=@mem_per_cpu@
#SBATCH --time=@time@
#SBATCH --signal=B:USR1@@notice@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-@id@.out
#SBATCH --array=@array@
#SBATCH --partition=@partition@
#SBATCH --account=@account@
#SBATCH --constraint=@constraint@
#SBATCH --qos=@qos@
#SBATCH --gres=@gres@
#SBATCH --mail-type=@mail_type@
#SBATCH --mail-user=@mail_user@
#
# @comments@
set -euo pipefail
# shellcheck source=/dev/null
. @common@

prepare
@scratch@
@verb@
