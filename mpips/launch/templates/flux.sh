#!/bin/bash
#flux: --job-name=@job_name@
#flux: --nodes=@nodes@
#flux: --nslots=@world@
#flux: --cores-per-slot=@cpus_per_task@
#flux: --time-limit=@seconds@s
#flux: --queue=@partition@
#flux: --bank=@account@
#flux: --output=@job_name@-{{id}}.out
#
# @comments@
# By flux batch. Before its time limit it submits itself again.
set -euo pipefail
job=$(flux job id --to=f58plain "$FLUX_ENCLOSING_ID")
hosts=$(flux hostlist --expand --delimiter=:@ntasks_per_node@, instance):@ntasks_per_node@
# shellcheck disable=SC2016    # that is for another shell
rsh='while [[ $1 == -* ]]; do shift; done; exec flux exec --rank="$(flux overlay lookup "$1")" sh -c "${*:2}"'
launcher=(--hosts "$hosts" --rsh "bash -c ${rsh@Q} rsh")
left() { flux job timeleft; }
again() { MPIPS_RUN=$run flux --parent batch "$0"; }    # Flux runs a copy of this file
