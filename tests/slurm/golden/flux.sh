#!/bin/bash
#flux: --job-name=long
#flux: --nodes=2
#flux: --nslots=4
#flux: --cores-per-slot=4
#flux: --time-limit=3600s
#flux: --queue=wide
#flux: --bank=ml
#flux: --output=long-{{id}}.out
#
# 1 server and 3 workers: about 390 MB a worker, 330 MB a server, and 00:02:07 to the end.
# By flux batch. Before its time limit it submits itself again.
set -euo pipefail
job=$(flux job id --to=f58plain "$FLUX_ENCLOSING_ID")
hosts=$(flux hostlist --expand --delimiter=:2, instance):2
# shellcheck disable=SC2016    # that is for another shell
rsh='while [[ $1 == -* ]]; do shift; done; exec flux exec --rank="$(flux overlay lookup "$1")" sh -c "${*:2}"'
launcher=(--hosts "$hosts" --rsh "bash -c ${rsh@Q} rsh")
left() { flux job timeleft; }
again() { MPIPS_RUN=$run flux --parent batch "$0"; }    # Flux runs a copy of this file
