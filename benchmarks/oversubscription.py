"""Eight ranks beside three ranks on the same cores: cost of waiting ranks.

Samples per second of whole runs of the same training: 2 servers and 6 workers beside 1 server and 2
workers.
"""

from benchmarks.mlp import Perceptron
from benchmarks.turns import compare_rates, take_turns
from mpips.tools.bench.jobs import temporary_folder
from mpips.tools.bench.measure import Options, Row

REACH = 0.85


def run(options: Options) -> list[Row]:
    """Compare the two worlds.

    Raises:
        Failed: If a run fails.
    """
    with temporary_folder() as folder:
        job = Perceptron(folder, options.quick)
        sides = {
            "many": lambda: job.rate(8, "--servers", "2"),
            "few": lambda: job.rate(3, "--servers", "1"),
        }
        found = take_turns(sides, options.repeats)
    mine, other, ratio = compare_rates(found["many"], found["few"])
    case = f"{job.case}, 2 servers, 6 workers"
    few = "1 server, 2 workers"
    return [Row("oversubscription", case, mine, "samples/s", few, other, ratio, REACH)]
